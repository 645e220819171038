"""Building prompt files: what is kept, counted, refused, and that workers change nothing."""

import errno
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizers import write_byte_tokenizer

from mindrlhf.data import build, workers
from mindrlhf.data.build import build_prompts
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import RunFailure, UserError

CHECKPOINT = Path(__file__).parents[2] / "examples" / "quickstart" / "checkpoint"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}>"


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory):
    """One token per byte, so that lengths can be counted by hand; 256 ends texts and 257 turns."""
    config = {"eos_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["<|endoftext|>", "<|im_end|>"], **config)


def _problem(index, length=8):
    return {"question": f"{index:0{length}d}", "answer": f"So it is {index}.\n#### {index}"}


def _write_lines(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_records_hold_ids_answers_and_sources_in_input_order(tokenizer_directory, tmp_path):
    first = _write_lines(tmp_path / "b.jsonl", [_problem(i) for i in range(300)])
    rows = [_problem(i) for i in range(300, 310)]
    second = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), second)
    report = build_prompts(
        [first, second], tmp_path / "o.mindrecord", tokenizer_directory, max_prompt_length=20, num_workers=1
    )
    tokenizer = load_tokenizer(tokenizer_directory)
    prompts = PromptFile.open(tmp_path / "o.mindrecord", tokenizer.fingerprint)
    records = prompts.read(range(len(prompts)))
    assert [tokenizer.decode(r.prompt_ids, False) for r in records] == [f"{i:08d}<|im_end|>>" for i in range(310)]
    assert [record.answer for record in records] == [str(i) for i in range(310)]
    sources = [records[i].source_id for i in (0, 299, 300, 309)]
    assert sources == ["b.jsonl:1", "b.jsonl:300", "a.parquet:1", "a.parquet:10"]
    assert set(report.header.look["prompt_tokens"].values()) == {10} and report.header.longest_prompt == 10
    assert report.header == prompts.header
    assert (prompts.header.num_read, prompts.header.longest_prompt, prompts.header.template) == (310, 10, "chat")


def test_a_record_may_name_its_source(tokenizer_directory, tmp_path):
    rows = [{"q": "one", "from": "openai/gsm8k"}, {"q": "two", "from": "code"}, {"q": "three", "from": "code"}]
    path = _write_lines(tmp_path / "a.jsonl", rows)
    keys = {"question": "q", "source": "from"}
    build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, handler="map_keys", key_map=keys)
    prompts = PromptFile.open(tmp_path / "o.mindrecord")
    records = prompts.read(range(3))
    assert [record.source for record in records] == [row["from"] for row in rows]
    assert records[2].source_id == "code:a.jsonl:3"
    build_prompts([path], tmp_path / "p.mindrecord", tokenizer_directory, handler="map_keys", key_map={"question": "q"})
    assert {record.source for record in PromptFile.open(tmp_path / "p.mindrecord").read(range(3))} == {"a.jsonl"}
    _write_lines(path, [{"q": "one", "from": "a:b"}])
    with pytest.raises(UserError, match="the name of a source has no colon"):
        build_prompts([path], tmp_path / "q.mindrecord", tokenizer_directory, handler="map_keys", key_map=keys)


def test_worker_processes_change_nothing(tokenizer_directory, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CHUNK_RECORDS", 7)
    lines = [{**_problem(i, length=1 + i % 13), "id": i} if i % 5 else "{broken" for i in range(200)]
    path = _write_lines(tmp_path / "a.jsonl", lines + lines[1:5])
    records, headers = {}, []
    for num_workers in (1, 2):
        output = tmp_path / f"{num_workers}.mindrecord"
        report = build_prompts(
            [path],
            output,
            tokenizer_directory,
            template="plain",
            max_prompt_length=9,
            num_workers=num_workers,
            skip_bad=True,
            deduplicate=True,
        )
        # By hand: a prompt has 1 + i % 13 digits (more for large i) and a line break.
        wanted = [i for i in range(200) if i % 5 and max(1 + i % 13, len(str(i))) + 1 <= 9]
        assert (report.header.num_kept, report.header.num_bad) == (len(wanted), 40)
        assert report.header.num_too_long == 160 - len(wanted)
        assert report.header.look["deduplicated"] == 4 and report.header.look["unread"] == {"id": 164}
        headers.append(report.header)
        records[num_workers] = PromptFile.open(output).read(range(len(wanted)))
        assert [record.answer for record in records[num_workers]] == [str(i) for i in wanted]
    assert headers[0] == headers[1]
    for one, two in zip(records[1], records[2], strict=True):
        assert np.array_equal(one.prompt_ids, two.prompt_ids)
        assert one.source_id == two.source_id
    assert (tmp_path / "1.mindrecord").read_bytes()[1 << 20 :] == (tmp_path / "2.mindrecord").read_bytes()[1 << 20 :]


def test_a_prompt_that_grows_without_end_is_a_bad_record(tmp_path, tokenizer_directory):
    doubling = "{% for _ in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
    long = (
        "{% if 'double' in question %}" + doubling + "{% elif 'long' in question %}{{ 'a' * 99999999999 }}{% endif %}"
    )
    (tmp_path / "t.jinja").write_text("{% set ns = namespace(text=question) %}" + long + "{{ question }}")
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"question": text, "answer": "#### 1"}) + "\n" for text in ("double", "long", "6"))
    )
    options = {"template": str(tmp_path / "t.jinja"), "max_prompt_length": 99, "num_workers": 1, "skip_bad": True}
    report = build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, **options)
    assert report.header.num_kept == 1
    for number, reason in enumerate(report.bad_examples, 1):
        assert f"a.jsonl:{number}: template 't.jinja' failed: MemoryError" in reason
    assert report.header.num_bad == 2


