"""Runs that are watched from outside and killed on purpose: what a rank does is read from its heartbeat."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import sanity_inputs

from mindrlhf.heartbeat import Beat, heartbeat_path, read_beat
from mindrlhf.training.processes import read_environment, read_status

SHARED_MEMORY = Path("/dev/shm")
_POLL_INTERVAL_S = 0.0005


class FaultJob:
    """A `mindrlhf train` in the background, with a directory for temporary files of its own.

    All of its processes can be told by a mark in their environment.
    """

    def __init__(self, directory: Path, output_dir: Path, arguments: list[object]):
        self.output_dir = output_dir
        self.temporary_dir = directory / "tmp"
        self.temporary_dir.mkdir(exist_ok=True)
        self.mark = uuid.uuid4().hex
        self.out_path = directory / f"{self.mark}.txt"
        with self.out_path.open("w") as out:
            self.process = subprocess.Popen(
                sanity_inputs.command("train", "examples/sanity/config.yaml", *arguments),
                cwd=sanity_inputs.REPOSITORY,
                env={**sanity_inputs.environment(self.mark), "TMPDIR": str(self.temporary_dir)},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def text(self) -> str:
        """Return what the command has printed."""
        return self.out_path.read_text()

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout_s)

    def wait_until(self, is_reached: Callable[[], bool], timeout_s: float = 400) -> None:
        """Watch for a moment that may be short."""
        deadline = time.monotonic() + timeout_s
        while not is_reached():
            assert time.monotonic() < deadline and self.process.poll() is None, self.text()
            time.sleep(_POLL_INTERVAL_S)

    def beat(self, rank: int = 0) -> Beat | None:
        """Return what a rank said last: when it is dead, what it died in."""
        return read_beat(heartbeat_path(self.output_dir / "logs", rank))

    def is_in(self, stage: str, first_step: int = 1) -> bool:
        """Whether the living lead is in a stage of a step."""
        beat = self.beat()
        if beat is None or not beat.activity.endswith(f": {stage}"):
            return False
        return int(beat.activity.split(":")[0].removeprefix("step ")) >= first_step and _is_running(beat.pid)

    def num_steps(self) -> int:
        """Return how many lines of metrics there are."""
        path = self.output_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def unfinished(self) -> list[Path]:
        """Return the checkpoints that are being written, or were when the writer died."""
        return list((self.output_dir / "checkpoints").glob(".step_*.partial"))

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.beat(rank).pid, number)

    def server_pid(self) -> int:
        """Return the pid of the rollout server."""
        (pid,) = [pid for pid, words in self.running().items() if "-m mindrlhf.rollout.server " in words]
        return pid

    def running(self) -> dict[int, str]:
        """Return the command lines of all processes of the run that still run, by pid."""
        commands = {}
        for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
            if read_environment(pid).get("MINDRLHF_TEST_MARK") == self.mark and _is_running(pid):
                with contextlib.suppress(OSError):
                    commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return commands

    def leftovers(self) -> list[str]:
        """Return everything that a run must not leave behind, after a few seconds for what ends by itself."""
        deadline = time.monotonic() + 10
        while (found := self._leftovers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _leftovers(self) -> list[str]:
        processes = [f"process {pid}: {words}" for pid, words in self.running().items()]
        # Sockets and shared memory with a name are files.
        return processes + [str(path) for path in self.temporary_dir.iterdir()]

    def clean_up(self) -> None:
        """End what is left."""
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def shared_memory() -> set[str]:
    """Return the named segments of shared memory of this user that no process has open."""
    own = [path for path in SHARED_MEMORY.iterdir() if path.stat().st_uid == os.getuid()]
    mapped = set()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                mapped |= {word for word in Path(f"/proc/{entry}/maps").read_text().split() if word.startswith("/dev")}
    return {str(path) for path in own} - mapped


def _is_running(pid: int) -> bool:
    status = read_status(pid)
    return status is not None and status.returncode is None
