"""Adapters against transformers: an adapter in PEFT's format is read, run, differentiated, merged and written."""

import json
from pathlib import Path

import numpy as np
import pytest
from slow_tests import RUNS_SLOW_TESTS
from test_causal_lm import CASES as BASES

pytestmark = pytest.mark.usefixtures("mindformers")

# One layer, but where layers differ.
CASES = {
    "qwen2": {**BASES["qwen2-tied"], "num_hidden_layers": 1},
    "deepseek-v3": {**BASES["deepseek-v3-yarn"], "num_hidden_layers": 1, "first_k_dense_replace": 0},
    "glm4": BASES["glm4"],
}
if RUNS_SLOW_TESTS:
    CASES["gemma3"] = BASES["gemma3"]
    CASES["qwen3-experts-rank-stabilised"] = {**BASES["qwen3-experts-in-some-layers"], "rank_stabilised": True}
RANK, ALPHA = 3, 5.0


@pytest.fixture(scope="module")
def references_dir(tmp_path_factory, run_in_rollout):
    out_dir = tmp_path_factory.mktemp("adapted")
    run_in_rollout(Path(__file__).with_name("transformers_adapters.py"), out_dir, json.dumps(CASES))
    return out_dir


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def reference_dir(references_dir, case):
    return references_dir / case


@pytest.fixture(scope="module")
def options(case):
    from mindrlhf.specs.lora import LoraOptions

    return LoraOptions(RANK, ALPHA, rank_stabilised="rank-stabilised" in case)


@pytest.fixture(scope="module")
def model(reference_dir, options):
    """The base with new adapters, as training begins; its parameters are those of the adapters of `reference_dir`
    once `adapted` was asked for."""
    from networks import attach_lora, load_hf_weights

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.weights.hf import read_hf_config

    network = build_model(read_hf_config(reference_dir), seq_length=12)
    load_hf_weights(network, reference_dir)
    attach_lora(network, options, 7, str(reference_dir))
    return network


@pytest.fixture(scope="module")
def expected(reference_dir):
    with np.load(reference_dir / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def computed(model, reference_dir, expected):
    """Logits with the adapter of `reference_dir` and without it, and the gradients of its factors by PEFT's names."""
    import mindspore as ms
    from causal_logits import CausalLMLogits
    from mindspore import nn, ops
    from networks import load_adapter

    from mindrlhf.specs.fuse import split
    from mindrlhf.training.engine.model import Whole
    from mindrlhf.training.runtime import Rank
    from mindrlhf.weights.adapters.peft import PREFIX

    class MeanSquare(nn.Cell):
        def __init__(self, network):
            super().__init__(auto_prefix=False)
            self.logits = CausalLMLogits(network)

        def construct(self, input_ids, segment_ids):
            logits = self.logits(input_ids, segment_ids)
            return ops.square(logits).mean(), logits

    class Gradients(nn.Cell):
        def __init__(self, network):
            super().__init__(auto_prefix=False)
            self.function = ops.value_and_grad(
                MeanSquare(network), None, ms.ParameterTuple(network.trainable_params()), has_aux=True
            )

        def construct(self, *inputs):
            return self.function(*inputs)

    load_adapter(model, reference_dir / "adapter")
    ids = expected["input_ids"]
    inputs = (ms.Tensor(ids), ms.Tensor(np.ones_like(ids)))
    step = Gradients(model)
    (_, logits), slopes = step(*inputs)
    by_name = {one.name: slope.asnumpy() for one, slope in zip(model.trainable_params(), slopes, strict=True)}
    gradients = {}
    for adapter in model.lora.adapters:
        for rule in (adapter.down, adapter.up):
            parts = split(rule, model.dims, by_name[rule.mf_name])
            gradients.update(zip((PREFIX + name for name in rule.hf_names), parts, strict=True))
    with Whole(model, Rank(0, 1)).without_adapters():
        (_, bare), _ = step(*inputs)
    return logits.asnumpy(), bare.asnumpy(), gradients


def test_logits_are_those_of_the_merged_matrices_in_float64(computed, expected):
    np.testing.assert_allclose(computed[0], expected["logits"], atol=1e-4, rtol=0)
    assert np.abs(expected["logits"] - computed[1]).max() > 0.1  # the adapter does something


def test_gradients_of_both_factors_are_those_of_transformers_in_float64(computed, expected):
    gradients = computed[2]
    assert gradients.keys() == expected.keys() - {"input_ids", "logits"}
    for name, gradient in gradients.items():
        largest = np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], atol=1e-4 * largest + 1e-7, rtol=0, err_msg=name)


def test_without_its_adapters_it_is_the_base_to_the_last_bit(computed, reference_dir, expected):
    import mindspore as ms
    from causal_logits import CausalLMLogits
    from networks import load_hf_weights

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.weights.hf import read_hf_config

    base = build_model(read_hf_config(reference_dir), seq_length=12)
    load_hf_weights(base, reference_dir)
    ids = expected["input_ids"]
    logits = CausalLMLogits(base)(ms.Tensor(ids), ms.Tensor(np.ones_like(ids))).asnumpy()
    np.testing.assert_array_equal(computed[1], logits)


def test_merged_files_hold_the_sum_and_the_written_adapter_is_the_one_that_was_read(
    model, reference_dir, options, tmp_path
):
    from networks import iter_adapter_tensors, iter_merged_tensors, load_adapter
    from safetensors.numpy import load_file

    from mindrlhf.weights.adapters.merge import merge_adapter
    from mindrlhf.weights.adapters.peft import adapter_config, adapter_shapes, write_adapter

    load_adapter(model, reference_dir / "adapter")
    config = adapter_config(model.spec, model.dims, options, "base")
    shapes = adapter_shapes(model.spec, model.dims, options)
    write_adapter(iter_adapter_tensors(model), shapes, config, tmp_path / "adapter")
    read = load_file(reference_dir / "adapter" / "adapter_model.safetensors")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert written.keys() == read.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, read[name], err_msg=name)

    merge_adapter(reference_dir, tmp_path / "adapter", tmp_path / "merged")
    base, merged = load_file(reference_dir / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    in_memory = dict(iter_merged_tensors(model))
    assert merged.keys() == in_memory.keys() == base.keys()
    scale = ALPHA / (np.sqrt(RANK) if options.rank_stabilised else RANK)
    for name, array in merged.items():
        module = "base_model.model." + name.removesuffix(".weight")
        total = base[name].astype(np.float64)
        if f"{module}.lora_A.weight" in read:
            total = total + scale * (
                read[f"{module}.lora_B.weight"].astype(np.float64) @ read[f"{module}.lora_A.weight"].astype(np.float64)
            )
        np.testing.assert_allclose(array, total, atol=2e-6, rtol=0, err_msg=name)
        np.testing.assert_allclose(in_memory[name], array, atol=2e-6, rtol=0, err_msg=name)
