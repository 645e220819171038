"""Runs in poor surroundings: without variables, home, a place for temporary files, shared memory, or lscpu."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import sanity_inputs
from slow_tests import SLOW

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 400  # generous: other work may load the machine
# What only the tests need, to find the package under test and to leave the other tests a processor.
KEPT = ("PYTHONPATH", "OMP_NUM_THREADS")


def train(inputs: Path, output_dir: Path, *options: object, prefix: tuple[str, ...] = (), **environment: str) -> None:
    """Train for two steps with nothing but ``environment``; ``prefix`` is put before the command."""
    values = {"run__max_steps": 2, "observe__sinks": "[]"}
    arguments = sanity_inputs.overrides(inputs, output_dir, **values)
    command = sanity_inputs.command("train", "examples/sanity/config.yaml", *arguments, *options)
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    finished = subprocess.run(
        [*prefix, *command],
        cwd=sanity_inputs.REPOSITORY,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert len(sanity_inputs.read_lines(output_dir / "metrics.jsonl")) >= 2
    assert (output_dir / "final" / "model.safetensors").is_file()


def path_without_lscpu(directory: Path) -> str:
    """Return a PATH of links to all programs but ``lscpu``."""
    directory.mkdir()
    for folder in os.get_exec_path():
        for program in os.listdir(folder) if os.path.isdir(folder) else ():
            if program != "lscpu" and not (directory / program).is_symlink():
                (directory / program).symlink_to(os.path.join(folder, program))
    assert shutil.which("sh", path=str(directory)) and not shutil.which("lscpu", path=str(directory))
    return str(directory)


def small_shared_memory(size: str = "64m") -> tuple[str, ...]:
    """Return what is put before a command to give it a small /dev/shm; skip where this is forbidden."""
    mount = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", mount, "sh")
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("needs the right to mount in a namespace of its own")
    return prefix


@SLOW
def test_a_run_without_variables_home_temporary_directory_and_lscpu(sanity_dir, tmp_path):
    """All at once: each alone is a slow test."""
    environment = {"LC_ALL": "C", "TMPDIR": "/proc/1", "PATH": path_without_lscpu(tmp_path / "bin")}
    train(sanity_dir, tmp_path / "run ü", **environment)


@SLOW
def test_two_ranks_without_the_directories_that_variables_name(sanity_dir, tmp_path):
    # A run as root makes a home that is not there, so that must be a place of the test's own.
    missing = str(tmp_path / "missing")
    train(sanity_dir, tmp_path / "run", "--workers", 2, HOME=missing, TMPDIR=missing)


@SLOW
def test_a_run_with_little_shared_memory(sanity_dir, tmp_path):
    train(sanity_dir, tmp_path / "run", "--workers", 2, prefix=small_shared_memory(), **os.environ)
