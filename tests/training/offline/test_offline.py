"""Runs on fixed data that are broken off and resumed end, bit for bit, like those that never stopped."""

import numpy as np
import pytest
from offline_cases import NoCheckpoints, PairFile, Sinks, export_model, write_config
from rewound import Rewound
from slow_tests import SLOW

from mindrlhf.config import load
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.preflight import RunInputs

ADAPTED = "dpo of adapters"
# Scorers and adapters come back every day in the tests of their engines.
KINDS = ("sft", *(pytest.param(kind, marks=SLOW) for kind in ("dpo", "reward-model", ADAPTED)))
NUM_STEPS = 7


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function that returns config, trainer and learner of a run that begins.

    Its learner is compiled once for each kind of run, and put back to the model that runs start from.
    """
    model_dir, learners = export_model(tmp_path_factory), {}

    def _make(kind, output_dir, overrides=(), num_held_out=24):
        from mindrlhf.training.engine.build import build_offline
        from mindrlhf.training.offline import preference, supervised
        from mindrlhf.training.runtime import Rank
        from mindrlhf.training.team import Team

        config = read_config(kind, model_dir, output_dir, overrides)
        if kind not in learners:
            learner = build_offline(config, (32,), Rank(0, 1))
            learners[kind] = learner, Rewound(learner)
        learner, rewound = learners[kind]
        rewound.rewind()
        trainer = supervised.SupervisedTrainer if kind == "sft" else preference.PreferenceTrainer
        inputs = RunInputs(None, PairFile(80, 0), PairFile(num_held_out, 1), (32,), 0)
        return config, trainer(config, inputs, Team(learner)), learner

    return _make


def read_config(kind, model_dir, output_dir, overrides):
    output_dir.mkdir(exist_ok=True)
    sections = {
        "run": {"output_dir": str(output_dir), "max_steps": NUM_STEPS},
        # Some steps of the first epoch, then the second; a rate that changes with the step.
        "optimizer": {"start_lr": 3e-3, "end_lr": 1e-3, "lr_schedule": "linear"},
        "checkpoint": {"every_steps": 3, "keep_last": 9},
        "lora": {"rank": 4} if kind == ADAPTED else {},
    }
    if kind == "sft":
        sections["training"] = {"rows_per_step": 16, "micro_batch_size": 8, "sequence_lengths": [32], "epochs": 3}
        sections["training"]["packing"] = "none"
        path = write_config(output_dir / "config.yaml", model_dir, **sections)
        return load.load_config("sft", path, overrides)
    sections["training"] = {
        "pairs_per_step": 16,
        "micro_batch_size": 8,
        "sequence_lengths": [32],
        "epochs": 3,
    }
    sections["evaluation"] = {"every_steps": 2}
    path = write_config(output_dir / "config.yaml", model_dir, **sections)
    return load.load_config("reward-model" if kind == "reward-model" else "dpo", path, overrides)


def checkpoints_of(config, trainer, learner, requests=None):
    from mindrlhf.training.team import Team

    return RunCheckpoints(config, Team(learner), trainer.order, requests or SaveRequests())


def train(trainer, progress, checkpoints):
    """Return whether the run was complete, and the metrics of each step without times."""
    from mindrlhf.training.train import run_steps

    sinks = Sinks()
    trainer.progress = progress
    is_complete = run_steps(trainer, checkpoints, sinks)
    varying = ("timing/all", "e2e_tps", "recompiles", "memory/peak_rss_gb")
    metrics = {
        step: {name: value for name, value in values.items() if name not in varying}
        for step, values in sinks.metrics.items()
    }
    return is_complete, metrics


def weights_of(learner):
    from networks import iter_hf_tensors

    weights = {name: array.copy() for name, array in iter_hf_tensors(learner.model.network)}
    adapters = {one.name: one.asnumpy().copy() for one in learner.model.network.get_parameters() if "lora" in one.name}
    return weights | adapters


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_like_one_that_never_stopped(kind, make, tmp_path):
    _, trainer, learner = make(kind, tmp_path / "whole")
    whole_progress = Progress()
    is_complete, whole = train(trainer, whole_progress, NoCheckpoints())
    assert is_complete and max(whole) == NUM_STEPS
    expected, summary = weights_of(learner), trainer.summary()

    config, trainer, learner = make(kind, tmp_path / "killed")
    checkpoints, progress = checkpoints_of(config, trainer, learner), Progress()
    trainer.num_steps, num_steps = 5, trainer.num_steps
    trainer_metrics = train(_with_rate_of(trainer, num_steps), progress, checkpoints)[1]
    checkpoints.wait()
    before = {step: values for step, values in trainer_metrics.items() if step <= 3}

    config, trainer, learner = make(kind, tmp_path / "killed")
    checkpoints = checkpoints_of(config, trainer, learner)
    progress = checkpoints.resume()
    assert progress.step == 3
    is_complete, after = train(trainer, progress, checkpoints)
    checkpoints.wait()
    assert is_complete
    assert before | after == whole
    assert trainer.summary() == summary
    for name, array in weights_of(learner).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def _with_rate_of(trainer, num_steps):
    """Make its steps with the learning rates of a run of ``num_steps``: it is killed, not shorter."""
    update, killed_at = trainer.update, trainer.num_steps

    def with_rate(index, items):
        trainer.num_steps = num_steps
        try:
            return update(index, items)
        finally:
            trainer.num_steps = killed_at

    trainer.update = with_rate
    return trainer


def test_a_request_to_end_saves_the_step_and_stops(make, tmp_path):
    requests = SaveRequests()
    config, trainer, learner = make("sft", tmp_path / "run", ["checkpoint.every_steps=0"])
    update = trainer.update

    def ask_in_the_second(index, items):
        requests.stop = index == 1
        return update(index, items)

    trainer.update = ask_in_the_second
    checkpoints = checkpoints_of(config, trainer, learner, requests)
    is_complete, metrics = train(trainer, Progress(), checkpoints)
    assert not is_complete and max(metrics) == 2
    assert checkpoints.resume().step == 2


@pytest.mark.parametrize("had_held_out", [True, False])
def test_accuracies_of_other_held_out_pairs_are_not_called_the_ones_before(make, tmp_path, had_held_out):
    """The key data.eval_file is free: a resumed run may be given one, or another."""
    _, trainer, _ = make("dpo", tmp_path / "run")
    trainer.progress = progress = Progress()
    if had_held_out:
        trainer.evaluate()
        assert trainer.summary().endswith(" after")
    _, trainer, _ = make("dpo", tmp_path / "run", num_held_out=25)
    trainer.progress = progress
    progress.step = 2
    trainer.evaluate()
    assert "before" not in trainer.summary() and ", " not in trainer.summary()
    progress.step = NUM_STEPS
    trainer.evaluate()
    assert "on 25 held-out pairs: " in trainer.summary() and " at step 2, " in trainer.summary()
