"""Which samples of a step are computed, and what their updates divide by."""

import numpy as np
import pytest
from configs import grpo_config
from made_samples import make_sample, with_reward

from mindrlhf.config.derived import skips_zero_advantages
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.training.batch import RowOptions
from mindrlhf.training.loop.objective import Objective
from mindrlhf.training.loop.step import Step, StepSamples

OPTIONS = RowOptions((16,), 2, 1, True)


def sample(group, reward, length, finish_reason="stop"):
    ids = np.arange(1, length + 1, dtype=np.int32)
    logprobs = np.full(length, -1.0, np.float32)
    return make_sample(ids[:1], ids, reward, group=group, logprobs=logprobs, finish_reason=finish_reason)


# Groups 0 and 2 have no signal. In floating point the mean of three times 0.1 is not 0.1.
SAMPLES = [
    *(sample(0, 0.1, length) for length in (2, 3, 4)),
    *(sample(1, reward, length) for reward, length in ((0.0, 2), (1.0, 5), (0.5, 3))),
    *(sample(2, 1.0, length) for length in (1, 6, 2)),
    *(sample(3, reward, length, reason) for reward, length, reason in ((1.0, 7, "length"), (0.0, 2, "stop"))),
]
ALL = [True] * len(SAMPLES)


def config_with(training=None, observe=None, **algorithm) -> GrpoConfig:
    return grpo_config(algorithm=algorithm, training=training or {}, observe=observe or {})


def rows_of(config, samples=SAMPLES, greedy=()):
    step = Step(1, 1, "", 0.0, StepSamples(samples, samples, greedy=greedy))
    Objective(config).make_batches(step, OPTIONS)
    return step


def test_groups_of_equal_rewards_are_left_out_and_their_tokens_counted():
    rows = rows_of(config_with())
    # The middle one of group 1 has just the mean.
    expected = [False] * 3 + [True, True, False] + [False] * 3 + [True, True]
    np.testing.assert_array_equal(rows.computed, expected)
    (batch,) = rows.batches
    assert (batch.num_tokens, batch.num_computed) == (37, 2 + 5 + 7 + 2)
    assert len(batch.placed) == 4 and rows.chosen("abcdefghijk") == list("dejk")
    assert [rows.num_chosen(count) for count in (0, 4, 11)] == [0, 1, 4]
    np.testing.assert_allclose([part[0] for part in rows.advantages[3:6]], [-1, 1, 0], atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        config_with(training={"skip_zero_advantages": False}),
        config_with(beta=0.1),
        config_with(beta=0.1, kl_in="reward", advantage="reinforce_pp", kl_estimator="k1"),
        config_with(entropy_coefficient=0.01),
        config_with(loss="kimi"),
        config_with(advantage="gae"),
    ],
)
def test_all_are_computed_where_something_else_has_a_gradient(config):
    assert not skips_zero_advantages(config)
    rows = rows_of(config)
    np.testing.assert_array_equal(rows.computed, ALL)
    assert (rows.advantages is None) == Objective(config).advantages_wait
    assert rows.batches[0].num_tokens == rows.batches[0].num_computed == 37


def test_each_update_computes_a_sample():
    rows = rows_of(config_with(training={"num_minibatches": 4}))
    # Parts of 3, 3, 3 and 2 samples: the first and the third teach nothing.
    np.testing.assert_array_equal(np.flatnonzero(rows.computed), [0, 3, 4, 6, 9, 10])
    assert [batch.num_tokens for batch in rows.batches] == [9, 10, 9, 9]
    assert [batch.num_computed for batch in rows.batches] == [2, 7, 1, 9]
    assert [len(batch.placed) for batch in rows.batches] == [1, 2, 1, 2]
    alike = [with_reward(one, total=1.0) for one in SAMPLES]
    np.testing.assert_array_equal(np.flatnonzero(rows_of(config_with(), alike).computed), [0])


def test_samples_that_are_shown_with_their_tokens_are_computed():
    rows = rows_of(config_with(observe={"sample_tokens": True, "groups_per_step": 1}))
    np.testing.assert_array_equal(np.flatnonzero(rows.computed), [*range(8), 9, 10])


def test_responses_that_were_cut_are_left_out_where_they_are_filtered():
    rows = rows_of(config_with(overlong_filter=True))
    np.testing.assert_array_equal(np.flatnonzero(rows.computed), [3, 4, 10])
    assert rows.batches[0].num_tokens == 37


def test_baselines_count():
    greedy = [with_reward(sample(group, 0.0, 2), total=total) for group, total in enumerate((0.1, 0.5, 1.0, 0.25))]
    rows = rows_of(config_with(advantage="remax"), greedy=greedy)
    # Those that earned just what the greedy response to their prompt did have no gradient.
    np.testing.assert_array_equal(np.flatnonzero(rows.computed), [3, 4, 9, 10])
    assert rows.metrics == {"reward/greedy": pytest.approx((3 * 0.1 + 3 * 0.5 + 3 * 1.0 + 2 * 0.25) / 11)}
