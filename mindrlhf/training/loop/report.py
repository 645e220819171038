"""Report of a finished step: metrics, samples, line of the fingerprint, and the guards."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from mindrlhf.algorithms.losses import POLICY_STATISTICS
from mindrlhf.algorithms.overlong import complete
from mindrlhf.checkpoint.algorithm_state import KlState, SampleTotals
from mindrlhf.config.derived import has_older_samples
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.observe import metrics as measure
from mindrlhf.observe.samples import TOKEN_VALUES, SampleRecord
from mindrlhf.observe.sinks import StepDetails
from mindrlhf.observe.timing import throughput
from mindrlhf.rollout.samples import (
    Sample,
    Sampler,
    groups_that_teach,
    reward_matrix,
    sample_parts,
    sample_record,
    tool_metrics,
    verifier_names,
)
from mindrlhf.rollout.stop_strings import stop_string_fraction
from mindrlhf.training.batch import Batch
from mindrlhf.training.checkpoints.run import Progress
from mindrlhf.training.loop.alarms import SlowRewards
from mindrlhf.training.loop.guards import Observers
from mindrlhf.training.loop.objective import Objective
from mindrlhf.training.loop.step import Step, StepSamples


class StepReport:
    """Writes steps down and has them reviewed.

    Attributes:
        details: rewards, lengths and a few samples of the last step; None before the first.
    """

    details: StepDetails | None = None

    def __init__(
        self,
        config: GrpoConfig,
        objective: Objective,
        observers: Observers,
        sampler: Sampler,
        progress: Progress,
        num_devices: int,
    ):
        self._config = config
        self._num_devices = num_devices
        self._objective = objective
        self._observers = observers
        self._sampler = sampler
        self._progress = progress
        self._ledger = SampleLedger(progress.algorithm.samples)
        self._slow_rewards = SlowRewards(config.reward.num_workers)

    def write(self, step: Step, timings: Mapping[str, float], busy: Mapping[str, float]) -> dict[str, float]:
        """Have a step that is done written down and reviewed; return its metrics, with those that it has already.

        Args:
            timings: seconds of the stages of the step.
            busy: metrics of how busy ranks and servers were.
        """
        config, samples, guards = self._config, step.samples, self._observers.guards
        shown = samples.used[: config.observe.num_samples(config.algorithm.num_generations)]
        unscored = [sample for sample in samples.generated if not sample.is_scored][: len(shown)]
        more = [self._sample_record(sample, step) for sample in unscored]
        self._observers.samples.write([*self._sample_records(step, shown), *more])
        self.details = StepDetails(
            rewards=np.array([sample.reward.total for sample in samples.used], np.float64),
            lengths=np.array([len(sample.completion.token_ids) for sample in samples.used]),
            samples=[f"{one.prompt_text}\n--- reward {one.reward.total:g}\n{one.response_text}" for one in shown],
        )
        measured = step_metrics(config, self._objective, step)
        performance = performance_metrics(config, timings, samples, self._num_devices)
        waits = self._slow_rewards.review(step.number, self._sampler.take_reward_wait_s(), timings)
        if config.observe.performance_stats:
            performance |= {**busy, **waits}
        judges = {f"judge/{name}": count for name, count in self._sampler.take_judge_counts().items()}
        metrics = measure.combine_metrics(measured, performance) | step.metrics
        if config.algorithm.dynamic_sampling:
            metrics |= self._ledger.add(samples)
            self._progress.algorithm.samples = self._ledger.state()
        if config.rollout.stop:
            completions = [sample.completion for sample in samples.generated]
            stopped = stop_string_fraction(completions, self._sampler.end_ids)
            metrics["response_length/stop_string_fraction"] = stopped
        metrics |= judges
        guards.review_rewards(step.number, [sample for sample in samples.generated if sample.is_scored])
        metrics |= guards.review(step, metrics.get("rollout_diff/mean_abs"))
        self._progress.algorithm.guards = guards.state()
        if "kl" in metrics and np.isfinite(metrics["kl"]):
            self._objective.kl.update(metrics["kl"])
            self._progress.algorithm.kl = KlState(**self._objective.kl.state())
        return metrics

    def write_fingerprint(self, weights: str, step: Step | None = None, metrics: Mapping[str, float] = {}) -> None:
        """Write the line of the step that is done, or with None that of the start.

        Args:
            weights: digest of the weights that were published last.
        """
        parts = sample_parts(step.samples.used) if step else {}
        parts |= {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics}
        state = self._progress.algorithm
        parts |= {"weights": weights}
        state.trajectory = self._observers.fingerprint.write(self._progress.step, state.trajectory or "", parts)

    def _sample_record(self, sample: Sample, step: Step) -> SampleRecord:
        return dataclasses.replace(
            sample_record(sample, step.number), conversations=self._sampler.conversations(sample)
        )

    def _sample_records(self, step: Step, shown: Sequence[Sample]) -> list[SampleRecord]:
        records = [self._sample_record(sample, step) for sample in shown]
        if not self._config.observe.sample_tokens or len(step.train_logprobs) < len(shown):
            return records
        with_tokens = []
        for record, sample, advantages, logprobs in zip(records, shown, step.advantages, step.train_logprobs):
            numbers = (advantages, sample.completion.logprobs, logprobs)
            tokens = self._sampler.token_values(sample, dict(zip(TOKEN_VALUES, numbers, strict=True)))
            with_tokens.append(dataclasses.replace(record, tokens=tokens))
        return with_tokens


class SampleLedger:
    """Accounts for every sample of a run: what was generated has been used, is left over, or was dropped.

    Args:
        state: what :meth:`state` returned at the checkpoint that the run goes on from.
    """

    def __init__(self, state: SampleTotals | None = None):
        self._totals = state or SampleTotals()

    def state(self) -> SampleTotals:
        """Return the totals so far, and how many samples are left over."""
        return self._totals

    def add(self, step: StepSamples) -> dict[str, float]:
        """Enter a step and return its metrics.

        Raises:
            AssertionError: the sums of the step or of the run do not add up.
        """
        generated, used, dropped, leftover = map(len, (step.generated, step.used, step.dropped, step.leftover))
        before = self._totals.carried
        # Groups of partial rollout that go on are not generated yet.
        assert before in (0, step.num_stale), f"{before} samples were carried over, {step.num_stale} are used"
        assert before + generated == used + leftover + dropped, (
            f"{before} samples carried over before and {generated} generated are not {used} used, {leftover} carried "
            f"over and {dropped} dropped"
        )
        last = self._totals
        self._totals = totals = SampleTotals(
            last.generated + generated, last.used + used, last.dropped + dropped, leftover
        )
        assert totals.generated == totals.used + totals.carried + totals.dropped, (
            f"the samples of the run do not add up: {totals}"
        )
        return {
            "samples/generated": float(generated),
            "samples/used": float(used),
            "samples/used_stale": float(step.num_stale),
            "samples/used_without_signal": float(step.num_without_signal),
            "samples/used_cut": float(np.sum(~complete([sample.completion.finish_reason for sample in step.used]))),
            "samples/carried": float(leftover),
            "samples/dropped_without_signal": float(dropped),
            "samples/total_generated": float(totals.generated),
            "samples/total_used": float(totals.used),
            "samples/total_dropped_without_signal": float(totals.dropped),
        }


def step_metrics(config: GrpoConfig, objective: Objective, step: Step) -> dict[str, float]:
    """Return the metrics of a step but for its times and those that it has already."""
    samples, has_older, tools = step.samples, has_older_samples(config), config.tools
    num_older = step.num_chosen(samples.num_older(step.version))
    return measure.combine_metrics(
        sample_metrics(samples.generated),
        rollout_metrics(step.trained, step.train_logprobs, num_older, has_older=has_older),
        staleness_metrics(samples.used, step.version) if has_older else {},
        segment_metrics(samples) if config.rollout.segment_tokens else {},
        packing_metrics(step.batches),
        {"packing/computed": float(step.computed.mean())},
        update_metrics(config, objective, step) if step.updates else {},
        tool_metrics(samples.generated) if tools.names or tools.environment or tools.agent else {},
    )


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return rewards and lengths of all samples that a step generated, whether trained on or not."""
    scored = [sample for sample in samples if sample.is_scored]
    rewards = measure.reward_metrics(
        np.array([sample.reward.total for sample in scored]),
        np.array([sample.group for sample in scored]),
        {name: reward_matrix(scored, 1, name).ravel() for name in verifier_names(scored)},
    )
    if "reward/groups_without_signal" in rewards:
        rewards["reward/groups_without_signal"] = float(np.mean(~groups_that_teach(scored)[1]))  # of each role
    lengths = measure.length_metrics(
        np.array([len(sample.prompt.prompt_ids) for sample in samples]),
        np.array([len(sample.completion.token_ids) for sample in samples]),
        np.array([sample.completion.finish_reason == "length" for sample in samples]),
    )
    rewards["reward/failures"] = sum(bool(sample.reward.failures) for sample in scored)
    return {**rewards, "reward/unscored": len(samples) - len(scored), **lengths}


