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
from mindrlhf.observe.report import SAMPLES_PAGE, content_hash, package_text, shortened, write_report
from mindrlhf.observe.samples import TOKEN_VALUES

MAX_TEXT = 20_000  # characters of a prompt or completion that the page keeps
MAX_LINKED_BYTES = 8 << 20  # of samples, up to which a run's end writes the page that its report links to
MAX_PAGE_BYTES = 64 << 20  # of samples that a page of one file is made of, unless a file is asked for


def write_page(run_dirs: list[Path], out_file: Path) -> Path:
    """Write the page of one run, or of two, and return its path.

    Raises:
        UserError: see ``render_page``.
        RunFailure: the page cannot be written.
    """
    replace_file(out_file, render_page(run_dirs))
    return out_file


def write_pages(run_dir: Path) -> Path:
    """Write the page of a run's samples, where it has some and they are few enough, and the report, which links to it.

    Returns:
        The path of the report.

    Raises:
        UserError, RunFailure: see :func:`mindrlhf.observe.report.write_report`.
    """
    samples = Path(run_dir) / "samples.jsonl"
    if samples.is_file() and 0 < samples.stat().st_size <= MAX_LINKED_BYTES:
        write_page([run_dir], Path(run_dir) / SAMPLES_PAGE)
    return write_report(run_dir)


def render_page(run_dirs: list[Path]) -> str:
    """Return the page of one run, or of two.

    The samples are in it, compressed; its content security policy forbids it to load anything, or to run any script
    but its own, whatever the samples contain.

    Raises:
        UserError: a directory has no samples, or its file is broken.
    """
    data = {"runs": [_read_run(path) for path in run_dirs]}
    return page_of(" and ".join(run["name"] for run in data["runs"]), data)


def page_of(title: str, data: dict[str, Any]) -> str:
    """Return a page of such data: "runs", or with "served" the names of runs whose samples it asks a server for."""
    packed = base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)).decode()
    script = package_text("viewer/viewer.js")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        package_text("viewer/viewer.html")
    )
    return template.render(
        title=title,
        connects="self" if "served" in data else "none",
        version=mindrlhf.__version__,
        script_hash=content_hash(script),
        style=Markup(package_text("viewer/viewer.css")),
        script=Markup(script),
        data=packed,
    )


def samples_path(run_dir: Path) -> Path:
    """Return where the samples of a run lie.

    Raises:
        UserError: it has none.
    """
    path = Path(run_dir) / "samples.jsonl"
    if not path.exists():
        raise UserError(f"no samples in {run_dir}: give the directory of a run with 'observe.samples_per_step' above 0")
    return path


def _read_run(run_dir: Path) -> dict[str, Any]:
    """Return the samples of a run as the page takes them: texts of prompts once, a short row for each sample."""
    path = samples_path(run_dir)
    prompts: dict[str, int] = {}
    verifiers: dict[str, int] = {}
    rows = []
    for record in read_jsonl(path):
        try:
            rows.append(sample_row(record, prompts, verifiers))
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"{path} has a line that is no sample: {json.dumps(record)[:80]}") from None
    if not rows:
        raise UserError(f"{path} is empty: the run has not finished a step")
    return {
        "name": Path(run_dir).resolve().name,
        "prompts": [shortened(text, MAX_TEXT) for text in prompts],
        "verifiers": list(verifiers),
        "rows": rows,
    }


def sample_row(record: dict[str, Any], prompts: dict[str, int], verifiers: dict[str, int]) -> list[Any]:
    """Return a sample as the page takes it.

    Args:
        prompts, verifiers: numbers of those that came before, by text and name; new ones are added.
    """
    completion = record["completion"]
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
