"""Preference learning on pairs about pictures, on a real tiny model."""

import dataclasses

import numpy as np
import pytest
from offline_cases import NoCheckpoints, Sinks, pair_gradients, write_config
from rewound import Rewound
from slow_tests import SLOW
from tiny_vl import IMAGE
from vision_actors import prepare_model, slope_and_difference

from mindrlhf.config.load import load_config
from mindrlhf.data.mindrecord import Prompt
from mindrlhf.images.pixels import encode_png
from mindrlhf.training.preflight import RunInputs
from mindrlhf.training.preflight.features import image_tokens

# Every day pairs are trained on in test_preference.py, and images in tests/training/engine and runs of jobs.
pytestmark = SLOW
LENGTH = 32
DARK, LIGHT = np.zeros((56, 56, 3), np.uint8), np.full((56, 56, 3), 255, np.uint8)


class PicturePairs:
    """The same prompt every time: of what is dark one response is preferred, of what is light the other."""

    def __init__(self, num_pairs: int):
        self.records = []
        for index in range(num_pairs):
            responses = [np.array([70, 90], np.int32), np.array([80, 90], np.int32)]
            is_dark = index % 2 == 0
            chosen, rejected = responses if is_dark else responses[::-1]
            files = (encode_png(DARK if is_dark else LIGHT),)
            prompt = np.array([60, *[IMAGE] * 4, 50], np.int32)
            record = Prompt(prompt, chosen, "", f"pairs:{index}", rejected)
            self.records.append(dataclasses.replace(record, image_files=files))

    def __len__(self):
        return len(self.records)

    def read(self, indices):
        return [self.records[index] for index in indices]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return prepare_model(tmp_path_factory)


@pytest.fixture(scope="module")
def make_trainer(model_dir):
    """Return a function that returns a trainer and its learner, which is compiled once."""
    learners = []

    def make(config):
        from mindrlhf.training.engine.build import build_offline
        from mindrlhf.training.offline.preference import PreferenceTrainer
        from mindrlhf.training.runtime import Rank
        from mindrlhf.training.team import Team

        if not learners:
            learner = build_offline(config, (LENGTH,), Rank(0, 1))
            learners.append((learner, Rewound(learner)))
        learner, rewound = learners[0]
        rewound.rewind()
        files = PicturePairs(32), PicturePairs(8)
        inputs = RunInputs(None, *files, (LENGTH,), 0, image_tokens(str(model_dir)))
        return PreferenceTrainer(config, inputs, Team(learner, [])), learner

    return make


def test_dpo_learns_what_only_the_pictures_tell(make_trainer, model_dir, tmp_path):
    from mindrlhf.training.checkpoints.run import Progress
    from mindrlhf.training.train import run_steps

    config = load_config(
        "dpo", write_config(tmp_path / "dpo.yaml", model_dir, dpo={"beta": 0.5}), ["training.epochs=4"]
    )
    trainer, _ = make_trainer(config)
    sinks, trainer.progress = Sinks(), Progress()
    assert run_steps(trainer, NoCheckpoints(), sinks)
    assert sinks.metrics[0]["eval/loss"] == pytest.approx(np.log(2))  # the policy is the reference
    assert sinks.metrics[max(sinks.metrics)]["eval/accuracy"] == 1.0


def test_two_passes_give_the_gradient_of_the_loss(make_trainer, model_dir, tmp_path):
    """Along a random direction of the trained weights, which are not those of the tower."""
    path = write_config(tmp_path / "dpo.yaml", model_dir, dpo={"loss": "ipo", "beta": 0.5})
    trainer, learner = make_trainer(load_config("dpo", path, []))
    pairs = trainer._pairs.take(range(6))
    gradients = pair_gradients(trainer, learner, pairs)
    assert not any(name.startswith("visual.") for name in gradients)
    slope, difference = slope_and_difference(
        learner.model.network, gradients, lambda: trainer._evaluate(pairs).losses.mean()
    )
    assert difference == pytest.approx(slope, rel=2e-2)
