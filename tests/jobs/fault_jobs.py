"""Runs that are watched from outside and killed on purpose: what a rank does is read from its heartbeat."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import sanity_inputs

from mindrlhf.checkpoint.state import ARRAYS_NAME, STATE_NAME, read_state
from mindrlhf.system.heartbeat import Beat, heartbeat_path, read_beat
from mindrlhf.system.processes import read_environment, read_status, shared_memory_files, state

SHARED_MEMORY = Path("/dev/shm")
# On PYTHONPATH it gives Python processes the faults that no signal does.
FAULTY_START = Path(__file__).parent / "faulty_start"
_POLL_INTERVAL_S = 0.002  # each look takes processor time from the run that is watched
_STOPPED_STATES = ("T", "Z", "X", "")

# What a command line of each kind of process holds; the scheduler's is a rank's.
KINDS = {
    "launcher": "-m mindrlhf.cli ",
    "msrun": "/msrun ",
    "rank": "-m mindrlhf.training.main ",
    "rollout server": "-m mindrlhf.rollout.server ",
    "verifier worker": "mindrlhf.sandbox.worker ",
    "verifiers": "mindrlhf.sandbox.pool_node",
}
NUM_STEPS = 9
# The run that the faults disturb, and the one that nobody does.
RECIPE = {
    "run__max_steps": NUM_STEPS,
    # Two updates a step, a learning rate, a reference model and a KL weight that all move: each is state.
    "training__num_minibatches": 2,
    "optimizer__lr_schedule": "linear",
    "optimizer__end_lr": 0,
    "algorithm__beta": 0.05,
    "algorithm__kl_target": 0.001,
    "algorithm__sync_ref_model": "true",
    "algorithm__ref_model_sync_steps": 3,
    "rollout__restarts": 5,
    "evaluation__every_steps": 2,
    "evaluation__max_prompts": 8,
    "checkpoint__every_steps": 1,
    "checkpoint__keep_last": 3,
    "observe__groups_per_step": 16,
    "observe__sinks": "[]",
}
# Not of the run's course: times, memory and what depends on them.
_TIMES = ("timing/", "async/", "memory/", "e2e_tps", "update_tps", "vllm_tps")


class FaultProcess:
    """A `mindrlhf` command in the background, with a directory for temporary files of its own.

    All of its processes can be told by a mark in their environment.
    """

    def __init__(self, directory: Path, *arguments: object, environment: Mapping[str, str] | None = None):
        self.temporary_dir = directory / "tmp"
        self.temporary_dir.mkdir(exist_ok=True)
        self.mark = uuid.uuid4().hex
        self.out_path = directory / f"{self.mark}.txt"
        with self.out_path.open("w") as out:
            self.process = subprocess.Popen(
                sanity_inputs.command(*arguments),
                cwd=sanity_inputs.REPOSITORY,
                env={
                    **sanity_inputs.environment(self.mark),
                    "TMPDIR": str(self.temporary_dir),
                    **(environment or {}),
                },
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

    def kill(self) -> None:
        """End the command itself, as kill -9 does, and wait for it."""
        self.process.kill()
        self.process.wait()

    def running(self) -> dict[int, str]:
        """Return the command lines of all processes of the command that still run, by pid."""
        commands = {}
        for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
            if read_environment(pid).get("MINDRLHF_TEST_MARK") == self.mark and _is_running(pid):
                with contextlib.suppress(OSError):
                    commands[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return commands

    def leftovers(self) -> list[str]:
        """Return everything that a command must not leave behind, after a few seconds for what ends by itself."""
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


class FaultJob(FaultProcess):
    """A run that trains: `mindrlhf train` on the sanity recipe, if not told otherwise."""

    def __init__(
        self,
        directory: Path,
        output_dir: Path,
        arguments: list[object],
        environment: Mapping[str, str] | None = None,
        command: tuple[object, ...] = ("train", "examples/sanity/config.yaml"),
    ):
        self.output_dir = output_dir
        super().__init__(directory, *command, *arguments, environment=environment)

    @property
    def save_dir(self) -> Path:
        """Where the checkpoints lie."""
        return self.output_dir / "checkpoints"

    def beat(self, rank: int = 0) -> Beat | None:
        """Return what a rank said last: when it is dead, what it died in."""
        return read_beat(heartbeat_path(self.output_dir / "logs", rank))

    def is_in(self, stage: str, first_step: int = 1) -> bool:
        """Whether the living rank 0 is in a stage of a step."""
        beat = self.beat()
        if beat is None or not beat.activity.endswith(f": {stage}"):
            return False
        return int(beat.activity.split(":")[0].removeprefix("step ")) >= first_step and _is_running(beat.pid)

    @contextlib.contextmanager
    def frozen(self, is_reached: Callable[[], bool]) -> Iterator[None]:
        """Stop rank 0 at a moment for as long as the block takes; a moment that was missed is waited for again."""
        while True:
            self.wait_until(is_reached)
            pid = self.beat().pid
            os.kill(pid, signal.SIGSTOP)
            while state(pid) not in _STOPPED_STATES:
                time.sleep(_POLL_INTERVAL_S)
            if is_reached():
                break
            os.kill(pid, signal.SIGCONT)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def num_steps(self) -> int:
        """Return how many lines of metrics there are."""
        path = self.output_dir / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def unfinished(self) -> list[Path]:
        """Return the checkpoints that are being written, or were when the writer died."""
        return list(self.save_dir.glob(".step_*.partial"))

    def finished(self) -> list[Path]:
        """Return the checkpoints that have their name, the oldest first."""
        return sorted(self.save_dir.glob("step_*"))

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.beat(rank).pid, number)

    def server_pid(self) -> int:
        """Return the pid of the rollout server."""
        (pid,) = [pid for pid, words in self.running().items() if "-m mindrlhf.rollout.server " in words]
        return pid


def check_no_shared_memory_was_left(before: set[str]) -> None:
    """Compare with ``shared_memory()`` of an earlier time. What other tests are at work on goes within seconds."""
    deadline = time.monotonic() + 60
    while not shared_memory() <= before:
        assert time.monotonic() < deadline, f"left: {sorted(shared_memory() - before)}"
        time.sleep(1)


def shared_memory() -> set[str]:
    """Return the named segments of shared memory of this user that no process has open.

    Not semaphores: the C library makes one under a name that nobody else knows and renames it, so that 32 bytes remain
    of a process that is killed between the two (docs/runs.md#when-something-fails).
    """
    own = [
        path
        for path in SHARED_MEMORY.iterdir()
        if not path.name.startswith("sem.") and path.stat().st_uid == os.getuid()
    ]
    mapped = set().union(*(shared_memory_files(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()))
    return {str(path) for path in own} - mapped


def _is_running(pid: int) -> bool:
    status = read_status(pid)
    return status is not None and status.returncode is None


def metrics(output_dir: Path) -> list[dict]:
    """Return the metrics of a run that must repeat."""
    lines = sanity_inputs.read_lines(output_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith(_TIMES)} for line in lines]


def last_state(output_dir: Path) -> dict:
    """Return the last checkpoint's state, without where the run was written and what its server was told."""
    directory = output_dir / "checkpoints" / f"step_{NUM_STEPS:08d}"
    values = dataclasses.asdict(read_state(directory))
    del values["config"]["run"]["output_dir"], values["config"]["rollout"]["env"]
    progress = json.loads((directory / STATE_NAME).read_text())["progress"]
    return {**values, "progress": progress, "arrays": (directory / ARRAYS_NAME).read_bytes()}


def assert_same_run(output_dir: Path, undisturbed: Path) -> None:
    """Check that two runs have the same metrics, samples, state, weights and optimiser state, bit for bit."""
    assert metrics(output_dir) == metrics(undisturbed)
    assert (output_dir / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()
    assert last_state(output_dir) == last_state(undisturbed)
    last = Path("checkpoints") / f"step_{NUM_STEPS:08d}"
    shards = [last / part / "rank_0" / "checkpoint_0.safetensors" for part in ("model", "reference")]
    for name in (*shards, Path("final") / "model.safetensors"):
        assert (output_dir / name).read_bytes() == (undisturbed / name).read_bytes(), name
