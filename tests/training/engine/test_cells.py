"""Gradients of a real small model, actor or critic, do not depend on how the batch is cut: rows, micro-batches,
packing, ranks, prompts that samples share."""

import dataclasses

import numpy as np
import pytest
from engines import whole_engine
from hypothesis import given
from hypothesis import strategies as st
from slow_tests import RUNS_SLOW_TESTS, SLOW
from tiny_models import tiny_model

from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch, make_update_batch
from mindrlhf.training.engine.cells import BUCKET_ELEMENTS, bucket_ranges

pytestmark = pytest.mark.usefixtures("mindformers")

VOCABULARY, LONGEST = 96, 64
KL_COEFFICIENT = 0.1
MODEL = tiny_model(
    vocab_size=VOCABULARY,
    num_hidden_layers=2 if RUNS_SLOW_TESTS else 1,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    initializer_range=0.1,
)
LATENT = tiny_model(
    "deepseek_v3", MODEL, tie_word_embeddings=False, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1,
    topk_group=1, routed_scaling_factor=1.0, rms_norm_eps=1e-6, rope_theta=10000.0,
)  # fmt: skip
PLAIN, IN_STEP = RowOptions((LONGEST,), 1, 1, False), "shared prompts, two ranks in step"
# Name -> how the batch is cut; each is compared with one row at a time. Every day few shapes, since each is compiled.
CUTTINGS = {
    "packed, one row at a time": RowOptions((LONGEST,), 1, 1, True),
    "all rows at once": RowOptions((LONGEST,), 8, 1, False),
    "packed, padding rows": RowOptions((LONGEST,), 8, 1, True),
    "two lengths": RowOptions((48, LONGEST), 8, 1, True),
    "two ranks": RowOptions((LONGEST,), 1, 2, True),
    "four ranks": RowOptions((LONGEST,), 1, 4, False),
    "four ranks, most of them padding": RowOptions((LONGEST,), 8, 4, True),
    "shared prompts": RowOptions((LONGEST,), 4, 1, True, "shared_prompts"),
    "shared prompts, two ranks": RowOptions((LONGEST,), 4, 2, True, "shared_prompts"),
    IN_STEP: RowOptions((LONGEST,), 4, 2, True, "shared_prompts", in_step=True),
}
NIGHTLY = ("two lengths", "shared prompts", "shared prompts, two ranks")
# Prompt length -> response lengths: a group that fills rows, one of one sample, a prompt of one token.
GROUPS = ((12, (5, 20, 1, 9, 30, 14)), (7, (10,)), (1, (3, 12, 4)), (20, (28, 2)))


@pytest.fixture(scope="module")
def sequences() -> list[TokenSequence]:
    stream = np.random.default_rng(2)
    made = []
    for prompt_length, response_lengths in GROUPS:
        prompt = stream.integers(1, VOCABULARY, prompt_length).astype(np.int32)
        for length in response_lengths:
            # What a tool wrote is in the middle of the longest response, and no loss is about it.
            is_generated = np.ones(length, bool)
            is_generated[8:12] = length < 30
            values = {
                "weights": np.ones(length),
                "advantages": np.full(length, stream.standard_normal()),
                "old_logprobs": -4.5 + 0.5 * stream.standard_normal(length),
                "reference_logprobs": -4.5 + 0.5 * stream.standard_normal(length),
                "values": stream.standard_normal(length),
                "returns": stream.standard_normal(length),
            }
            kept = {name: array[is_generated].astype(np.float32) for name, array in values.items()}
            response = stream.integers(1, VOCABULARY, length).astype(np.int32)
            made.append(TokenSequence(prompt, response, kept, is_generated))
    return made


def build(model: dict):
    from networks import load_random_weights

    from mindrlhf.models.causal_lm import build_model

    network = build_model(model, seq_length=LONGEST)
    load_random_weights(network, seed=5)
    return network


def policy_engine(model: dict = MODEL, device: str = "cpu", kl_estimator: str = "k3"):
    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import PolicyLoss

    policy = PolicyLogProbs(build(model), 0.8, device)
    surrogate = policy_losses.surrogate("gspo", clip_low=0.02, clip_high=0.028)  # a ratio of each response
    bonus = {"entropy_coefficient": 0.05} if kl_estimator else {}
    return whole_engine(PolicyLoss(policy, surrogate, on_policy=False, kl_estimator=kl_estimator, **bonus))


def critic_engine():
    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.algorithms.value_loss import ValueLoss
    from mindrlhf.specs import scorer_config

    return whole_engine(ValueLoss(TokenScores(build(scorer_config(MODEL)), after_token=False), 0.2))


