"""The critic of a policy that sees: its values, their gradients, its tower, and its part of checkpoints and runs."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_vl import IMAGE, TinyVl, write_tiny_vl

from mindrlhf.config.load import load_grpo_config
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.training.vision.image_rows import ImageTokens

LENGTH, ROWS = 48, 2
RANDOM = np.random.default_rng(3)
SHOWN = [RANDOM.integers(0, 256, (*size, 3), np.uint8) for size in ((56, 84), (28, 56))]


@pytest.fixture(scope="module")
def make_actor(tmp_path_factory):
    """Return a function that builds the actor and critic of a rank, as a run of PPO does."""
    import mindspore as ms

    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.reinforcement import _build_actor
    from mindrlhf.training.runtime import Rank

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    ms.set_context(runtime_num_threads=1)
    model = write_tiny_vl(tmp_path_factory.mktemp("model"), TinyVl(hidden=32, intermediate=48, vision_hidden=32))
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_text("")
    changes = [
        f"model.path={model}",
        f"critic.path={model}",
        f"data.tokenizer_dir={model}",
        "data.train_file=prompts.mindrecord",
        "reward.verifier_function=accuracy_reward",
        "rollout.max_response_length=8",
        "training.chunk_size=2",
        f"training.batch_size={ROWS}",
        "algorithm.name=ppo",
    ]
    config = load_grpo_config(path, changes)
    return lambda: _build_actor(config, SimpleNamespace(row_lengths=(LENGTH,)), Rank(0, 1))


@pytest.fixture(scope="module")
def actor(make_actor):
    import mindspore as ms

    actor = make_actor()
    weight = actor.critic.network.score_weight  # 0 at first
    weight.set_data(ms.Tensor(np.random.default_rng(1).standard_normal(weight.shape).astype(np.float32)))
    return actor


def batch_of(actor, images):
    rng, sequences = np.random.default_rng(7), []
    for number, image in enumerate(images):
        prompt = np.array([60 + number, *[IMAGE] * (image.shape[0] * image.shape[1] // 28**2), 50], np.int32)
        for _ in range(2):
            response = rng.integers(0, 256, 6).astype(np.int32)
            values = {name: rng.standard_normal(6).astype(np.float32) for name in ("values", "returns", "advantages")}
            values |= {"weights": np.ones(6, np.float32)}
            sequences.append(TokenSequence(prompt, response, values, images=(image,)))
    tokens = ImageTokens.of(actor.model.network.dims)
    return make_batch(sequences, RowOptions((LENGTH,), ROWS, 1, True, image_tokens=tokens))


def receive(actor, batch) -> None:
    actor.receive_batch(batch.share(0, 1), is_first=True)
    actor.receive_images(tuple(batch.images.values()))


def test_values_are_projections_of_what_the_policy_has_of_text_and_pictures(actor):
    """Both start from the same weights; the policy's hidden states are compared with transformers elsewhere."""
    from mindrlhf.training.worker.model import model_tensors

    batch = batch_of(actor, SHOWN)
    receive(actor, batch)
    weight = actor.critic.network.score_weight.asnumpy()[0]
    for found, rows in zip(actor.compute_values(0).arrays, batch.micro_batches, strict=True):
        network = actor.model.network
        hidden = network(*model_tensors(network, rows)[:2]).asnumpy()
        np.testing.assert_allclose(found, hidden @ weight * rows.mask, rtol=0, atol=1e-5 * np.abs(found).max())
    others = batch_of(actor, [255 - SHOWN[0], SHOWN[1]])
    values = batch.collect([actor.compute_values(0).arrays])
    receive(actor, others)
    changed = others.collect([actor.compute_values(0).arrays])
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(values[:2], changed[:2]))
    for one, other in zip(values[2:], changed[2:]):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_gradients_are_the_slope_of_the_loss(actor):
    """Along a random direction of all trained weights; the tower has none."""
    import mindspore as ms

    critic, batch = actor.critic, batch_of(actor, SHOWN)
    receive(actor, batch)
    (rows,) = batch.micro_batches

    def loss() -> float:
        inputs = [rows.tokens["values"], rows.tokens["returns"]]
        return float(critic.accumulate(rows, inputs, batch.num_tokens)[0][0])

    loss()
    gradients = {name: gradient.astype(np.float64).copy() for name, gradient in critic.gradients()}
    assert "score.weight" in gradients and not [name for name in gradients if name.startswith("visual.")]
    rng = np.random.default_rng(0)
    direction = {name: rng.standard_normal(gradient.shape) for name, gradient in gradients.items()}
    parameters = {parameter.name: parameter for parameter in critic.network.trainable_params()}
    start = {name: parameters[name].asnumpy().copy() for name in gradients}
    losses = []
    for distance in (1e-3, -1e-3):
        for name, value in start.items():
            parameters[name].set_data(ms.Tensor((value + distance * direction[name]).astype(np.float32)))
        losses.append(loss())
    for name, value in start.items():
        parameters[name].set_data(ms.Tensor(value))
    critic.apply(0.0)
    slope = sum((gradients[name] * direction[name]).sum() for name in gradients)
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope, rel=2e-2)


def test_a_checkpoint_brings_back_the_same_updates_of_both(actor, make_actor, tmp_path):
    batch = batch_of(actor, SHOWN)

    def update(worker):
        receive(worker, batch)
        values = worker.compute_values(0).arrays
        done = worker.update_critic(0, lr=1e-2)
        worker.compute_logprobs("old_logprobs", 0)
        return *values, done.statistics, np.array(done.grad_norm)

    update(actor)
    (tmp_path / "state").mkdir()
    actor.state_writer(lambda name, arrays: list(arrays))(tmp_path / "state")
    expected = update(actor)
    restored = make_actor()
    restored.restore(str(tmp_path / "state"))
    for one, other in zip(update(restored), expected, strict=True):
        np.testing.assert_array_equal(one, other)
