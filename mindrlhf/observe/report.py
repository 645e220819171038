"""The HTML report of a run: one file that opens without a network."""

import base64
import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup

import mindrlhf
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.observe.axes import compact, with_unit
from mindrlhf.observe.charts import interval_plot
from mindrlhf.observe.panels import REWARD_SHARE, Group, build_panels, recent_mean
from mindrlhf.observe.records import replace_file
from mindrlhf.observe.run_data import OTHER_TYPES, RunData, is_number, read_run
from mindrlhf.observe.samples import IMAGES_NAME, conversation_turns, question_of
from mindrlhf.system.strict_yaml import YAML_ERRORS, load_yaml

REPORT_NAME, SAMPLES_PAGE, COMPARISON_NAME = "report.html", "samples.html", "comparison.html"
SEED_KEYS = ("run.seed", "run.output_dir")
REFRESH_S = 20  # after which the page of a run that goes on is loaded anew
MAX_ABOUT = 500
MAX_TEXT = 4000  # characters of a prompt or completion that are shown
MAX_PICTURE_BYTES = 4 << 20


@contextlib.contextmanager
def or_warn() -> Iterator[None]:
    """Tell of a page that a broken file or the disk keeps from being written: a run has a model to export."""
    try:
        yield
    except (UserError, RunFailure) as failure:
        print(f"warning: no report: {failure}", file=sys.stderr, flush=True)


def write_report(run_dir: Path, *, is_running: bool = False) -> Path | None:
    """Write the report of a run, ``REPORT_NAME`` in its directory, and return its path, or None after a warning."""
    path = Path(run_dir) / REPORT_NAME
    with or_warn():
        replace_file(path, render_report([read_run(run_dir)], is_running=is_running))
        return path
    return None


def render_report(runs: Sequence[RunData], *, is_running: bool = False) -> str:
    """Return the page of one run, or of several over each other; runs that differ in their seeds alone are averaged.

    The page holds its style, script and data; its content security policy forbids it to load anything or to run any
    script but its own, whatever the samples contain. That of a run that ``is_running`` reloads itself.
    """
    style, script = package_text("report.css"), package_text("report.js")
    groups = group_runs(runs)
    panels = build_panels(groups)
    run = runs[0]
    values = _of_one(run) if len(runs) == 1 else _of_several(runs, groups)
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        package_text("report.html")
    )
    return template.render(
        run=run,
        groups=groups,
        refresh_s=REFRESH_S if is_running else 0,
        version=mindrlhf.__version__,
        script_hash=content_hash(script),
        style=Markup(style),
        script=Markup(script),
        panels=panels,
        svg_of=lambda chart: Markup(chart.svg),
        hover_data=Markup(_safe_json([chart.hover for panel in panels for chart in panel.charts])),
        **values,
    )


def _of_one(run: RunData) -> dict[str, Any]:
    return {
        "num_planned": _num_planned(run),
        "about": _about(run),
        "headline": _checked("summary.json", _headline, run),
        "facts": _facts(run),
        "comparisons": _checked("summary.json", _comparisons, run),
        "sample_sets": _checked("samples.jsonl", _sample_sets, run),
        "samples_page": SAMPLES_PAGE if (run.directory / SAMPLES_PAGE).is_file() else "",
        "metric_rows": _metric_rows(run),
    }


def _checked(name: str, shown_of: Callable[[RunData], Any], run: RunData) -> Any:
    """Return what the page shows of a file, which anybody may have written."""
    try:
        return shown_of(run)
    except OTHER_TYPES as error:
        raise UserError(f"{run.directory / name} is not as a run writes it ({error}): remove it") from error


