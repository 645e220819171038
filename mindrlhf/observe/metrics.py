"""From the arrays of one training step to a flat dict of floats with stable names.

Every function here is pure NumPy, computes in float64 and takes the samples of the whole batch, so that
a metric does not depend on how the batch is spread over ranks, rows or micro-batches.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from mindrlhf.algorithms.advantages import groups_with_signal


def reward_metrics(
    rewards: np.ndarray, group_ids: np.ndarray, rewards_by_verifier: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return statistics of the rewards of one batch.

    Args:
        rewards: float [num_samples], the weighted total that advantages are computed from.
        group_ids: int [num_samples], samples with the same id answer the same prompt; groups may differ in size.
        rewards_by_verifier: name -> float [num_samples], unweighted reward of each verifier; NaN where it does
            not apply to the prompt.

    Returns:
        ``reward/mean``, ``reward/std`` (population standard deviation over all samples),
        ``reward/<verifier>/mean`` and ``reward/groups_without_signal``: the fraction of groups whose rewards
        are all equal, and whose advantages are therefore zero. It is left out where each prompt has one sample.
    """
    rewards = _filled(rewards, "rewards")
    group_ids = np.asarray(group_ids)
    assert group_ids.shape == rewards.shape, f"group_ids {group_ids.shape} must match rewards {rewards.shape}"
    _, has_signal = groups_with_signal(rewards, group_ids)
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
    }
    if len(np.unique(group_ids)) < len(group_ids):
        metrics["reward/groups_without_signal"] = np.mean(~has_signal)
    for name, values in rewards_by_verifier.items():
        values = _filled(values, f"rewards of {name}")
        assert values.shape == rewards.shape, f"rewards of {name} {values.shape} must match rewards {rewards.shape}"
        metrics[f"reward/{name}/mean"] = np.nanmean(values)
    return _as_floats(metrics)


def length_metrics(prompt_lengths: np.ndarray, response_lengths: np.ndarray, cut: np.ndarray) -> dict[str, float]:
    """Return mean, min and max of prompt and response lengths in tokens.

    Args:
        prompt_lengths: int [num_samples] or [num_prompts].
        response_lengths: int [num_samples], stop token included.
        cut: bool [num_samples], True where the token limit ended the response (finish reason "length").

    Returns:
        ``prompt_length/{mean,min,max}``, ``response_length/{mean,min,max}``, ``response_length/cut_fraction``.
    """
    metrics = {}
    for name, lengths in (("prompt_length", prompt_lengths), ("response_length", response_lengths)):
        lengths = _filled(lengths, name)
        metrics |= {f"{name}/mean": lengths.mean(), f"{name}/min": lengths.min(), f"{name}/max": lengths.max()}
    cut = _filled(cut, "cut")
    assert cut.shape == np.shape(response_lengths), f"cut {cut.shape} must match responses {np.shape(response_lengths)}"
    metrics["response_length/cut_fraction"] = cut.mean()
    return _as_floats(metrics)


def rollout_diff_metrics(
    rollout_logprobs: np.ndarray, train_logprobs: np.ndarray, response_mask: np.ndarray
) -> dict[str, float]:
    """Return how far the training cell's log-probs are from those the sampler reported.

    Args:
        rollout_logprobs: float, any shape: log-prob of each sampled token under the generator.
        train_logprobs: float, same shape: the same under the training cell, before the update.
        response_mask: bool or 0/1, same shape, nonzero on response tokens; the rest is ignored.

    Returns:
        ``rollout_diff/mean_abs`` and ``rollout_diff/max_abs`` of the difference d = train - rollout in nats, and
        ``rollout_diff/k3``, the mean of exp(d) - 1 - d: the k3 estimator of KL(rollout || train) from samples of
        the rollout policy (Schulman 2020, "Approximating KL Divergence").
    """
    shapes = np.shape(rollout_logprobs), np.shape(train_logprobs), np.shape(response_mask)
    assert len(set(shapes)) == 1, f"rollout, train and mask must have one shape, not {shapes}"
    chosen = np.asarray(response_mask).astype(bool)
    assert chosen.any(), "there is no response token to compare"
    difference = np.asarray(train_logprobs, np.float64)[chosen] - np.asarray(rollout_logprobs, np.float64)[chosen]
    with np.errstate(over="ignore"):
        k3 = np.expm1(difference) - difference
    metrics = {
        "rollout_diff/mean_abs": np.abs(difference).mean(),
        "rollout_diff/max_abs": np.abs(difference).max(),
        "rollout_diff/k3": k3.mean(),
    }
    return _as_floats(metrics)


