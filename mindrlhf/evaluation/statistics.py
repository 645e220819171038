"""Accuracy over several samples per prompt, and how sure of it we are.

The unit of chance is the prompt: samples of one prompt are not independent, so they are first reduced to one
value per prompt (their mean, ``pass_at_k``), and the bootstrap then draws prompts with replacement.
"""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mindrlhf.errors import UserError

CONFIDENCE, NUM_RESAMPLES = 0.95, 10_000
# Random indices drawn at a time, 32 MB, however many prompts and resamples there are.
INDICES_PER_BATCH = 1 << 22


class Interval(NamedTuple):
    """A mean and its interval at ``CONFIDENCE``."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} [{self.low:.4f}, {self.high:.4f}]"


def pass_at_k(correct: ArrayLike, k: int) -> np.ndarray:
    """The chance that at least one of k samples is right, for each prompt: ``[prompts, n]`` to float64 ``[prompts]``.

    The unbiased estimator ``1 - C(n - c, k) / C(n, k)`` from ``c`` right ones among ``n`` samples (Chen et al.
    2021, arXiv:2107.03374, equation 1), as the product of ``(n - c - i) / (n - i)`` for ``i < k``, whose factors
    lie in [0, 1]: nothing overflows.

    Raises:
        UserError: ``correct`` holds other values than 0 and 1, or ``k`` is not in ``1..n``.
    """
    values = _checked(correct, "correct", num_dimensions=2)
    if not np.isin(values, (0.0, 1.0)).all():
        raise UserError("pass@k counts right and wrong samples: every value must be 0 or 1")
    num_samples = values.shape[1]
    if not 1 <= k <= num_samples:
        raise UserError(f"pass@{k} of {num_samples} samples per prompt: k must be between 1 and {num_samples}")
    num_wrong = np.arange(num_samples, -1, -1, dtype=np.float64)  # [n + 1], by number of right ones
    all_wrong = np.ones(num_samples + 1)
    for i in range(k):
        all_wrong *= np.maximum(num_wrong - i, 0.0) / (num_samples - i)
    return (1.0 - all_wrong)[values.sum(axis=1).astype(np.int64)]


def bootstrap_interval(per_prompt_values: ArrayLike) -> Interval:
    """The mean of ``per_prompt_values [prompts]`` with its BCa bootstrap interval; the same for the same values.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 14.3. Of equal values the interval
    is that value alone; of a single one it is infinite.

    Raises:
        UserError: no values, or values that are not finite.
    """
    from scipy.stats import bootstrap

    values = _checked(per_prompt_values, "per_prompt_values", num_dimensions=1)
    mean = float(values.mean())
    if values.size == 1:
        return Interval(mean, -np.inf, np.inf)
    if values.min() == values.max():
        return Interval(mean, mean, mean)
    result = bootstrap(
        (values,),
        np.mean,
        n_resamples=NUM_RESAMPLES,
        batch=max(1, INDICES_PER_BATCH // values.size),
        confidence_level=CONFIDENCE,
        method="BCa",
        random_state=np.random.default_rng(0),
    )
    low, high = result.confidence_interval
    return Interval(mean, float(low), float(high))


def accuracy_interval(per_prompt_values: ArrayLike) -> Interval:
    """The interval of an accuracy: by bootstrap, and where all prompts are right, or all wrong, Wilson's.

    ``per_prompt_values`` is ``[prompts]``. Of n prompts all alike the bootstrap knows nothing; the score interval
    (Wilson 1927, Journal of the American Statistical Association 22, p. 209) is then 0 to ``z^2 / (n + z^2)``, or its
    mirror image: with 0 right of 200 prompts 0 to 1.9 %.

    Raises:
        UserError: as ``bootstrap_interval``.
    """
    values = _checked(per_prompt_values, "per_prompt_values", num_dimensions=1)
    if values.min() != values.max() or values[0] not in (0.0, 1.0):
        return bootstrap_interval(values)
    square = NormalDist().inv_cdf((1.0 + CONFIDENCE) / 2.0) ** 2
    width = square / (values.size + square)
    mean = float(values[0])
    return Interval(mean, mean * (1.0 - width), mean + (1.0 - mean) * width)


def paired_difference(a: ArrayLike, b: ArrayLike) -> Interval:
    """The mean of ``a - b`` with its interval, for two models' values ``[prompts]`` on the same prompts in order.

    ``a`` is better than ``b`` when ``low > 0``. What makes a prompt easy or hard for both
    cancels, so the interval is narrower than those of the two means suggest.

    Raises:
        UserError: as ``bootstrap_interval``, and when the numbers of prompts differ.
    """
    a, b = _checked(a, "a", num_dimensions=1), _checked(b, "b", num_dimensions=1)
    if a.shape != b.shape:
        raise UserError(f"{a.size} prompts against {b.size}: a paired comparison needs the same prompts on both sides")
    return bootstrap_interval(a - b)


def _checked(values: ArrayLike, name: str, num_dimensions: int) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != num_dimensions or array.size == 0:
        wanted = "[prompts]" if num_dimensions == 1 else "[prompts, samples]"
        raise UserError(f"{name} has the shape {list(array.shape)}: it must be {wanted}, and not empty")
    if not np.isfinite(array).all():
        raise UserError(f"{name} holds {np.count_nonzero(~np.isfinite(array))} values that are NaN or infinite")
    return array
