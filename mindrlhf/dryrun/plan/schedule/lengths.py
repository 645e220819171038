"""How long responses are: given on the command line, or fitted to the metrics of a run."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean, median

import numpy as np

from mindrlhf.config.load import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.observe.records import read_jsonl

DEFAULT_SIGMA = 1.0
# Without lengths, the longest allowed response is so many times the median: where reasoning models are trained.
DEFAULT_LIMIT_IN_MEDIANS = 8.0
_GIVEN = re.compile(r"lognormal:(?P<median>[0-9.]+),(?P<sigma>[0-9.]+)")
_MEAN, _LONGEST, _CUT = (f"response_length/{name}" for name in ("mean", "max", "cut_fraction"))
_NUM_QUANTILES = 10_000
_SIGMAS = (0.0, 3.0)
_NUM_HALVINGS = 25


@dataclass(frozen=True)
class ResponseLengths:
    """Log-normal lengths in tokens, cut at ``limit``; the logarithm has the median's as mean and ``sigma``.

    Attributes:
        source: where the numbers come from, in words.
    """

    median: float
    sigma: float
    limit: int
    source: str

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return ``count`` lengths, float64 of at least 1."""
        return self._cut(np.exp(self.sigma * rng.standard_normal(count)))

    @property
    def mean(self) -> float:
        """Of the lengths as they are cut."""
        return float(self._cut(np.exp(self.sigma * normal_quantiles())).mean())

    def _cut(self, factors: np.ndarray) -> np.ndarray:
        return np.clip(self.median * factors, 1.0, float(self.limit))


def read_lengths(text: str | None, limit: int) -> ResponseLengths:
    """Return the lengths that ``--lengths`` names.

    Args:
        text: ``lognormal:MEDIAN,SIGMA`` or the output directory of a run; None for an assumed long tail.
        limit: ``rollout.max_response_length``.

    Raises:
        UserError: it is neither, or the run has no steps; names the fix.
    """
    if text is None:
        middle = max(1.0, limit / DEFAULT_LIMIT_IN_MEDIANS)
        return ResponseLengths(middle, DEFAULT_SIGMA, limit, "assumed; give yours with --lengths")
    if text.startswith("lognormal:"):
        given = _GIVEN.fullmatch(text)
        middle, sigma = map(float, given.groups()) if given else (0.0, 0.0)
        if not (1 <= middle <= limit and sigma <= _SIGMAS[1]):
            raise UserError(
                f"--lengths is {text!r}: give lognormal:MEDIAN,SIGMA with a median of 1 to rollout.max_response_length "
                f"= {limit} and a sigma of 0 to {_SIGMAS[1]:g}, for example lognormal:500,1"
            )
        return ResponseLengths(middle, sigma, limit, "given")
    return _fit(Path(text), limit)


def _fit(run: Path, limit: int) -> ResponseLengths:
    """Fit lengths to a run's steps: to their mean, and to the share that was cut or, where none was, the longest."""
    steps = list(_steps(run))
    if not steps:
        raise UserError(
            f"--lengths {run}: there is no metrics.jsonl with response lengths; give the output directory of a GRPO "
            "run, or lognormal:MEDIAN,SIGMA"
        )
    mean, cut = (fmean(step[name] for step in steps) for name in (_MEAN, _CUT))
    longest = median(step[_LONGEST] for step in steps)
    config = load_grpo_config(run / "config.yaml", (), world_size=None)
    num_samples = config.training.chunk_size * config.training.num_rollouts * config.algorithm.num_generations
    normal = normal_quantiles()
    # In half of the steps the longest of n responses is below the quantile of 0.5 ** (1 / n).
    top = NormalDist().inv_cdf(0.5 ** (1 / num_samples))

    def is_too_wide(sigma: float) -> bool:
        middle = _median(mean, sigma, limit)
        if cut > 0:
            return float((middle * np.exp(sigma * normal) >= limit).mean()) > cut
        return middle * math.exp(sigma * top) > longest

    sigma = _halve(*_SIGMAS, is_too_wide)
    source = f"fitted to {len(steps)} steps of {run}: mean {mean:.0f}, longest {longest:.0f}, truncated {cut:.1%}"
    return ResponseLengths(_median(mean, sigma, limit), sigma, limit, source)


def _steps(run: Path) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step that has those of response lengths."""
    path = run / "metrics.jsonl"
    if path.exists():
        yield from (values for values in read_jsonl(path) if _CUT in values)


def _median(mean: float, sigma: float, limit: int) -> float:
    """Return the median of lengths of this mean and sigma."""
    return _halve(1.0, float(limit), lambda middle: ResponseLengths(middle, sigma, limit, "").mean > mean)


def _halve(low: float, high: float, is_too_high: Callable[[float], bool]) -> float:
    """Return the largest value that is not too high, to a millionth of the interval or better."""
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_too_high(middle) else (middle, high)
    return low


@cache
def normal_quantiles() -> np.ndarray:
    """Return evenly likely values of a standard normal variable, ascending, float64; not to be changed."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((index + 0.5) / _NUM_QUANTILES) for index in range(_NUM_QUANTILES)])