def test_sft_appends_the_end_token_and_bounds_the_sum(tokenizer_directory, tmp_path):
    data = [{"q": "abc", "r": "x" * length, "a": 1} for length in (1, 5, 6, 7)]
    path = _write_lines(tmp_path / "a.jsonl", data)
    for template, end_id, overhead in (("plain", 256, 1), ("chat", 257, 2)):
        report = build_prompts(
            [path],
            tmp_path / "sft.mindrecord",
            tokenizer_directory,
            handler="map_keys",
            key_map={"question": "q", "answer": "a", "response": "r"},
            template=template,
            task="sft",
            max_prompt_length=100,
            max_length=3 + overhead + 6 + 1,
        )
        assert (report.header.num_kept, report.header.num_too_long) == (3, 1)
        records = PromptFile.open(tmp_path / "sft.mindrecord").read(range(3))
        assert [len(record.response_ids) for record in records] == [2, 6, 7]
        assert all(record.response_ids[-1] == end_id for record in records)
        x_id = load_tokenizer(tokenizer_directory).encode("x")
        assert records[1].response_ids[:-1].tolist() == x_id * 5
        lengths = report.header.look["response_tokens"]
        assert (lengths["0%"], lengths["100%"], report.header.longest_response) == (2, 7, 7)


def test_first_bad_record_ends_the_build_and_leaves_nothing(tokenizer_directory, tmp_path):
    (tmp_path / "out").mkdir()
    path = _write_lines(tmp_path / "a.jsonl", [_problem(1), {"question": "q"}, "{"])
    for num_workers in (1, 2):
        advice = "the record has 'question'; name them as in --handler map_keys --map question=question,answer=ANSWER"
        with pytest.raises(UserError, match=rf"a\.jsonl:2: no field 'answer'; {advice} \(--skip-bad"):
            build_prompts([path], tmp_path / "out" / "o.mindrecord", tokenizer_directory, num_workers=num_workers)
    assert os.listdir(tmp_path / "out") == []


def test_a_disk_that_refuses_is_one_line_and_leaves_nothing(tokenizer_directory, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "Arrow's own words")

    monkeypatch.setattr(build, "write_prompt_file", refuse)
    _write_lines(tmp_path / "a.jsonl", [_problem(1)])
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "a.mindrecord"
    with pytest.raises(UserError) as raised:
        build_prompts([tmp_path / "a.jsonl"], output, tokenizer_directory, max_prompt_length=64, num_workers=1)
    assert str(raised.value).startswith(f"{output} cannot be written (No space left on device): make room")
    assert os.listdir(tmp_path / "out") == []


def test_skip_bad_counts_and_names_the_first_few(tokenizer_directory, tmp_path):
    lines = [_problem(1), *["{"] * 6, r'{"question": "\ud800", "answer": "#### 1"}', _problem(2)]
    path = _write_lines(tmp_path / "a.jsonl", [*lines, {"question": "\0", "answer": "#### 1"}])
    report = build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, max_prompt_length=99, skip_bad=True)
    assert (report.header.num_read, report.header.num_kept, report.header.num_bad) == (10, 2, 8)
    assert [example.split(": ")[0] for example in report.bad_examples] == [f"{path}:{n}" for n in range(2, 7)]


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [("\ud800", "1", "half of a surrogate pair"), ("a\0b", "1", "a NUL"), ("q", "1\0", "a NUL")],
)
def test_text_that_cannot_be_stored_is_bad(tokenizer_directory, tmp_path, question, answer, reason):
    path = _write_lines(tmp_path / "a.jsonl", [{"problem": question, "answer": answer}])
    with pytest.raises(UserError, match=f"a.jsonl:1: text holds {reason}"):
        build_prompts([path], tmp_path / "o", tokenizer_directory, handler="deepscaler", max_prompt_length=9)