def train(engine, batch, num_ranks: int = 1):
    """Return gradients by name and statistics, summed over the ranks, one after the other here, and the outputs."""
    statistics, shares = 0.0, []
    for rank in range(num_ranks):
        share = batch.part_of(rank, num_ranks)
        shares.append([])
        for rows in share.micro_batches:
            found, outputs = engine.add(rows, share.num_tokens, KL_COEFFICIENT)
            statistics = statistics + found
            shares[-1].append(outputs)
    gradients = {name: array.astype(np.float64) for name, array in engine.gradients()}
    engine.apply(0.0)  # clears them, and moves no weight
    return gradients, statistics, np.concatenate(batch.collect(shares))


@pytest.fixture(scope="module")
def policy():
    return policy_engine()


@pytest.fixture(scope="module")
def plain(policy, sequences):
    return train(policy, make_batch(sequences, PLAIN))


def assert_same(actual, expected, tolerance: float = 2e-6) -> None:
    """The sums of float32, which has 6e-8, are in another order."""
    gradients, statistics, outputs = actual
    np.testing.assert_allclose(statistics, expected[1], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(outputs, expected[2], rtol=0, atol=1e-5)
    assert gradients.keys() == expected[0].keys()
    for name, reference in expected[0].items():
        assert np.linalg.norm(gradients[name] - reference) <= tolerance * np.linalg.norm(reference), name
        assert np.abs(reference).max() > 0, name


def test_clips_and_kl_take_part(plain, sequences):
    _, low, high, kl, entropy, *_ = plain[1]
    assert low > 0 and high > 0 and kl > 0 and entropy > 0
    assert low + high < sum(sequence.num_generated for sequence in sequences)


@pytest.mark.parametrize(
    "cutting", [pytest.param(name, marks=[SLOW] if name in NIGHTLY else []) for name in CUTTINGS]
)
def test_the_cutting_of_a_batch_changes_nothing(policy, plain, sequences, cutting):
    options = CUTTINGS[cutting]
    assert_same(train(policy, make_batch(sequences, options), options.num_ranks), plain)


@SLOW
def test_latent_attention_and_experts_learn_the_same(sequences):
    engine, options = policy_engine(LATENT), CUTTINGS[IN_STEP]
    plain = train(engine, make_batch(sequences, PLAIN))
    assert_same(train(engine, make_batch(sequences, options), options.num_ranks), plain)


def test_a_critic_learns_the_same(sequences):
    engine = critic_engine()
    plain = train(engine, make_batch(sequences, PLAIN))
    assert plain[1][1] > 0, "some values are clipped"
    for name, options in CUTTINGS.items():
        if RUNS_SLOW_TESTS or name in ("packed, one row at a time", "four ranks", "shared prompts"):  # two graphs
            assert_same(train(engine, make_batch(sequences, options), options.num_ranks), plain)


def test_the_order_of_the_samples_changes_nothing(policy, plain, sequences):
    totals, statistics, _ = train(policy, make_batch(sequences[::-1], CUTTINGS["packed, padding rows"]))
    assert_same((totals, statistics, plain[2]), plain)


@pytest.mark.parametrize("cutting", ["two ranks", pytest.param("packed, padding rows", marks=SLOW)])
def test_samples_without_an_advantage_can_be_left_out(sequences, cutting):
    engine, options = policy_engine(kl_estimator=""), CUTTINGS[cutting]
    has_advantage = np.arange(len(sequences)) % 3 == 0
    given = [
        dataclasses.replace(one, values=one.values | {"advantages": one.values["advantages"] * np.float32(has_any)})
        for one, has_any in zip(sequences, has_advantage)
    ]
    everything = train(engine, make_batch(given, PLAIN))
    batch = make_update_batch([[one] for one in given], has_advantage, options)
    totals, statistics, _ = train(engine, batch, options.num_ranks)
    # The loss is the same, and so is every gradient; entropy and clips are of the tokens that were computed.
    assert statistics[0] == pytest.approx(everything[1][0], rel=1e-5) and statistics[0] != 0
    assert_same((totals, everything[1], everything[2]), everything)
    chosen = make_batch([one for one, has_any in zip(given, has_advantage) if has_any], options)
    np.testing.assert_allclose(statistics[1:], train(engine, chosen, options.num_ranks)[1][1:], rtol=1e-5)


def test_tiled_and_plain_log_probabilities_give_the_same_gradients(plain, sequences):
    """The form for Ascend, of plain operators, runs on the CPU too."""
    found = train(policy_engine(device="ascend"), make_batch(sequences, CUTTINGS["packed, padding rows"]))
    assert_same(found, plain, 1e-5)


@given(sizes=st.lists(st.integers(1, 2 * BUCKET_ELEMENTS), min_size=1, max_size=30))
def test_buckets_cover_every_tensor_in_order(sizes):
    ranges = bucket_ranges(sizes)
    assert [index for first, last in ranges for index in range(first, last)] == list(range(len(sizes)))
    for first, last in ranges:
        assert last - first == 1 or sum(sizes[first:last]) <= BUCKET_ELEMENTS
