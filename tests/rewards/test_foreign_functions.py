"""The wrappers of docs/migration.md: reward functions of TRL and verl, unchanged, as verifiers."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from page_blocks import ROOT, blocks

from mindrlhf.data.build import build_prompts
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.rewards.registry import resolve

CHECKPOINT = ROOT / "examples" / "quickstart" / "checkpoint"
CONTEXT = {"prompt": "What is 3 + 4?", "finish_reason": "stop", "num_tokens": 3}
# As TRL documents them: columns and what is sampled are lists of one length.
TRL = """
def reward(completions, **kwargs):
    sizes = {name: len(value) for name, value in kwargs.items() if isinstance(value, list)}
    assert set(sizes.values()) == {len(completions)}, sizes
    right = [len(set(c) & set(a)) / len(set(a)) for c, a in zip(completions, kwargs["answer"])]
    return [r + 10.0 * level + 100.0 * ("+" in p) for r, level, p in zip(right, kwargs["level"], kwargs["prompts"])]
"""
# As verl's reward_score modules are; some of them return more than the score.
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    score = float(ground_truth in solution_str) + 10.0 * extra_info["level"] + 100.0 * (data_source == "gsm8k")
    return {"score": score, "acc": True} if extra_info.get("more") else score
"""


@pytest.fixture
def wrapper(tmp_path, monkeypatch):
    """Save a wrapper of the page beside a function of its stack: ``wrapper(name, module, source)``."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def save(name: str, module: str, source: str):
        (block,) = (one for one in blocks(ROOT / "docs" / "migration.md") if one.file == f"{name}.py")
        assert len([line for line in block.text.splitlines() if line.startswith("    ")]) <= 3
        (tmp_path / f"{name}.py").write_text(block.text)
        (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return resolve(f"{tmp_path / name}.py:{name}")

    return save


@pytest.mark.parametrize(("completion", "expected"), [("7", 131.0), ("8", 130.0)])
def test_a_function_of_trl_gets_columns_as_lists(wrapper, completion, expected):
    verifier = wrapper("trl_reward", "my_trl_rewards", TRL)
    assert verifier(completion, "7", CONTEXT, {"level": 3, "unread": None}) == expected


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize(("completion", "expected"), [("#### 7", 121.0), ("#### 8", 120.0)])
def test_a_function_of_verl_gets_source_and_extra_info(wrapper, completion, expected, more):
    verifier = wrapper("verl_reward", "my_verl_reward", VERL)
    columns = {"data_source": "gsm8k", "extra_info": {"level": 2, "more": more}, "unread": 1}
    assert verifier(completion, "7", CONTEXT, columns) == expected


def test_the_wrappers_score_a_file(wrapper, tmp_path, capsys):
    """The command, in processes of its own, with the columns that a prompt file would keep."""
    from mindrlhf.cli import main

    wrapper("verl_reward", "my_verl_reward", VERL)
    wrapper("trl_reward", "my_trl_rewards", TRL)
    extra = {"level": 1, "data_source": "gsm8k", "extra_info": {"level": 1}}
    sample = {"completion": "7", "answer": "7", "prompt": "3 + 4?", "extra": extra}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    names = ",".join(f"{tmp_path / name}.py:{name}" for name in ("trl_reward", "verl_reward"))
    options = ["--input", str(tmp_path / "samples.jsonl"), "--output", str(tmp_path / "scored.jsonl")]
    assert main(["rewards", "score", "--verifier", names, *options]) == 0, capsys.readouterr().err
    scored = json.loads((tmp_path / "scored.jsonl").read_text())
    assert scored["rewards"] == {"trl_reward": 111.0, "verl_reward": 111.0}


TRUTHS = [
    *([7], [7, 8], ["Paris"], ["Paris", "paris"], [[1, 2], [3]], [0.5, 0.25], [True, False], ["7"]),
    *({"target": ["a", "b"]}, {"target": "a"}, {"target": ["a"], "style": "rule"}, {"a": {"b": [{"c": 1}, {"c": 2}]}}),
    *({"numbers": [3, 4], "target": 24}, {"answer": 7}, {"inputs": ["1"], "outputs": ["2"]}, {"n": 1.5}, {"ok": True}),
    *(7, -3, 0, 0.5, 1e22, True, False),
]


@pytest.mark.parametrize("truth", TRUTHS, ids=json.dumps)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_function_of_verl_gets_structured_ground_truths_as_they_are(wrapper, tmp_path, truth, kind):
    row = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": truth}, "data_source": "s"}
    path = tmp_path / f"train.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    options = {"handler": "verl", "num_workers": 1, "columns": {"data_source": "data_source"}}
    build_prompts([path], tmp_path / "o.mindrecord", CHECKPOINT, **options)
    (record,) = PromptFile.open(tmp_path / "o.mindrecord").read(range(1))
    source = f"""
def compute_score(data_source, solution, truth, extra_info=None):
    return float((type(truth), truth, data_source) == ({type(truth).__name__}, {truth!r}, "s"))
"""
    verifier = wrapper("verl_reward", "my_verl_reward", source)
    assert verifier("7", record.answer, CONTEXT, record.extra) == 1.0


def test_texts_of_verl_are_kept_once_and_truths_of_several_rows_together(tmp_path):
    def built(*truths):
        rows = [
            {"prompt": [{"role": "user", "content": f"{i}"}], "reward_model": {"ground_truth": one}}
            for i, one in enumerate(truths)
        ]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"handler": "verl", "num_workers": 1}
        build_prompts([tmp_path / "a.jsonl"], tmp_path / "o.mindrecord", CHECKPOINT, **options)
        file = PromptFile.open(tmp_path / "o.mindrecord")
        return file.header.columns, [record.extra.get("ground_truth") for record in file.read(range(len(truths)))]

    assert built("7", "[7, 8]") == ((), [None, None])
    assert built("7", [1, 2]) == (("ground_truth",), ["7", [1, 2]])
