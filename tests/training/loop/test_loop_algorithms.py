"""The algorithm's parts in the loop over scripted samples: where they take their numbers from and send them."""


import numpy as np
import pytest
from test_loop import Run


def advantages_of(run, update=0):
    """Return the first advantage of each response of an update, in the order of the rows' placement, and all tokens."""
    rows = [rows for rank in run.ranks for rows in rank.updates[update][2]]
    return np.concatenate([each.tokens["advantages"][each.mask > 0] for each in rows])


@pytest.mark.parametrize("world_size", [1, 2])
def test_kl_in_the_reward_asks_for_old_logprobs_and_lowers_early_tokens_most(world_size):
    algorithm = {"advantage": "reinforce_pp", "beta": 0.4, "kl_in": "reward", "kl_estimator": "k1"}
    run = Run(num_prompts=1, world_size=world_size, algorithm=algorithm)
    run.trainer.warm_up()
    metrics = run()[1]
    assert "warm_up [8, 16] 4 ['old_logprobs', 'reference_logprobs']" in run.journal
    work = [entry for entry in run.journal if entry.startswith(("old", "reference", "update 0"))]
    assert work == ["old_logprobs 0", "reference_logprobs 0", "update 0"]
    # -1.25 under the policy and -1.75 under the reference: 0.5 nats a token, of which 0.4 is taken off.
    assert metrics["kl"] == pytest.approx(0.5)
    # Prompt 0 earns 2.5 whatever the length; responses of 1, 2 and 3 tokens.
    to_go = np.array([2.5 - 0.2, 2.5 - 0.4, 2.5 - 0.2, 2.5 - 0.6, 2.5 - 0.4, 2.5 - 0.2])
    expected = (to_go - to_go.mean()) / to_go.std()
    np.testing.assert_allclose(sorted(advantages_of(run)), sorted(expected), rtol=1e-5)


def test_a_teacher_gives_the_advantage_of_each_token():
    run = Run(
        num_prompts=2,
        algorithm={"name": "distill", "advantage": "distill", "beta": 1.0, "kl_in": "reward", "kl_estimator": "k1"},
    )
    metrics = run()[1]
    # -1.25 under the student and -1.75 under the teacher.
    assert metrics["kl"] == pytest.approx(0.5)
    assert advantages_of(run) == pytest.approx([-0.5] * 12)


def test_remax_samples_one_greedy_response_for_each_prompt():
    run = Run(num_prompts=2, algorithm={"advantage": "remax"})
    metrics = run()[1]
    (sampled, sampling), (greedy, greedy_sampling) = run.generator.requests
    assert sampling.temperature == 1.0 and greedy_sampling.temperature == 0.0
    assert [request.prompt_ids for request in greedy] == [request.prompt_ids for request in sampled]
    assert [request.num_samples for request in greedy] == [1, 1]
    # Responses of one token: both prompts earn 2.5.
    assert metrics["reward/greedy"] == 2.5
    assert sorted(advantages_of(run)) == [0.0] * 6 + [0.0] + [2.0] * 2 + [4.0] * 3


