"""An actor that sees, on a real tiny model: which images the tower takes and when, what is trained, what is saved."""

from pathlib import Path

import numpy as np
import pytest
import vision_actors
from rewound import Rewound
from slow_tests import SLOW
from tiny_vl import IMAGE
from vision_actors import LENGTH, ROWS, actor_maker, prepare_model, receive, row_options

from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return prepare_model(tmp_path_factory)


@pytest.fixture(scope="module")
def built(model_dir, tmp_path_factory):
    """The actor of a rank, built as a run does, and what puts it back to that."""
    changes = ("algorithm.num_generations=2", "training.chunk_size=1", "algorithm.beta=0.05")
    actor = actor_maker(model_dir, tmp_path_factory.mktemp("config"), *changes)()
    rewound = Rewound(actor.engine)
    actor.warm_up(row_options(actor).shapes(), ["old_logprobs", "reference_logprobs"])
    return actor, rewound


@pytest.fixture(scope="module")
def actor(built):
    return built[0]


def draw(seed: int, *size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def batch_of(actor, images: list[tuple]):
    """Four samples of each prompt, which shows the images."""
    return vision_actors.batch_of(actor, images, 4, ("advantages",))


FIRST, SECOND = draw(1, 56, 84), draw(2, 28, 28)


def test_the_tower_runs_once_a_step_for_all_models(actor, monkeypatch):
    seen = []
    network = actor.model.network
    monkeypatch.setattr(network.images, "_tower", lambda *arrays: seen.append(arrays) or network.visual(*arrays))
    batch = batch_of(actor, [(FIRST,), (FIRST, SECOND)])
    assert len(batch.micro_batches) > 1
    receive(actor, batch)
    for name in ("old_logprobs", "reference_logprobs"):
        actor.compute_logprobs(name, 0)
    actor.update(0, lr=0.0, kl_coefficient=0.05)
    # Both images have one window of 64 patches: one run, in which two slots of it have patches.
    assert [int(arrays[2].asnumpy().any(1).sum()) for arrays in seen] == [2]


def test_reference_and_policy_see_the_same_and_images_matter(actor):
    batch = batch_of(actor, [(FIRST,), (SECOND,)])
    receive(actor, batch)
    old, reference = (actor.compute_logprobs(name, 0) for name in ("old_logprobs", "reference_logprobs"))
    for one, other in zip(old, reference):
        np.testing.assert_array_equal(one, other)
    changed = batch_of(actor, [(draw(3, 56, 84),), (SECOND,)])
    receive(actor, changed)
    others = changed.collect([actor.compute_logprobs("old_logprobs", 0)])
    before = batch.collect([old])
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(before[:4], others[:4]))
    for one, other in zip(before[4:], others[4:]):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_an_update_moves_the_decoder_and_leaves_the_tower(actor):
    from networks import iter_hf_tensors

    batch = batch_of(actor, [(FIRST,), (SECOND,)])
    receive(actor, batch)
    actor.compute_logprobs("reference_logprobs", 0)
    actor.compute_logprobs("old_logprobs", 0)
    before = {name: array.copy() for name, array in iter_hf_tensors(actor.model.network)}
    result = actor.update(0, lr=1e-2, kl_coefficient=0.05)
    assert np.isfinite(result.grad_norm) and result.grad_norm > 0
    after = dict(iter_hf_tensors(actor.model.network))
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in before if not name.startswith("visual.")}
    trained = [parameter.name for parameter in actor.engine.optimizer.parameters]
    assert trained and not [name for name in trained if name.startswith("visual.")]


def test_the_tower_is_published_with_each_version(actor, monkeypatch):
    from networks import iter_hf_tensors

    with actor.model.placement.create_weight_buffer() as buffer:
        names, written = [], []
        write = buffer.write
        monkeypatch.setattr(buffer, "write", lambda name, *part: names.append(name) or write(name, *part))
        for version in (1, 2):
            names.clear()
            buffer.begin(version)
            actor.model.placement.write_to(buffer)
            buffer.commit()
            buffer.verify(version)
            written.append(sorted(buffer.written()))
            assert any(name.startswith("visual.") for name in names) and "model.norm.weight" in names
        assert written[0] == written[1]
        found = {name: array for name, _, array in buffer.tensors(2)}
        for name, array in iter_hf_tensors(actor.model.network):
            np.testing.assert_array_equal(found[name], array)


def test_a_checkpoint_brings_back_the_same_updates(built, tmp_path):
    """In an actor that is as it was built; graphs are compiled anew in the tests of runs."""
    actor, rewound = built
    batch = batch_of(actor, [(FIRST,), (SECOND, FIRST)])

    def update(worker):
        receive(worker, batch)
        worker.compute_logprobs("reference_logprobs", 0)
        worker.compute_logprobs("old_logprobs", 0)
        done = worker.update(0, lr=1e-2, kl_coefficient=0.05)
        return done.statistics, done.grad_norm, *done.logprobs

    update(actor)
    (tmp_path / "state").mkdir()
    actor.state_writer(lambda name, arrays: list(arrays))(tmp_path / "state")
    expected = *update(actor), *update(actor)  # the second has the first one's weights
    rewound.rewind()
    actor.restore(str(tmp_path / "state"))
    for one, other in zip((*update(actor), *update(actor)), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@SLOW
def test_fine_tuning_learns_to_tell_pictures_apart(model_dir):
    """Two prompts that differ in the picture alone; the tower, whose weights are random, stays as it is."""
    from mindrlhf.config.model import ModelSection
    from mindrlhf.config.offline import SupervisedSection
    from mindrlhf.config.run import DataSection
    from mindrlhf.config.schema import SftConfig
    from mindrlhf.training.engine.build import build_offline
    from mindrlhf.training.preflight.features import image_tokens
    from mindrlhf.training.runtime import Rank

    config = SftConfig(
        model=ModelSection(path=str(model_dir)),
        data=DataSection(train_file="unread", tokenizer_dir="unread"),
        training=SupervisedSection(micro_batch_size=ROWS),
    )
    worker = build_offline(config, (LENGTH,), Rank(0, 1))
    prompt = np.array([60, *[IMAGE] * 6, 50], np.int32)
    dark, light = np.zeros((56, 84, 3), np.uint8), np.full((56, 84, 3), 255, np.uint8)
    options = RowOptions((LENGTH,), ROWS, 1, True, image_tokens=image_tokens(str(model_dir)))

    def batch(pairs):
        sequences = [TokenSequence(prompt, np.array([word], np.int32), {}, images=(image,)) for image, word in pairs]
        return make_batch(sequences, options)

    def probabilities(made):
        worker.model.see(tuple(made.images.values()))
        return np.exp(
            [float(one[0]) for one in made.collect([[worker.model.logprobs(r) for r in made.micro_batches]])]
        )

    right, wrong = batch([(dark, 70), (light, 80)]), batch([(light, 70), (dark, 80)])
    assert probabilities(right).max() < 0.1
    for _ in range(90):
        worker.train(right.part_of(0, 1), lr=3e-3)
    assert probabilities(right).min() > 0.8 and probabilities(wrong).max() < 0.2
