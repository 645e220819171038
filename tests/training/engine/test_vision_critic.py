"""The critic of a policy that sees: its values, their gradients, its tower, and its part of checkpoints and runs."""

import numpy as np
import pytest
import vision_actors
from engines import accumulate
from rewound import Rewound
from vision_actors import actor_maker, prepare_model, receive, slope_and_difference

RANDOM = np.random.default_rng(3)
SHOWN = [RANDOM.integers(0, 256, (*size, 3), np.uint8) for size in ((56, 84), (28, 56))]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The actor and critic of a rank, built as a run of PPO does, and what puts them back to that."""
    model = prepare_model(tmp_path_factory)
    changes = (f"critic.path={model}", "training.chunk_size=2", "algorithm.name=ppo")
    actor = actor_maker(model, tmp_path_factory.mktemp("config"), *changes)()
    return actor, Rewound(actor.engine, actor.critic)


@pytest.fixture(scope="module")
def actor(built):
    import mindspore as ms

    actor, _ = built
    weight = actor.critic.model.network.score_weight  # 0 at first
    weight.set_data(ms.Tensor(np.random.default_rng(1).standard_normal(weight.shape).astype(np.float32)))
    return actor


def batch_of(actor, images):
    """Two samples of each prompt, which shows one image."""
    return vision_actors.batch_of(actor, [(image,) for image in images], 2, ("values", "returns", "advantages"))


def test_values_are_projections_of_what_the_policy_has_of_text_and_pictures(actor):
    """Both start from the same weights; the policy's hidden states are compared with transformers elsewhere."""
    from mindrlhf.training.engine.model import model_tensors

    batch = batch_of(actor, SHOWN)
    receive(actor, batch)
    weight = actor.critic.model.network.score_weight.asnumpy()[0]
    for found, rows in zip(actor.compute_values(0), batch.micro_batches, strict=True):
        network = actor.model.network
        hidden = network(*model_tensors(network, rows)[:2]).asnumpy()
        np.testing.assert_allclose(found, hidden @ weight * rows.mask, rtol=0, atol=1e-5 * np.abs(found).max())
    others = batch_of(actor, [255 - SHOWN[0], SHOWN[1]])
    values = batch.collect([actor.compute_values(0)])
    receive(actor, others)
    changed = others.collect([actor.compute_values(0)])
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(values[:2], changed[:2]))
    for one, other in zip(values[2:], changed[2:]):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_gradients_are_the_slope_of_the_loss(actor):
    """Along a random direction of all trained weights; the tower has none."""
    critic, batch = actor.critic, batch_of(actor, SHOWN)
    receive(actor, batch)
    (rows,) = batch.micro_batches

    def loss() -> float:
        inputs = [rows.tokens["values"], rows.tokens["returns"]]
        return float(accumulate(critic, rows, inputs, batch.num_tokens)[0][0])

    loss()
    gradients = {name: gradient.astype(np.float64).copy() for name, gradient in critic.gradients()}
    assert "score.weight" in gradients and not [name for name in gradients if name.startswith("visual.")]
    slope, difference = slope_and_difference(critic.model.network, gradients, loss)
    critic.apply(0.0)
    assert difference == pytest.approx(slope, rel=2e-2)
