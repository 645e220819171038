"""A real update on a small model, saved and replayed: the same loss and norms, and the sample that spoiled it."""

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
from engines import whole_engine
from fakes import LocalTeam
from made_samples import make_sample
from tiny_models import tiny_model

from mindrlhf.cli import main
from mindrlhf.config.model import ModelSection
from mindrlhf.config.reward import RewardSection
from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.packing import TokenSequence
from mindrlhf.errors import UserError
from mindrlhf.observe.fingerprint import digest_weights
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.training.loop.guards import Guards
from mindrlhf.training.loop.policy import Policy, PolicyUpdate
from mindrlhf.training.loop.skipped_batches import load_skipped
from mindrlhf.training.loop.step import Step, StepSamples

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


@pytest.fixture(autouse=True)
def started_runtime(actor, monkeypatch):
    """A process can set MindSpore up once, and the actor has done so."""
    from mindrlhf.training import runtime

    monkeypatch.setattr(runtime, "start_runtime", lambda run, log_dir: runtime.Rank(0, 1))


def weights(actor) -> dict[str, np.ndarray]:
    return {parameter.name: parameter.asnumpy().copy() for parameter in actor.model.network.get_parameters()}


def optimizer_state(actor) -> list[np.ndarray]:
    optimizer = actor.engine.updater.optimizer
    return [item.asnumpy().copy() for item in (*optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.global_step)]


@pytest.fixture(scope="module")
def skipped(actor, config):
    """Update 1 of step 5 has a NaN among the advantages of sample 2; update 2 is sound, but saved as well.

    Returns the result of each. The weights of the sound one are those of checkpoint 5: nothing had been updated.
    """
    stream = np.random.default_rng(0)
    samples = []
    for index, length in enumerate((5, 7, 4, 6)):
        ids = stream.integers(1, 64, length + 2).astype(np.int32)
        texts = {"prompt": f"prompt {index}", "response": f"text {index}"}
        samples.append(make_sample(ids[:2], ids[2:], index / 4, {}, group=index, **texts))
    sequences = []
    for item in samples:
        ones = np.ones(item.num_generated, np.float32)
        sequences.append(TokenSequence(item.prompt.prompt_ids, item.completion.token_ids, {"weights": ones}))
    batch = make_batch(sequences, RowOptions((ROW_LENGTH,), 1, 1, True))
    assert len(batch.micro_batches) > 1
    advantages = [stream.standard_normal(item.num_generated) for item in samples]
    digest = digest_weights(actor.publish(version=1).written["0"])
    actor.export(config_dir := checkpoint_dir(config, 5), None)
    assert (config_dir / "config.json").exists()
    before, state = weights(actor), optimizer_state(actor)

    broken = [array.copy() for array in advantages]
    broken[2][1] = np.nan
    results = []
    actor.receive([batch.part_of(0, 1), batch.part_of(0, 1)])
    actor.receive_tokens("advantages", [batch.spread(values, 1)[0] for values in (broken, advantages)])
    for number in range(2):
        results.append(actor.update(batch=number, lr=0.0 if number else 1.0, kl_coefficient=0.0))
        if number == 0:
            for name, array in weights(actor).items():
                np.testing.assert_array_equal(array, before[name])
            for one, other in zip(optimizer_state(actor), state, strict=True):
                np.testing.assert_array_equal(one, other)
    as_skipped = [PolicyUpdate.of([one], batch) for one in (results[0], replace(results[1], grad_norm=float("inf")))]
    both = [*samples, *samples]
    made = {"computed": np.ones(len(both), bool), "batches": [batch, batch], "updates": as_skipped}
    record = Step(5, 5, digest, 0.0, StepSamples(both, both), **made)
    guards = Guards(config, Policy(LocalTeam([actor]), None), first_step=0)
    assert guards.review(record, 0.0)["guard/skipped_updates"] == 2
    guards.close()
    return results


def checkpoint_dir(config, step):
    from pathlib import Path

    directory = Path(config.run.output_dir) / "checkpoints" / f"step_{step:08d}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "model"


