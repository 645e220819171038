"""Adapters of sharded models, compiled for Ascend and executed by CPU ranks, train like those of one plain process.

Nightly: every day test_parallel_execution.py executes a model without, test_compile_matrix.py compiles adapters, and
tests/models/test_lora.py and tests/training compute with them. As in test_parallel_execution.py the ranks run the
product's worker, the plain process the product's cells for the CPU.
"""

import platform
from dataclasses import dataclass

import numpy as np
import pytest
from execution_cases import (
    ALL_LAYOUTS,
    IS_LAST,
    LEARNING_RATE,
    NOT_FINITE,
    UNCUT_MODEL,
    batches,
    hf_weights,
    plain_learner,
    plain_network,
)
from execution_jobs import compile_and_execute
from slow_tests import SLOW

from mindrlhf.dryrun.execute.run import SEED

pytestmark = [
    SLOW,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
]

TOLERANCE = 1e-5
LORA = {"rank": 4, "alpha": 8.0}
OLD_LOGPROBS = 6  # their place among the inputs of the update
FIRST_UPDATE = IS_LAST.index(True) + 1  # its number of calls
_OF_TWO = ("tp2", "tp2_sequence_parallel", "dp2_optimizer_parallel", "pp2")
LAYOUTS = {
    2: {name: ALL_LAYOUTS[2][name] for name in _OF_TWO},
    4: {"dp2_tp2": {"data_parallel": 2, "model_parallel": 2, "vocab_emb_dp": True, "enable_parallel_optimizer": True}},
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def executions(tmp_path_factory):
    """The result of every layout by name."""
    from mindrlhf.algorithms.losses import POLICY_INPUTS
    from mindrlhf.dryrun.compile.request import LOGPROBS, UPDATE

    root, computed = tmp_path_factory.mktemp("execution"), dict.fromkeys(NAMES, "old_logprobs")
    cells = (UPDATE, LOGPROBS)
    return compile_and_execute(root, UNCUT_MODEL, LAYOUTS, batches(), cells, POLICY_INPUTS, computed, lora=LORA)


@dataclass
class Plain:
    """What one process computes: losses and norms, log-probabilities of the base, and the merged model at the end."""

    losses: list[float]
    norms: list[float]
    initial: list[np.ndarray]
    adapters: dict[str, np.ndarray]
    begun: dict[str, np.ndarray]
    merged: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    from mindrlhf.data.packing import PackedRows
    from mindrlhf.models.lora.model import attach_lora
    from mindrlhf.specs.lora import LoraOptions
    from mindrlhf.weights.adapters.merge import iter_merged_tensors

    network = plain_network(tmp_path_factory.mktemp("mindformers-log"), UNCUT_MODEL)
    attach_lora(network, LoraOptions(**LORA), SEED, "base")
    learner = plain_learner(network)
    rows = [PackedRows(*inputs[:4], tokens={}) for inputs in batches()]
    adapters = {one.name: one for one in network.trainable_params()}
    begun = {name: parameter.asnumpy().copy() for name, parameter in adapters.items()}
    initial = [learner.model.logprobs(one) for one in rows]
    losses, norms = [], []
    for call, (inputs, is_last) in enumerate(zip(batches(), IS_LAST)):
        inputs[OLD_LOGPROBS] = initial[call]
        kl_coefficient, num_tokens = inputs[9][0]
        losses.append(learner.accumulate(rows[call], [*inputs[4:9], kl_coefficient], num_tokens)[0][0])
        if is_last:
            norms.append(learner.apply(LEARNING_RATE))
    trained = {name: parameter.asnumpy() for name, parameter in adapters.items()}
    return Plain(losses, norms, initial, trained, begun, dict(iter_merged_tensors(network)))


@pytest.mark.parametrize("name", NAMES)
def test_losses_and_norms_are_those_of_one_process(executions, plain, name):
    result = executions[name]
    assert [np.isnan(loss) for loss in plain.losses] == [call == NOT_FINITE for call in range(len(IS_LAST))]
    np.testing.assert_allclose(result.losses, plain.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(result.grad_norms, plain.norms, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_alone_are_trained_and_saved(executions, plain, name):
    """Two updates, and between them one that is withheld."""
    result = executions[name]
    assert result.weights.keys() == plain.adapters.keys()
    for parameter, expected in plain.adapters.items():
        np.testing.assert_allclose(result.weights[parameter], expected, rtol=0, atol=TOLERANCE, err_msg=parameter)
        assert np.abs(expected - plain.begun[parameter]).max() > 100 * TOLERANCE, parameter
    assert result.replica_difference == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_policy_without_its_adapters(executions, plain, name):
    """Its log-probabilities at the end are still those under the initial weights, which "first" are too."""
    for kind in ("first", "reference"):
        for found, expected in zip(executions[name].outputs[kind], plain.initial, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    for first, reference in zip(executions[name].outputs["first"], executions[name].outputs["reference"]):
        np.testing.assert_array_equal(first, reference)


@pytest.mark.parametrize("name", NAMES)
def test_merged_weights_are_published(executions, plain, name):
    published, base = executions[name].published, hf_weights(UNCUT_MODEL)
    for hf_name, tensor in base.items():
        np.testing.assert_array_equal(published["before"][hf_name], tensor, err_msg=hf_name)
    assert published["after"].keys() == plain.merged.keys()
    for hf_name, expected in plain.merged.items():
        np.testing.assert_allclose(published["after"][hf_name], expected, rtol=0, atol=TOLERANCE, err_msg=hf_name)
        is_adapted = ".layers." in hf_name and "_proj.weight" in hf_name
        assert (np.abs(expected - base[hf_name]).max() > 10 * TOLERANCE) == is_adapted, hf_name


@pytest.mark.parametrize("name", NAMES)
def test_updates_after_a_restored_checkpoint_are_the_same_to_the_last_bit(executions, name):
    result = executions[name]
    np.testing.assert_array_equal(result.resumed_losses, result.losses[FIRST_UPDATE:])
    for hf_name, tensor in result.published["after"].items():
        np.testing.assert_array_equal(result.published["resumed"][hf_name], tensor, err_msg=hf_name)


@pytest.mark.parametrize("name", NAMES)
def test_the_adapter_is_exported_in_peft_s_format(executions, tmp_path, name):
    """And base and adapter into the model that was published."""
    from safetensors.numpy import load_file

    from mindrlhf.weights.adapters.merge import merge_adapter

    result = executions[name]
    exported, saved = result.exported.with_name("exported_adapter"), result.exported.parent / "saved" / "model"
    tensors = load_file(exported / "adapter_model.safetensors")
    assert len(tensors) == UNCUT_MODEL["num_hidden_layers"] * 2 * 7
    assert all(one.startswith("base_model.model.model.layers.") for one in tensors)
    base = result.exported.parents[1] / "model"
    for adapter in (saved, exported):
        merge_adapter(base, adapter, tmp_path / "merged" / adapter.name)
        (file,) = (tmp_path / "merged" / adapter.name).glob("*.safetensors")
        for hf_name, tensor in load_file(file).items():
            np.testing.assert_allclose(tensor, result.published["after"][hf_name], rtol=0, atol=1e-7, err_msg=hf_name)
