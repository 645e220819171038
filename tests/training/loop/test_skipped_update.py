"""An update of a small model that is skipped changes nothing."""

import json

import numpy as np
import pytest
from engines import whole_engine
from tiny_models import tiny_model

from mindrlhf.config.model import ModelSection
from mindrlhf.config.reward import RewardSection
from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.config.schema import GrpoConfig

MODEL = tiny_model()
ROW_LENGTH = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> GrpoConfig:
    directory = tmp_path_factory.mktemp("run")
    (directory / "bare").mkdir()
    (directory / "bare" / "config.json").write_text(json.dumps(MODEL))
    return GrpoConfig(
        model=ModelSection(path=str(directory / "bare"), random_init=True),
        data=DataSection(train_file="train", tokenizer_dir="tokenizer"),
        reward=RewardSection(verifier_function=("length",)),
        run=RunSection(output_dir=str(directory / "out"), seed=3),
    )


@pytest.fixture(scope="module")
def actor(config, tmp_path_factory):
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.models.load import load_model
    from mindrlhf.training.engine.actor import Actor
    from mindrlhf.training.engine.policy_loss import build_policy_loss
    from mindrlhf.training.runtime import start_runtime
    from mindrlhf.weights.publish.publisher import PUBLISH

    start_runtime(config.run, tmp_path_factory.mktemp("log"))
    network = load_model(config.model, config.model.path, config.run, ROW_LENGTH)
    loss = build_policy_loss(config, PolicyLogProbs(network, config.rollout.temperature, "cpu"))
    actor = Actor(whole_engine(loss, config.optimizer))
    actor.open_weights(PUBLISH, is_owner=True)
    return actor


def weights(actor) -> dict[str, np.ndarray]:
    return {parameter.name: parameter.asnumpy().copy() for parameter in actor.model.network.get_parameters()}


def optimizer_state(actor) -> list[np.ndarray]:
    optimizer = actor.engine.updater.optimizer
    return [item.asnumpy().copy() for item in (*optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.global_step)]


def test_a_loss_that_is_not_finite_skips_the_update_though_the_gradients_are(actor):
    before, state = weights(actor), optimizer_state(actor)
    assert np.isnan(actor.engine.updater.apply(1.0, loss=float("inf")))
    for name, array in weights(actor).items():
        np.testing.assert_array_equal(array, before[name])
    for one, other in zip(optimizer_state(actor), state, strict=True):
        np.testing.assert_array_equal(one, other)
    assert actor.engine.updater.apply(0.0) == 0.0, "nothing of it is left in the accumulators"
