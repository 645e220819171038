"""Ascend graphs of a model that sees, executed on CPU ranks, train like one plain process on CPU cells.

The ranks of the first pipeline stage run the tower, on the CPU's cells, for the images of their own rows; what goes
into the decoder, its three-axis positions and everything behind are the graphs of the cluster.
"""

import platform

import numpy as np
import pytest
from execution_cases import (
    EPSILON,
    IS_LAST,
    KL_COEFFICIENT,
    LEARNING_RATE,
    NUM_ROWS,
    ROW_LENGTH,
    hf_weights,
    mf_weights,
)
from execution_jobs import compile_and_execute
from slow_tests import RUNS_SLOW_TESTS
from tiny_vl import IMAGE, VISION_END, VISION_START, TinyVl, config_of

from mindrlhf.algorithms.losses import POLICY_INPUTS
from mindrlhf.data.packing import TokenSequence
from mindrlhf.specs import find_spec
from mindrlhf.training.batch import Batch, RowOptions, make_batch
from mindrlhf.training.vision.image_rows import ImageTokens

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
]

TOLERANCE = 1e-5
# In Qwen3-VL two layers of the decoder are given rows of images too.
MODELS = {
    "qwen2_5_vl": config_of(TinyVl(is_tied=False)),
    "qwen3_vl": config_of(TinyVl(family="qwen3_vl", vision_depth=3, layers=3, is_tied=False)),
}
_SP = {"use_seq_parallel": True, "vocab_emb_dp": True}
# By model and number of ranks, name -> parallel_config.
_ALL_LAYOUTS = {
    "qwen2_5_vl": {
        2: {
            "dp2_optimizer_parallel": {"data_parallel": 2, "enable_parallel_optimizer": True},
            "tp2_sequence_parallel": {"data_parallel": 1, "model_parallel": 2, **_SP},
            "pp2": {"data_parallel": 1, "pipeline_stage": 2, "micro_batch_num": 2},
        },
        4: {"tp2_dp2": {"data_parallel": 2, "model_parallel": 2, "vocab_emb_dp": False}},
    },
    "qwen3_vl": {
        2: {"qwen3_vl_tp2_sequence_parallel": {"data_parallel": 1, "model_parallel": 2, **_SP}},
        4: {"qwen3_vl_tp2_dp2": {"data_parallel": 2, "model_parallel": 2, "vocab_emb_dp": False}},
    },
}
LAYOUTS = _ALL_LAYOUTS if RUNS_SLOW_TESTS else {}  # nightly
FAMILY_OF = {name: family for family, sizes in LAYOUTS.items() for layouts in sizes.values() for name in layouts}
NAMES = list(FAMILY_OF)
# For each prompt the sizes of its images in tokens, and the lengths of its responses; two to a row, and padding.
GROUPS = (([(2, 3)], (5, 4)), ([], (9,)), ([(2, 2), (1, 3)], (7, 6)), ([(3, 1)], (8, 3, 5)))


def sequences(call: int, side: int) -> list[TokenSequence]:
    """Samples of a call; an image token is of ``side`` x ``side`` pixels."""
    random = np.random.default_rng(call)
    found = []
    for sizes, response_lengths in GROUPS:
        prompt = [40 + call]
        for rows, columns in sizes:
            prompt += [VISION_START, *[IMAGE] * (rows * columns), VISION_END]
        images = tuple(random.integers(0, 255, (rows * side, columns * side, 3), np.uint8) for rows, columns in sizes)
        for length in response_lengths:
            values = {"advantages": np.full(length, random.standard_normal(), np.float32)}
            values["weights"] = np.ones(length, np.float32)
            for name in POLICY_INPUTS[2:]:
                values[name] = (-5.6 + 0.2 * random.standard_normal(length)).astype(np.float32)
            response = random.integers(1, 250, length).astype(np.int32)
            found.append(TokenSequence(np.array([*prompt, 33], np.int32), response, values, images=images))
    return found


def batches(model: dict) -> list[Batch]:
    tokens = ImageTokens.of(find_spec(model).dims(model))
    options = RowOptions((ROW_LENGTH,), NUM_ROWS, 1, True, image_tokens=tokens)
    made = [make_batch(sequences(call, tokens.geometry.token_side), options) for call in range(len(IS_LAST))]
    assert all(len(batch.micro_batches) == 1 for batch in made)
    return made


def num_tokens(call: int) -> int:
    """Response tokens of the update that a call belongs to: all calls have as many."""
    ends = [0, *(number + 1 for number, is_last in enumerate(IS_LAST) if is_last)]
    calls = next(end - start for start, end in zip(ends, ends[1:]) if call < end)
    return calls * sum(sum(lengths) for _, lengths in GROUPS)


