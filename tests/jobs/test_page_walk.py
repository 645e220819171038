"""Every command of every page, run as typed in the order of the page, in a clone in which the quickstart has run.

A block that cannot run here says why in a comment above it, such as ``<!-- not run: needs NPUs -->``; the reason begins
with one of ``page_blocks.REASONS``. A block of another language whose first line is a comment with a file's name, such
as ``# my_rewards.py``, is saved under that name first. Each page begins in a copy of the clone: pages need nothing of
each other.

``WALKED_PAGES`` in the environment (names as in the ids, with commas between) walks these alone; each block's command,
exit code and seconds are in the captured output.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import sanity_inputs
from page_blocks import PAGES, ROOT, blocks
from slow_tests import SLOW

_BLOCK_TIMEOUT_S = 3000
_WALKED = [name for name in os.environ.get("WALKED_PAGES", "").split(",") if name]


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _environment(clone: Path) -> dict[str, str]:
    """The shell of a user who has activated the environment: imports and programs are the clone's."""
    path = f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ours = {name for name in os.environ if name.startswith(("MINDRLHF_", "PYTEST_"))} - {"MINDRLHF_GRAPH_CACHE"}
    ours |= {"LOCAL_DEFAULT_PATH"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PATH": path, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}


def _type(command: str, clone: Path) -> subprocess.CompletedProcess:
    """Run a block in one shell; a shell that does not end takes its processes with it."""
    arguments = ["bash", "-euo", "pipefail", "-c", command]
    with subprocess.Popen(
        arguments,
        cwd=clone,
        env=_environment(clone),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=_BLOCK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\n(ended after {_BLOCK_TIMEOUT_S} s)"
    return subprocess.CompletedProcess(arguments, process.returncode, output)


def _clone_with_the_quickstart(directory: Path, rollout_python: str) -> None:
    """Copy the repository, and run what ``scripts/quickstart.sh`` does after the set-up."""
    clone = directory / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".*_cache"))
    (clone / ".venv").symlink_to(sys.prefix)
    (clone / ".venv-rollout").symlink_to(Path(rollout_python).parents[1])
    script = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
    _, set_up, after = script.partition("bash scripts/setup.sh\n")
    assert set_up and "examples/quickstart/config.yaml" in after
    ran = _type(after, clone)
    assert ran.returncode == 0, ran.stdout[-3000:]


@pytest.fixture
def clone(rollout_python, tmp_path) -> Path:
    make = partial(_clone_with_the_quickstart, rollout_python=rollout_python)
    made = sanity_inputs.made_once("page_walk", make)
    return Path(shutil.copytree(made / "clone", tmp_path / "clone", symlinks=True))


def _walked_pages() -> list[Path]:
    with_commands = [page for page in PAGES if any(block.is_command and not block.reason for block in blocks(page))]
    assert {*_WALKED} <= {_name(page) for page in with_commands}, "WALKED_PAGES names a page without commands"
    return [page for page in with_commands if not _WALKED or _name(page) in _WALKED]


@SLOW
@pytest.mark.timeout(4 * _BLOCK_TIMEOUT_S)
@pytest.mark.parametrize("page", _walked_pages(), ids=_name)
def test_every_command_of_the_page_runs(page, clone):
    for block in blocks(page):
        if block.file:
            (clone / block.file).parent.mkdir(parents=True, exist_ok=True)
            (clone / block.file).write_text(block.text, encoding="utf-8")
        if not block.is_command:
            continue
        if block.reason:
            print(f"{block}: not run: {block.reason}")
            continue
        started = time.monotonic()
        ran = _type(block.text, clone)
        print(f"{block}: exit code {ran.returncode} after {time.monotonic() - started:.0f} s\n{block.text}")
        assert ran.returncode == 0, f"{block}:\n{block.text}\n{ran.stdout[-3000:]}"
    for metrics in clone.glob("runs/**/metrics.jsonl"):
        assert sanity_inputs.read_lines(metrics)
    assert {"output", "rank_0", "kernel_meta"}.isdisjoint(os.listdir(clone)), "logs of MindFormers and MindSpore"
