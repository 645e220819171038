"""The learning curve of a run as one picture for a README or a page."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.observe.charts import HEIGHT, LEFT, WIDTH
from mindrlhf.observe.panels import ACCURACY, LOSS, REWARD, lines_of
from mindrlhf.observe.records import replace_file
from mindrlhf.observe.run_data import RunData, read_run

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

    A run without one of them shows the other, or its loss. The picture follows the reader's light or dark mode.

    Raises:
        UserError: the directory has no metrics, or none of these.
        RunFailure: the file cannot be written.
    """
    replace_file(Path(out_file), learning_curve_svg([read_run(run_dir)]))
    return Path(out_file)


def learning_curve_svg(runs: Sequence[RunData]) -> str:
    """Return the picture as SVG text, of seeds their mean and band; see ``write_learning_curve``."""
    lines = {spec: lines_of(spec, [("", runs)]) for spec in (ACCURACY, REWARD, LOSS)}
    shown = [spec for spec in (ACCURACY, REWARD) if lines[spec]] or [spec for spec in (LOSS,) if lines[spec]]
    charts = [spec.draw(lines[spec], "Mean reward in training" if spec is REWARD else "") for spec in shown]
    if not charts:
        raise UserError(f"run {runs[0].name} has none of eval/accuracy, reward/mean and loss: no curve to draw")
    width, height = WIDTH * len(charts), HEIGHT + TITLE_PX
    titles = " and ".join(chart.title for chart in charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(titles)} over the training steps">',
        f'<style>{STYLE}</style><rect class="page" width="{width}" height="{height}" rx="10"/>',
    ]
    for index, chart in enumerate(charts):
        parts.append(f'<g transform="translate({index * WIDTH} {TITLE_PX})">')
        parts.append(f'<text class="title" x="{LEFT}" y="-10">{escape(chart.title)}</text>{chart.drawing}</g>')
    return "".join([*parts, "</svg>\n"])
