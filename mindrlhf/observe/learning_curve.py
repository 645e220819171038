"""The learning curve of a run as one picture for a README or a page."""

from html import escape
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.observe.charts import HEIGHT, LEFT, WIDTH, line_chart
from mindrlhf.observe.panels import accuracy_series
from mindrlhf.observe.records import replace_file
from mindrlhf.observe.run_data import RunData, read_run
from mindrlhf.observe.series import Series

TITLE_PX = 34
STYLE = """
svg { --page: #ffffff; --ink: #171b24; --quiet: #626b7b; --grid: #eceef2; --axis: #b6bcc8; --c: #2563c9 }
@media (prefers-color-scheme: dark) {
  svg { --page: #11141a; --ink: #e8ebf1; --quiet: #98a2b3; --grid: #262c36; --axis: #4d5666; --c: #6ea6ff }
}
.page { fill: var(--page) } .grid { stroke: var(--grid) } .axis { stroke: var(--axis) } .dot { fill: var(--c) }
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif }
.tick { fill: var(--quiet); font-size: 12px } .title { fill: var(--ink); font-size: 15px; font-weight: 600 }
.line, .raw, .interval { fill: none; stroke: var(--c); stroke-linejoin: round; stroke-linecap: round }
.line { stroke-width: 2 } .raw { stroke-opacity: 0.3 } .interval { stroke-width: 3; stroke-opacity: 0.45 }
.band { fill: var(--c); fill-opacity: 0.14 }
"""


def write_learning_curve(run_dir: Path, out_file: Path) -> Path:
    """Write held-out accuracy (with intervals) and mean reward over the steps of a run as a stand-alone SVG file.

    A run without one of them shows the other; a supervised run shows its loss. The picture follows the reader's
    light or dark mode.

    Raises:
        UserError: the directory has no metrics, or none of these.
        RunFailure: the file cannot be written.
    """
    replace_file(Path(out_file), learning_curve_svg(read_run(run_dir)))
    return Path(out_file)


def learning_curve_svg(run: RunData) -> str:
    """Return the picture as SVG text; see ``write_learning_curve``."""
    drawings = _drawings(run)
    if not drawings:
        raise UserError(f"run {run.name} has none of eval/accuracy, reward/mean and loss: there is no curve to draw")
    width, height = WIDTH * len(drawings), HEIGHT + TITLE_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(" and ".join(title for title, _ in drawings))} over the training steps">',
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}" rx="10"/>',
    ]
    for index, (title, drawing) in enumerate(drawings):
        parts.append(f'<g transform="translate({index * WIDTH} {TITLE_PX})">')
        parts.append(f'<text class="title" x="{LEFT}" y="-10">{escape(title)}</text>{drawing}</g>')
    return "".join([*parts, "</svg>\n"])


def _drawings(run: RunData) -> list[tuple[str, str]]:
    """Return at most two (title, SVG elements)."""
    curves: list[tuple[str, str, Series, bool]] = []
    accuracy = accuracy_series(run)
    if accuracy is not None:
        curves.append(("Held-out accuracy", "%", accuracy, False))
    for title, metric in (("Mean reward in training", "reward/mean"), ("Loss", "loss")):
        if metric in run.series and len(curves) < (1 if metric == "loss" else 2):
            curves.append((title, "", run.series[metric], True))
    return [
        (title, line_chart(title, unit, [series], from_zero=unit == "%", noisy=noisy).drawing)
        for title, unit, series, noisy in curves
    ]
