"""Metrics against numbers worked out by hand."""

import math

import numpy as np
import pytest

from mindrlhf.observe.metrics import (
    combine_metrics,
    length_metrics,
    packing_metrics,
    reward_metrics,
    rollout_diff_metrics,
    rollout_ratio_metrics,
)


def test_rewards_by_hand():
    metrics = reward_metrics(
        rewards=np.array([1.0, 0.0, 1.0, 1.0, 0.5], np.float32),
        group_ids=np.array([7, 7, 3, 3, 9]),
        rewards_by_verifier={"accuracy_reward": np.array([1, 0, 1, 1, 0]), "format_reward": np.full(5, 0.5)},
    )
    assert metrics == pytest.approx(
        {
            "reward/mean": 3.5 / 5,
            "reward/std": math.sqrt((3 * 0.3**2 + 0.7**2 + 0.2**2) / 5),
            "reward/groups_without_signal": 2 / 3,
            "reward/accuracy_reward/mean": 0.6,
            "reward/format_reward/mean": 0.5,
        }
    )
    assert all(type(value) is float for value in metrics.values())


def test_groups_need_not_be_contiguous():
    interleaved = reward_metrics(np.array([0.0, 1.0, 0.0, 1.0]), np.array([0, 1, 0, 1]), {})
    assert interleaved["reward/groups_without_signal"] == 1.0
    contiguous = reward_metrics(np.array([0.0, 1.0, 0.0, 1.0]), np.array([0, 0, 1, 1]), {})
    assert contiguous["reward/groups_without_signal"] == 0.0


def test_one_sample_for_each_prompt_makes_no_groups():
    assert "reward/groups_without_signal" not in reward_metrics(np.array([0.0, 1.0]), np.array([0, 1]), {})


def test_rounding_is_no_signal():
    assert reward_metrics(np.array([0.1 + 0.2, 0.3]), np.zeros(2, int), {})["reward/groups_without_signal"] == 1.0


def test_lengths_by_hand():
    metrics = length_metrics(
        prompt_lengths=np.array([10, 20]), response_lengths=np.array([4, 8, 16, 8]), cut=np.array([0, 0, 1, 0], bool)
    )
    assert metrics == {
        "prompt_length/mean": 15.0,
        "prompt_length/min": 10.0,
        "prompt_length/max": 20.0,
        "response_length/mean": 9.0,
        "response_length/min": 4.0,
        "response_length/max": 16.0,
        "response_length/cut_fraction": 0.25,
    }


def test_rollout_ratios_by_hand():
    log2 = math.log(2.0)
    rollout = [np.array([-1.0, -3.0]), np.array([-0.5]), np.array([-2.0, -2.0])]
    train = [np.array([-1.0 + log2, -3.0 + log2]), np.array([-0.5 - log2]), np.array([-2.0, -2.0])]
    # Ratios 2, 2; 1/2; 1, 1. Their sum is 6.5, that of their squares 10.25.
    assert rollout_ratio_metrics(rollout, train) == pytest.approx(
        {
            "rollout_ratio/mean": 6.5 / 5,
            "rollout_ratio/min": 0.5,
            "rollout_ratio/max": 2.0,
            "rollout_ratio/effective": 6.5**2 / (5 * 10.25),
            "rollout_ratio/sequence_min": 0.5,
            "rollout_ratio/sequence_max": 4.0,
        }
    )


def test_rollout_ratios_too_large_for_a_float_stay_finite():
    metrics = rollout_ratio_metrics([np.array([-2000.0, -1.0])], [np.array([0.0, -1.0])])
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["rollout_ratio/max"] == pytest.approx(math.exp(50.0))


def test_rollout_difference_by_hand():
    train = np.array([[-1.0 + math.log(2.0), -3.0], [-0.5, 99.0]])
    rollout = np.array([[-1.0, -3.0 + math.log(2.0)], [-0.5, 0.0]])
    metrics = rollout_diff_metrics(rollout, train, np.array([[1, 1], [1, 0]]))
    # Ratios 2, 1/2 and 1: r - 1 - log r is 1 - log 2, log 2 - 1/2 and 0.
    assert metrics == pytest.approx(
        {
            "rollout_diff/mean_abs": 2 * math.log(2.0) / 3,
            "rollout_diff/max_abs": math.log(2.0),
            "rollout_diff/k3": 0.5 / 3,
        }
    )


def test_k3_estimates_the_kl_of_rollout_from_train():
    rollout_probs, train_probs = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.35, 0.25])
    # One token per outcome, repeated in proportion to the rollout policy: the mean is then the exact expectation.
    tokens = np.repeat(np.arange(3), [5, 3, 2])
    metrics = rollout_diff_metrics(np.log(rollout_probs)[tokens], np.log(train_probs)[tokens], np.ones(10))
    exact_kl = np.sum(rollout_probs * np.log(rollout_probs / train_probs))
    assert metrics["rollout_diff/k3"] == pytest.approx(exact_kl, rel=1e-12)


def test_k3_keeps_tiny_differences():
    metrics = rollout_diff_metrics(np.zeros(4), np.full(4, 1e-6), np.ones(4))
    assert metrics["rollout_diff/k3"] == pytest.approx(5e-13, rel=1e-4)


def test_packing_counts_filler_rows():
    assert packing_metrics([100, 60, 0], [128, 64, 128]) == {"packing/efficiency": 0.5, "packing/num_rows": 3.0}


def test_combined_parts_keep_their_names_apart():
    assert combine_metrics({"loss": np.float32(0.5)}, {"lr": 1}) == {"loss": 0.5, "lr": 1.0}
    with pytest.raises(AssertionError, match="loss"):
        combine_metrics({"loss": 1.0}, {"loss": 2.0})