@pytest.fixture(scope="module")
def executions(tmp_path_factory):
    """The result of every layout by name."""
    from mindrlhf.dryrun.compile.request import LOGPROBS, UPDATE

    results = {}
    for family, layouts in LAYOUTS.items():
        inputs, images = [], []
        for call, batch in enumerate(batches(MODELS[family])):
            (rows,) = batch.micro_batches
            scalars = np.tile(np.array([[KL_COEFFICIENT, num_tokens(call)]], np.float32), (NUM_ROWS, 1))
            arrays = (rows.input_ids, rows.segment_ids, rows.labels, rows.mask)
            inputs.append([*arrays, *(rows.tokens[name] for name in POLICY_INPUTS), scalars])
            images.append([batch.images[digest] for digest in rows.images])
        root, cells = tmp_path_factory.mktemp("execution"), (UPDATE, LOGPROBS)
        results |= compile_and_execute(root, MODELS[family], layouts, inputs, cells, POLICY_INPUTS, {}, images=images)
    return results


class Plain:
    """One process on the CPU's cells: losses of the calls, initial log-probabilities by sample, final weights."""

    def __init__(self, model: dict):
        import mindspore as ms

        from mindrlhf.algorithms import policy_losses
        from mindrlhf.algorithms.logprobs import PolicyLogProbs
        from mindrlhf.algorithms.losses import PolicyLoss
        from mindrlhf.config.training import OptimizerSection
        from mindrlhf.models.causal_lm import build_model
        from mindrlhf.training.runtime import Rank
        from mindrlhf.training.worker.learner import Learner

        network = build_model(model, seq_length=ROW_LENGTH, num_image_rows=NUM_ROWS * ROW_LENGTH)
        parameters = {parameter.name: parameter for parameter in network.get_parameters()}
        self.model, self.start = model, mf_weights(model)
        for name, value in self.start.items():
            parameters[name].set_data(ms.Tensor(value))
        surrogate = policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.28)
        loss = PolicyLoss(PolicyLogProbs(network, 1.0, "cpu"), surrogate, on_policy=False, kl_estimator="k3")
        learner = Learner(network, loss, OptimizerSection(epsilon=EPSILON), Rank(0, 1), "cpu")
        made = batches(model)
        network.images.see([image for batch in made for image in batch.images.values()])
        self.logprobs = [
            batch.collect([[learner.model.logprobs(rows) for rows in batch.micro_batches]]) for batch in made
        ]
        self.losses = []
        for call, batch in enumerate(made):
            (rows,) = batch.micro_batches
            inputs = [*(rows.tokens[name] for name in POLICY_INPUTS), np.float32(KL_COEFFICIENT)]
            self.losses.append(learner.accumulate(rows, inputs, num_tokens(call))[0][0])
            if IS_LAST[call]:
                learner.apply(LEARNING_RATE)
        self.weights = {name: parameters[name].asnumpy() for name in self.start}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What one process does, by the name of a layout."""
    from mindrlhf.models.context import prepare_mindformers

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    runs = {family: Plain(MODELS[family]) for family in LAYOUTS}
    return {name: runs[family] for name, family in FAMILY_OF.items()}


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_one_process(executions, plain, name):
    np.testing.assert_allclose(executions[name].losses, plain[name].losses, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_those_of_one_process(executions, plain, name):
    found = executions[name].outputs["reference"]
    for batch, one, other in zip(batches(plain[name].model), found, plain[name].logprobs, strict=True):
        for mine, expected in zip(batch.responses([one]), other, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_one_process_and_the_tower_is_as_it_was(executions, plain, name):
    start = plain[name].start
    assert executions[name].weights.keys() == start.keys()
    for parameter, expected in plain[name].weights.items():
        actual = executions[name].weights[parameter]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=parameter)
        if parameter.startswith("visual."):
            np.testing.assert_array_equal(actual, start[parameter])
        else:
            assert np.abs(expected - start[parameter]).max() > 100 * TOLERANCE, parameter


@pytest.mark.parametrize("name", NAMES)
def test_replicas_stay_equal_and_a_resumed_step_is_the_same_to_the_last_bit(executions, plain, name):
    result = executions[name]
    assert result.replica_difference == 0.0
    np.testing.assert_array_equal(result.resumed_losses, result.losses[IS_LAST.index(True) + 1 :])
    for moment in ("before", "after", "resumed"):
        assert result.published[moment].keys() == hf_weights(plain[name].model).keys()
    for tensor, published in result.published["after"].items():
        np.testing.assert_array_equal(result.published["resumed"][tensor], published, err_msg=tensor)