def test_equal_file_names_are_told_apart(tokenizer_directory, tmp_path):
    paths = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        paths.append(_write_lines(tmp_path / folder / "a.jsonl", [_problem(1)]))
    build_prompts(paths, tmp_path / "o.mindrecord", tokenizer_directory, max_prompt_length=99)
    records = PromptFile.open(tmp_path / "o.mindrecord").read([0, 1])
    assert [record.source_id for record in records] == ["x/a.jsonl:1", "y/a.jsonl:1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "dpo"}, "unknown task 'dpo'; choose from prompts, sft"),
        ({"task": "sft"}, "task sft needs max_length"),
        ({"max_length": 9}, "which task prompts lacks"),
        ({"handler": "nope"}, "unknown handler 'nope'"),
        ({"template": "nope"}, "no template 'nope'"),
        ({"tokenizer_path": "absent"}, "no tokenizer at absent"),
        ({"inputs": []}, "no input files"),
        ({"inputs": ["absent.jsonl"]}, "no such data file"),
        ({"max_prompt_length": 3}, "no record is left of 2: 2 longer than 3 tokens, 0 bad; raise --max-prompt-length"),
        ({"task": "sft", "max_length": 5}, r"2 longer than 99 tokens \(5 in all\)"),
    ],
)
def test_settings_that_do_not_fit(tokenizer_directory, tmp_path, options, message):
    path = _write_lines(tmp_path / "a.jsonl", [_problem(1), _problem(2)])
    defaults = {"inputs": [path], "tokenizer_path": tokenizer_directory, "max_prompt_length": 99}
    with pytest.raises(UserError, match=message):
        build_prompts(output=tmp_path / "o.mindrecord", **{**defaults, **options})
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_input_is_neither_overwritten_nor_read_twice(tokenizer_directory, tmp_path):
    path = _write_lines(tmp_path / "a.jsonl", [_problem(1)])
    outputs = {"would overwrite input": path, "is a directory": Path(), "named twice": tmp_path / "o.mindrecord"}
    for message, output in outputs.items():
        with pytest.raises(UserError, match=message):
            build_prompts([path, tmp_path / "." / "a.jsonl"], output, tokenizer_directory)


def test_preference_pairs_hold_both_responses_and_the_longer_one_counts(tokenizer_directory, tmp_path):
    pairs = [("good", "bad"), ("y", "much longer"), ("same", "same")]
    lines = [{"question": "q", "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    path = _write_lines(tmp_path / "pairs.jsonl", lines)
    report = build_prompts(
        [path],
        tmp_path / "pairs.mindrecord",
        tokenizer_directory,
        handler="orca_pairs",
        task="preference",
        max_prompt_length=20,
        max_length=8,  # prompt of 3 + "good" + end token
        skip_bad=True,
    )
    (record,) = PromptFile.open(tmp_path / "pairs.mindrecord").read([0])
    tokenizer = load_tokenizer(tokenizer_directory)
    assert tokenizer.decode(record.response_ids, False) == "good<|im_end|>"
    assert tokenizer.decode(record.rejected_ids, False) == "bad<|im_end|>"
    assert (report.header.num_too_long, report.header.num_bad, report.header.longest_response) == (1, 1, 5)
    assert "the same text" in report.bad_examples[0]


def test_records_may_choose_their_verifiers(tokenizer_directory, tmp_path):
    choices = ["code_execution", "", "accuracy_reward,format_reward", "code_execution"]
    lines = [json.dumps({"q": f"question {i}", "a": "assert f(1) == 1", "v": v}) for i, v in enumerate(choices)]
    path = _write_lines(tmp_path / "r.jsonl", lines)
    keys = {"question": "q", "answer": "a", "verifier": "v"}
    options = {"handler": "map_keys", "key_map": keys, "template": "plain"}
    build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, **options)
    file = PromptFile.open(tmp_path / "o.mindrecord")
    assert file.header.verifier_choices == ("", "accuracy_reward,format_reward", "code_execution")
    assert [record.verifier for record in file.read(range(4))] == choices


@pytest.mark.parametrize("verifier", ["", "format_reward,code_execution"])
def test_unit_tests_that_test_nothing_are_refused_when_data_is_built(tokenizer_directory, tmp_path, verifier):
    check = {"test": "def check(candidate):\n    assert candidate(1) == 1", "entry_point": "f"}
    rows = [
        {"q": "one", "t": "def check(candidate):\n    assert candidate(1) == 1", "v": verifier},
        {"q": "two", "t": ["assert f(1) == 1", "assert 1 == 1"], "v": verifier},
        {"q": "three", "t": check, "v": verifier},
        {"q": "four", "t": "42", "v": "accuracy_reward"},
    ]
    keys = {"question": "q", "answer": "t", "verifier": "v"}
    options = {"handler": "map_keys", "key_map": keys, "template": "plain"}
    path = _write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match="a.jsonl:1: .*'check' is not called"):
        build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, **options)
    report = build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, skip_bad=True, **options)
    assert "unit test 2 tests nothing: it asks nothing of the program" in report.bad_examples[1]
    assert [record.answer for record in PromptFile.open(report.path).read(range(2))] == [json.dumps(check), "42"]


