"""Preference runs on a real small model: the two passes add up to the loss's own gradient, and pairs get in order."""

import json

import numpy as np
import pytest
from engines import export
from offline_cases import NoCheckpoints, PairFile, Sinks, export_model, pair_gradients, write_config
from rewound import Rewound, set_arrays
from vision_actors import slope_and_difference

from mindrlhf.config.load import load_config
from mindrlhf.training.preflight import RunInputs


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return export_model(tmp_path_factory)


def make_trainer(config, learner=None):
    from mindrlhf.training.offline.preference import PreferenceTrainer
    from mindrlhf.training.team import Team

    learner = learner or build_learner(config)
    inputs = RunInputs(None, PairFile(160, 0), PairFile(24, 1), tuple(config.training.sequence_lengths), 0)
    return PreferenceTrainer(config, inputs, Team(learner, [])), learner


def build_learner(config):
    from mindrlhf.training.engine.build import build_offline
    from mindrlhf.training.runtime import Rank

    return build_offline(config, (32,), Rank(0, 1))


@pytest.fixture(scope="module")
def begin():
    """Return `make_trainer` over one learner of DPO and one reward model, as they were built: each is compiled once."""
    learners = {}

    def make(config):
        kind = type(config)
        if kind not in learners:
            learner = build_learner(config)
            learners[kind] = learner, Rewound(learner)
        learner, rewound = learners[kind]
        rewound.rewind()
        return make_trainer(config, learner)

    return make


def run(trainer):
    """Train to the end; return the metrics of each step and what the user is told."""
    from mindrlhf.training.checkpoints.run import Progress
    from mindrlhf.training.train import run_steps

    sinks, trainer.progress = Sinks(), Progress()
    assert run_steps(trainer, NoCheckpoints(), sinks)
    return sinks.metrics, trainer.summary()


def test_dpo_learns_the_order_of_pairs(begin, model_dir, tmp_path):
    config = load_config("dpo", write_config(tmp_path / "dpo.yaml", model_dir, dpo={"beta": 0.5}))
    metrics, summary = run(begin(config)[0])
    assert metrics[0]["eval/loss"] == pytest.approx(np.log(2))  # the policy is the reference
    assert list(metrics) == list(range(1 + 3 * 10))
    assert [step for step, values in metrics.items() if "eval/accuracy" in values] == [0, 30]
    assert metrics[30]["eval/accuracy"] > 0.9
    assert summary.startswith("preference accuracy on 24 held-out pairs: 50.0%")


def test_two_passes_give_the_gradient_of_the_loss(begin, model_dir, tmp_path):
    """The accumulated gradient is the slope of the loss along a random direction of the weights."""
    config = load_config("dpo", write_config(tmp_path / "dpo.yaml", model_dir, dpo={"loss": "ipo", "beta": 0.5}))
    trainer, learner = begin(config)
    pairs = trainer._pairs.take(range(6))
    gradients = pair_gradients(trainer, learner, pairs)
    network = learner.model.network
    assert {parameter.name for parameter in network.trainable_params()} == gradients.keys()
    slope, difference = slope_and_difference(network, gradients, lambda: trainer._evaluate(pairs).losses.mean())
    assert difference == pytest.approx(slope, rel=2e-2)


def test_reward_model_learns_and_comes_back_from_disk(begin, model_dir, tmp_path):
    from networks import iter_hf_tensors, load_model

    config = load_config("reward-model", write_config(tmp_path / "rm.yaml", model_dir))
    trainer, learner = begin(config)
    metrics, _ = run(trainer)
    assert metrics[0]["eval/accuracy"] == 0.5  # from a language model: every score is 0 at first
    assert metrics[30]["eval/accuracy"] > 0.9
    export(learner, tmp_path / "final")
    exported = json.loads((tmp_path / "final" / "config.json").read_text())
    assert exported["architectures"] == ["Qwen2ForSequenceClassification"]
    again = dict(iter_hf_tensors(load_model(config.model, str(tmp_path / "final"), config.run, 32, as_scorer=True)))
    for name, array in iter_hf_tensors(learner.model.network):
        np.testing.assert_array_equal(array, again[name])
    assert again["score.weight"].shape == (1, 32) and "lm_head.weight" not in again


def test_a_score_is_that_of_the_text_up_to_the_token(begin, model_dir, tmp_path):
    """The score of a response equals that of the same tokens as the end of a shorter row, packed or not."""
    from networks import load_model

    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.data.packing import TokenSequence
    from mindrlhf.training.batch import RowOptions, make_batch
    from mindrlhf.training.engine.model import row_tensors

    config = load_config("reward-model", write_config(tmp_path / "rm.yaml", model_dir), ["model.random_init=true"])
    _, learner = begin(config)
    # Weights of a model that begins at random: its scores are not 0.
    network = load_model(config.model, config.model.path, config.run, 32, as_scorer=True)
    drawn = {one.name: one.asnumpy() for one in network.get_parameters()}
    set_arrays([(one, drawn[one.name]) for one in learner.model.network.get_parameters()])
    cells = {True: learner.model.graph, False: TokenScores(learner.model.network, after_token=False)}
    prompt, response = np.arange(5, dtype=np.int32), np.arange(10, 17, dtype=np.int32)

    def scores(after_token, pack, sequences):
        batch, cell = make_batch(sequences, RowOptions((32,), 8, 1, pack)), cells[after_token]
        return batch.collect([[cell(*row_tensors(rows))[0].asnumpy() for rows in batch.micro_batches]])

    whole = TokenSequence(prompt, response, {})
    after = scores(True, True, [whole, whole])
    before = scores(False, False, [whole])[0]
    np.testing.assert_allclose(after[0], after[1], atol=1e-5)
    # A value before token t + 1 is the score after token t.
    np.testing.assert_allclose(after[0][:-1], before[1:], atol=1e-5)
    shorter = scores(True, False, [TokenSequence(prompt, response[:3], {})])[0]
    np.testing.assert_allclose(after[0][:3], shorter, atol=1e-5)
    assert np.abs(after[0]).max() > 0.01
