"""The Ascend graph of rows that share prompts, executed on CPU ranks, computes what CPU cells do with plain rows."""

import platform

import numpy as np
import pytest
from execution_cases import (
    IS_LAST,
    KL_COEFFICIENT,
    LEARNING_RATE,
    NUM_ROWS,
    ROW_LENGTH,
    UNCUT_MODEL,
    VOCABULARY,
    mf_weights,
    plain_learner,
    plain_network,
)
from execution_jobs import compile_and_execute
from slow_tests import SLOW

from mindrlhf.algorithms.losses import POLICY_INPUTS
from mindrlhf.config.training import SHARED_PROMPTS
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import Batch, RowOptions, make_batch

pytestmark = [
    SLOW,  # tests/training/worker/test_shared_prompts.py has the numbers of CPU cells every day
    pytest.mark.timeout(1200),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
]

TOLERANCE = 1e-5
# Two replicas, whose rows have positions of their own; each holds half of the optimizer state.
LAYOUTS = {2: {"dp2_shared": {"data_parallel": 2, "enable_parallel_optimizer": True}}}
SHARED = RowOptions((ROW_LENGTH,), NUM_ROWS, 1, True, SHARED_PROMPTS, in_step=True)
PLAIN = RowOptions((ROW_LENGTH,), NUM_ROWS, 1, True)
# Prompt length -> response lengths: they fill four rows, a group over two of them.
GROUPS = ((9, (6, 5, 3, 2)), (12, (7, 8, 4, 9, 6)), (4, (5, 1)), (1, (6,)), (7, (8, 9)))


def sequences(call: int) -> list[TokenSequence]:
    random = np.random.default_rng(call)
    found = []
    for prompt_length, response_lengths in GROUPS:
        prompt = random.integers(1, VOCABULARY, prompt_length).astype(np.int32)
        for length in response_lengths:
            values = {"advantages": np.full(length, random.standard_normal(), np.float32)}
            values["weights"] = np.ones(length, np.float32)
            for name in POLICY_INPUTS[2:]:
                values[name] = (-4.85 + 0.2 * random.standard_normal(length)).astype(np.float32)
            found.append(TokenSequence(prompt, random.integers(1, VOCABULARY, length).astype(np.int32), values))
    return found


def num_tokens(call: int) -> int:
    """Response tokens of the update that a call belongs to: all calls have as many."""
    ends = [0, *(number + 1 for number, is_last in enumerate(IS_LAST) if is_last)]
    calls = next(end - start for start, end in zip(ends, ends[1:]) if call < end)
    return calls * sum(sum(lengths) for _, lengths in GROUPS)


def shared_batches() -> list[Batch]:
    return [make_batch(sequences(call), SHARED) for call in range(len(IS_LAST))]


@pytest.fixture(scope="module")
def execution(tmp_path_factory):
    from mindrlhf.dryrun.compile.request import LOGPROBS, UPDATE

    inputs = []
    for call, batch in enumerate(shared_batches()):
        (rows,) = batch.micro_batches
        scalars = np.tile(np.array([[KL_COEFFICIENT, num_tokens(call)]], np.float32), (NUM_ROWS, 1))
        arrays = (rows.model_inputs, rows.segment_ids, rows.labels, rows.mask)
        inputs.append([*arrays, *(rows.tokens[name] for name in POLICY_INPUTS), scalars])
    root = tmp_path_factory.mktemp("execution")
    cells = (UPDATE, LOGPROBS)
    results = compile_and_execute(root, UNCUT_MODEL, LAYOUTS, inputs, cells, POLICY_INPUTS, {}, shared_prompts=True)
    return results["dp2_shared"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of the calls, initial log-probabilities by sample, and final weights, from rows that repeat prompts."""
    network = plain_network(tmp_path_factory.mktemp("mindformers-log"), UNCUT_MODEL)
    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    learner = plain_learner(network)
    losses, logprobs = [], []
    batches = [make_batch(sequences(call), PLAIN) for call in range(len(IS_LAST))]
    for batch in batches:
        logprobs.append(batch.collect([[learner.model.logprobs(rows) for rows in batch.micro_batches]]))
    for call, batch in enumerate(batches):
        statistics = [
            learner.accumulate(
                rows, [*(rows.tokens[name] for name in POLICY_INPUTS), np.float32(KL_COEFFICIENT)], num_tokens(call)
            )[0]
            for rows in batch.micro_batches
        ]
        losses.append(sum(one[0] for one in statistics))
        if IS_LAST[call]:
            learner.apply(LEARNING_RATE)
    return losses, logprobs, {name: parameter.asnumpy() for name, parameter in parameters.items()}


def test_losses_are_those_of_plain_rows(execution, plain):
    assert execution.lowered["ReduceScatter"] >= 1, "gradients are summed where their optimizer state is"
    np.testing.assert_allclose(execution.losses, plain[0], rtol=0, atol=TOLERANCE)


def test_logprobs_are_those_of_plain_rows(execution, plain):
    for batch, found, expected in zip(shared_batches(), execution.outputs["reference"], plain[1], strict=True):
        for one, other in zip(batch.responses([found]), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE)


def test_weights_are_those_of_plain_rows(execution, plain):
    start = mf_weights(UNCUT_MODEL)
    for parameter, expected in plain[2].items():
        actual = execution.weights[parameter]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=parameter)
        assert np.abs(expected - start[parameter]).max() > 100 * TOLERANCE, parameter