def test_unit_tests_that_would_be_refused_are_refused_with_their_row(tokenizer_directory, tmp_path):
    tests = [
        "assert f(1) == 1",
        "a, b = f(1), f(2)\nassert a < b",
        "assert eval(f(1)) == 1",
        "open('a', 'w')\nassert f(1)",
    ]
    path = _write_lines(tmp_path / "a.jsonl", [{"q": f"question {test}", "t": test} for test in tests])
    options = {"handler": "map_keys", "key_map": {"question": "q", "answer": "t"}, "template": "plain"}
    report = build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, skip_bad=True, **options)
    assert report.header.num_kept == 1
    for bad, row, reason in zip(
        report.bad_examples, (2, 3, 4), ("both sides", "'eval' is given", "'open' does not reach")
    ):
        assert f"a.jsonl:{row}:" in bad and reason in bad
    options |= {"skip_bad": True, "allow_own_helpers": True}
    assert build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, **options).header.num_kept == 2


def test_an_answer_may_be_put_together_from_several_fields(tokenizer_directory, tmp_path):
    row = {"q": "one", "test": "def check(candidate):\n    assert candidate(1) == 1", "entry_point": "f"}
    path = _write_lines(tmp_path / "a.jsonl", [row])
    options = {"handler": "map_keys", "key_map": {"question": "q", "answer": "test+entry_point"}, "template": "plain"}
    build_prompts([path], tmp_path / "o.mindrecord", tokenizer_directory, **options)
    (record,) = PromptFile.open(tmp_path / "o.mindrecord").read(range(1))
    assert json.loads(record.answer) == {"test": row["test"], "entry_point": "f"}


CHAT = [{"role": "user", "content": "What is 3 + 4?"}]
END_FORMS = {
    "messages": lambda text: {"messages": [*CHAT, {"role": "assistant", "content": text}]},
    "prompt and completion, chats": lambda text: {
        "prompt": CHAT,
        "completion": [{"role": "assistant", "content": text}],
    },
    "prompt and completion, texts": lambda text: {"prompt": "What is 3 + 4?", "completion": text},
    "hh-rlhf": lambda text: {
        "chosen": f"\n\nHuman: What is 3 + 4?\n\nAssistant: {text}",
        "rejected": "\n\nHuman: What is 3 + 4?\n\nAssistant: It is eight.",
    },
    "pairs of chats": lambda text: {
        "chosen": [*CHAT, {"role": "assistant", "content": text}],
        "rejected": [*CHAT, {"role": "assistant", "content": "It is eight."}],
    },
    "pairs behind a prompt": lambda text: {"prompt": CHAT, "chosen": text, "rejected": "It is eight."},
}
ENDS = [
    "",
    "<|im_end|>",
    "<|im_end|>\n",
    "<|im_end|>\n\n",
    "<|im_end|> ",
    "<|im_end|>\n<|im_end|>",
    "<|im_end|><|im_end|>",
]


@pytest.mark.parametrize("form", END_FORMS)
def test_a_response_that_holds_its_end_token_gets_it_once(form, tmp_path):
    task = "preference" if "rejected" in END_FORMS[form]("") else "sft"
    rows = [END_FORMS[form](f"It is seven.{end}") for end in ENDS]
    path = _write_lines(tmp_path / "a.jsonl", rows)
    options = {"handler": "trl", "task": task, "max_length": 99}
    for keeps in (False, True):
        report = build_prompts([path], tmp_path / "o", CHECKPOINT, keep_control_tokens=keeps, **options)
        records = PromptFile.open(report.path).read(range(len(ENDS)))
        tokenizer = load_tokenizer(CHECKPOINT)
        texts = {tokenizer.decode(record.response_ids, False) for record in records}
        assert texts == {"It is seven.<|im_end|>"} and report.num_with_control_tokens == 0