def batch_dir(config, update):
    return checkpoint_dir(config, 5).parents[2] / "skipped" / "step_00000005" / f"update_{update}"


def test_the_replay_of_a_sound_batch_has_its_loss_and_norm(skipped, config):
    from mindrlhf.training.loop.replay import replay

    found = replay(batch_dir(config, 2))
    assert found.has_same_weights is True and found.model_dir == checkpoint_dir(config, 5)
    assert found.loss == pytest.approx(skipped[1].statistics[0], rel=1e-12)
    assert found.grad_norm == pytest.approx(skipped[1].grad_norm, rel=1e-5)
    assert found.first_not_finite == "" and all(sample.is_finite for sample in found.samples)
    assert max(sample.max_abs_change for sample in found.samples) == 0.0
    lowest = [sample.min_logprob for sample in found.samples]
    assert lowest == sorted(lowest) and lowest[-1] < 0
    assert sorted(sample.index for sample in found.samples) == [0, 1, 2, 3]


def test_the_replay_of_a_broken_batch_names_the_sample(skipped, config, capsys):
    assert np.isnan(skipped[0].grad_norm) and np.isnan(skipped[0].statistics[0])
    assert main(["replay", str(batch_dir(config, 1))]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "step 5, update 1: 4 samples, 22 response tokens"
    assert out[1].endswith("(those of the update)")
    assert out[2].startswith("loss: nan (was nan)") and out[3] == "gradient norm: nan (was nan)"
    # The last layers have a gradient from every sample; which comes first is the model's order.
    assert out[4] != "first gradient that is not finite: none"
    samples = out[out.index("samples, the strangest first:") + 1 :]
    assert len(samples) == 4 and samples[0].lstrip().startswith("2: ") and "largest advantage nan" in samples[0]
    assert sum("nan" in line for line in samples) == 1


def test_other_weights_are_said_to_be_other_weights(skipped, config):
    from mindrlhf.training.loop.replay import find_weights, replay

    batch, _, _ = load_skipped(batch_dir(config, 2))
    elsewhere = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=4))
    other = replay(batch_dir(config, 2), model_dir=write_other(elsewhere))
    assert other.has_same_weights is False
    assert max(sample.max_abs_change for sample in other.samples) > 0.01
    # Of checkpoints 3, 5 and 9, those after the step are of no use; without any there must be a model to begin with.
    for step in (3, 9):
        checkpoint_dir(config, step).mkdir(exist_ok=True)
        (checkpoint_dir(config, step) / "config.json").write_text("{}")
    choose = {1: None, 3: 3, 4: 3, 5: 5, 6: 5, 9: 9, 20: 9}
    for step, expected in choose.items():
        asked = dataclasses.replace(batch, step=step)
        if expected is None:
            with pytest.raises(UserError, match="--model DIR"):
                find_weights(batch_dir(config, 2), asked, config)
        else:
            assert find_weights(batch_dir(config, 2), asked, config) == checkpoint_dir(config, expected)


def write_other(config):
    from mindrlhf.models.load import load_model
    from mindrlhf.weights.convert import export_hf, iter_hf_tensors

    network = load_model(config.model, config.model.path, config.run, ROW_LENGTH)
    directory = checkpoint_dir(config, 5).parents[2] / "other"
    export_hf(iter_hf_tensors(network), network.hf_config, directory, dtype="float32")
    return directory


def test_a_loss_that_is_not_finite_skips_the_update_though_the_gradients_are(actor):
    before, state = weights(actor), optimizer_state(actor)
    assert np.isnan(actor.engine.updater.apply(1.0, loss=float("inf")))
    for name, array in weights(actor).items():
        np.testing.assert_array_equal(array, before[name])
    for one, other in zip(optimizer_state(actor), state, strict=True):
        np.testing.assert_array_equal(one, other)
    assert actor.engine.updater.apply(0.0) == 0.0, "nothing of it is left in the accumulators"
