"""Graphs that save memory, and those of YaRN, executed on CPU ranks, train like one plain process.

The plain process is the one of test_parallel_execution: other cells, whole logits, nothing recomputed.
"""

import platform

import numpy as np
import pytest
from execution_cases import MODEL, batches, mf_weights
from execution_jobs import compile_and_execute
from slow_tests import SLOW
from test_parallel_execution import TOLERANCE, train_plainly

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
    SLOW,
]

# YaRN that is felt within a row: half the context, most channels slowed.
YARN_MODEL = {
    **MODEL,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}
MODEL_PARALLEL = {"data_parallel": 1, "model_parallel": 2, "use_seq_parallel": True, "vocab_emb_dp": False}
# name -> (model, parallel_config, memory)
CASES = {
    # Tiles that divide neither positions nor words; logits of a micro-batch are 4 x 32 positions, 64 words a rank.
    "tiles_tp2": (MODEL, MODEL_PARALLEL, {"logit_positions": 48, "logit_words": 24}),
    "recompute_tp2": (
        MODEL,
        MODEL_PARALLEL,
        {"recompute_layers": "1", "recompute_operators": ("attention", "norms", "activation")},
    ),
    "yarn_tp2": (YARN_MODEL, MODEL_PARALLEL, {}),
    "swapped_tp2": (MODEL, MODEL_PARALLEL, {"swap_moments": True}),
    "swapped_pp2": (MODEL, {"data_parallel": 1, "pipeline_stage": 2, "micro_batch_num": 2}, {"swap_moments": True}),
    "swapped_dp2": (MODEL, {"data_parallel": 2, "enable_parallel_optimizer": True}, {"swap_moments": True}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """The executed run, and the plain one."""
    from mindrlhf.algorithms.losses import POLICY_INPUTS
    from mindrlhf.dryrun.compile.request import LOGPROBS, UPDATE

    model, parallel, memory = CASES[request.param]
    root = tmp_path_factory.mktemp("execution")
    layouts = {2: {request.param: parallel}}
    cells = (UPDATE, LOGPROBS)
    executed = compile_and_execute(root, model, layouts, batches(), cells, POLICY_INPUTS, {}, memory=memory)
    return executed[request.param], train_plainly(tmp_path_factory.mktemp("mindformers-log"), False, model)


def test_losses_and_norms_are_those_of_one_process(case):
    executed, plain = case
    np.testing.assert_allclose(executed.losses, plain.losses, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(executed.grad_norms, plain.norms, rtol=1e-4)


def test_logprobs_are_those_of_one_process(case):
    executed, plain = case
    for found, expected in zip(executed.outputs["reference"], plain.initial, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_weights_are_those_of_one_process(case):
    executed, plain = case
    start = mf_weights()
    for name, expected in plain.weights.items():
        np.testing.assert_allclose(executed.weights[name], expected, rtol=0, atol=TOLERANCE, err_msg=name)
        assert np.abs(expected - start[name]).max() > 100 * TOLERANCE, name