def rollout_metrics(
    trained: Sequence[Sample], train_logprobs: Sequence[np.ndarray], num_stale: int, *, has_older: bool
) -> dict[str, float]:
    """Return how far the log-probabilities of training are from those of the rollout; see ``step_metrics``.

    Args:
        trained: samples of which the training cells computed the log-probabilities.
        num_stale: how many of them, at their head, are of older weights. They differ by the updates since as well, so
            that they do not count as differences of the generator. Where all are, there is none to report.
        has_older: the correction acts on the stale ones too, and so their ratios are reported.
    """
    rollout = [sample.completion.logprobs for sample in trained]
    metrics: dict[str, float] = {}
    if num_stale < len(trained):
        tokens, trained = np.concatenate(rollout[num_stale:]), np.concatenate(train_logprobs[num_stale:])
        metrics |= measure.rollout_diff_metrics(tokens, trained, np.ones(len(tokens)))
    first = 0 if has_older else num_stale
    if first < len(trained):
        metrics |= measure.rollout_ratio_metrics(rollout[first:], train_logprobs[first:])
    return metrics


def staleness_metrics(used: Sequence[Sample], version: int) -> dict[str, float]:
    """Return how many versions of the weights the tokens of a step that began with ``version`` are behind."""
    found = [sample.completion for sample in used]
    spans = [span for one in found for span in one.spans or ((one.weights_version, len(one.logprobs)),)]
    staleness = version - np.array([span_version for span_version, _ in spans])
    assert staleness.min() >= 0, f"weights {version} train on samples of weights {version - staleness.min()}"
    mean = np.average(staleness, weights=[num_tokens for _, num_tokens in spans])
    return {"staleness/mean": float(mean), "staleness/max": float(staleness.max())}


