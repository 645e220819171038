"""A critic that sees, cut over ranks, compiled for Ascend and executed on CPU ranks, learns what one process does.

The ranks of the first pipeline stage run its tower for the images of their own rows, as those of a policy do.
"""

import platform

import numpy as np
import pytest
from execution_cases import EPSILON, IS_LAST, KL_COEFFICIENT, LEARNING_RATE, NUM_ROWS, ROW_LENGTH, mf_weights
from execution_jobs import compile_and_execute
from safetensors.numpy import load_file
from slow_tests import SLOW
from test_vision_execution import batches, num_tokens
from tiny_vl import TinyVl, config_of

from mindrlhf.algorithms.value_loss import VALUE_INPUTS
from mindrlhf.specs import scorer_config

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
    SLOW,  # critics and models that see take the same ways by themselves
]

TOLERANCE = 1e-5
CLIP_RANGE = 0.2
CRITIC = scorer_config(config_of(TinyVl(is_tied=False)))
LAYOUTS = {
    2: {
        "critic_sees_tp2": {"data_parallel": 1, "model_parallel": 2, "use_seq_parallel": True, "vocab_emb_dp": True},
        "critic_sees_pp2": {"data_parallel": 1, "pipeline_stage": 2, "micro_batch_num": 2},
        "critic_sees_dp2": {"data_parallel": 2, "enable_parallel_optimizer": True},
    }
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


def returns(call: int, mask: np.ndarray) -> np.ndarray:
    return np.random.default_rng(call).standard_normal(mask.shape).astype(np.float32) * mask


@pytest.fixture(scope="module")
def executions(tmp_path_factory):
    """The result of every layout by name."""
    from mindrlhf.dryrun.compile.request import VALUE_UPDATE, VALUES

    inputs, images = [], []
    for call, batch in enumerate(batches(CRITIC)):
        (rows,) = batch.micro_batches
        scalars = np.tile(np.array([[KL_COEFFICIENT, num_tokens(call)]], np.float32), (NUM_ROWS, 1))
        arrays = (rows.input_ids, rows.segment_ids, rows.labels, rows.mask)
        inputs.append([*arrays, rows.mask * 0, returns(call, rows.mask), scalars])
        images.append([batch.images[digest] for digest in rows.images])
    root, computed = tmp_path_factory.mktemp("execution"), dict.fromkeys(NAMES, "values")
    cells = (VALUE_UPDATE, VALUES)
    return compile_and_execute(root, CRITIC, LAYOUTS, inputs, cells, VALUE_INPUTS, computed, images=images)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses, first values and final weights of the product's critic on one rank."""
    import mindspore as ms

    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.algorithms.value_loss import ValueLoss
    from mindrlhf.config.training import OptimizerSection
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.runtime import Rank
    from mindrlhf.training.worker.critic import Critic

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    network = build_model(CRITIC, seq_length=ROW_LENGTH, num_image_rows=NUM_ROWS * ROW_LENGTH)
    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    start = mf_weights(CRITIC)
    for name, value in start.items():
        parameters[name].set_data(ms.Tensor(value))
    loss = ValueLoss(TokenScores(network, after_token=False), CLIP_RANGE)
    critic = Critic(network, loss, OptimizerSection(epsilon=EPSILON), Rank(0, 1), "cpu")
    made = batches(CRITIC)
    network.images.see([image for batch in made for image in batch.images.values()])
    all_rows = [batch.micro_batches[0] for batch in made]
    values = [critic.values(rows) for rows in all_rows]
    losses = []
    for call, (rows, is_last) in enumerate(zip(all_rows, IS_LAST)):
        given = [values[call], returns(call, rows.mask)]
        losses.append(critic.accumulate(rows, given, num_tokens(call))[0][0])
        if is_last:
            critic.apply(LEARNING_RATE)
    return losses, values, {name: parameters[name].asnumpy() for name in start}


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_one_process(executions, plain, name):
    np.testing.assert_allclose(executions[name].losses, plain[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_one_process(executions, plain, name):
    for found, expected in zip(executions[name].outputs["first"], plain[1], strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_one_process_and_the_tower_is_as_it_was(executions, plain, name):
    start = mf_weights(CRITIC)
    assert executions[name].weights.keys() == start.keys()
    for parameter, expected in plain[2].items():
        actual = executions[name].weights[parameter]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=parameter)
        if parameter.startswith("visual."):
            np.testing.assert_array_equal(actual, start[parameter])
        else:
            assert np.abs(expected - start[parameter]).max() > 100 * TOLERANCE, parameter


@pytest.mark.parametrize("name", NAMES)
def test_replicas_stay_equal_and_a_resumed_step_is_the_same_to_the_last_bit(executions, name):
    result = executions[name]
    assert result.replica_difference == 0.0
    np.testing.assert_array_equal(result.resumed_losses, result.losses[IS_LAST.index(True) + 1 :])
    exported = load_file(result.exported / "model.safetensors")
    assert exported.keys() == result.published["after"].keys()
    for tensor, published in result.published["after"].items():
        np.testing.assert_array_equal(result.published["resumed"][tensor], published, err_msg=tensor)
        np.testing.assert_array_equal(exported[tensor], published, err_msg=tensor)