def _names(runs: Sequence[RunData]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.directory) for run in runs]


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """Return the runs by their configs apart from the seed, with the name of each group, "" for a single one."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        keys = {key: value for key, value in _keys_of(run).items() if key not in SEED_KEYS}
        groups.setdefault(json.dumps(keys, sort_keys=True, default=str) if keys else str(index), []).append(index)
    names = _names(runs)
    named = []
    for first, *seeds in groups.values():
        named.append((f"{names[first]} and seeds" if seeds else names[first], [runs[one] for one in (first, *seeds)]))
    return named if len(named) > 1 else [("", named[0][1])]


def _of_several(runs: Sequence[RunData], groups: Sequence[Group]) -> dict[str, Any]:
    """Return what sums each run up, and the keys in which they differ."""
    facts = [{name: f"{value} {unit}".strip() for name, value, unit, _ in _facts(run)} for run in runs]
    configs = [_keys_of(run) for run in runs]
    keys = [(key, [str(config.get(key, "-")) for config in configs]) for key in sorted(set().union(*configs))]
    colours = {run.directory: index for index, (_, members) in enumerate(groups) for run in members}
    compared = {
        "names": [(name, colours[run.directory]) for name, run in zip(_names(runs), runs)],
        "rows": [(name, [of_run.get(name, "-") for of_run in facts]) for name in facts[0]],
        "differing": [(key, values) for key, values in keys if len(set(values)) > 1],
    }
    return {"title": " against ".join(_names(runs)), "compared": compared}


def _keys_of(run: RunData) -> dict[str, Any]:
    """Return the keys of a run's config by their dotted names; {} where it has none that can be read."""
    try:
        content = load_yaml(run.config_text or "")
    except YAML_ERRORS:
        return {}
    sections = content.items() if isinstance(content, dict) else ()
    return {f"{name}.{key}": value for name, part in sections if isinstance(part, dict) for key, value in part.items()}


def _num_planned(run: RunData) -> int:
    """Return how many steps the run was to have, where that is known and they are not done; else 0."""
    planned = _keys_of(run).get("run.max_steps")
    return planned if isinstance(planned, int) and planned > run.num_steps else 0


def _about(run: RunData) -> list[tuple[str, str]]:
    """Return what the run is of: (name, text), those that are known."""
    keys = _keys_of(run)
    ranks = run.started.get("num_ranks")
    found = {
        "Model": keys.get("model.path"),
        "Data": keys.get("data.train_file"),
        "Held-out data": keys.get("data.eval_file"),
        "Algorithm": keys.get("algorithm.name"),
        "Seed": keys.get("run.seed"),
        "Ranks": f"{ranks} on {keys.get('run.device', '?')}" if ranks else None,
        "Command": run.started.get("command"),
    }
    return [(name, shortened(text, MAX_ABOUT)) for name, text in found.items() if text not in (None, "")]


def _headline(run: RunData) -> dict[str, Any] | None:
    """Return what training changed: from the summary, else None."""
    summary = run.summary or {}
    before, after, difference = (summary.get(name) for name in ("before", "after", "difference"))
    values = [part.get(name) for part in (before, after) if part for name in ("accuracy", "low", "high")]
    values += [difference.get(name) for name in ("mean", "low", "high")] if difference else []
    if not before or not after or not all(map(is_number, values)):
        return None  # a single prompt has no interval
    named = (("Before", before), ("After", after))
    rows = [(name, part["accuracy"], part["low"], part["high"]) for name, part in named]
    headline = {"before": before, "after": after, "num_prompts": summary.get("num_prompts"), "verdict": None}
    headline["plot"] = Markup(interval_plot(rows))
    if difference:
        verdict = ("same", "No clear difference: the interval contains 0")
        if difference["low"] > 0:
            verdict = ("better", "Better: the whole interval is above 0")
        elif difference["high"] < 0:
            verdict = ("worse", "Worse: the whole interval is below 0")
        headline |= {"difference": difference, "verdict": verdict}
    return headline


