"""Axes of the charts: scales, ticks at round numbers, and how values are written."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from values to pixels, clamped to the axis."""

    low: float
    high: float
    start_px: float
    end_px: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``; values outside the axis land on its end."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return self.start_px + (value - low) / (high - low) * (self.end_px - self.start_px)


def round_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten that lie in [low, high], at most ``max_ticks`` (>= 2)."""
    assert high > low, f"an axis needs a length, not [{low}, {high}]"
    magnitude = 10.0 ** math.floor(math.log10((high - low) / max_ticks))
    for factor in (1, 2, 5, 10, 20, 50):
        spacing = factor * magnitude
        first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
        if last - first + 1 <= max_ticks:
            break
    return [index * spacing for index in range(first, last + 1)]


def round_domain(low: float, high: float) -> tuple[float, float]:
    """Return [low, high] widened to the ticks around it; a single value gets room on both sides."""
    if high <= low:
        margin = abs(low) * 0.5 or 1.0
        low, high = low - margin, high + margin
    ticks = round_ticks(low, high, 5)
    spacing = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    return math.floor(low / spacing + 1e-9) * spacing, math.ceil(high / spacing - 1e-9) * spacing


def decade_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten in [low, high], evenly thinned to at most six; both ends are powers of ten."""
    first, last = round(math.log10(low)), round(math.log10(high))
    stride = math.ceil((last - first + 1) / 6)
    return [10.0**exponent for exponent in range(first, last + 1, stride)]


def tick_label(value: float, spacing: float, unit: str, log: bool = False, largest: float | None = None) -> str:
    """Return the text of one tick, with the decimals that tell neighbours apart.

    All ticks of an axis have the format of its ``largest`` one (default: of ``value``).
    """
    if log:
        return f"1e{round(math.log10(value))}"
    if unit == "%":
        return f"{_fixed(100 * value, 100 * spacing)}%"
    if spacing < 1e3 and not 0 < spacing < 1e-4:
        return _fixed(value, spacing)
    if abs(value) < spacing / 2:
        return "0"
    size = abs(value if largest is None else largest)
    if spacing < 1:
        power = math.floor(math.log10(size) + 1e-9)
        return f"{_fixed(value / 10.0**power, spacing / 10.0**power)}e{power}"
    for limit, divisor, suffix in ((1e12, 0, ""), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{_fixed(value / divisor, spacing / divisor)}{suffix}" if divisor else f"{value:.2g}"
    return f"{value:,.0f}"


def compact(value: float) -> str:
    """Return a number in few characters: 1.25k, 3.2M, 0.912, 4.1e-5."""
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            divisor = 1e3 if suffix == "k" else limit
            return f"{value / divisor:.3g}{suffix}" if size < 1e12 else f"{value:.2g}"
    if size and size < 1e-3:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 100 else f"{value:.3g}"


def with_unit(value: float, unit: str) -> str:
    """Return a value as the text of a headline: 73.2%, 1.28 s, 2.9k tokens/s."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "%":
        return f"{100 * value:.1f}%"
    return f"{compact(value)} {unit}".rstrip()


def _fixed(value: float, spacing: float) -> str:
    decimals = max(0, -math.floor(math.log10(spacing) + 1e-9)) if spacing > 0 else 0
    text = f"{value:.{decimals}f}"
    return text.removeprefix("-") if float(text) == 0 else text.replace("-", "−")