def segment_metrics(samples: StepSamples) -> dict[str, float]:
    """Return with how many weights the responses of a step were made, and how many go on in the next."""
    counts = [len(sample.completion.spans) for sample in samples.used]
    return {
        "segments/mean": float(np.mean(counts)),
        "segments/max": float(max(counts)),
        "segments/unfinished": float(samples.num_unfinished),
    }


def packing_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Return how well the rows of a step are filled."""
    rows = [row for batch in batches for micro_batch in batch.micro_batches for row in micro_batch.segment_ids]
    return measure.packing_metrics([int((row > 0).sum()) for row in rows], [len(row) for row in rows])


def update_metrics(config: GrpoConfig, objective: Objective, step: Step) -> dict[str, float]:
    """Return the training scalars: means over the updates of the step, of the tokens in their rows."""
    updates, batches = step.updates, step.batches
    counts = [batches[position % len(batches)].num_computed for position in range(len(updates))]
    means = [_per_token(update.statistics, count) for update, count in zip(updates, counts)]
    loss, *per_token = np.mean(means, axis=0)
    names = dict(zip(POLICY_STATISTICS[1:], per_token, strict=True))
    metrics = {
        "loss": loss,
        "clip_fraction/low": names["clipped_low"],
        "clip_fraction/high": names["clipped_high"],
        "kl": names["kl"],
        "entropy": names["entropy"],
        "grad_norm": np.mean([update.grad_norm for update in updates]),
        "lr": step.lr,
        "recompiles": max(update.process.recompiles for update in updates),
        "memory/peak_rss_gb": max(update.process.peak_rss_gb for update in updates),
    }
    if objective.is_corrected:
        metrics["correction/weight"] = names["correction"]
        metrics["correction/changed"] = names["corrected"]
    if not objective.needs_reference or objective.kl_in_reward:
        del metrics["kl"]  # the loss computed none, and 0 would claim otherwise
    if config.algorithm.kl_target is not None:
        metrics["kl_coefficient"] = objective.kl.coefficient
    return metrics


def performance_metrics(
    config: GrpoConfig, timings: Mapping[str, float], samples: StepSamples, num_devices: int
) -> dict[str, float]:
    """Return times and rates of a step, the rollout's of the samples it generated, the others of those it used."""
    if not config.observe.performance_stats:
        return {}
    num_generations = config.algorithm.num_generations
    metrics = dict(timings)
    if samples.rollout_s is not None:  # beside the loop
        timings = {**timings, "timing/rollout": samples.rollout_s}
    for stages, ones in ((("rollout",), samples.generated), (("all", "update"), samples.used)):
        metrics |= throughput(
            {name: timings[name] for name in (f"timing/{stage}" for stage in stages) if name in timings},
            mean_prompt_length=float(np.mean([len(sample.prompt.prompt_ids) for sample in ones])),
            mean_response_length=float(np.mean([len(sample.completion.token_ids) for sample in ones])),
            num_prompts=len(ones) // num_generations,
            num_samples=num_generations,
            world_size=num_devices,
        )
    return metrics


def _per_token(total: np.ndarray, num_tokens: int) -> np.ndarray:
    """Divide all statistics but the loss, which already is a mean."""
    return np.concatenate([total[:1], total[1:] / num_tokens])
