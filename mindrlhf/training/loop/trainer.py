"""The reinforcement learning loop, as the lead rank runs it: sample, score, update, publish, report."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.algorithms.losses import POLICY_STATISTICS
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.stream import PromptStream
from mindrlhf.evaluation.heldout import HeldOut
from mindrlhf.observe import metrics as measure
from mindrlhf.observe.samples import SampleWriter
from mindrlhf.observe.sinks import SinkGroup
from mindrlhf.observe.timing import StageTimer, throughput
from mindrlhf.observe.trajectory import TrajectoryWriter
from mindrlhf.rollout.conversations import tool_metrics
from mindrlhf.rollout.samples import Sample, Sampler, reward_matrix, sample_parts, sample_record, verifier_names
from mindrlhf.rollout.types import Generator
from mindrlhf.system import heartbeat
from mindrlhf.training.batch import Batch, RowOptions, make_batch
from mindrlhf.training.checkpoints.requests import StopRequested
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.loop.dynamic_sampling import SampleLedger, StepSamples, from_carried, to_carried
from mindrlhf.training.loop.guards import Guards, StepRecord
from mindrlhf.training.loop.key_data import KeyData
from mindrlhf.training.loop.objective import Objective
from mindrlhf.training.loop.policy import Policy, PolicyUpdate
from mindrlhf.training.loop.prompts import Drawing
from mindrlhf.training.loop.value_function import ValueFunction, value_metrics
from mindrlhf.training.schedule import learning_rate
from mindrlhf.training.team import Team


@dataclass(frozen=True)
class Parts:
    """What the loop works with, made by :mod:`mindrlhf.training.main`."""

    team: Team
    policy: Policy
    generator: Generator
    sampler: Sampler
    prompts: PromptFile
    stream: PromptStream
    held_out: HeldOut | None
    sinks: SinkGroup
    sample_writer: SampleWriter
    rows: RowOptions
    stop_token_ids: tuple[int, ...]
    checkpoints: RunCheckpoints
    guards: Guards
    trajectory: TrajectoryWriter
    key_data: KeyData | None = None  # None: no step is dumped


class Trainer:
    """Group-relative policy optimisation over verifier rewards."""

    def __init__(self, config: GrpoConfig, parts: Parts, progress: Progress, num_steps: int):
        self.config = config
        self.parts = parts
        self.policy = parts.policy
        self.progress = progress
        self.num_steps = num_steps
        self.timer = StageTimer(lambda stage: heartbeat.enter(f"step {progress.step + 1}: {stage}"))
        self.objective = Objective(config)
        if "kl" in progress.algorithm_state:
            self.objective.kl.restore(progress.algorithm_state["kl"])
        self._weights = ""  # digest of the published weights
        needs_values = self.objective.needs_values
        self.critic = ValueFunction(config, parts.team, self.timer, num_steps) if needs_values else None
        self.ledger = SampleLedger(progress.algorithm_state.get("samples"))
        self._drawing = Drawing(
            config,
            parts.prompts,
            parts.stream,
            parts.sampler,
            parts.stop_token_ids,
            self.timer,
            parts.checkpoints.interruptible,
        )

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
        self._drawing.read_small_file()

    def run(self) -> bool:
        """Train to the last step, evaluating, reporting and saving on the way.

        Returns:
            Whether the last step was reached: a request to end may come before it.
        """
        checkpoints = self.parts.checkpoints
        self.publish()
        if self.progress.step == 0:
            self._write_trajectory({})
        self.timer.finish_step()
        every_eval = self.config.evaluation.every_steps
        is_new = self.progress.step == 0 and not self.progress.evaluations
        if self.parts.held_out and self.config.evaluation.before_training and is_new:
            self.parts.sinks.write(0, self.evaluate())
        while self.progress.step < self.num_steps:
            checkpoints.begin_step(self.progress)
            try:
                metrics = self.step()
            except StopRequested:
                checkpoints.save_broken_off(self.progress)
                return False
            is_last = self.progress.step == self.num_steps
            if self.parts.held_out and (is_last or (every_eval and self.progress.step % every_eval == 0)):
                metrics |= self.evaluate()
            self.parts.sinks.write(self.progress.step, metrics)
            self.parts.guards.check()
            must_stop = checkpoints.must_stop  # read first: a later request breaks off the next step
            if checkpoints.is_due(self.progress):
                with self.timer.stage("checkpoint"):
                    checkpoints.save(self.progress)
            if must_stop:
                return False
        return True

    def publish(self) -> None:
        """Put the current weights on the board and have the generator load them."""
        self.progress.weights_version += 1
        version = self.progress.weights_version
        self._weights = self.policy.publish(version)
        self.parts.generator.wake()
        self.parts.generator.update_weights(version)

    def evaluate(self) -> dict[str, float]:
        """Sample the held-out prompts and return their metrics; the time counts to no step."""
        with self.timer.stage("evaluation"):
            evaluation = self.parts.held_out.run(self.parts.sampler, self.progress.step)
        self.progress.evaluations.append(evaluation)
        return {**evaluation.metrics(), "timing/evaluation": self.timer.finish_step()["timing/evaluation"]}

    def step(self) -> dict[str, float]:
        """Do one step and return its metrics."""
        index = self.progress.step
        key_data = self.parts.key_data if self.parts.key_data and self.parts.key_data.is_due(index + 1) else None
        if key_data:
            key_data.begin(index + 1)
        carried = from_carried(self.progress.carried)
        step_samples, greedy = self._drawing.draw(index, carried, needs_greedy=self.objective.needs_greedy)
        samples = step_samples.used
        self.parts.generator.sleep()
        with self.timer.stage("pack"):
            batches = self._batches(samples)
        with self.timer.stage("distribute"):
            self.policy.distribute(batches)
        trains_actor = index >= self.num_critic_steps
        old, reference = self._logprobs(needs_old=not trains_actor)
        old_logprobs = self._old_logprobs(step_samples, old)
        values = self.critic.values(batches) if self.critic else None
        with self.timer.stage("pack"):
            extra = self._send_advantages(samples, greedy, old_logprobs, reference, values)
        if self.critic:
            extra |= self.critic.update(batches, index)
        updates = self._update(len(batches), index) if trains_actor else []
        record = StepRecord(index + 1, samples, batches, updates, self.objective.kl.coefficient, self._weights)
        if key_data:
            with self.timer.stage("dump"):
                key_data.finish(record)
        with self.timer.stage("reshard_to_infer"):
            self.publish()
        self.progress.step += 1
        self._write_samples(samples)
        # A single update computes the log-probabilities before it changes the weights: they are the old ones.
        metrics = self._metrics(step_samples, batches, old or self.policy.responses(updates), updates) | extra
        metrics |= self._account(step_samples)
        self.parts.guards.review_rewards(index + 1, step_samples.drawn)
        metrics |= self.parts.guards.review(record, metrics["rollout_diff/mean_abs"])
        self.progress.algorithm_state["guards"] = self.parts.guards.state()
        course = {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics}
        self._write_trajectory(sample_parts(samples) | course)
        if "kl" in metrics and np.isfinite(metrics["kl"]):
            self.objective.kl.update(metrics["kl"])
            self.progress.algorithm_state["kl"] = self.objective.kl.state()
        return metrics

    def _batches(self, samples: Sequence[Sample]) -> list[Batch]:
        """Cut the samples into one batch per optimiser update of a pass."""
        batches = []
        for part in np.array_split(np.arange(len(samples)), self.config.training.num_minibatches):
            if len(part):
                sequences = self.objective.sequences([samples[item] for item in part])
                batches.append(make_batch(sequences, self.parts.rows))
        return batches

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

    def _old_logprobs(self, step_samples: StepSamples, old: list[np.ndarray]) -> list[np.ndarray]:
        """Return the log-probabilities under the policy that drew each sample, as the loss takes them.

        Those of stale samples are the generator's, since the weights that drew them are gone; the ranks are told.
        """
        rollout_logprobs = [sample.rollout_logprobs for sample in step_samples.used]
        if not old:  # nothing reads them, or with correction.bypass the generator's are the old ones
            return rollout_logprobs
        num_stale = step_samples.num_stale
        logprobs = rollout_logprobs[:num_stale] + old[num_stale:]
        if num_stale:
            self.policy.send_tokens("old_logprobs", logprobs)
        return logprobs

    def _send_advantages(
        self,
        samples: Sequence[Sample],
        greedy: Sequence[Sample],
        old_logprobs: Sequence[np.ndarray],
        reference: Sequence[np.ndarray],
        values: Sequence[np.ndarray] | None,
    ) -> dict[str, float]:
        """Compute the advantages of the whole step and send every rank those of its rows; return metrics of them."""
        metrics: dict[str, float] = {}
        penalties = baselines = None
        if self.objective.kl_in_reward:
            penalties, metrics["kl"] = self.objective.penalties(old_logprobs, reference)
        if self.objective.needs_greedy:
            baselines = np.array([greedy[sample.group].reward for sample in samples])
            metrics["reward/greedy"] = float(baselines.mean())
        advantages = self.objective.advantages(samples, penalties=penalties, baselines=baselines, values=values)
        self.policy.send_tokens("advantages", advantages)
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

    def _metrics(
        self,
        step_samples: StepSamples,
        batches: Sequence[Batch],
        train_logprobs: Sequence[np.ndarray],
        updates: Sequence[PolicyUpdate],
    ) -> dict[str, float]:
        samples = step_samples.drawn
        lengths = np.array([len(sample.response_ids) for sample in samples])
        prompt_lengths = np.array([len(sample.prompt_ids) for sample in samples])
        # Stale samples differ by the update since they were drawn as well.
        rollout_logprobs = [sample.rollout_logprobs for sample in step_samples.fresh]
        train_logprobs = train_logprobs[step_samples.num_stale :]
        rows = [row for batch in batches for micro_batch in batch.micro_batches for row in micro_batch.segment_ids]
        parts = [
            measure.reward_metrics(
                np.array([sample.reward for sample in samples]),
                np.array([sample.group for sample in samples]),
                {name: reward_matrix(samples, 1, name).ravel() for name in verifier_names(samples)},
            ),
            {"reward/failures": sum(bool(sample.failures) for sample in samples)},
            measure.length_metrics(
                prompt_lengths, lengths, np.array([sample.finish_reason == "length" for sample in samples])
            ),
            measure.rollout_diff_metrics(
                np.concatenate(rollout_logprobs),
                np.concatenate(train_logprobs),
                np.ones(sum(map(len, rollout_logprobs))),
            ),
            measure.rollout_ratio_metrics(rollout_logprobs, train_logprobs),
            measure.packing_metrics([int((row > 0).sum()) for row in rows], [len(row) for row in rows]),
            self._update_metrics(batches, updates) if updates else {},
            tool_metrics(samples) if self.config.tools.names else {},
        ]
        timings = self.timer.finish_step()
        if self.config.observe.performance_stats:
            parts.append(timings)
            parts.append(self._throughput(timings, step_samples))
        return measure.combine_metrics(*parts)

    def _throughput(self, timings: dict[str, float], step_samples: StepSamples) -> dict[str, float]:
        """Return the rates of the step: the rollout's of the samples it drew, the others of those that were used."""
        rates = {}
        for stages, samples in ((("rollout",), step_samples.drawn), (("all", "update"), step_samples.used)):
            rates |= throughput(
                {name: timings[name] for name in (f"timing/{stage}" for stage in stages) if name in timings},
                mean_prompt_length=float(np.mean([len(sample.prompt_ids) for sample in samples])),
                mean_response_length=float(np.mean([len(sample.response_ids) for sample in samples])),
                num_prompts=len(samples) // self.config.algorithm.num_generations,
                num_samples=self.config.algorithm.num_generations,
                world_size=self.parts.team.num_devices,
            )
        return rates

    def _account(self, step_samples: StepSamples) -> dict[str, float]:
        """Keep what is left over for the next step, and return where the samples of this one went."""
        if not self.config.algorithm.dynamic_sampling:
            return {}
        metrics = self.ledger.add(step_samples)
        self.progress.carried = to_carried(step_samples.carried)
        self.progress.algorithm_state["samples"] = self.ledger.state()
        return metrics

    def _update_metrics(self, batches: Sequence[Batch], updates: Sequence[PolicyUpdate]) -> dict[str, float]:
        """Return the training scalars: means over the updates of the step."""
        counts = [batches[position % len(batches)].num_tokens for position in range(len(updates))]
        means = [_per_token(update.statistics, count) for update, count in zip(updates, counts)]
        loss, *per_token = np.mean(means, axis=0)
        names = dict(zip(POLICY_STATISTICS[1:], per_token))
        metrics = {
            "loss": loss,
            "clip_fraction/low": names["clipped_low"],
            "clip_fraction/high": names["clipped_high"],
            "kl": names["kl"],
            "entropy": names["entropy"],
            "grad_norm": np.mean([update.grad_norm for update in updates]),
            "lr": self.learning_rate((self.progress.step - self.num_critic_steps) * self.updates_per_step - 1),
            "recompiles": max(update.recompiles for update in updates),
            "memory/peak_rss_gb": max(update.peak_rss_gb for update in updates),
        }
        if self.objective.is_corrected:
            metrics["correction/weight"] = names["correction"]
            metrics["correction/changed"] = names["corrected"]
        if not self.objective.needs_reference or self.objective.kl_in_reward:
            del metrics["kl"]  # the loss computed none, and 0 would claim otherwise
        if self.config.algorithm.kl_target is not None:
            metrics["kl_coefficient"] = self.objective.kl.coefficient
        return metrics

    def _write_trajectory(self, parts: dict[str, str | float]) -> None:
        state = self.progress.algorithm_state
        parts = {**parts, "weights": self._weights}
        state["trajectory"] = self.parts.trajectory.write(self.progress.step, state.get("trajectory", ""), parts)

    def _write_samples(self, samples: Sequence[Sample]) -> None:
        chosen = samples[: self.config.observe.samples_per_step]
        self.parts.sample_writer.write(sample_record(sample, self.progress.step) for sample in chosen)


def _per_token(total: np.ndarray, num_tokens: int) -> np.ndarray:
    """Divide all statistics but the loss, which already is a mean."""
    return np.concatenate([total[:1], total[1:] / num_tokens])