def rollout_ratio_metrics(
    rollout_logprobs: Sequence[np.ndarray], train_logprobs: Sequence[np.ndarray]
) -> dict[str, float]:
    """Return statistics of the importance ratio rho = train / rollout probability, what off-policy correction acts on.

    Args:
        rollout_logprobs, train_logprobs: float [response] each, as in :func:`rollout_diff_metrics`.

    Returns:
        ``rollout_ratio/{mean,min,max}`` over tokens; ``rollout_ratio/effective``, (sum rho)^2 / (n sum rho^2), the
        share of tokens that importance sampling leaves effective (Kish 1965); and ``rollout_ratio/sequence_{min,max}``,
        the product over a response. Logarithms are bounded to +-50.
    """
    differences = [
        np.asarray(train, np.float64) - np.asarray(rollout, np.float64)
        for train, rollout in zip(train_logprobs, rollout_logprobs, strict=True)
    ]
    ratios = np.exp(np.clip(np.concatenate(differences), -50.0, 50.0))
    sequences = np.exp(np.clip([difference.sum() for difference in differences], -50.0, 50.0))
    metrics = {
        "rollout_ratio/mean": ratios.mean(),
        "rollout_ratio/min": ratios.min(),
        "rollout_ratio/max": ratios.max(),
        "rollout_ratio/effective": ratios.sum() ** 2 / (ratios.size * (ratios**2).sum()),
        "rollout_ratio/sequence_min": sequences.min(),
        "rollout_ratio/sequence_max": sequences.max(),
    }
    return _as_floats(metrics)


def packing_metrics(num_tokens: Sequence[int], row_lengths: Sequence[int]) -> dict[str, float]:
    """Return how well the packed rows are filled.

    Args:
        num_tokens: int [num_rows], real tokens in each row; 0 for rows made only to fill a shape.
        row_lengths: int [num_rows], length of each row.

    Returns:
        ``packing/efficiency``: real tokens over all token slots, and ``packing/num_rows``.
    """
    num_tokens, row_lengths = _filled(num_tokens, "num_tokens"), _filled(row_lengths, "row_lengths")
    assert num_tokens.shape == row_lengths.shape, f"{num_tokens.shape} token counts for {row_lengths.shape} rows"
    assert (num_tokens <= row_lengths).all(), "a row cannot hold more tokens than its length"
    efficiency = num_tokens.sum() / row_lengths.sum()
    return _as_floats({"packing/efficiency": efficiency, "packing/num_rows": row_lengths.size})


def combine_metrics(*parts: Mapping[str, float]) -> dict[str, float]:
    """Return all parts as one dict of Python floats; two parts that claim one name are a programming error."""
    combined: dict[str, float] = {}
    for part in parts:
        shared = combined.keys() & part.keys()
        assert not shared, f"metrics reported twice: {sorted(shared)}"
        combined |= _as_floats(part)
    return combined


def _filled(values: np.ndarray | Sequence, name: str) -> np.ndarray:
    array = np.asarray(values, np.float64)
    assert array.ndim == 1 and array.size, f"{name} must be one-dimensional and not empty, not shape {array.shape}"
    return array


def _as_floats(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
