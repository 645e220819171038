"""Reinforcement learning as rank 0 runs it: :meth:`Trainer.step` is the algorithm, from top to bottom."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

from mindrlhf.config.derived import has_older_samples
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.observe.sinks import StepDetails
from mindrlhf.observe.timing import StageTimer
from mindrlhf.system import heartbeat
from mindrlhf.training.batch import RowOptions
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.evaluation import Evaluations
from mindrlhf.training.loop.guards import Observers
from mindrlhf.training.loop.objective import Objective
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.loop.report import StepReport
from mindrlhf.training.loop.sampling.in_step import Rollout, WholeSteps
from mindrlhf.training.loop.sampling.scheduler import Scheduler
from mindrlhf.training.loop.step import Step
from mindrlhf.training.team import Team


@dataclass(frozen=True)
class Parts:
    """Parts of the loop, made by :mod:`mindrlhf.training.reinforcement`."""

    team: Team
    policy: Policy
    rows: RowOptions
    rollout: Rollout
    observers: Observers
    timer: StageTimer


class Trainer:
    """Policy optimisation over rewards."""

    def __init__(self, config: GrpoConfig, parts: Parts, progress: Progress, num_steps: int):
        self.config = config
        self.parts = parts
        self.policy = parts.policy
        self.timer = parts.timer
        self.progress = progress
        self.num_steps = num_steps
        self.objective = Objective(config)
        if kl := progress.algorithm.kl:
            self.objective.kl.restore(asdict(kl))
        self.critic = None
        if self.objective.needs_values:
            from mindrlhf.training.loop.value_function import ValueFunction

            self.critic = ValueFunction(config, parts.team, self.timer, num_steps)
        self.sampling = open_scheduler(
            config, parts.rollout, progress, num_steps, self.timer, needs_greedy=self.objective.needs_greedy
        )
        self.evaluations = Evaluations(config, parts.rollout, progress, self.timer, num_steps)
        self.report = StepReport(
            config, self.objective, parts.observers, parts.rollout.sampler, progress, parts.team.num_devices
        )
        self._weights = ""  # digest of the published weights
        # From the last bucket of weights on the ranks are left alone, unless a reward model scores what is evaluated.
        is_free = config.run.device == "cpu" and not (config.reward.model_path or config.rollout.weight_buffer_gib)
        self.compiles_beside = is_free and progress.step == 0 and self.evaluations.is_due()
        self._compiled: Future | None = None

    def step(self) -> dict[str, float]:
        """Do one step and return its metrics.

        Raises:
            StopRequested: the run was asked to end, and the step has changed nothing yet.
        """
        step = self._sample()
        with self.timer.stage("pack"):
            self.objective.make_batches(step, self.parts.rows)  # with their advantages, unless these have to wait
        with self.timer.stage("distribute"):
            self.policy.receive(step.batches)
        self._compute_logprobs(step)
        if self.critic:
            self.critic.compute_values(step)
        if self.objective.advantages_wait:
            self._finish_advantages(step)
        if step.number > self.num_critic_steps:
            self._update(step)
        self.sampling.free_buffer(step.number)
        with self.timer.stage("reshard_to_infer"):
            self.publish()
        self.progress.step += 1
        return self._report(step)

    def _sample(self) -> Step:
        """Return the step with its prompts, the responses to them and their rewards."""
        progress = self.progress
        samples = self.sampling.sample(progress.step)
        self.parts.observers.guards.check_scored(progress.step + 1, samples)
        samples = samples.scored()
        return Step(progress.step + 1, progress.weights_version, self._weights, self.objective.kl.coefficient, samples)

    def _compute_logprobs(self, step: Step) -> None:
        """Have the ranks compute the log-probabilities that the loss or the advantages read, and keep them there."""
        if self.objective.needs_old_logprobs or step.number <= self.num_critic_steps:
            # Where only the critic is trained, nothing else measures the actor.
            with self.timer.stage("old_log_p"):
                step.train_logprobs = self.policy.logprobs("old_logprobs")
        self._choose_old_logprobs(step)
        if self.objective.needs_reference:
            with self.timer.stage("reference_model"):
                step.reference_logprobs = self.policy.logprobs("reference_logprobs")

    def _choose_old_logprobs(self, step: Step) -> None:
        """Set the log-probabilities under the policy that generated each sample, as the loss takes them.

        Those of stale samples are the generator's, since the weights that generated them are gone; the ranks are told.
        Where samples are older by plan they are the trainer's for all: the correction accounts for their age.
        """
        rollout_logprobs = [sample.completion.logprobs for sample in step.trained]
        if not step.train_logprobs:  # nothing reads them, or with correction.bypass the generator's are the old ones
            step.old_logprobs = rollout_logprobs
            return
        step.old_logprobs = step.train_logprobs
        num_stale = step.num_chosen(step.samples.num_stale)
        if num_stale and not has_older_samples(self.config):
            step.old_logprobs = rollout_logprobs[:num_stale] + step.train_logprobs[num_stale:]
            self.policy.send_tokens("old_logprobs", step.old_logprobs)

    def _finish_advantages(self, step: Step) -> None:
        """Compute the advantages that waited, send the ranks those of their rows, and train the critic."""
        with self.timer.stage("pack"):
            arrays = self.objective.finish_advantages(step)
            for name, responses in arrays.items():
                self.policy.send_tokens(name, step.chosen(responses))
        if self.critic:
            self.critic.update(step, arrays["returns"])

    def _update(self, step: Step) -> None:
        """Make the updates of a step: ``num_iterations`` passes over its batches."""
        first = (step.number - 1 - self.num_critic_steps) * self.updates_per_step
        with self.timer.stage("update"):
            for number in range(self.config.training.num_iterations * len(step.batches)):
                step.lr = self.learning_rate(first + number)
                step.updates.append(self.policy.update(number % len(step.batches), step.lr, step.kl_coefficient))
        if not step.train_logprobs:
            # A single update computes the log-probabilities before it changes the weights.
            step.train_logprobs = self.policy.responses(step.updates)
        algorithm = self.config.algorithm
        if algorithm.sync_ref_model and step.number % algorithm.ref_model_sync_steps == 0:
            with self.timer.stage("sync_ref_model"):
                self.policy.sync_reference()

    def publish(self) -> None:
        """Put the current weights into the weight buffer and have the generator load them."""
        self.progress.weights_version += 1
        load = self._load_and_compile if self.compiles_beside else self.sampling.load
        self.compiles_beside = False
        self._weights = self.policy.publish(self.progress.weights_version, load)

    def _report(self, step: Step) -> dict[str, float]:
        """Write the step down, have the guards look at it, and return its metrics."""
        timings = self.timer.finish_step()
        self.sampling.end_step()
        metrics = self.report.write(step, timings, self.sampling.metrics(timings))
        self.report.write_fingerprint(self._weights, step, metrics)
        return metrics

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates that one step makes."""
        return self.config.training.num_minibatches * self.config.training.num_iterations

    @property
    def num_critic_steps(self) -> int:
        """Steps at the start in which only the critic is trained."""
        return self.config.critic.warmup_steps if self.critic else 0

    def learning_rate(self, update: int) -> float:
        """Return the actor's learning rate at one of its updates, counted from the start of the run."""
        num_updates = (self.num_steps - self.num_critic_steps) * self.updates_per_step
        return self.config.optimizer.learning_rate(update, num_updates)

    def warm_up(self) -> None:
        """Compile all graphs and read small prompt files whole; none of it needs the generator."""
        graphs = ["old_logprobs"] if self.objective.needs_old_logprobs or self.num_critic_steps else []
        graphs += ["reference_logprobs"] if self.objective.needs_reference else []
        self.policy.warm_up(self.parts.rows, graphs)
        self.parts.rollout.prompts.read_small_file()

    def begin(self) -> None:
        """Give the generator the weights that the first step samples from."""
        heartbeat.enter("loading the weights into vLLM")
        self.publish()
        if self.progress.step == 0:
            self.report.write_fingerprint(self._weights)
        self.timer.finish_step()

    def details(self) -> StepDetails | None:
        """Return what the last step has beyond its metrics."""
        return self.report.details

    def evaluate(self) -> dict[str, float]:
        """Sample the held-out prompts if it is time, and return their metrics; the time counts to no step."""
        metrics = self.evaluations.run(self.sampling.settle)
        if self._compiled is not None:
            heartbeat.enter("compiling the training graphs")
            self._compiled.result()
            self._compiled = None
            self.timer.finish_step()
        if metrics:
            self.parts.observers.guards.review_evaluations(self.progress.evaluations)
        return metrics

    def _load_and_compile(self, version: int, bucket: int) -> None:
        """Have all graphs compiled from here to the end of the first evaluation, beside the generator's start."""
        self._compiled = ThreadPoolExecutor(1, "compile").submit(self.warm_up)
        self.parts.rollout.generator.wait_ready()
        self.sampling.load(version, bucket)

    def check(self) -> None:
        """Stop the run if the last step, which is reported by now, demands it."""
        self.parts.observers.guards.check()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Time the saving of a checkpoint; it is reported with the next step."""
        self.sampling.settle()
        with self.timer.stage("checkpoint"):
            yield

    def close(self) -> None:
        self.sampling.close()


def open_scheduler(
    config: GrpoConfig, rollout: Rollout, progress: Progress, num_steps: int, timer: StageTimer, *, needs_greedy: bool
) -> Scheduler:
    """Return the scheduler of a run: within the step or beside it, of whole responses or of segments."""
    is_beside, kind = config.rollout.off_policy_steps > 0, WholeSteps
    if config.rollout.segment_tokens:
        from mindrlhf.training.loop.sampling.segments import Segments as kind
    prompts = rollout.prompts.beside_the_loop() if is_beside else rollout.prompts
    maker = kind(config, prompts, progress, num_steps, needs_greedy=needs_greedy)
    if is_beside:
        from mindrlhf.training.loop.sampling.pipelined import PipelinedScheduler

        return PipelinedScheduler(config, rollout, progress, num_steps, maker, timer)
    return Scheduler(rollout, progress, num_steps, maker)