def _facts(run: RunData) -> list[tuple[str, str, str, str]]:
    """Return (name, value, unit, remark) of the numbers that sum a run up; those it does not have are left out."""
    facts = [("Steps", f"{run.num_steps:,}", "", "")]
    for name, metric, unit in (("Reward", "reward/mean", ""), ("Response length", "response_length/mean", "tokens")):
        values = run.values(metric)
        if values.size:
            tenth = max(1, values.size // 10)
            start, end = compact(float(values[:tenth].mean())), compact(recent_mean(values))
            remark = f"from {start}: means of the first and last {tenth:,} steps" if tenth > 1 else ""
            facts.append((name, end, unit, remark))
    step_times = run.values("timing/all")
    if step_times.size:
        facts.append(("Time per step", compact(float(np.median(step_times))), "s", "median"))
    if total := _total_time(run, step_times):
        facts.append(("Total time", *total))
    if (shares := run.values(REWARD_SHARE)).size:
        facts.append(("Waiting for rewards", f"{shares.mean():.1%}", "", "of a step, mean; see reward.num_workers"))
    for name, metric, unit, statistic, remark in (
        ("Throughput", "e2e_tps", "tokens/s", np.median, "median, per device"),
        ("Log-prob gap", "rollout_diff/max_abs", "nats", np.max, "rollout to training, largest"),
        ("Peak memory", "memory/peak_rss_gb", "GB", np.max, "resident, largest rank"),
    ):
        values = run.values(metric)
        if values.size:
            facts.append((name, compact(float(statistic(values))), unit, remark))
    return facts


def _total_time(run: RunData, step_times: np.ndarray) -> tuple[str, str, str] | None:
    """Return the time of the whole run with its remark; of a run that has not noted its start, that of its steps."""
    if run.starts_s:
        elapsed_s = max(0.0, run.last_written.timestamp() - run.starts_s[0])
        remark = "from start to last record"
        if (num_restarts := len(run.starts_s) - 1) > 0:
            remark += f", with {num_restarts} restart{'s' if num_restarts > 1 else ''} and what lay between"
        return _duration(elapsed_s), "", remark
    return (_duration(float(step_times.sum())), "", "sum of all steps") if step_times.size else None


def _comparisons(run: RunData) -> list[dict[str, Any]]:
    """Return prompts with what the policy wrote before and after training, in the order of the summary."""
    before, after = (
        {str(sample.get("prompt", "")): sample for sample in (run.summary or {}).get(name) or []}
        for name in ("samples_before", "samples_after")
    )
    comparisons = []
    for prompt in dict.fromkeys([*before, *after]):
        pair = [before.get(prompt), after.get(prompt)]
        answer = next((sample["answer"] for sample in pair if sample and "answer" in sample), "")
        shown = [None if sample is None else _sample(sample) for sample in pair]
        pictures = next((found for one in pair if one and (found := _pictures(one, run.directory))), [])
        asked = {"prompt": shortened(question_of(prompt)), "answer": shortened(answer), "pictures": pictures}
        comparisons.append({**asked, "pair": shown})
    return comparisons


def _sample_sets(run: RunData) -> list[tuple[str, list[dict[str, Any]]]]:
    sets = []
    for name, samples in (("First samples", run.first_samples), ("Last samples", run.last_samples)):
        if samples:
            shown = [_sample(sample) | {"pictures": _pictures(sample, run.directory)} for sample in samples]
            sets.append((f"{name}: step {samples[0]['step']}", shown))
    return sets


# Where templates put an image, which is shown itself: Qwen, Gemma, LLaVA.
_IMAGE_MARKS = re.compile(
    r"<\|(?:vision_start|image_pad|vision_end)\|>|<(?:start_of_image|end_of_image|image_soft_token|image)>"
)


def _sample(record: Mapping[str, Any]) -> dict[str, Any]:
    rewards = record.get("rewards")
    by_verifier = rewards.items() if isinstance(rewards, dict) else ()
    question = question_of(str(record.get("prompt", "")))
    return {
        "prompt": shortened(_IMAGE_MARKS.sub("", question) if record.get("images") else question),
        "turns": [(role, shortened(text)) for role, text in conversation_turns(record)],
        "answer": shortened(record.get("answer", "")),
        "reward": record.get("unscored") or (_reward_text(record["reward"]) if "reward" in record else None),
        "rewards": [(name, _reward_text(value)) for name, value in by_verifier],
        "cut": record.get("finish_reason") == "length",
    }


def _pictures(record: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Return the images of a sample's prompt as addresses that hold them; but for what is missing or no PNG file."""
    found = []
    digests = record.get("images")
    for digest in digests if isinstance(digests, list) else ():
        path = run_dir / IMAGES_NAME / f"{digest}.png"
        # The name comes from a file that anybody may have written.
        if re.fullmatch("[0-9a-f]{64}", str(digest)) and path.is_file() and path.stat().st_size <= MAX_PICTURE_BYTES:
            data = path.read_bytes()
            if data.startswith(b"\x89PNG"):
                found.append(f"data:image/png;base64,{base64.b64encode(data).decode()}")
    return found


def _reward_text(value: Any) -> str:
    return with_unit(value, "") if isinstance(value, (int, float)) else "not finite"


def shortened(text: Any, limit: int = MAX_TEXT) -> str:
    """Return a text of at most so many characters, and how many more there are."""
    text = str(text)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def _metric_rows(run: RunData) -> list[tuple[str, ...]]:
    """Return (name, first, last, lowest, highest) of every metric."""
    rows = []
    for name in sorted(run.series):
        values = run.values(name)
        shown = (values[0], values[-1], values.min(), values.max())
        rows.append((name, *(with_unit(float(value), "") for value in shown)))
    return rows


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _safe_json(data: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def content_hash(script: str) -> str:
    """Return what a content security policy lets run: this script and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def package_text(name: str) -> str:
    """Return a file of a page, by its place in this package."""
    return resources.files("mindrlhf.observe").joinpath(name).read_text(encoding="utf-8")
