"""JSON lines that survive kills and resumes, and samples as they are written."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.observe import records as records_module
from mindrlhf.observe.records import JsonlWriter, read_jsonl, replace_file
from mindrlhf.observe.samples import SampleRecord, SampleWriter, question_of


def write_steps(path, steps, first_step):
    writer = JsonlWriter(path, first_step=first_step)
    for step in steps:
        writer.write({"step": step, "loss": float(step)})
    writer.close()


def steps_of(path):
    return [record["step"] for record in read_jsonl(path)]


def test_each_record_is_on_disk_when_write_returns(tmp_path):
    writer = JsonlWriter(tmp_path / "run" / "metrics.jsonl", first_step=0)
    writer.write({"step": 0, "loss": 1.5})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 0, "loss": 1.5}\n'
    writer.close()
    writer.close()


def test_numbers_json_lacks_become_null(tmp_path):
    writer = JsonlWriter(tmp_path / "a.jsonl", first_step=0)
    nested = {"d": [np.float32(0.5), -np.inf]}
    writer.write({"step": 1, "a": float("nan"), "b": np.float32("inf"), "c": nested, "e": np.int64(3)})
    writer.close()
    text = (tmp_path / "a.jsonl").read_text()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(text, parse_constant=refuse)
    assert record == {"step": 1, "a": None, "b": None, "c": {"d": [0.5, None]}, "e": 3}


lines = st.tuples(st.integers(0, 3), st.sampled_from(["", "a", "ä" * 40, "\u2028", "x" * 700]))


@given(
    lines=st.lists(lines, max_size=12),
    first_step=st.integers(1, 5),
    rest=st.sampled_from(["", "\n", " \n\n", '{"step": 9, "te', '{"step": 0}', '{"step": 9}', "nul"]),
    block_bytes=st.sampled_from([1, 7, 64, 1 << 18]),
)
def test_a_file_is_cut_where_the_steps_begin_that_are_written_again(lines, first_step, rest, block_bytes):
    step, records = 0, []
    for more, text in lines:
        step += more
        records.append({"step": step, "text": text})
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(records_module, "_BLOCK_BYTES", block_bytes):
        path = Path(directory, "samples.jsonl")
        path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records) + rest, encoding="utf-8")
        write_steps(path, [77], first_step)
        kept = [one for one in records if one["step"] < first_step]
        # A whole record without a line end counts; it stands after all others.
        kept += [{"step": 0}] if rest == '{"step": 0}' else []
        if rest == '{"step": 0}' and any(one["step"] >= first_step for one in records):
            return  # not what a run writes
        assert list(read_jsonl(path)) == [*kept, {"step": 77, "loss": 77.0}]
        assert path.read_text(encoding="utf-8").count("\n") == len(kept) + 1


def test_what_stays_of_a_long_file_is_neither_read_nor_written_again(tmp_path):
    path = tmp_path / "samples.jsonl"
    write_steps(path, range(1000), first_step=0)
    whole = path.read_bytes()
    broken = b"not a record" + whole[12:]
    path.write_bytes(broken)
    inode = path.stat().st_ino
    write_steps(path, [990], first_step=990)
    ends = [place + 1 for place, byte in enumerate(broken) if byte == ord("\n")]
    assert path.read_bytes() == broken[: ends[989]] + b'{"step": 990, "loss": 990.0}\n'
    assert path.stat().st_ino == inode


def test_a_broken_line_that_goes_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3 is not a record"):
        JsonlWriter(path, first_step=2)
    assert steps_of_first(path, 2) == [0, 1]


def steps_of_first(path, number):
    return [record["step"] for record in itertools.islice(read_jsonl(path), number)]


def test_a_new_run_starts_the_file_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(6), first_step=0)
    write_steps(path, [0], first_step=0)
    assert steps_of(path) == [0]


def test_a_line_cut_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert steps_of(path) == [1]
    write_steps(path, [2], first_step=2)
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize("line", ['{"step": 1,', "[1]", '{"loss": 1}', '{"step": "1"}', '{"step": true}', "\xff"])
def test_any_other_broken_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line.encode("latin-1") + b'\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is not a record"):
        list(read_jsonl(path))


def test_unwritable_places_are_run_failures_and_wrong_ones_mistakes(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailure, match="cannot write"):
        JsonlWriter(tmp_path / "file" / "metrics.jsonl", first_step=0)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*report\.html"):
        replace_file(tmp_path / "report.html", "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "report.html"]


@pytest.mark.parametrize("write", ["writer.write({'step': 1})", "print('x' * 9000, file=open('/dev/full', 'w'))"])
@pytest.mark.parametrize("has_log", [True, False])
def test_a_full_disk_ends_a_rank_without_a_traceback(write, has_log):
    program = f"""
import contextlib, sys
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.training.main import guarded
def run():
    with contextlib.closing(JsonlWriter("/dev/full", first_step=0)) as writer:
        {write}
sys.exit(guarded("rank", run))
"""
    with open("/dev/full", "w", encoding="utf-8") as full:
        stderr = subprocess.PIPE if has_log else full
        rank = subprocess.run([sys.executable, "-c", program], stderr=stderr, text=True, check=False)
    assert rank.returncode == 1
    said = "rank: error: cannot write /dev/full: No space left on device\n" if "writer" in write else ""
    assert not has_log or rank.stderr == said, "the launcher names a full disk"


def test_samples_keep_their_text(tmp_path):
    texts = ['say "hi"\n</script>', "三加四\u2028等于七", "broken \ud800 surrogate"]
    writer = SampleWriter(tmp_path / "samples.jsonl", first_step=0)
    rewards = {"accuracy_reward": np.float32(1.0), "length_reward": float("nan")}
    writer.write(SampleRecord(3, text, text, "7", 1.5, rewards, "stop") for text in texts)
    writer.close()
    records = list(read_jsonl(tmp_path / "samples.jsonl"))
    assert [record["completion"] for record in records] == texts
    assert records[0] == {
        "step": 3,
        "prompt": texts[0],
        "completion": texts[0],
        "answer": "7",
        "reward": 1.5,
        "rewards": {"accuracy_reward": 1.0, "length_reward": None},
        "finish_reason": "stop",
    }


@pytest.mark.parametrize(
    "prompt",
    [
        "<|im_start|>What is\n1 + 1?<|im_end|>",
        "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nWhat is\n1 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<|im_start|>user\nold<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\n"
        "What is\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is\n1 + 1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<bos><start_of_turn>user\nWhat is\n1 + 1?<end_of_turn>\n<start_of_turn>model\n",
        "[gMASK]<sop><|user|>\nWhat is\n1 + 1?<|assistant|>\n",
        "<s>[INST] What is\n1 + 1?[/INST]",
        "Work it out.\n\nUser: What is\n1 + 1?\n\nAssistant:\n",
        "What is\n1 + 1?",
    ],
)
def test_the_question_of_a_prompt_stands_without_its_template(prompt):
    assert question_of(prompt) == "What is\n1 + 1?"
