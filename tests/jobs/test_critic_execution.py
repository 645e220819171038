"""A critic that is cut over ranks, compiled for Ascend and executed on CPU ranks, learns what one process does.

Its values and updates are asked for as in a run, beside an actor (which here is the same model, and does nothing).
"""

import platform

import numpy as np
import pytest
from execution_cases import (
    CRITIC,
    CRITIC_LAYOUTS,
    EPSILON,
    IS_LAST,
    LEARNING_RATE,
    NOT_FINITE,
    ROW_LENGTH,
    critic_batches,
    mf_weights,
)
from execution_jobs import compile_and_execute
from safetensors.numpy import load_file
from slow_tests import SLOW

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the simulation of CANN is x86-64 only"),
    SLOW,  # adapters, pipelines and shared prompts take the same ways every day
]

TOLERANCE = 1e-5
CLIP_RANGE = 0.2
NAMES = [name for layouts in CRITIC_LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def executions(tmp_path_factory):
    """The result of every layout by name."""
    from mindrlhf.algorithms.value_loss import VALUE_INPUTS
    from mindrlhf.dryrun.compile.request import VALUE_UPDATE, VALUES

    root = tmp_path_factory.mktemp("execution")
    computed = dict.fromkeys(NAMES, "values")
    return compile_and_execute(
        root, CRITIC, CRITIC_LAYOUTS, critic_batches(), (VALUE_UPDATE, VALUES), VALUE_INPUTS, computed
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses, first values and final weights of the product's critic on one rank."""
    import mindspore as ms

    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.algorithms.value_loss import ValueLoss
    from mindrlhf.config.training import OptimizerSection
    from mindrlhf.data.packing import PackedRows
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.runtime import Rank
    from mindrlhf.training.worker.critic import Critic

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    network = build_model(CRITIC, seq_length=ROW_LENGTH)
    parameters = {parameter.name: parameter for parameter in network.get_parameters()}
    for name, value in mf_weights(CRITIC).items():
        parameters[name].set_data(ms.Tensor(value))
    loss = ValueLoss(TokenScores(network, after_token=False), CLIP_RANGE)
    critic = Critic(network, loss, OptimizerSection(epsilon=EPSILON), Rank(0, 1), "cpu")
    rows = [PackedRows(*inputs[:4], tokens={}) for inputs in critic_batches()]
    values = [critic.values(one) for one in rows]
    statistics = []
    for call, (inputs, is_last) in enumerate(zip(critic_batches(), IS_LAST)):
        statistics.append(critic.accumulate(rows[call], [values[call], inputs[5]], inputs[6][0, 1])[0])
        if is_last:
            assert np.isfinite(critic.apply(LEARNING_RATE)) == (call != NOT_FINITE + 1)
    assert statistics[-1][1] > 0, "the clip was never active"
    losses = [one[0] for one in statistics]
    return losses, values, {name: parameter.asnumpy() for name, parameter in parameters.items()}


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_one_process(executions, plain, name):
    assert [np.isnan(loss) for loss in plain[0]] == [call == NOT_FINITE for call in range(len(IS_LAST))]
    np.testing.assert_allclose(executions[name].losses, plain[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_one_process(executions, plain, name):
    assert len(executions[name].outputs["first"]) == len(IS_LAST)
    for found, expected in zip(executions[name].outputs["first"], plain[1]):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_one_process(executions, plain, name):
    start = mf_weights(CRITIC)
    assert executions[name].weights.keys() == plain[2].keys()
    for parameter, expected in plain[2].items():
        actual = executions[name].weights[parameter]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE, err_msg=parameter)
        assert np.abs(expected - start[parameter]).max() > 100 * TOLERANCE, parameter


@pytest.mark.parametrize("name", NAMES)
def test_the_critic_is_exported_as_its_ranks_hold_it(executions, name):
    exported = load_file(executions[name].exported / "model.safetensors")
    published = executions[name].published["after"]
    assert exported.keys() == published.keys()
    for hf_name, tensor in published.items():
        np.testing.assert_array_equal(exported[hf_name], tensor, err_msg=hf_name)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_hold_the_same_shard_stay_equal(executions, name):
    assert executions[name].replica_difference == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_updates_after_a_restored_checkpoint_are_the_same_to_the_last_bit(executions, name):
    result = executions[name]
    np.testing.assert_array_equal(result.resumed_losses, result.losses[IS_LAST.index(True) + 1 :])
    for hf_name, tensor in result.published["after"].items():
        np.testing.assert_array_equal(result.published["resumed"][hf_name], tensor, err_msg=hf_name)
