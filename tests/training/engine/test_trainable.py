"""An engine that trains some parameters of a model: their gradients are those of training all, the others stay."""

import numpy as np
import pytest
from engines import whole_engine
from slow_tests import SLOW
from test_cells import MODEL

from mindrlhf.config.training import OptimizerSection
from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch

# Every day adapters alone are trained in test_adapted_model.py, and all but a tower in test_vision_actor.py.
pytestmark = [SLOW, pytest.mark.usefixtures("mindformers")]

FROZEN = {
    "the head": lambda name: not name.startswith("output_layer"),
    "all but the last layer": lambda name: f".layers.{MODEL['num_hidden_layers'] - 1}." in name,
    "all but matrices of attention": lambda name: name.endswith("linear_qkv.weight"),
}


def make_engine(is_trained=None):
    from networks import load_random_weights

    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import SupervisedLoss
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.lora.model import train_only

    network = build_model({**MODEL, "tie_word_embeddings": False}, seq_length=16)
    load_random_weights(network, seed=5)
    if is_trained:
        train_only(network, is_trained)
    loss = SupervisedLoss(PolicyLogProbs(network, 1.0, "cpu"))
    return whole_engine(loss, OptimizerSection(start_lr=0.01))


def accumulate(engine):
    stream = np.random.default_rng(1)
    sequences = [TokenSequence(*np.split(stream.integers(1, 96, 14).astype(np.int32), [4]), {}) for _ in range(2)]
    batch = make_batch(sequences, RowOptions((16,), 2, 1, False))
    for rows in batch.part_of(0, 1).micro_batches:
        engine.add(rows, batch.num_tokens)


@pytest.fixture(scope="module")
def all_gradients():
    engine = make_engine()
    accumulate(engine)
    return {name: gradient.copy() for name, gradient in engine.gradients()}


@pytest.mark.parametrize("frozen", FROZEN)
def test_what_is_trained_has_the_gradients_of_training_all_and_the_rest_stays(frozen, all_gradients):
    is_trained = FROZEN[frozen]
    engine = make_engine(is_trained)
    trained = {name for name in all_gradients if is_trained(name)}
    before = {one.name: one.asnumpy().copy() for one in engine.network.get_parameters()}
    accumulate(engine)
    gradients = dict(engine.gradients())
    assert gradients.keys() == trained and trained < all_gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, all_gradients[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert {one.name for one in engine.optimizer.parameters} == trained
    assert len(engine.optimizer.exp_avg) == len(trained)
    norm = engine.apply(0.01)
    expected = np.sqrt(sum(np.square(all_gradients[name], dtype=np.float64).sum() for name in trained))
    np.testing.assert_allclose(norm, expected, rtol=1e-5)
    for one in engine.network.get_parameters():
        assert np.array_equal(one.asnumpy(), before[one.name]) == (one.name not in trained), one.name
