"""Pretended machines (machines.sh): each has its own network, hostname, processes, /dev/shm and /tmp."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from mindrlhf.system.processes import read_environment, read_status

SCRIPT = Path(__file__).with_name("machines.sh")
SKIPPED = 77


class Machines:
    """Machines that run one shell script each, in which $NODE_RANK, $NODES and $MASTER_IP say where it runs.

    Args:
        directory: for their output; all machines see it.
        script: run by bash, in the current directory.
        keep: directories of /tmp that all machines see, beside ``directory``.
    """

    def __init__(
        self,
        directory: Path,
        script: str,
        num_nodes: int = 2,
        keep: tuple[Path, ...] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.directory = directory
        self.num_nodes = num_nodes
        self.mark = uuid.uuid4().hex
        self._script = (
            f"({script}) > {directory}/out_$NODE_RANK.txt 2>&1; code=$?; echo $code > {directory}/code_$NODE_RANK"
        )
        self._error_path = directory / "machines.txt"
        kept = [str(path) for path in (directory, *keep) if str(path).startswith("/tmp/")]
        with self._error_path.open("w") as out:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), "bash", "-c", f"{self._script}; exit $code"],
                env={
                    **os.environ,
                    **(environment or {}),
                    "NODES": str(num_nodes),
                    "KEEP": " ".join(kept),
                    "OMP_NUM_THREADS": "1",
                    "MINDRLHF_TEST_MARK": self.mark,
                },
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def wait(self, timeout_s: float) -> list[int | None]:
        """Wait until all have ended, and return their exit codes; None for one that did not live to say it."""
        if self.process.wait(timeout_s) == SKIPPED:
            pytest.skip(self._error_path.read_text().strip())
        return [self.code(node) for node in range(self.num_nodes)]

    def wait_for(self, condition, timeout_s: float = 300) -> None:
        """Wait until a condition holds while the machines run."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() == SKIPPED:
                pytest.skip(self._error_path.read_text().strip())
            assert self.process.poll() is None and time.monotonic() < end_s, self.all_text()
            time.sleep(0.1)

    def code(self, node: int) -> int | None:
        """Return how a machine's script ended; None while it runs, and when it was killed."""
        path = self.directory / f"code_{node}"
        return int(path.read_text()) if path.exists() and path.read_text().strip() else None

    def text(self, node: int) -> str:
        """Return what a machine's script has printed."""
        path = self.directory / f"out_{node}.txt"
        return path.read_text() if path.exists() else ""

    def all_text(self) -> str:
        """Return what all have printed."""
        texts = [f"--- machine {node}\n{self.text(node)}" for node in range(self.num_nodes)]
        return "\n".join([self._error_path.read_text(), *texts])

    def processes(self, node: int) -> dict[int, str]:
        """Return the command lines of the running processes of a machine by pid, its init aside."""
        found = {}
        for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
            environment, status = read_environment(pid), read_status(pid)
            own = environment.get("MINDRLHF_TEST_MARK") == self.mark and environment.get("NODE_RANK") == str(node)
            if own and status is not None and status.returncode is None:
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def find(self, node: int, words: str, without: str = "\0") -> int:
        """Return the pid of the first process of a machine whose command line has these words, but not the others."""
        return min(pid for pid, line in self.processes(node).items() if words in line and without not in line)

    def cut(self, node: int) -> None:
        """Take a machine's network interface down."""
        pid = min(self.processes(node))
        subprocess.run(["nsenter", "-t", str(pid), "-n", "ip", "link", "set", "eth0", "down"], check=True)

    def power_off(self, node: int) -> None:
        """Kill all processes of a machine at once, by its init."""
        init = read_status(min(self.processes(node))).parent_pid
        os.kill(init, signal.SIGKILL)

    def clean_up(self) -> None:
        """End what is left."""
        self.process.kill()
        self.process.wait()


def check_ends_with_its_starter(code: str, environment: Mapping[str, str] | None = None) -> None:
    """Kill a starter, and wait until the process that it has started, and all that this one has, are gone.

    Args:
        code: of the starter, in Python: prints the number of the process that it has started, and sleeps.
    """
    starting = {"stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", code], **starting) as starter:
        pid = int(starter.stdout.readline())
        children = []
        while not children:
            children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout.split()
        starter.kill()
    end_s = time.monotonic() + 60
    while any(Path(f"/proc/{one}").exists() for one in (pid, *children)):
        assert time.monotonic() < end_s
        time.sleep(0.05)