def test_beta_follows_its_target_and_continues_after_a_restart():
    algorithm = {"beta": 0.1, "kl_target": 0.05}
    run = Run(num_prompts=4, algorithm=algorithm)
    metrics = run()
    # The loss reports a KL of 0.1 per token, twice the target: the error is bounded to 0.2, and a tenth of it is taken.
    assert run.ranks[0].kl_coefficients == pytest.approx([0.1, 0.1 * 1.02])
    assert metrics[2]["kl_coefficient"] == pytest.approx(0.1 * 1.02)
    assert run.progress.algorithm.kl.coefficient == pytest.approx(0.1 * 1.02**2)
    later = Run(num_prompts=2, algorithm=algorithm)
    later.progress.algorithm = run.progress.algorithm
    later.trainer = type(later.trainer)(later.config, later.trainer.parts, later.progress, 1)
    later.train()
    assert later.ranks[0].kl_coefficients == pytest.approx([0.1 * 1.02**2])


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_the_tokens_of_its_own_rows(world_size):
    """Advantage and weight of each token, by the length of its response, whichever rank and row it is in."""
    run = Run(
        num_prompts=2,
        world_size=world_size,
        algorithm={"advantage": "dr_grpo", "aggregation": "sequence_mean"},
        training={"micro_batch_size": 1},
    )
    run()
    seen = []
    for rank in run.ranks:
        for rows in rank.updates[0][2]:
            for row, segments in enumerate(rows.segment_ids):
                for segment in range(1, segments.max() + 1):
                    tokens = (segments == segment) & (rows.mask[row] > 0)
                    advantage, weight = (set(rows.tokens[name][row][tokens]) for name in ("advantages", "weights"))
                    seen.append((int(tokens.sum()), *advantage, *weight))
    # Prompt 0: no signal. Prompt 1: rewards 2.5, 4.5, 6.5. 12 tokens in 6 responses: weights 12 / (6 n).
    expected = [(n, (2.0 * n - 4.0) * prompt, np.float32(2 / n)) for n in (1, 2, 3) for prompt in (0, 1)]
    assert sorted(seen) == sorted(expected)


def test_correction_sends_the_rollout_logprobs_and_reports_what_it_did():
    run = Run(num_prompts=2, correction={"weight": "token"})
    metrics = run()[1]
    for rows in run.ranks[0].updates[0][2]:
        np.testing.assert_array_equal(rows.tokens["rollout_logprobs"], -1.0 * rows.mask)
    assert metrics["correction/weight"] == 1.0 and metrics["correction/changed"] == 0.0
    # -1.5 in the trainer, -1.0 in the generator.
    assert metrics["rollout_ratio/max"] == pytest.approx(np.exp(-0.5))
    assert metrics["rollout_ratio/effective"] == pytest.approx(1.0)
    assert metrics["rollout_ratio/sequence_min"] == pytest.approx(np.exp(-1.5))
    plain = Run(num_prompts=2)
    assert not [name for name in plain()[1] if name.startswith("correction/")]
    assert "rollout_logprobs" not in plain.ranks[0].updates[0][2][0].tokens


def test_bypass_takes_the_rollout_logprobs_for_the_old_ones():
    run = Run(num_prompts=2, correction={"bypass": True}, training={"num_iterations": 2})
    run()
    assert not [entry for entry in run.journal if entry.startswith("old_logprobs")]
    for rows in run.ranks[0].updates[0][2]:
        np.testing.assert_array_equal(rows.tokens["old_logprobs"], -1.0 * rows.mask)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_samples_without_a_gradient_are_not_sent_to_the_ranks(world_size, skips):
    """Prompt 0 earns the same for all three responses; of prompt 1's the middle one has just the mean."""
    run = Run(num_prompts=2, world_size=world_size, training={"skip_zero_advantages": skips})
    metrics = run()[1]
    rows = [rows for rank in run.ranks for rows in rank.updates[0][2]]
    tokens = sum(int((each.mask > 0).sum()) for each in rows)
    assert tokens == (1 + 3 if skips else 12)
    # The loss is that of all 12 tokens, the statistics are means over those that were computed.
    assert {num_tokens for rank in run.ranks for _, num_tokens, _ in rank.updates} == {12}
    given = np.sort(advantages_of(run))
    deviation = np.std([2.5, 4.5, 6.5], ddof=1) + 1e-6
    ends = [-2 / deviation, *[2 / deviation] * 3]
    np.testing.assert_allclose(given, sorted(ends if skips else ends + [0.0] * 8), rtol=1e-5)
    assert metrics["loss"] == pytest.approx(4 * (2 / deviation) ** 2 / 12)
    assert metrics["entropy"] == pytest.approx(3.0)
    assert metrics["rollout_diff/mean_abs"] == pytest.approx(0.5)
    # What was generated is reported whole.
    assert metrics["reward/mean"] == pytest.approx((3 * 2.5 + 2.5 + 4.5 + 6.5) / 6)
    record = run.memory.reviewed[0][0]
    assert [one.group for one in record.trained] == ([1, 1] if skips else [0, 0, 0, 1, 1, 1])
    assert record.samples_of(0) == record.trained
