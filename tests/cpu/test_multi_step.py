"""Tokens that are planned several at a time are those that are planned one at a time, bit for bit."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from rollout_probes import ask_probe
from slow_tests import SLOW
from tiny_models import LLAMA3_ROPE, WIDE, tiny_model

VOCABULARY, MAX_TOKENS = 300, 40
QWEN = tiny_model(base=WIDE, vocab_size=VOCABULARY, tie_word_embeddings=True)
QWEN3 = tiny_model("qwen3", QWEN)
LLAMA3 = tiny_model("llama", QWEN, rope_scaling=LLAMA3_ROPE)
EXPERTS = tiny_model("qwen3_moe", QWEN, num_experts=8)


def case(num_prompts=3, num_samples=4, lengths=(5, 32, 33), limits=(MAX_TOKENS,), interrupt=0, **sampling) -> dict:
    """Prompts within one block of the cache, on its edge, and over two."""
    random = np.random.default_rng(num_prompts)
    prompts = [random.integers(10, VOCABULARY, lengths[i % len(lengths)]).tolist() for i in range(num_prompts)]
    max_tokens = [limits[i % len(limits)] for i in range(num_prompts)]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [], **sampling}
    shape = {"prompts": prompts, "num_samples": num_samples, "max_tokens": max_tokens}
    return {**shape, "sampling": sampling, "interrupt": interrupt}


CASES = {
    "plain": case(),
    "stop tokens": case(stop_token_ids=list(range(10))),
    "greedy": case(num_samples=1, temperature=0.0),
    "nucleus": case(temperature=0.7, top_p=0.9, top_k=20),
    "other limits": case(limits=(1, 17, 40)),
    "more than slots": case(num_prompts=9, stop_token_ids=[3, 4, 5]),
    "interrupted": case(interrupt=3),
    "interrupted among ends": case(interrupt=4, num_prompts=3, stop_token_ids=list(range(30))),
    "to the end of the model's length": case(lengths=(84, 60), limits=(12, 36)),
}


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="multi-step-") as name:
        yield Path(name)


def ask(python: str, directory: Path, model: dict, cases: dict[str, dict], **config) -> dict:
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(json.dumps(model))
    config = {"max_model_len": 96, "max_num_seqs": 12, **config}
    return ask_probe("multi_step_probe.py", python, directory, cases, **config)


def check_equal(cases: dict) -> None:
    for name, words in cases.items():
        one, several = dict(words["one"]), dict(words["several"])
        one.pop("steps"), several.pop("steps")
        assert one == several, name
        assert any(len(set(tokens)) > 1 for tokens in one["tokens"]), name


def test_samples_are_the_same(rollout_python, directory):
    result = ask(rollout_python, directory, QWEN, CASES)
    assert result["several"]
    cases = result["cases"]
    check_equal(cases)
    steps = {name: [words["one"]["steps"], words["several"]["steps"]] for name, words in cases.items()}
    # Every prompt is read with the first token; then come all others at a time, 16 of them after a sample has ended.
    assert steps["plain"] == [MAX_TOKENS, 2]
    assert steps["other limits"] == [MAX_TOKENS, 3], "limits of 1, 17 and 40: steps of 1, 33 and 6 tokens"
    assert steps["interrupted"] == [MAX_TOKENS, 14], "three tokens a step after the first"
    assert len({len(tokens) for tokens in cases["stop tokens"]["one"]["tokens"]}) > 5
    assert set(cases["stop tokens"]["one"]["reasons"]) == {"stop", "length"}
    assert all(several < one for one, several in steps.values())
    # Three prompts of 5, 32 and 33 tokens for four samples each, in blocks of 32 that the others find.
    shared, apart = result["shared"]
    assert shared["read"][0] == (5 + 3) + (32 + 3) + (33 + 3)
    assert apart["read"][0] == 4 * 5 + 4 * 32 + 33 + 3
    assert shared["tokens"] == apart["tokens"]
    np.testing.assert_allclose(shared["sums"], apart["sums"], atol=2e-4)


@pytest.mark.parametrize("model", [QWEN3, LLAMA3], ids=["norms of heads", "scaled rotation"])
def test_other_dense_models_are_computed_alike(rollout_python, directory, model):
    result = ask(rollout_python, directory, model, {name: CASES[name] for name in ("plain", "stop tokens")})
    check_equal(result["cases"])
    assert result["dense"]


@SLOW
def test_a_window_is_left_to_vllm(rollout_python, directory):
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    result = ask(rollout_python, directory, {**QWEN, **window}, {"plain": CASES["plain"]})
    assert not result["dense"]


@SLOW
def test_samples_that_wait_for_the_cache_are_the_same(rollout_python, directory):
    # Four blocks of 32 tokens for each of 12 samples would be 48: room for 17 makes some wait, and begin anew.
    num_blocks, bytes_per_block = 17, 2 * 2 * 32 * 2 * 32 * 4
    cases = {name: CASES[name] for name in ("plain", "more than slots")}
    result = ask(rollout_python, directory, QWEN, cases, kv_cache_gib=num_blocks * bytes_per_block / 2**30)
    assert result["several"]
    assert result["cases"]["plain"]["one"]["steps"] > MAX_TOKENS, "nothing waited"
    for words in result["cases"].values():
        # A sample that began anew was computed in another batch: kernels may round differently there.
        assert words["one"]["reasons"] == words["several"]["reasons"]
        same = [one == several for one, several in zip(words["one"]["tokens"], words["several"]["tokens"])]
        assert sum(same) >= len(same) - 1


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_experts_are_recorded_for_every_token(rollout_python, directory, dtype):
    cases = {name: CASES[name] for name in ("plain", "stop tokens")}
    result = ask(rollout_python, directory, EXPERTS, cases, record_routing=True, dtype=dtype)
    assert result["several"]
    check_equal(result["cases"])
    assert all(words["several"]["has experts"] for words in result["cases"].values())
