"""Gradients of a real small model do not depend on how the batch is cut: rows, micro-batches, packing, ranks."""

import numpy as np
import pytest
from head_hooks import bind, collect_weight_gradient, graph_parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_tests import RUNS_SLOW_TESTS, SLOW
from tiny_models import tiny_model

from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import Batch, RowOptions, make_batch, make_update_batch
from mindrlhf.training.engine.cells import BUCKET_ELEMENTS, bucket_ranges

pytestmark = pytest.mark.usefixtures("mindformers")

VOCABULARY = 96
KL_COEFFICIENT = 0.1
MODEL = tiny_model(vocab_size=VOCABULARY, num_hidden_layers=2 if RUNS_SLOW_TESTS else 1, tie_word_embeddings=True)
LONGEST = 48
# Name -> how the batch is cut. The first is the plainest and the one the others are compared with.
CUTTINGS = {
    "one row at a time": RowOptions((LONGEST,), 1, 1, False),
    "packed, one row at a time": RowOptions((LONGEST,), 1, 1, True),
    "all rows at once": RowOptions((LONGEST,), 8, 1, False),
    "packed, padding rows": RowOptions((LONGEST,), 8, 1, True),
    "two lengths": RowOptions((24, LONGEST), 8, 1, True),
    "two ranks": RowOptions((LONGEST,), 1, 2, True),
    "four ranks": RowOptions((LONGEST,), 1, 4, False),
    "four ranks, most of them padding": RowOptions((LONGEST,), 8, 4, True),
}


class Gradients:
    """The loss of reinforcement learning over a random model, and its accumulated gradients."""

    def __init__(self, token_logprobs_device: str = "cpu", kl_estimator: str = "k3"):
        import mindspore as ms
        from networks import load_random_weights

        from mindrlhf.algorithms import policy_losses
        from mindrlhf.algorithms.logprobs import PolicyLogProbs
        from mindrlhf.algorithms.losses import PolicyLoss
        from mindrlhf.models.causal_lm import build_model
        from mindrlhf.training.engine.cells import AccumulateGradients, make_accumulators

        network = build_model(MODEL, seq_length=LONGEST)
        load_random_weights(network, seed=5)
        self.policy = PolicyLogProbs(network, 0.8, token_logprobs_device)
        self.parameters = graph_parameters(self.policy)
        self.head_name = network.head_weight.name
        self.accumulators = make_accumulators(self.parameters)
        surrogate = policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.28)
        loss = PolicyLoss(self.policy, surrogate, on_policy=False, kl_estimator=kl_estimator)
        loss.set_train(True)
        self.accumulate = AccumulateGradients(loss, ms.ParameterTuple(self.parameters), self.accumulators)

    def of(self, batch: Batch, num_ranks: int):
        """Return the gradients by name and the statistics, both summed over the ranks by hand, and the log-probs."""
        import mindspore as ms

        from mindrlhf.algorithms.losses import POLICY_INPUTS

        totals: dict[str, np.ndarray] = {}
        statistics, shares = 0.0, []
        for rank in range(num_ranks):
            share = batch.part_of(rank, num_ranks)
            shares.append([])
            for rows in share.micro_batches:
                further = (rows.tokens.get(name, rows.mask) for name in POLICY_INPUTS)
                arrays = (rows.input_ids, rows.segment_ids, rows.labels, rows.mask, *further)
                bind(self.policy)
                scalars = (ms.Tensor(KL_COEFFICIENT, ms.float32), ms.Tensor(share.num_tokens, ms.float32))
                outputs = self.accumulate(*map(ms.Tensor, arrays), *scalars)
                statistics = statistics + outputs[0].asnumpy().astype(np.float64)
                shares[-1].append(outputs[1].asnumpy())
            for name, gradient in self.take().items():
                totals[name] = totals.get(name, 0.0) + gradient
        return totals, statistics, np.concatenate(batch.collect(shares))

    def take(self) -> dict[str, np.ndarray]:
        """Return what one rank has accumulated and clear it."""
        gradients = {}
        for parameter, accumulator in zip(self.parameters, self.accumulators):
            gradients[parameter.name] = accumulator.asnumpy().astype(np.float64)
            accumulator.asnumpy()[...] = 0.0
        head = np.zeros((VOCABULARY, MODEL["hidden_size"]), np.float32)
        collect_weight_gradient(self.policy, head)
        gradients[self.head_name] = gradients[self.head_name] + head
        return gradients


