"""Tokens that are planned several at a time are those that are planned one at a time, bit for bit."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from rollout_probes import ask_probe
from slow_tests import SLOW

VOCABULARY, MAX_TOKENS = 300, 40
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
EXPERTS = {
    **QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def case(
    num_prompts=3, num_samples=4, lengths=(5, 32, 33), limits=(MAX_TOKENS,), interrupt=0, delay=1e9, **sampling
) -> dict:
    """Prompts within one block of the cache, on its edge, and over two."""
    random = np.random.default_rng(num_prompts)
    prompts = [random.integers(10, VOCABULARY, lengths[i % len(lengths)]).tolist() for i in range(num_prompts)]
    max_tokens = [limits[i % len(limits)] for i in range(num_prompts)]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop_token_ids": [], **sampling}
    shape = {"prompts": prompts, "num_samples": num_samples, "max_tokens": max_tokens}
    return {**shape, "sampling": sampling, "interrupt": interrupt, "delay": delay}


CASES = {
    "plain": case(),
    "stop tokens": case(stop_token_ids=list(range(10))),
    "greedy": case(num_samples=1, temperature=0.0),
    "nucleus": case(temperature=0.7, top_p=0.9, top_k=20),
    "other limits": case(limits=(1, 17, 40)),
    "more than slots": case(num_prompts=9, stop_token_ids=[3, 4, 5]),
    "interrupted": case(interrupt=3),
    "without delay": case(stop_token_ids=list(range(10)), delay=0),
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


QWEN3 = {**QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "attention_bias": False}


LLAMA3 = {
    **QWEN,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
MISTRAL = {**QWEN, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}


def check_equal(cases: dict) -> None:
    for name, words in cases.items():
        one, several = dict(words["one"]), dict(words["several"])
        one.pop("steps"), several.pop("steps")
        assert one == several, name
        assert any(len(set(tokens)) > 1 for tokens in one["tokens"]), name


def test_samples_are_the_same(rollout_python, directory):
    result = ask(rollout_python, directory, QWEN, CASES)
    assert result["several"] and result["decoder"] == "used"
    cases = result["cases"]
    check_equal(cases)
    steps = {name: [words["one"]["steps"], words["several"]["steps"]] for name, words in cases.items()}
    # Every prompt is read with the first token; then come all others at a time.
    assert steps["plain"] == [MAX_TOKENS, 2]
    # A sample that ends leaves the others to go on.
    assert [steps[name][1] for name in ("other limits", "stop tokens", "nucleus")] == [2, 2, 2]
    assert 2 < steps["without delay"][1] < steps["without delay"][0]
    assert len({len(tokens) for tokens in cases["stop tokens"]["one"]["tokens"]}) > 5
    assert steps["interrupted"] == [MAX_TOKENS, 14], "three tokens a step after the first"
    assert set(cases["stop tokens"]["one"]["reasons"]) == {"stop", "length"}
    assert all(several < one for one, several in steps.values())


SHARED = {
    "plain": CASES["plain"],
    "over blocks": case(num_samples=3, lengths=(40, 63, 64, 65), num_prompts=4, limits=(30,)),
    "more than slots": CASES["more than slots"],
    "one sample each": case(num_samples=1),
    "interrupted": CASES["interrupted"],
}


def test_a_prompt_is_read_once_for_its_samples(rollout_python, directory):
    """A prompt is read whole once; vLLM reads for each further sample what the prompt's whole blocks lack."""
    cases = ask(rollout_python, directory, QWEN, SHARED, shares_prompts=True)
    for name, words in cases.items():
        apart, shared = words["apart"], words["shared"]
        assert apart["tokens"] == shared["tokens"] and apart["reasons"] == shared["reasons"], name
        for own, other in zip(apart["logprobs"], shared["logprobs"], strict=True):
            np.testing.assert_allclose(own, other, atol=2e-5, err_msg=name)
    first = {name: (words["apart"]["read"][0], words["shared"]["read"][0]) for name, words in cases.items()}
    assert first["plain"] == (4 * 5 + 4 * 32 + 33 + 3 * 1, (5 + 3) + (32 + 3) + (33 + 3))
    whole = 40 + 63 + 64 + 65
    assert first["over blocks"] == (whole + 2 * (8 + 31 + 32 + 1), whole + 2 * 4)
    assert first["one sample each"] == (5 + 32 + 33,) * 2
    apart, shared = (sum(cases["more than slots"][word]["read"]) for word in ("apart", "shared"))
    assert shared < apart


def test_heads_that_are_normalised_are_computed_alike(rollout_python, directory):
    result = ask(rollout_python, directory, QWEN3, {"plain": CASES["plain"], "stop tokens": CASES["stop tokens"]})
    assert result["several"] and result["decoder"] == "used"
    check_equal(result["cases"])


@pytest.mark.parametrize("model", [LLAMA3, pytest.param(MISTRAL, marks=SLOW)], ids=["llama3", "mistral"])
def test_llama_and_its_kin_are_computed_alike(rollout_python, directory, model):
    result = ask(rollout_python, directory, model, {"plain": CASES["plain"], "stop tokens": CASES["stop tokens"]})
    assert result["several"] and result["decoder"] == "used"
    check_equal(result["cases"])


@SLOW
def test_a_window_is_left_to_vllm(rollout_python, directory):
    model = {**MISTRAL, "sliding_window": 64}
    result = ask(rollout_python, directory, model, {"plain": CASES["plain"]})
    assert result["decoder"] == "none"
    check_equal(result["cases"])


def test_weights_that_take_the_left_place_are_multiplied_alike(rollout_python, directory):
    # All but the projection of attention's output are large; feed-forward results lie by columns.
    large = {**QWEN, "hidden_size": 512, "intermediate_size": 1024, "num_key_value_heads": 4, "vocab_size": 1100}
    result = ask(rollout_python, directory, large, {"plain": CASES["plain"], "stop tokens": CASES["stop tokens"]})
    assert result["several"] and result["decoder"] == "used"
    check_equal(result["cases"])


def test_a_decoder_that_differs_is_not_used(rollout_python, directory):
    result = ask(rollout_python, directory, QWEN, {"plain": CASES["plain"]}, break_decoder=True)
    assert result["several"] and result["decoder"] == "given up"
    check_equal(result["cases"])


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
    assert result["several"] and result["decoder"] == "none", "experts are vLLM's"
    check_equal(result["cases"])
    assert all(words["several"]["has experts"] for words in result["cases"].values())


@SLOW
def test_in_bfloat16_samples_are_the_same(rollout_python, directory):
    result = ask(rollout_python, directory, QWEN, {"plain": CASES["plain"]}, dtype="bfloat16")
    assert result["several"]
    check_equal(result["cases"])
