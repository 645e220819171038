"""The wrappers of docs/migration.md: reward functions of TRL and verl, unchanged, as verifiers."""

import json
import sys

import pytest
from page_blocks import ROOT, blocks

from mindrlhf.rewards.registry import resolve

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
