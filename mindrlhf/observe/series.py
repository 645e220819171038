"""One metric over the steps of a run, and how to draw thousands of points in a few hundred."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Series:
    """Values of one metric; ``low`` and ``high`` are the band around them, where there is one."""

    name: str
    steps: np.ndarray  # int64 [n], strictly ascending
    values: np.ndarray  # float64 [n], NaN where the metric was not a finite number
    low: np.ndarray | None = None  # float64 [n]
    high: np.ndarray | None = None  # float64 [n]

    def take(self, indices: np.ndarray) -> "Series":
        """Return the points at ``indices`` (int [m], ascending)."""
        bands = (None if band is None else band[indices] for band in (self.low, self.high))
        return Series(self.name, self.steps[indices], self.values[indices], *bands)


def thin(series: Series, max_points: int) -> Series:
    """Return at most ``max_points`` of the points: the lowest and the highest of each equal run of points.

    No spike is lost, and a single gap (NaN) only if its bucket has other points.
    """
    num_points = len(series.steps)
    if num_points <= max_points:
        return series
    kept = set()
    for bucket in np.array_split(np.arange(num_points), max_points // 2):
        values = series.values[bucket]
        if np.isnan(values).all():
            kept.add(bucket[0])
        else:
            kept.update((bucket[np.nanargmin(values)], bucket[np.nanargmax(values)]))
    return series.take(np.array(sorted(kept)))


def smooth(series: Series, window: int) -> Series:
    """Return the triangularly weighted mean of the ``window`` (odd) points around each point.

    Gaps, and points beyond the ends, have no weight; a gap stays a gap.
    """
    assert window % 2 == 1, f"the window must be odd to have a middle, not {window}"
    present = ~np.isnan(series.values)
    reach = window // 2
    kernel = reach + 1.0 - np.abs(np.arange(-reach, reach + 1))
    span = slice(reach, reach + len(present))
    sums = np.convolve(np.where(present, series.values, 0.0), kernel)[span]
    weights = np.convolve(present.astype(float), kernel)[span]
    means = np.full(len(present), np.nan)
    np.divide(sums, weights, out=means, where=present)
    return Series(series.name, series.steps, means)


def robust_ceiling(values: np.ndarray) -> float:
    """Return the top of an axis on which a few extreme points do not flatten all others.

    That is the maximum, unless it is more than three times the 95th percentile (of at least five values):
    then 1.25 times that percentile. The first step of a run, which compiles the graph, is the usual case.
    """
    values = values[np.isfinite(values)]
    if not values.size:
        return 1.0
    maximum = float(values.max())
    usual = float(np.percentile(values, 95 if values.size >= 20 else 75))
    return 1.25 * usual if values.size >= 5 and 0 < 3 * usual < maximum else maximum
