"""A critic in the loop over scripted samples: GAE recomputed by brute force, the order of work, steps for it alone."""

import numpy as np
import pytest
import test_loop
from test_loop import Run

from mindrlhf.errors import RunFailure
from mindrlhf.training.loop.value_function import critic_optimizer, value_metrics
from mindrlhf.training.results import ProcessStatistics, UpdateResult

GAMMA, LAMBDA, BETA = 0.9, 0.8, 0.4
OPTIONS = {"gamma": GAMMA, "gae_lambda": LAMBDA, "whiten_advantages": False}
ALGORITHM = {"advantage": "gae", "options": OPTIONS}
KL_IN_REWARD = {**ALGORITHM, "beta": BETA, "kl_in": "reward", "kl_estimator": "k1"}


class CriticRank(test_loop.Rank):
    """Its value of a state depends on the token read last: 1/8 of it, so that tokens and prompts differ."""

    def __init__(self, journal):
        super().__init__(journal)
        self.critic_updates = []
        self.norm = 0.5

    def take_turn(self, model):
        self.journal.append(f"turn of {model}")

    def compute_values(self, batch):
        self.journal.append(f"values {batch}")
        micro_batches = self.batches[batch].micro_batches
        for rows in micro_batches:
            rows.tokens["values"] = (rows.input_ids * rows.mask / 8).astype(np.float32)
        return [rows.tokens["values"] for rows in micro_batches]

    def update_critic(self, batch, lr):
        self.journal.append(f"update_critic {batch}")
        micro_batches, num_tokens = self.batches[batch].micro_batches, self.batches[batch].num_tokens
        self.critic_updates.append((lr, micro_batches))
        count = sum(float(rows.mask.sum()) for rows in micro_batches)
        statistics = np.array([3.0 * count / num_tokens, 0.25 * count])
        return UpdateResult(statistics, self.norm, ProcessStatistics(0, 0.5))


@pytest.fixture
def make_run(monkeypatch):
    monkeypatch.setattr(test_loop, "Rank", CriticRank)

    def make(critic=None, **options):
        return Run(critic={"path": "critic", "start_lr": 0.5, **(critic or {})}, **options)

    return make


def responses_of(rank, update=0, which="critic_updates"):
    """Yield for each response of an update: prompt token, ids of what was read before each token, and its arrays."""
    micro_batches = getattr(rank, which)[update][-1]
    for rows in micro_batches:
        for row, segments in enumerate(rows.segment_ids):
            for segment in range(1, segments.max() + 1):
                tokens = (segments == segment) & (rows.mask[row] > 0)
                arrays = {name: array[row][tokens].astype(np.float64) for name, array in rows.tokens.items()}
                yield rows.input_ids[row][tokens], arrays


def brute_force(rewards, values):
    """A_t and R_t from the sums of eq. 16 of arXiv:1506.02438 as they stand, in O(n^2)."""
    length = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + GAMMA * following[t] - values[t] for t in range(length)]
    advantages = [
        sum((GAMMA * LAMBDA) ** (later - t) * deltas[later] for later in range(t, length)) for t in range(length)
    ]
    return np.array(advantages), np.array(advantages) + values


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_advantages_and_returns_of_its_own_rows(make_run, world_size):
    run = make_run(num_prompts=2, world_size=world_size, algorithm=KL_IN_REWARD, training={"micro_batch_size": 1})
    run()
    seen = 0
    for rank in run.ranks:
        for read, arrays in responses_of(rank):
            length, prompt = len(read), read[0] - 1
            # -1.25 under the policy and -1.75 under the reference: 0.5 nats a token.
            rewards = np.full(length, -BETA * 0.5)
            rewards[-1] += 2.5 if prompt == 0 else 2 * length + 0.5
            values = read / 8
            advantages, returns = brute_force(rewards, values)
            np.testing.assert_array_equal(arrays["values"], values)
            np.testing.assert_allclose(arrays["advantages"], advantages, rtol=1e-6)
            np.testing.assert_allclose(arrays["returns"], returns, rtol=1e-6)
            seen += 1
    assert seen == 6


def test_whitened_advantages_leave_the_returns_as_they_are(make_run):
    plain, white = (
        make_run(num_prompts=2, algorithm={**ALGORITHM, "options": {**OPTIONS, "whiten_advantages": flag}})
        for flag in (False, True)
    )
    plain(), white()
    pairs = list(zip(responses_of(plain.ranks[0]), responses_of(white.ranks[0]), strict=True))
    tokens = np.concatenate([arrays["advantages"] for (_, arrays), _ in pairs])
    for (_, ours), (_, theirs) in pairs:
        np.testing.assert_array_equal(ours["returns"], theirs["returns"])
        expected = (ours["advantages"] - tokens.mean()) / tokens.std()
        np.testing.assert_allclose(theirs["advantages"], expected, rtol=1e-5, atol=1e-6)


