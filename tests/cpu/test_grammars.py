"""Grammars in the engines: samples keep to them, and what is trained are the policy's own log-probabilities."""

import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from rollout_probes import ask_probe
from test_multi_step import QWEN
from test_stop_engines import tokenizer_dir  # noqa: F401

PATTERN = r"[\x00-\x7f]{6}(st|no)"  # about half of the tokens, and then a few


@pytest.mark.parametrize("engine", ["CpuEngine", "VllmEngine"])
def test_samples_keep_to_a_grammar_and_its_tokens_are_not_the_policys(rollout_python, tokenizer_dir, engine):  # noqa: F811
    with tempfile.TemporaryDirectory(prefix="grammar-") as name:
        (Path(name) / "model").mkdir()
        (Path(name) / "model" / "config.json").write_text(json.dumps(QWEN))
        config = {"tokenizer_dir": str(tokenizer_dir), "load_format": "auto"}
        given = {"engine": engine, "pattern": PATTERN}
        found = ask_probe("grammar_probe.py", rollout_python, Path(name), given, **config)
    kept = []
    for (text, reason, tokens, is_policys, logprobs), policy, masses in zip(
        found["samples"], found["policy"], found["masses"]
    ):
        assert reason == "stop" and re.fullmatch(PATTERN, text, re.DOTALL), text
        assert is_policys == [mass >= 0.5 for mass in masses] and len(is_policys) == len(tokens)
        own = [value for value, is_own in zip(policy, is_policys) if is_own]
        np.testing.assert_allclose(logprobs, own, atol=1e-4)
        kept += is_policys
    assert 0 < sum(kept) < len(kept)
    assert all(reason.startswith("the form cannot be followed: ") for reason in found["refused"]), found["refused"]
    assert all("install xgrammar 0.2.4" in reason for reason in found["of an old xgrammar"])
    assert found["plain"]