@pytest.fixture(scope="module")
def sequences() -> list[TokenSequence]:
    stream = np.random.default_rng(2)
    sequences = []
    for prompt_length, response_length in ((3, 5), (1, 12), (8, 8), (20, 28), (2, 1), (5, 9), (4, 20)):
        ids = stream.integers(1, VOCABULARY, prompt_length + response_length).astype(np.int32)
        values = {
            "advantages": np.full(response_length, stream.standard_normal(), np.float32),
            "old_logprobs": (-4.5 + 0.5 * stream.standard_normal(response_length)).astype(np.float32),
            "reference_logprobs": (-4.5 + 0.5 * stream.standard_normal(response_length)).astype(np.float32),
        }
        sequences.append(TokenSequence(ids[:prompt_length], ids[prompt_length:], values))
    return sequences


@pytest.fixture(scope="module")
def gradients():
    return Gradients()


@pytest.fixture(scope="module")
def plain(gradients, sequences):
    return gradients.of(make_batch(sequences, CUTTINGS["one row at a time"]), 1)


def assert_same(actual, expected) -> None:
    gradients, statistics, logprobs = actual
    np.testing.assert_allclose(statistics, expected[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(logprobs, expected[2], rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected[0].keys()
    for name, reference in expected[0].items():
        scale = np.abs(reference).max()
        assert scale > 0, name
        np.testing.assert_allclose(gradients[name] / scale, reference / scale, rtol=0, atol=1e-5, err_msg=name)


def test_clips_and_kl_take_part(plain, sequences):
    _, low, high, kl, entropy, *_ = plain[1]
    assert low > 0 and high > 0 and kl > 0 and entropy > 0
    assert low + high < sum(len(sequence.response_ids) for sequence in sequences)


# Every day two shapes, since each is compiled.
@pytest.mark.parametrize(
    "cutting", [pytest.param(name, marks=[SLOW] * (name == "two lengths")) for name in list(CUTTINGS)[1:]]
)
def test_the_cutting_of_a_batch_changes_nothing(gradients, plain, sequences, cutting):
    options = CUTTINGS[cutting]
    assert_same(gradients.of(make_batch(sequences, options), options.num_ranks), plain)


def test_the_order_of_the_samples_changes_nothing(gradients, plain, sequences):
    batch = make_batch(sequences[::-1], CUTTINGS["packed, padding rows"])
    totals, statistics, _ = gradients.of(batch, 1)
    assert_same((totals, statistics, plain[2]), plain)


@pytest.mark.parametrize("cutting", ["two ranks", pytest.param("packed, padding rows", marks=SLOW)])
def test_samples_without_an_advantage_can_be_left_out(sequences, cutting):
    gradients, options = Gradients(kl_estimator=""), CUTTINGS[cutting]
    has_advantage = np.array([True, False, True, False, False, True, False])
    given = []
    for sequence, has_any in zip(sequences, has_advantage):
        advantages = sequence.values["advantages"] * np.float32(has_any)
        given.append(
            TokenSequence(sequence.prompt_ids, sequence.response_ids, {**sequence.values, "advantages": advantages})
        )
    everything = gradients.of(make_batch(given, CUTTINGS["one row at a time"]), 1)
    batch = make_update_batch([[one] for one in given], has_advantage, options)
    totals, statistics, _ = gradients.of(batch, options.num_ranks)
    # The loss is the same, and so is every gradient; entropy and clips are of the tokens that were computed.
    assert statistics[0] == pytest.approx(everything[1][0], rel=1e-5) and statistics[0] != 0
    assert_same((totals, everything[1], everything[2]), everything)
    chosen = make_batch([one for one, has_any in zip(given, has_advantage) if has_any], options)
    np.testing.assert_allclose(statistics[1:], gradients.of(chosen, options.num_ranks)[1][1:], rtol=1e-5)


def test_tiled_and_plain_log_probabilities_give_the_same_gradients(plain, sequences):
    """The form for Ascend, of plain operators, runs on the CPU too."""
    assert_same(Gradients("ascend").of(make_batch(sequences, CUTTINGS["packed, padding rows"]), 1), plain)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 2 * BUCKET_ELEMENTS), min_size=1, max_size=30))
def test_buckets_cover_every_tensor_in_order(sizes):
    ranges = bucket_ranges(sizes)
    assert [index for first, last in ranges for index in range(first, last)] == list(range(len(sizes)))
    for first, last in ranges:
        assert last - first == 1 or sum(sizes[first:last]) <= BUCKET_ELEMENTS