def test_actor_and_critic_take_turns(make_run):
    run = make_run(num_prompts=4, algorithm=KL_IN_REWARD, training={"num_minibatches": 2, "num_iterations": 2})
    run.train()
    work = [entry for entry in run.journal if entry.split()[0] not in ("publish", "commit", "wake", "update_weights")]
    one_step = [
        *("generate 2", "sleep"),
        *("old_logprobs 0", "old_logprobs 1", "reference_logprobs 0", "reference_logprobs 1"),
        *("turn of critic", "values 0", "values 1"),
        *("update_critic 0", "update_critic 1", "update_critic 0", "update_critic 1", "turn of actor"),
        *("update 0", "update 1", "update 0", "update 1"),
    ]
    assert work == one_step * 2


def test_both_models_learn_from_the_same_rows(make_run):
    run = make_run(num_prompts=2, algorithm=ALGORITHM, training={"num_minibatches": 3})
    run()
    rank = run.ranks[0]
    for update in range(3):
        pairs = zip(responses_of(rank, update), responses_of(rank, update, "updates"), strict=True)
        for (ours, _), (theirs, _) in pairs:
            np.testing.assert_array_equal(ours, theirs)


def test_metrics_of_the_critic(make_run):
    metrics = make_run(num_prompts=2, world_size=2, algorithm=ALGORITHM, training={"num_minibatches": 2})()[1]
    assert metrics["value/loss"] == pytest.approx(3.0)
    assert metrics["value/clip_fraction"] == pytest.approx(0.25)
    assert metrics["value/grad_norm"] == 0.5 and metrics["value/lr"] == 0.5
    # What is read before each token: the prompt, 1 or 2, and then the response so far.
    read = [[p, *[50 + index] * index] for p in (1, 2) for index in range(3)]
    assert metrics["value/mean"] == pytest.approx(np.mean(np.concatenate(read)) / 8)
    assert {"timing/values", "timing/update_critic"} <= metrics.keys()


def test_explained_variance_by_hand():
    returns = [np.array([1.0, 3.0]), np.array([5.0])]
    assert value_metrics(returns, returns) == {"value/mean": 3.0, "value/explained_variance": 1.0}
    constant = [np.array([7.0, 7.0]), np.array([7.0])]
    assert value_metrics(constant, returns) == {"value/mean": 7.0, "value/explained_variance": 0.0}
    worse = [np.array([3.0, 1.0]), np.array([-1.0])]
    # Errors -2, 2, 6: variance 32 / 3, against 8 / 3 of the returns.
    assert value_metrics(worse, returns)["value/explained_variance"] == pytest.approx(-3.0)
    assert value_metrics(returns, constant) == {"value/mean": 3.0}


def test_at_first_only_the_critic_is_trained(make_run):
    options = {"num_prompts": 6, "algorithm": ALGORITHM, "optimizer": {"start_lr": 1.0, "warmup_steps": 2}}
    run = make_run(critic={"warmup_steps": 2}, **options)
    run.trainer.warm_up()
    metrics = run()
    assert "warm_up [8, 16] 4 ['old_logprobs']" in run.journal
    work = [entry for entry in run.journal if entry.startswith(("old", "update_critic", "update 0"))]
    assert work == ["old_logprobs 0", "update_critic 0"] * 2 + ["update_critic 0", "update 0"]
    for step in (1, 2):
        assert not metrics[step].keys() & {"loss", "grad_norm", "lr", "clip_fraction/low"}
        assert metrics[step]["rollout_diff/mean_abs"] == pytest.approx(0.25), "measured on the old log-probabilities"
    # The actor's own warm-up of the learning rate begins with its first update.
    assert metrics[3]["lr"] == 0.5 and run.ranks[0].updates[0][0] == 0.5
    assert [lr for lr, _ in run.ranks[0].critic_updates] == [0.25, 0.5, 0.5]


def test_the_critic_keeps_its_learning_rate_where_the_actors_decays(make_run):
    optimizer = {"start_lr": 1.0, "end_lr": 0.0, "lr_schedule": "linear", "beta1": 0.7}
    run = make_run(num_prompts=6, algorithm=ALGORITHM, optimizer=optimizer)
    run()
    assert [lr for lr, *_ in run.ranks[0].updates] == [1.0, 0.5, 0.0]
    assert [lr for lr, _ in run.ranks[0].critic_updates] == [0.5, 0.5, 0.5]
    assert critic_optimizer(run.config).beta1 == 0.7


def test_gradients_of_the_critic_that_are_not_finite_end_the_run(make_run):
    run = make_run(num_prompts=2, algorithm=ALGORITHM)
    run.ranks[0].norm = float("nan")
    with pytest.raises(RunFailure, match="step 1: the gradient norm of the critic is nan.*lower critic.start_lr"):
        run()


def test_other_algorithms_ask_no_critic(make_run):
    run = make_run(num_prompts=2)
    metrics = run()[1]
    assert not [entry for entry in run.journal if "critic" in entry or entry.startswith("values")]
    assert not [name for name in metrics if name.startswith("value/")]
