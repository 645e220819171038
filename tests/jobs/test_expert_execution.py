"""Experts that are shared by ranks, compiled for Ascend and executed on CPU ranks, train like one plain process.

The plain process has the CPU cells' experts, each of which sees every token, and sends nothing anywhere.
"""

import platform

import numpy as np
import pytest
from execution_cases import IS_LAST, MODEL, batches, hf_weights, mf_weights
from execution_jobs import compile_and_execute
from slow_tests import RUNS_SLOW_TESTS
from test_parallel_execution import FIRST_UPDATE, TOLERANCE, train_plainly

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
]

EXPERTS = {
    **MODEL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# name -> (number of ranks, parallel_config)
ALL_CASES = {
    "ep2_dp2": (2, {"data_parallel": 2, "expert_parallel": 2}),
    "whole_dp2": (2, {"data_parallel": 2}),
}
CASES = ALL_CASES if RUNS_SLOW_TESTS else {"ep2_dp2": ALL_CASES["ep2_dp2"]}


@pytest.fixture(scope="module", params=CASES)
def executed(request, tmp_path_factory):
    from mindrlhf.algorithms.losses import POLICY_INPUTS
    from mindrlhf.dryrun.compile.request import LOGPROBS, UPDATE

    size, parallel = CASES[request.param]
    root = tmp_path_factory.mktemp("execution")
    layouts, computed = {size: {request.param: parallel}}, {request.param: "old_logprobs"}
    cells = (UPDATE, LOGPROBS)
    return compile_and_execute(root, EXPERTS, layouts, batches(), cells, POLICY_INPUTS, computed)[request.param]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train_plainly(tmp_path_factory.mktemp("mindformers-log"), True, EXPERTS)


def test_losses_norms_and_statistics_are_those_of_one_process(executed, plain):
    assert executed.lowered["AlltoAllV"] == 5, "rows and their experts go there, rows come back, and two slopes"
    np.testing.assert_allclose(executed.losses, plain.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(executed.grad_norms, plain.norms, rtol=1e-4)
    assert len(executed.statistics) == sum(IS_LAST)
    for found, expected in zip(executed.statistics, plain.statistics, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=TOLERANCE)


@pytest.mark.parametrize(
    "kind, of_plain", [("first", "started"), ("reference", "initial"), ("synchronised", "trained")]
)
def test_logprobs_are_those_of_one_process(executed, plain, kind, of_plain):
    for found, expected in zip(executed.outputs[kind], getattr(plain, of_plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_weights_are_those_of_one_process(executed, plain):
    start = mf_weights(EXPERTS)
    assert executed.weights.keys() == plain.weights.keys()
    assert executed.replica_difference == 0.0
    for name, expected in plain.weights.items():
        np.testing.assert_allclose(executed.weights[name], expected, rtol=0, atol=TOLERANCE, err_msg=name)
        assert np.abs(expected - start[name]).max() > 100 * TOLERANCE, name


def test_publishing_and_resuming(executed):
    """The buffer holds the tensors that the ranks began with; updates after a restored checkpoint end alike."""
    tensors = hf_weights(EXPERTS)
    assert executed.published["before"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(executed.published["before"][name], tensor, err_msg=name)
    assert sum(executed.written_bytes) == sum(tensor.nbytes for tensor in tensors.values())
    np.testing.assert_array_equal(executed.resumed_losses, executed.losses[FIRST_UPDATE:])
    for name, tensor in executed.published["after"].items():
        np.testing.assert_array_equal(executed.published["resumed"][name], tensor, err_msg=name)