@pytest.mark.parametrize("text", ["<|im_end|>", " <|im_end|>\n<|im_end|>"])
def test_a_response_of_an_end_token_alone_is_a_bad_record(text, tmp_path):
    path = _write_lines(tmp_path / "a.jsonl", [END_FORMS["messages"](text)])
    with pytest.raises(UserError, match="the response is an end token alone"):
        build_prompts([path], tmp_path / "o", CHECKPOINT, handler="trl", task="sft", max_length=99)


def test_an_end_token_within_a_response_stays_text(tmp_path):
    path = _write_lines(tmp_path / "a.jsonl", [END_FORMS["messages"]("seven<|im_end|>eight")])
    report = build_prompts([path], tmp_path / "o", CHECKPOINT, handler="trl", task="sft", max_length=99)
    (record,) = PromptFile.open(report.path).read(range(1))
    assert report.num_with_control_tokens == 1
    assert record.response_ids.tolist().count(load_tokenizer(CHECKPOINT).turn_end_id) == 1


def test_sft_without_responses_says_so(tokenizer_directory, tmp_path):
    path = _write_lines(tmp_path / "a.jsonl", [{"problem": "p", "answer": "1"}])
    with pytest.raises(UserError, match="no response to train on"):
        build_prompts([path], tmp_path / "o", tokenizer_directory, handler="deepscaler", task="sft", max_length=99)


def test_few_chunks_are_in_flight(tokenizer_directory, tmp_path):
    """The reader must not run ahead of the workers, whatever the size of the input."""
    taken = []

    class EchoPool:
        def __init__(self, *_, **__):
            pass

        def submit(self, function, chunk):
            future = workers.Future()
            future.set_result(chunk)
            return future

        def shutdown(self, cancel_futures):
            taken.append("shutdown")

    def chunks():
        for i in range(100):
            taken.append(i)
            yield i

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "ProcessPoolExecutor", EchoPool)
        results = workers.encode_in_order(None, None, chunks(), num_workers=2)
        assert next(results) == 0
        assert len(taken) == 2 * workers.CHUNKS_IN_FLIGHT_PER_WORKER
        assert [*results] == list(range(1, 100))
    assert taken[-1] == "shutdown"


def _wait_for_children(process, count, limit_s=60):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        found = [c for c in psutil.Process(process.pid).children() if "spawn_main" in " ".join(c.cmdline())]
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {count} worker processes within {limit_s} s")


@pytest.fixture
def endless_build(tokenizer_directory, tmp_path):
    """A build in a process of its own that never ends: its input is a generator of chunks."""
    code = f"""
import sys
from mindrlhf.data import build, readers
from mindrlhf.errors import RunFailure

def endless(path):
    while True:
        yield readers.RawRecord(path, 1, {{"question": "q", "answer": "#### 1"}}, 0)

if __name__ == "__main__":
    build.read_records = endless
    try:
        build.build_prompts([{str(tmp_path / "a.jsonl")!r}], {str(tmp_path / "o" / "o.mindrecord")!r},
                            {str(tokenizer_directory)!r}, max_prompt_length=9, num_workers=2)
    except RunFailure as failure:
        print(failure)
        sys.exit(failure.exit_code)
"""
    (tmp_path / "o").mkdir()
    _write_lines(tmp_path / "a.jsonl", [_problem(1)])
    script = tmp_path / "endless.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = []
    try:
        children += _wait_for_children(process, 2)
        yield process, children, tmp_path / "o"
    finally:
        for child in children:
            with suppress(psutil.NoSuchProcess):  # psutil knows a reused pid from the process it met
                child.kill()
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.timeout(120)
def test_killed_worker_ends_the_build(endless_build):
    process, children, output = endless_build
    children[0].kill()
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == RunFailure.exit_code
    assert "a data worker process died" in stdout
    assert os.listdir(output) == []
    assert psutil.wait_procs(children, timeout=30)[1] == []


@pytest.mark.timeout(120)
def test_workers_do_not_outlive_a_killed_parent(endless_build):
    process, children, _ = endless_build
    process.kill()
    assert psutil.wait_procs(children, timeout=30)[1] == []
