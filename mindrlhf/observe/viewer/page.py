"""A page to read the samples of a run, or of two side by side: one file that opens without a network."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

import mindrlhf
from mindrlhf.errors import UserError
from mindrlhf.observe.records import read_jsonl, replace_file
from mindrlhf.observe.report import SAMPLES_PAGE, content_hash, or_warn, package_text, shortened, write_report
from mindrlhf.observe.run_data import OTHER_TYPES
from mindrlhf.observe.samples import TOKEN_VALUES, conversation_turns, question_of

MAX_TEXT = 20_000  # characters of a prompt or completion that the page keeps
MAX_LINKED_BYTES = 8 << 20  # of samples, up to which a run's end writes the page that its report links to
MAX_PAGE_CHARS = 64 << 20  # of completions


def write_pages(run_dir: Path) -> Path | None:
    """Write the page of a run's samples, where it has some and they are few enough, and the report, which links to it.

    Returns:
        What :func:`mindrlhf.observe.report.write_report` does.
    """
    samples = Path(run_dir) / "samples.jsonl"
    with or_warn():
        if samples.is_file() and 0 < samples.stat().st_size <= MAX_LINKED_BYTES:
            replace_file(Path(run_dir) / SAMPLES_PAGE, render_page([run_dir]))
        return write_report(run_dir)
    return None


def render_page(run_dirs: list[Path], steps: tuple[int, int] = (0, 1 << 62)) -> str:
    """Return the page of one run, or of two, with the samples of the steps from ``steps[0]`` to ``steps[1]``.

    The samples are in it, compressed; its content security policy forbids it to load anything, or to run any script
    but its own, whatever the samples contain.

    Raises:
        UserError: a directory has no samples in these steps or too many for a page, or its file is broken.
    """
    data = {"runs": [_read_run(path, steps) for path in run_dirs]}
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)).decode()
    script = package_text("viewer/viewer.js")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        package_text("viewer/viewer.html")
    )
    return template.render(
        title=" and ".join(run["name"] for run in data["runs"]),
        version=mindrlhf.__version__,
        script_hash=content_hash(script),
        style=Markup(package_text("viewer/viewer.css")),
        script=Markup(script),
        data=packed,
    )


def _read_run(run_dir: Path, steps: tuple[int, int]) -> dict[str, Any]:
    """Return the samples of a run as the page takes them: texts of prompts once, a short row for each sample."""
    path = Path(run_dir) / "samples.jsonl"
    if not path.exists():
        raise UserError(f"no samples in {run_dir}: give the directory of a run with 'observe.groups_per_step' above 0")
    prompts: dict[str, int] = {}
    verifiers: dict[str, int] = {}
    rows, num_chars = [], 0
    for record in read_jsonl(path):
        if steps[0] <= record["step"] <= steps[1]:
            try:
                rows.append(_sample_row(record, prompts, verifiers))
            except OTHER_TYPES:
                raise UserError(f"{path} has a line that is no sample: {json.dumps(record)[:80]}") from None
            num_chars += len(rows[-1][2])
            if num_chars > MAX_PAGE_CHARS:
                raise UserError(
                    f"{path} is too much for a page up to step {record['step']}: name fewer, as in --steps "
                    f"{steps[0]}:{max(steps[0], record['step'] - 1)}"
                )
    if not rows:
        raise UserError(f"{path} has no samples of steps that are finished and in --steps")
    return {
        "name": Path(run_dir).resolve().name,
        "prompts": [shortened(text, MAX_TEXT) for text in prompts],
        "begins": [max(0, text.find(question_of(text))) for text in prompts],  # of the last user turn, for the list
        "verifiers": list(verifiers),
        "rows": rows,
    }


def _sample_row(record: dict[str, Any], prompts: dict[str, int], verifiers: dict[str, int]) -> list[Any]:
    """Return a sample as the page takes it; numbers of new prompts and verifiers are added to both dictionaries."""
    completion = record["completion"]
    if record.get("conversations"):
        completion = "\n\n".join(f"{role}:\n{text}" for role, text in conversation_turns(record))
    rewards = {verifiers.setdefault(name, len(verifiers)): value for name, value in record["rewards"].items()}
    tokens = record.get("tokens")
    row = [
        record["step"],
        prompts.setdefault(record["prompt"], len(prompts)),
        shortened(completion, MAX_TEXT),
        record["answer"],
        record["reward"],
        [rewards.get(index) for index in range(len(verifiers))],
        record["finish_reason"],
        len(tokens) if tokens else len(completion),
    ]
    return [*row, [tokens, *(record.get(name) for name in TOKEN_VALUES)]] if tokens else row
