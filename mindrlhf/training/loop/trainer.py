"""The reinforcement learning loop, as rank 0 runs it: sample, score, batch, log-probs, advantages, update, publish."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from mindrlhf.checkpoint.algorithm_state import KlState
from mindrlhf.config.derived import has_older_samples
from mindrlhf.config.evaluation import ACCURACY
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.evaluation.best import best_step, num_since_best
from mindrlhf.evaluation.divergence import RewardWatch
from mindrlhf.observe.metrics import combine_metrics
from mindrlhf.observe.samples import TOKEN_VALUES, SampleRecord
from mindrlhf.observe.sinks import StepDetails
from mindrlhf.rollout.samples import Sample, sample_parts, sample_record
from mindrlhf.system import heartbeat
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.life_cycle import Steps
from mindrlhf.training.loop.dynamic_sampling import SampleLedger, StepSamples
from mindrlhf.training.loop.key_data import KeyData
from mindrlhf.training.loop.objective import Objective
from mindrlhf.training.loop.parts import Parts
from mindrlhf.training.loop.policy import PolicyUpdate
from mindrlhf.training.loop.sampling.ahead import SamplingAhead
from mindrlhf.training.loop.sampling.asynchronous import SamplingAsynchronously
from mindrlhf.training.loop.sampling.in_step import SampledStep, SamplingInStep
from mindrlhf.training.loop.sampling.spans import SamplingInSpans
from mindrlhf.training.loop.step_metrics import performance_metrics, step_metrics
from mindrlhf.training.loop.step_record import StepRecord
from mindrlhf.training.loop.step_rows import StepRows, make_step_rows
from mindrlhf.training.loop.value_function import ValueFunction, value_metrics
from mindrlhf.training.schedule import learning_rate


class Trainer(Steps):
    """Policy optimisation over rewards."""

    def __init__(self, config: GrpoConfig, parts: Parts, progress: Progress, num_steps: int):
        self.config = config
        self.parts = parts
        self.policy = parts.policy
        self.progress = progress
        self.num_steps = num_steps
        self.timer = parts.timer
        self.objective = Objective(config)
        if kl := progress.algorithm.kl:
            self.objective.kl.restore(asdict(kl))
        self._weights = ""  # digest of the published weights
        needs_values = self.objective.needs_values
        self.critic = ValueFunction(config, parts.team, self.timer, num_steps) if needs_values else None
        self.ledger = SampleLedger(progress.algorithm.samples)
        self.sampling = self._build_sampling()
        self._reward_watch = RewardWatch()

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates that one step makes."""
        return self.config.training.num_minibatches * self.config.training.num_iterations

    @property
    def num_critic_steps(self) -> int:
        """Steps at the start in which only the critic is trained."""
        return self.config.critic.warmup_steps if self.critic else 0

    def warm_up(self) -> None:
        """Compile all graphs and read small prompt files whole; none of it needs the generator."""
        graphs = ["old_logprobs"] if self.objective.needs_old_logprobs or self.num_critic_steps else []
        graphs += ["reference_logprobs"] if self.objective.needs_reference else []
        self.policy.warm_up(self.parts.rows, graphs)
        self.parts.rollout.prompts.read_small_file()

    def begin(self) -> None:
        """Give the generator the weights that the first step samples from."""
        heartbeat.enter("handing the weights to vLLM")
        self.publish()
        if self.progress.step == 0:
            self._write_fingerprint({})
        self.timer.finish_step()

    def step(self) -> dict[str, float]:
        """Do one step and return its metrics; see ``Steps.step``."""
        index = self.progress.step
        key_data = self._begin_key_data(index + 1)
        sampled = self.sampling.sample(index)
        samples = sampled.samples
        baselines = self.objective.baselines(samples.used, sampled.greedy)
        with self.timer.stage("pack"):
            rows = make_step_rows(self.config, self.objective, samples.used, baselines, self.parts.rows)
        batches = rows.batches
        with self.timer.stage("distribute"):
            self.policy.distribute(batches)
        trains_actor = index >= self.num_critic_steps
        old, reference = self._logprobs(needs_old=not trains_actor)
        old_logprobs = self._old_logprobs(samples, rows, old)
        values = self.critic.values(batches) if self.critic else None
        with self.timer.stage("pack"):
            metrics = self._send_advantages(samples.used, rows, baselines, old_logprobs, reference, values)
        if self.critic:
            metrics |= self.critic.update(batches, index)
        updates = self._update(len(batches), index) if trains_actor else []
        trained = rows.chosen(samples.used)
        record = StepRecord(index + 1, trained, batches, updates, self.objective.kl.coefficient, self._weights)
        if key_data:
            with self.timer.stage("dump"):
                key_data.finish(record)
        version = self.progress.weights_version
        self.sampling.free_board(index + 1)
        with self.timer.stage("reshard_to_infer"):
            self.publish()
        self.progress.step += 1
        # A single update computes the log-probabilities before it changes the weights: they are the old ones.
        logprobs = old or self.policy.responses(updates)
        if self.objective.learns_words:
            metrics |= self.objective.divergences(samples.used, logprobs, reference)[1]
        return self._report(record, sampled, rows, version, logprobs, metrics)

    def details(self) -> StepDetails | None:
        """Return rewards, lengths and a few samples of the last step."""
        return self._details

    def publish(self) -> None:
        """Put the current weights on the board and have the generator load them."""
        self.progress.weights_version += 1
        version = self.progress.weights_version
        self._weights = self.policy.publish(version, self.sampling.load)

    def evaluate(self) -> dict[str, float]:
        """Sample the held-out prompts if it is time, and return their metrics; the time counts to no step."""
        if not self._must_evaluate():
            return {}
        rollout = self.parts.rollout
        self.sampling.settle()
        with self.timer.stage("evaluation"):
            evaluation = rollout.held_out.run(rollout.sampler, self.progress.step)
            more = {name: one.run(rollout.sampler, self.progress.step) for name, one in rollout.more_held_out.items()}
        choice = self.config.evaluation
        if choice.best_by != ACCURACY:
            judge = more[choice.best_set] if choice.best_set else evaluation
            evaluation = evaluation.judged_on(judge, choice.best_set, choice.best_metric)
        self.progress.evaluations.append(evaluation)
        if parted := self._reward_watch.review(evaluation):
            print(f"warning: {parted}", file=sys.stderr, flush=True)
        metrics = evaluation.metrics()
        for name, one in more.items():
            metrics.update(one.set_metrics(name))
        return {**metrics, "timing/evaluation": self.timer.finish_step()["timing/evaluation"]}

    def check(self) -> None:
        """Stop the run if its guards demand it."""
        self.parts.observers.guards.check()

    def is_over(self) -> bool:
        """Return whether ``evaluation.best_by`` has not risen for ``evaluation.patience`` evaluations."""
        patience, evaluations = self.config.evaluation.patience, self.progress.evaluations
        is_over = patience > 0 and num_since_best(evaluations) >= patience
        if is_over and self.progress.step < self.num_steps:
            print(
                f"mindrlhf: ended after step {self.progress.step}: the {self.config.evaluation.best_by} of step "
                f"{best_step(evaluations)} was not exceeded by {patience} evaluations since",
                flush=True,
            )
        return is_over

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Time the saving of a checkpoint; it is reported with the next step."""
        self.sampling.settle()
        with self.timer.stage("checkpoint"):
            yield

    def close(self) -> None:
        """End what is still going on."""
        self.sampling.close()

    def _build_sampling(self) -> SamplingInStep | SamplingAhead | SamplingAsynchronously:
        rollout, ahead = self.parts.rollout, self.config.rollout.off_policy_steps
        needs_greedy = self.objective.needs_greedy

        def wait_stage() -> contextlib.AbstractContextManager[None]:
            return self.timer.stage("rollout_wait")

        if self.config.rollout.asynchronous:
            return SamplingAsynchronously(self.config, rollout, self.progress, self.num_steps, wait_stage=wait_stage)
        if self.config.rollout.segment_tokens:
            return SamplingInSpans(self.config, rollout, self.progress, self.num_steps)
        if not ahead:
            return SamplingInStep(rollout, self.progress, needs_greedy=needs_greedy)
        return SamplingAhead(
            rollout,
            self.progress,
            ahead=ahead,
            num_steps=self.num_steps,
            needs_greedy=needs_greedy,
            wait_stage=wait_stage,
        )

    def _must_evaluate(self) -> bool:
        step, evaluation = self.progress.step, self.config.evaluation
        if not self.parts.rollout.held_out:
            return False
        if step == 0:
            return evaluation.before_training and not self.progress.evaluations
        return step == self.num_steps or bool(evaluation.every_steps and step % evaluation.every_steps == 0)

    def _begin_key_data(self, step: int) -> KeyData | None:
        """Begin the dump of a step, from 1, if it is among the chosen ones."""
        key_data = self.parts.observers.key_data
        if not (key_data and key_data.is_due(step)):
            return None
        key_data.begin(step)
        return key_data

    def _logprobs(self, *, needs_old: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Have the ranks compute the old log-probabilities and the reference's, where needed; return them by sample.

        ``needs_old`` asks for the former where the objective does not: nothing else measures the actor in this step.
        """
        old, reference = [], []
        if self.objective.needs_old_logprobs or needs_old:
            with self.timer.stage("old_log_p"):
                old = self.policy.logprobs("old_logprobs")
        if self.objective.needs_reference:
            with self.timer.stage("reference_model"):
                reference = self.policy.logprobs("reference_logprobs")
        return old, reference

    def _old_logprobs(self, step_samples: StepSamples, rows: StepRows, old: list[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probabilities under the policy that generated each computed sample, as the loss takes them.

        Those of stale samples are the generator's, since the weights that generated them are gone; the ranks are told.
        Where samples are older by plan they are the trainer's for all: the correction accounts for their age.
        """
        rollout_logprobs = [sample.rollout_logprobs for sample in rows.chosen(step_samples.used)]
        if not old:  # nothing reads them, or with correction.bypass the generator's are the old ones
            return rollout_logprobs
        if has_older_samples(self.config):
            return old
        num_stale = rows.num_chosen(step_samples.num_stale)
        logprobs = rollout_logprobs[:num_stale] + old[num_stale:]
        if num_stale:
            self.policy.send_tokens("old_logprobs", logprobs)
        return logprobs

    def _send_advantages(
        self,
        samples: Sequence[Sample],
        rows: StepRows,
        baselines: np.ndarray | None,
        old_logprobs: Sequence[np.ndarray],
        reference: Sequence[np.ndarray],
        values: Sequence[np.ndarray] | None,
    ) -> dict[str, float]:
        """Compute the advantages of the whole step and send every rank those of its rows; return metrics of them.

        Log-probabilities and values are of the samples in ``rows``: all, where an advantage needs them.
        """
        metrics: dict[str, float] = {}
        penalties = None
        if self.objective.kl_in_reward:
            penalties, kl = self.objective.penalties(samples, old_logprobs, reference)
            metrics |= kl
        if baselines is not None:
            metrics["reward/greedy"] = float(baselines.mean())
        advantages = rows.advantages
        if advantages is None:
            advantages = self.objective.advantages(samples, penalties=penalties, baselines=baselines, values=values)
        self.policy.send_tokens("advantages", rows.chosen(advantages))
        self._advantages = advantages
        if values is not None:
            returns = self.objective.returns(samples, values, penalties)
            self.policy.send_tokens("returns", returns)
            metrics |= value_metrics(values, returns)
        return metrics

    def _update(self, num_batches: int, index: int) -> list[PolicyUpdate]:
        """Make the updates of a step and return what each gave, in order."""
        updates = []
        with self.timer.stage("update"):
            for iteration in range(self.config.training.num_iterations):
                for position in range(num_batches):
                    steps = index - self.num_critic_steps
                    update = steps * self.updates_per_step + iteration * num_batches + position
                    lr = self.learning_rate(update)
                    updates.append(self.policy.update(position, lr, self.objective.kl.coefficient))
        algorithm = self.config.algorithm
        if algorithm.sync_ref_model and (index + 1) % algorithm.ref_model_sync_steps == 0:
            with self.timer.stage("sync_ref_model"):
                self.policy.sync_reference()
        return updates

    def learning_rate(self, update: int) -> float:
        """Return the actor's learning rate at one of its updates, counted from the start of the run."""
        num_updates = (self.num_steps - self.num_critic_steps) * self.updates_per_step
        return learning_rate(self.config.optimizer, update, num_updates)

    def _report(
        self,
        record: StepRecord,
        sampled: SampledStep,
        rows: StepRows,
        version: int,
        train_logprobs: Sequence[np.ndarray],
        metrics: dict[str, float],
    ) -> dict[str, float]:
        """Have a step that is done written down and reviewed; return its metrics, with those that it has already.

        Args:
            rows: of the samples that ``train_logprobs`` are of.
            version: of the weights that the step began with.
        """
        samples = sampled.samples
        config, observers, state = self.config, self.parts.observers, self.progress.algorithm
        shown = samples.used[: config.observe.samples_per_step]
        observers.samples.write(self._sample_records(shown, record.step, train_logprobs))
        self._details = StepDetails(
            rewards=np.array([sample.reward for sample in samples.used], np.float64),
            lengths=np.array([len(sample.response_ids) for sample in samples.used]),
            samples=[f"{one.prompt}\n--- reward {one.reward:g}\n{one.completion}" for one in shown],
        )
        num_updates = (record.step - self.num_critic_steps) * self.updates_per_step
        lr = self.learning_rate(num_updates - 1) if record.updates else None
        measured = step_metrics(config, self.objective, sampled, rows, version, train_logprobs, record.updates, lr)
        timings = self.timer.finish_step()
        performance = performance_metrics(config, timings, sampled, self.parts.team.num_devices)
        if config.observe.performance_stats:
            performance |= self.sampling.metrics(timings)
        judges = {f"judge/{name}": count for name, count in self.parts.rollout.sampler.take_judge_counts().items()}
        metrics = combine_metrics(measured, performance) | metrics | self._keep_leftover(samples) | judges
        self._reward_watch.note(metrics["reward/mean"])
        observers.guards.review_rewards(record.step, samples.generated)
        metrics |= observers.guards.review(record, metrics.get("rollout_diff/mean_abs"))
        state.guards = observers.guards.state()
        course = {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics}
        self._write_fingerprint(sample_parts(samples.used) | course)
        if "kl" in metrics and np.isfinite(metrics["kl"]):
            self.objective.kl.update(metrics["kl"])
            state.kl = KlState(**self.objective.kl.state())
        return metrics

    def _sample_records(
        self, shown: Sequence[Sample], step: int, train_logprobs: Sequence[np.ndarray]
    ) -> list[SampleRecord]:
        records = [sample_record(sample, step) for sample in shown]
        if not self.config.observe.sample_tokens or len(train_logprobs) < len(shown):
            return records
        sampler = self.parts.rollout.sampler
        with_tokens = []
        for record, sample, advantages, logprobs in zip(records, shown, self._advantages, train_logprobs):
            numbers = (advantages, sample.rollout_logprobs, logprobs)
            tokens = sampler.token_values(sample, dict(zip(TOKEN_VALUES, numbers, strict=True)))
            with_tokens.append(dataclasses.replace(record, tokens=tokens))
        return with_tokens

    def _keep_leftover(self, samples: StepSamples) -> dict[str, float]:
        """Keep what is left over for the next step; with dynamic sampling return where the samples of this one went."""
        self.sampling.keep_leftover(samples)
        if not self.config.algorithm.dynamic_sampling:
            return {}
        metrics = self.ledger.add(samples)
        self.progress.algorithm.samples = self.ledger.state()
        return metrics

    def _write_fingerprint(self, parts: dict[str, str | float]) -> None:
        state = self.progress.algorithm
        parts = {**parts, "weights": self._weights}
        state.trajectory = self.parts.observers.fingerprint.write(self.progress.step, state.trajectory or "", parts)
