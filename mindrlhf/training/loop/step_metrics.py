"""The metrics of a reinforcement learning step, from its samples and from what the ranks returned."""

from collections.abc import Mapping, Sequence

import numpy as np

from mindrlhf.algorithms.losses import POLICY_STATISTICS
from mindrlhf.algorithms.top_k.loss import TOP_K_STATISTICS
from mindrlhf.config.derived import has_older_samples
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.observe import metrics as measure
from mindrlhf.observe.timing import throughput
from mindrlhf.rollout.conversations import tool_metrics
from mindrlhf.rollout.samples import Sample, reward_matrix, verifier_names
from mindrlhf.training.batch import Batch
from mindrlhf.training.loop.objective import Objective
from mindrlhf.training.loop.policy import PolicyUpdate
from mindrlhf.training.loop.sampling.in_step import SampledStep
from mindrlhf.training.loop.step_rows import StepRows


def step_metrics(
    config: GrpoConfig,
    objective: Objective,
    sampled: SampledStep,
    rows: StepRows,
    version: int,
    train_logprobs: Sequence[np.ndarray],
    updates: Sequence[PolicyUpdate],
    lr: float | None,
) -> dict[str, float]:
    """Return the metrics of a step but for its times.

    Args:
        config, objective: of the run.
        sampled: of the step.
        rows: of one pass over the used samples.
        version: of the weights that the step began with.
        train_logprobs: float [generated tokens] of each computed sample, under the weights that the step began with.
        updates: of the step, passes in order.
        lr: learning rate of the last update, None when there was none.
    """
    samples = sampled.samples
    has_older = has_older_samples(config)
    num_stale = rows.num_chosen(sampled.num_stale(version))
    return measure.combine_metrics(
        sample_metrics(samples.generated),
        rollout_metrics(rows.chosen(samples.used), train_logprobs, num_stale, has_older=has_older),
        staleness_metrics(samples.used, version) if has_older else {},
        span_metrics(sampled) if config.rollout.segment_tokens else {},
        packing_metrics(rows.batches),
        {"packing/computed": float(rows.computed.mean())},
        update_metrics(config, objective, rows.batches, updates, lr) if updates else {},
        tool_metrics(samples.generated) if config.tools.names or config.tools.environment else {},
    )


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return rewards and lengths of all samples that a step generated, whether trained on or not."""
    rewards = measure.reward_metrics(
        np.array([sample.reward for sample in samples]),
        np.array([sample.group for sample in samples]),
        {name: reward_matrix(samples, 1, name).ravel() for name in verifier_names(samples)},
    )
    lengths = measure.length_metrics(
        np.array([len(sample.prompt_ids) for sample in samples]),
        np.array([len(sample.response_ids) for sample in samples]),
        np.array([sample.finish_reason == "length" for sample in samples]),
    )
    return {**rewards, "reward/failures": sum(bool(sample.failures) for sample in samples), **lengths}


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
    rollout = [sample.rollout_logprobs for sample in trained]
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
    spans = [span for sample in used for span in sample.spans or ((sample.weights_version, sample.num_generated),)]
    staleness = version - np.array([span_version for span_version, _ in spans])
    assert staleness.min() >= 0, f"weights {version} train on samples of weights {version - staleness.min()}"
    mean = np.average(staleness, weights=[num_tokens for _, num_tokens in spans])
    return {"staleness/mean": float(mean), "staleness/max": float(staleness.max())}


def span_metrics(sampled: SampledStep) -> dict[str, float]:
    """Return with how many weights the responses of a step were made, and how many go on in the next."""
    counts = [len(sample.spans) for sample in sampled.samples.used]
    return {
        "segments/mean": float(np.mean(counts)),
        "segments/max": float(max(counts)),
        "segments/unfinished": float(sampled.num_unfinished),
    }


def packing_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """Return how well the rows of a step are filled."""
    rows = [row for batch in batches for micro_batch in batch.micro_batches for row in micro_batch.segment_ids]
    return measure.packing_metrics([int((row > 0).sum()) for row in rows], [len(row) for row in rows])


def update_metrics(
    config: GrpoConfig, objective: Objective, batches: Sequence[Batch], updates: Sequence[PolicyUpdate], lr: float
) -> dict[str, float]:
    """Return the training scalars: means over the updates of the step, of the tokens in their rows."""
    counts = [batches[position % len(batches)].num_computed for position in range(len(updates))]
    means = [_per_token(update.statistics, count) for update, count in zip(updates, counts)]
    loss, *per_token = np.mean(means, axis=0)
    further = TOP_K_STATISTICS if objective.learns_words else ()
    names = dict(zip((*POLICY_STATISTICS[1:], *further), per_token, strict=True))
    metrics = {
        "loss": loss,
        "clip_fraction/low": names["clipped_low"],
        "clip_fraction/high": names["clipped_high"],
        "kl": names["kl"],
        "entropy": names["entropy"],
        "grad_norm": np.mean([update.grad_norm for update in updates]),
        "lr": lr,
        "recompiles": max(update.recompiles for update in updates),
        "memory/peak_rss_gb": max(update.peak_rss_gb for update in updates),
    }
    if objective.is_corrected:
        metrics["correction/weight"] = names["correction"]
        metrics["correction/changed"] = names["corrected"]
    if objective.learns_words:
        metrics["distill/topk_kl"] = names["topk_kl"]
        metrics["distill/teacher_mass"] = names["teacher_mass"]
        metrics["distill/student_mass"] = names["student_mass"]
    if not objective.needs_reference or objective.kl_in_reward or objective.learns_words:
        del metrics["kl"]  # the loss computed none, and 0 would claim otherwise
    if config.algorithm.kl_target is not None:
        metrics["kl_coefficient"] = objective.kl.coefficient
    return metrics


def performance_metrics(
    config: GrpoConfig, timings: Mapping[str, float], sampled: SampledStep, num_devices: int
) -> dict[str, float]:
    """Return times and rates of a step, the rollout's of the samples it generated, the others of those it used."""
    if not config.observe.performance_stats:
        return {}
    num_generations = config.algorithm.num_generations
    metrics = dict(timings)
    if sampled.rollout_s is not None:  # beside the loop
        timings = {**timings, "timing/rollout": sampled.rollout_s}
    samples = sampled.samples
    for stages, ones in ((("rollout",), samples.generated), (("all", "update"), samples.used)):
        metrics |= throughput(
            {name: timings[name] for name in (f"timing/{stage}" for stage in stages) if name in timings},
            mean_prompt_length=float(np.mean([len(sample.prompt_ids) for sample in ones])),
            mean_response_length=float(np.mean([len(sample.response_ids) for sample in ones])),
            num_prompts=len(ones) // num_generations,
            num_samples=num_generations,
            world_size=num_devices,
        )
    return metrics


def _per_token(total: np.ndarray, num_tokens: int) -> np.ndarray:
    """Divide all statistics but the loss, which already is a mean."""
    return np.concatenate([total[:1], total[1:] / num_tokens])
