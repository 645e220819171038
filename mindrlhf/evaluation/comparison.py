"""Is the later model better? Two evaluations on the same prompts, compared."""

import json
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindrlhf.evaluation.heldout import NUM_SAMPLES_SHOWN, Evaluation, known, paired
from mindrlhf.evaluation.statistics import Interval, accuracy_interval, paired_difference
from mindrlhf.observe.records import replace_file
from mindrlhf.observe.samples import question_of
from mindrlhf.system.terminal import visible, width


def compare(before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Return accuracies, the paired difference with its 95 % interval, and sample answers, as JSON values."""
    chosen = _telling(before.shown, after.shown)
    first, last = paired(before, after)
    return {
        "steps": [before.step, after.step],
        "before": _interval(accuracy_interval(known(before.means)), "accuracy"),
        "after": _interval(accuracy_interval(known(after.means)), "accuracy"),
        "difference": _interval(paired_difference(last, first), "mean"),
        "num_prompts": len(first),
        "samples_before": [before.shown[index] for index in chosen],
        "samples_after": [after.shown[index] for index in chosen],
    }


def _telling(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[int]:
    """Return which answers to show: those whose reward changed most come first, whichever way, then changed texts."""

    def change(index: int) -> tuple[float, bool]:
        first, last = before[index], after[index]
        return abs(last["reward"] - first["reward"]), first["completion"] != last["completion"]

    if [one["prompt"] for one in before] != [one["prompt"] for one in after]:
        return list(range(min(len(before), len(after), NUM_SAMPLES_SHOWN)))
    return sorted(range(len(before)), key=change, reverse=True)[:NUM_SAMPLES_SHOWN]


def write_summary(run_dir: Path, evaluations: Sequence[Evaluation]) -> dict[str, Any] | None:
    """Write ``summary.json`` from the last evaluation of a run and the first on the same prompts.

    None when there are not two: a resumed run may have been given other held-out prompts.
    """
    comparable = [one for one in evaluations if one.is_comparable(evaluations[-1])]
    if len(comparable) < 2:
        return None
    summary = compare(comparable[0], comparable[-1])
    replace_file(run_dir / "summary.json", json.dumps(summary, indent=2))
    return summary


def summary_text(summary: dict[str, Any]) -> str:
    """Return the summary as a person reads it at the end of a run."""
    before, after, difference = summary["before"], summary["after"], summary["difference"]
    first_step = summary["steps"][0]
    since = f", since step {first_step}" if first_step else ""
    lines = [
        f"held-out accuracy on {summary['num_prompts']} prompts (95% interval){since}",
        f"  before  {_percent(before['accuracy'], before)}",
        f"  after   {_percent(after['accuracy'], after)}",
        f"  change  {difference_text(difference)}",
    ]
    when = f"at step {first_step}" if first_step else "before training"
    for title, samples in ((when, summary["samples_before"]), ("after training", summary["samples_after"])):
        lines.append(f"\nsample answers {title}")
        for sample in samples:
            lines.append(_folded("question", question_of(sample["prompt"])))
            lines.append(_folded("answer", sample["completion"]))
            lines.append(_folded("expected", sample["answer"], f"   reward {sample['reward']:g}"))
    return "\n".join(lines)


def _interval(interval: Interval, name: str) -> dict[str, float | None]:
    values = {name: float(interval.mean), "low": float(interval.low), "high": float(interval.high)}
    # One prompt has no bounded interval, and JSON has no infinity.
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _percent(value: float, bounds: dict[str, float | None]) -> str:
    if bounds["low"] is None:
        return f"{value:6.1%}  (one prompt has no interval)"
    return f"{value:6.1%}  ({bounds['low']:.1%} to {bounds['high']:.1%})"


def difference_text(difference: dict[str, float | None]) -> str:
    """Return a paired difference of accuracies in points, with its interval and what it means."""
    if difference["low"] is None:
        return f"{100 * difference['mean']:+5.1f} points  (one prompt has no interval)"
    mean, low, high = (100 * difference[name] for name in ("mean", "low", "high"))
    verdict = "better" if low > 0 else "worse" if high < 0 else "no clear difference"
    return f"{mean:+5.1f} points  ({low:+.1f} to {high:+.1f}): {verdict}"


def _folded(name: str, text: str, more: str = "") -> str:
    """Return a line that a terminal does not break inside a word; in a log it is one line."""
    line = f"  {name:<10}{visible(' '.join(text.split()))}{more}"
    fold = textwrap.TextWrapper(subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)
    fold.width = width(sys.stdout, sys.maxsize)
    return fold.fill(line)
