"""The cells of a vision tower in a dump at level L0: what it computes, and that training does not notice."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import vision_actors
from slow_tests import SLOW
from vision_actors import actor_maker, prepare_model, receive

from mindrlhf.debugging.dump_paths import rank_dir
from mindrlhf.images.pixels import image_digest
from mindrlhf.images.slots import window_places

# Looked for, not imported: see StageDump.
pytestmark = [SLOW, pytest.mark.skipif(find_spec("msprobe") is None, reason="the debug extra is not installed")]

DUMP = ("msprobe.enabled=true", "msprobe.level=L0", "msprobe.task=tensor", "algorithm.beta=0")
RNG = np.random.default_rng(1)
FIRST, SECOND = (RNG.integers(0, 256, (*size, 3), np.uint8) for size in ((56, 84), (28, 28)))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return prepare_model(tmp_path_factory)


class Dumped:
    """Two steps of an actor with a learning rate of 0: the first is dumped."""

    def __init__(self, model_dir: Path, directory: Path, *changes: str):
        self.directory = directory / "dump"
        self.actor = actor_maker(model_dir, directory, *DUMP, f"msprobe.dump_dir={self.directory}", *changes)()
        self.batch = vision_actors.batch_of(self.actor, [(FIRST,), (FIRST, SECOND)], 4, ("advantages", "old_logprobs"))
        self.steps = []
        for is_dumped in (True, False):
            if is_dumped:
                self.actor.begin_dump(4)
            receive(self.actor, self.batch)
            logprobs = self.actor.compute_logprobs("old_logprobs", 0)
            self.steps.append((logprobs, self.actor.update(0, 0.0, 0.0)))
            self.actor.end_dump()

    def cells(self, stage: str) -> dict:
        return json.loads((rank_dir(self.directory, stage, 4, 0) / "dump.json").read_text())["data"]

    def tensor(self, stage: str, leaf: dict) -> np.ndarray:
        return np.load(rank_dir(self.directory, stage, 4, 0) / "dump_tensor_data" / leaf["data_name"])


@pytest.fixture(scope="module")
def frozen(model_dir, tmp_path_factory) -> Dumped:
    return Dumped(model_dir, tmp_path_factory.mktemp("frozen"))


def test_tower_and_projector_are_those_that_training_ran(frozen):
    """Both images have one window of 64 patches, 16 tokens."""
    images, cells = frozen.actor.model.network.images, frozen.cells("update")
    towers = [entry for name, entry in cells.items() if name.startswith("Cell.model.visual.VisionTower.forward.")]
    assert len(towers) == len(frozen.batch.micro_batches) > 1
    grids = {image_digest(pixels): np.divide(pixels.shape[:2], 28).astype(int) for pixels in (FIRST, SECOND)}
    for number, (rows, tower) in enumerate(zip(frozen.batch.micro_batches, towers)):
        output = frozen.tensor("update", tower["output"][0])
        projector = cells[f"Cell.model.visual.merger.Merger.forward.{number}"]
        np.testing.assert_array_equal(frozen.tensor("update", projector["output"][0]), output)
        for slot, digest in enumerate(rows.images):
            own = output[16 * slot + window_places(tuple(grids[digest]), 4)]
            np.testing.assert_allclose(own, images._rows[digest], rtol=0, atol=1e-6 * np.abs(output).max())


def test_each_parameter_of_the_tower_is_there_once(frozen):
    leaves = [leaf for entry in frozen.cells("old_log_prob").values() for leaf in entry.get("parameters", {}).items()]
    found = sorted(name for name, _ in leaves if name.startswith("visual."))
    network = frozen.actor.model.network
    assert found == sorted(parameter.name for parameter in network.visual.get_parameters())


def check_that_training_did_not_notice(dumped: Dumped) -> None:
    (before, first), (after, second) = dumped.steps
    for one, other in zip([*before, *first.logprobs], [*after, *second.logprobs], strict=True):
        np.testing.assert_array_equal(one, other)
    assert first.grad_norm == second.grad_norm


def test_training_does_not_notice(frozen):
    check_that_training_did_not_notice(frozen)


@SLOW
def test_a_tower_that_is_trained_has_gradients(model_dir, tmp_path):
    dumped = Dumped(model_dir, tmp_path, "model.train_vision=all")
    check_that_training_did_not_notice(dumped)
    cells = dumped.cells("update")
    assert any(name.startswith("Cell.model.visual.blocks.1.") or ".tower.blocks.1." in name for name in cells)
    leaves = [leaf for name, entry in cells.items() if ".parameters_grad.0" in name for (leaf,) in entry.values()]
    assert len(leaves) == len(dumped.actor.model.network.trainable_params())
    total = sum(float((dumped.tensor("update", leaf).astype(np.float64) ** 2).sum()) for leaf in leaves)
    assert total**0.5 == pytest.approx(dumped.steps[0][1].grad_norm, rel=1e-5)
