"""Real msrun jobs of a test's own workers: the launcher in a process of its own, and everything that it started."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

from mindrlhf.system.processes import read_environment, read_status

LAUNCHER = """
import sys
from mindrlhf.launch.launch import launch
sys.exit(launch(sys.argv[3:], int(sys.argv[2]), sys.argv[1], **{{'grace_s': 3.0, **{options!r}}}))
"""


class Job:
    """A launcher in a process of its own, all of whose descendants can be told by a mark in their environment."""

    def __init__(self, tmp_path: Path, worker: str, num_workers: int, **options: object) -> None:
        self.dir = tmp_path
        self.mark = uuid.uuid4().hex
        (tmp_path / "worker.py").write_text(textwrap.dedent(worker))
        code = LAUNCHER.format(options=options)
        argv = [sys.executable, "-c", code, str(tmp_path / "logs"), str(num_workers), str(tmp_path / "worker.py")]
        self.launcher = subprocess.Popen(
            argv,
            env=os.environ | {"MINDRLHF_TEST_MARK": self.mark},
            stdout=(tmp_path / "out").open("w"),
            stderr=(tmp_path / "err").open("w"),
        )

    def wait(self, timeout_s: float) -> int:
        return self.launcher.wait(timeout=timeout_s)

    def wait_for_rank(self, rank: int) -> int:
        deadline = time.monotonic() + 120
        while not (self.dir / f"pid_{rank}").exists():
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.errors()
            time.sleep(0.05)
        return int((self.dir / f"pid_{rank}").read_text())

    def running(self) -> list[int]:
        """Return the pids of the launcher and everything it started that still run."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        marked = [pid for pid in pids if read_environment(pid).get("MINDRLHF_TEST_MARK") == self.mark]
        return [pid for pid in marked if (status := read_status(pid)) is not None and status.returncode is None]

    def output(self) -> str:
        return (self.dir / "out").read_text()

    def errors(self) -> str:
        return (self.dir / "err").read_text()

    def clean_up(self) -> None:
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()
