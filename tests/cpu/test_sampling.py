import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.cpu.rollout.sampling import sample_rows
from mindrlhf.rollout.server.streams import stream_key, uniforms


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, one step at a time, in Python integers."""
    mask, outputs = (1 << 64) - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(z ^ (z >> 31))
    return outputs


def test_uniforms_are_splitmix64():
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # reference values of the algorithm
    got = uniforms(np.full(5, 1234567, np.uint64), np.arange(5, dtype=np.uint64))
    np.testing.assert_array_equal(got, [(bits >> 11) / 2**53 for bits in splitmix64(1234567, 5)])


def test_streams_of_neighbouring_seeds_and_samples_are_unrelated():
    keys = np.array([stream_key(seed, sample) for seed in range(30) for sample in range(10)], np.uint64)
    assert len(set(keys.tolist())) == 300
    draws = np.array([uniforms(keys, np.full(300, position, np.uint64)) for position in range(200)])
    assert abs(draws.mean() - 0.5) < 4 / np.sqrt(12 * draws.size)
    correlations = np.corrcoef(draws.T)[np.triu_indices(300, 1)]
    assert np.abs(correlations).max() < 6 / np.sqrt(200)


@pytest.mark.parametrize("vocab_size", [5, 256, 1000])
def test_frequencies_match_the_distribution(vocab_size):
    logits = np.random.default_rng(0).normal(size=vocab_size) * 2
    probs = np.exp(logits) / np.exp(logits).sum()
    num_draws = 40_000
    draws = uniforms(np.full(num_draws, 99, np.uint64), np.arange(num_draws, dtype=np.uint64))
    token_ids, logprobs = sample_rows(np.tile(probs.astype(np.float32), (num_draws, 1)), draws)
    np.testing.assert_allclose(logprobs, np.log(probs)[token_ids], atol=1e-5)
    counts = np.bincount(token_ids, minlength=vocab_size)
    expected = probs * num_draws
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    chi_square = ((observed - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    degrees = (expected > 0).sum() - 1
    assert chi_square < degrees + 4.5 * np.sqrt(2 * degrees)


@settings(max_examples=60)
@given(st.integers(1, 700), st.integers(0, 2**32 - 1), st.floats(0, 1, exclude_max=True))
def test_the_token_is_where_the_cumulative_sum_passes_the_draw(vocab_size, seed, draw):
    random = np.random.default_rng(seed)
    probs = random.random(vocab_size) * (random.random(vocab_size) < 0.5)
    probs[random.integers(vocab_size)] += 0.1
    probs = (probs / probs.sum()).astype(np.float32)
    token_ids, _ = sample_rows(probs[None], np.array([draw]))
    token = int(token_ids[0])
    ends = np.cumsum(probs, dtype=np.float64)
    assert probs[token] > 0
    assert ends[token] - probs[token] - 1e-5 <= draw * ends[-1] <= ends[token] + 1e-5


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_impossible_tokens_at_the_ends_are_never_sampled(draw):
    probs = np.zeros((1, 600), np.float32)
    probs[0, 300:310] = 0.1
    token_ids, _ = sample_rows(probs, np.array([draw]))
    assert 300 <= token_ids[0] < 310
