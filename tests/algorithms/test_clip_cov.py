"""Clip-Cov against the formula of arXiv:2505.22617, token by token."""

import statistics

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.algorithms.clip_cov import clip_cov

BOUNDS = {"low": 1.0, "high": 5.0, "seed": 7}


def draw(seed, lengths=(5, 9, 1, 14)):
    stream = np.random.default_rng(seed)
    advantages = [2 * stream.standard_normal(length) for length in lengths]
    return advantages, [-stream.exponential(2.0, length).astype(np.float32) for length in lengths]


def covariances(advantages, logprobs):
    pairs = [(a, float(p)) for one, other in zip(advantages, logprobs) for a, p in zip(one, other)]
    mean_a, mean_p = (statistics.fmean(values) for values in zip(*pairs))
    return np.array([(a - mean_a) * (p - mean_p) for a, p in pairs])


@given(seed=st.integers(0, 10_000), ratio=st.floats(0, 1))
def test_so_many_tokens_within_the_bounds_lose_their_advantage_and_no_other(seed, ratio):
    advantages, logprobs = draw(seed)
    before = [part.copy() for part in advantages]
    found = clip_cov(advantages, logprobs, ratio=ratio, **BOUNDS)
    flat, kept = np.concatenate(before), np.concatenate(found)
    left_out = np.flatnonzero(flat != kept)
    inside = covariances(before, logprobs)
    candidates = (inside >= 1) & (inside <= 5)
    assert len(left_out) == min(candidates.sum(), max(1, int(ratio * len(flat))))
    assert (kept[left_out] == 0).all() and candidates[left_out].all()
    np.testing.assert_array_equal(np.concatenate(advantages), flat)
    assert [len(part) for part in found] == [len(part) for part in before]


def test_by_hand():
    """Means -1 and 0: covariances 2, -2, 2, -2 of the first four, 0 of the rest."""
    advantages = [np.array([2.0, -2.0]), np.array([-2.0, 2.0, 0.0])]
    logprobs = [np.float32([0, 0]), np.float32([-2, -2, -1])]
    found = clip_cov(advantages, logprobs, ratio=0.4, **BOUNDS)
    np.testing.assert_array_equal(np.concatenate(found), [0, -2, 0, 2, 0])
    found = clip_cov(advantages, logprobs, ratio=0.4, low=2.5, high=5.0, seed=7)
    np.testing.assert_array_equal(np.concatenate(found), [2, -2, -2, 2, 0])


def test_what_is_drawn_follows_from_the_seed_and_the_samples():
    advantages, logprobs = draw(3, (40, 60))
    one, again, other = (clip_cov(advantages, logprobs, ratio=0.02, low=0.1, high=50, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(np.concatenate(one), np.concatenate(again))
    assert (np.concatenate(one) != np.concatenate(other)).any()
