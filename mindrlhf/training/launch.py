"""Starting the ranks of a run with ``msrun``, following them, and ending all of them whatever happens.

Nothing here imports MindSpore: the launcher stays small beside the ranks. A single rank is started without
``msrun``, which saves the start of a scheduler and of ``msrun`` itself (two more imports of MindSpore).
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.training import processes
from mindrlhf.training.launch_logs import LogFollower

SCHEDULER = "the scheduler"
# A rank that ended before its environment could be read.
_UNNAMED = "a rank"
_LOG_NAMES = {SCHEDULER: "scheduler.log", _UNNAMED: "worker_*.log"}
_POLL_INTERVAL_S = 0.1
_ORPHAN_GRACE_S = 2.0
_KILL_TIMEOUT_S = 10.0
_KILL_INTERVAL_S = 0.05
# msrun looks at its workers once a second; a worker it has buried without a word of complaint ended well.
_MSRUN_REPORT_DELAY_S = 3.0
_SCHEDULER_DELAY_S = 3.0
_MSRUN_COMPLAINT = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")
_CLUSTER_VARIABLES = frozenset(
    {"MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_TOPO_TIMEOUT"}
    | {"RANK_ID", "RANK_SIZE", "DEVICE_ID"}
)
_CLUSTER_DEFAULTS = {
    # Also the longest wait of a collective on CPU, so it must exceed the worst skew between ranks (one rank starts
    # the rollout server, another may still compile). The launcher itself notices dead ranks, within a second.
    "MS_NODE_TIMEOUT": "1800",
    # Seconds between the messages by which ranks learn that the cluster stands (MindSpore's own default: 3 to 5).
    "MS_RETRY_INTERVAL_LOWER": "1",
    "MS_RETRY_INTERVAL_UPPER": "1",
    # Ascend's default of 120 s is shorter than the start of a large model's rollout server.
    "HCCL_CONNECT_TIMEOUT": "1800",
}


def launch(
    command: Sequence[str],
    num_workers: int,
    log_dir: str | Path,
    *,
    env: Mapping[str, str] | None = None,
    master_port: int | None = None,
    grace_s: float = 5.0,
    out: TextIO | None = None,
) -> int:
    """Run ``python COMMAND`` on ``num_workers`` ranks of this machine and return an exit code.

    Rank ``i`` writes ``log_dir/worker_i.log``; rank 0's lines appear on ``out`` (default: standard output), other
    ranks' warnings and errors after ``[rank i]``. When a rank fails or this process gets SIGINT, SIGTERM or SIGHUP,
    every rank gets SIGTERM and, after ``grace_s`` seconds, SIGKILL; so does everything they have started. Children
    that other threads of this process start meanwhile count as the run's.

    Args:
        command: the interpreter's arguments: ``["main.py", ...]`` or ``["-m", "package.module", ...]``.
        num_workers: ranks on this machine; more than one goes through ``msrun``.
        log_dir: made if missing; logs of an earlier launch in it are removed.
        env: added to this process's environment for the ranks; wins over this launcher's defaults.
        master_port: TCP port of the scheduler; a free one when None.

    Returns:
        0 when every rank ended with 0; the exit code of the first rank that failed (128 + signal number if a signal
        killed it); 128 + signal number when interrupted. The cause and the log file are named on standard error.

    Raises:
        UserError: ``num_workers`` is below 1, or this interpreter has no ``msrun`` or no ``python`` beside it.
        RunFailure: processes of the run could not be killed.
    """
    if num_workers < 1:
        raise UserError(f"the number of workers is {num_workers}; give at least 1")
    log_dir = Path(log_dir).absolute()
    log_dir.mkdir(parents=True, exist_ok=True)
    for stale in [*log_dir.glob("worker_*.log"), log_dir / "scheduler.log", log_dir / "msrun.log"]:
        stale.unlink(missing_ok=True)
    environment = worker_environment(num_workers, env or {})
    if num_workers == 1:
        environment |= {"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "0"}
        argv, root_log = [sys.executable, *command], log_dir / "worker_0.log"
    else:
        argv = _msrun_argv(command, num_workers, log_dir, master_port or find_free_port())
        root_log = log_dir / "msrun.log"
    bystanders = {status.pid for status in processes.descendants(os.getpid())}
    with processes.adopting_orphans(), _recorded_signals() as received:
        with root_log.open("wb") as log_file:
            root = _start(argv, environment, log_file)
        run = _Run(root, num_workers, log_dir, bystanders, received, out or sys.stdout)
        try:
            return run.watch()
        finally:
            run.stop(grace_s)


def worker_environment(num_workers: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: this process's, our defaults where nothing is set, and ``env`` over all."""
    inherited = {name: value for name, value in os.environ.items() if name not in _CLUSTER_VARIABLES}
    num_cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores // num_workers)),
        # Threads that spin while they wait take the cores that the other ranks and the rollout server need.
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        **_CLUSTER_DEFAULTS,
    }
    environment = defaults | inherited | dict(env)
    # msrun starts whatever `python` comes first on PATH.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    environment[processes.LAUNCHER_PID_VARIABLE] = str(os.getpid())
    return environment


def find_free_port() -> int:
    """Return a TCP port that is free now and that the kernel will not hand to another program's outgoing connection."""
    first_ephemeral_port = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(10_000, first_ephemeral_port) or range(10_000, 65_536)
    for port in random.SystemRandom().sample(candidates, k=len(candidates)):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise RunFailure(f"no free TCP port for the msrun scheduler among {len(candidates)} from 10000 on")


def _msrun_argv(command: Sequence[str], num_workers: int, log_dir: Path, master_port: int) -> list[str]:
    bin_dir = Path(sys.executable).parent
    for name in ("msrun", "python"):
        if not (bin_dir / name).exists():
            raise UserError(f"{bin_dir} has no {name}: run bash scripts/setup.sh and use the mindrlhf of its .venv")
    return [
        sys.executable,
        str(bin_dir / "msrun"),
        f"--worker_num={num_workers}",
        f"--local_worker_num={num_workers}",
        "--master_addr=127.0.0.1",
        f"--master_port={master_port}",
        "--join=True",
        f"--log_dir={log_dir}",
        # Ranks from 0 on would be shown by processes of msrun's own; this one does not exist.
        f"--tail_worker_log={num_workers}",
        "python",
        *command,
    ]


def _start(argv: list[str], environment: dict[str, str], log_file: BinaryIO) -> subprocess.Popen:
    launcher_pid = os.getpid()
    return subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log_file,
        stderr=subprocess.STDOUT,
        # Ctrl-C in a terminal reaches this process only, which then ends the ranks in order.
        start_new_session=True,
        preexec_fn=lambda: processes.die_with_parent(launcher_pid),
    )


@contextlib.contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Yield a list that grows by the number of each SIGINT, SIGTERM and SIGHUP this process receives meanwhile."""
    received: list[int] = []
    previous = {}
    # Outside the main thread Python allows no handlers, and no signal is delivered there either.
    with contextlib.suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous[number] = signal.signal(number, lambda signal_number, _: received.append(signal_number))
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Run:
    """The processes of one launch: ``root`` is msrun, or rank 0 itself when it is alone."""

    def __init__(
        self,
        root: subprocess.Popen,
        num_workers: int,
        log_dir: Path,
        bystanders: set[int],
        received_signals: list[int],
        out: TextIO,
    ) -> None:
        self._root = root
        self._num_workers = num_workers
        self._log_dir = log_dir
        self._bystanders = bystanders
        self._received_signals = received_signals
        self._names = {root.pid: _rank_name(0)} if num_workers == 1 else {}
        self._returncodes: dict[int, int] = {}
        self._first_seen_s: dict[int | str, float] = {}
        self._follower = LogFollower({rank: log_dir / f"worker_{rank}.log" for rank in range(num_workers)}, out)

    def watch(self) -> int:
        """Follow the run until every rank has ended well, one has failed or a signal came; return the exit code."""
        start_s = time.monotonic()
        while True:
            self._update()
            self._follower.poll()
            if self._received_signals:
                _say(f"{signal.Signals(self._received_signals[0]).name} received: stopping all processes")
                return 128 + self._received_signals[0]
            if self._root.pid not in self._names and (self._root.poll() or 0) < 0:
                _say(f"msrun {_describe(self._root.returncode)}; logs: {self._log_dir}")
                return _exit_code(self._root.returncode)
            culprit = self._find_culprit()
            # What ends the scheduler (a missing module, a bad config) mostly ends the ranks too, and they tell more.
            if culprit is not None and (culprit[0] != SCHEDULER or self._has_lasted(SCHEDULER, _SCHEDULER_DELAY_S)):
                return self._report_failure(*culprit, time.monotonic() - start_s)
            if sum(self._names[pid] != SCHEDULER for pid in self._returncodes) == self._num_workers:
                return 0
            if self._root.pid not in self._names and self._root.poll() is not None:
                if self._root.returncode != 0:
                    _say(f"msrun {_describe(self._root.returncode)}; see {self._log_dir}/msrun.log")
                return _exit_code(self._root.returncode)
            time.sleep(_POLL_INTERVAL_S)

    def stop(self, grace_s: float) -> None:
        """End every process of the run: the ranks by SIGTERM first, then whatever is left, by SIGKILL at the last."""
        if self._root.pid not in self._names and self._root.poll() is None:
            # msrun would answer the end of one worker by killing the others before they could clean up.
            self._root.send_signal(signal.SIGSTOP)
        self._terminate(lambda: [pid for pid in self._running() if pid in self._names], grace_s)
        # What a dead rank leaves behind (its rollout server) is now a child of this process.
        orphan_grace_s = min(grace_s, _ORPHAN_GRACE_S)
        self._terminate(lambda: [pid for pid in self._running() if pid != self._root.pid], orphan_grace_s)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while remaining := self._running():
            if time.monotonic() > deadline:
                raise RunFailure(f"processes {sorted(remaining)} of this run could not be killed; end them by hand")
            processes.signal_all(remaining, signal.SIGKILL)
            time.sleep(_KILL_INTERVAL_S)
        self._follow_if_possible(final=True)

    def _terminate(self, list_running: Callable[[], list[int]], grace_s: float) -> None:
        """Send SIGTERM and wait until the processes are gone, the grace is over or the user interrupts again."""
        deadline = time.monotonic() + grace_s
        processes.signal_all(list_running(), signal.SIGTERM)
        while list_running() and time.monotonic() < deadline and len(self._received_signals) < 2:
            self._follow_if_possible()
            time.sleep(_POLL_INTERVAL_S)

    def _follow_if_possible(self, *, final: bool = False) -> None:
        # A closed terminal or pipe must not keep the processes alive.
        with contextlib.suppress(OSError, ValueError):
            self._follower.poll(final=final)

    def _running(self) -> list[int]:
        """Return the pids of the run that still run; its dead that are this process's to bury are buried."""
        self._root.poll()
        running = []
        for status in processes.descendants(os.getpid(), except_trees=self._bystanders):
            if status.returncode is None:
                running.append(status.pid)
            elif status.parent_pid == os.getpid() and status.pid != self._root.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(status.pid, os.WNOHANG)
        return running

    def _update(self) -> None:
        """Learn the names of new workers and how ended ones ended."""
        if self._root.pid in self._names:
            if self._root.poll() is not None:
                self._returncodes[self._root.pid] = self._root.returncode
            return
        if len(self._names) < self._num_workers + 1:
            self._find_names()
        for pid in self._names.keys() - self._returncodes.keys():
            if (returncode := self._find_returncode(pid)) is not None:
                self._returncodes[pid] = returncode

    def _find_names(self) -> None:
        for status in processes.descendants(self._root.pid):
            if status.pid not in self._names and status.parent_pid == self._root.pid:
                environment = processes.read_environment(status.pid)
                # Between fork and exec a child still has msrun's own environment, which names neither.
                if environment.get("MS_ROLE") == "MS_SCHED":
                    self._names[status.pid] = SCHEDULER
                elif "RANK_ID" in environment:
                    self._names[status.pid] = _rank_name(int(environment["RANK_ID"]))

    def _find_returncode(self, pid: int) -> int | None:
        """Return how a child of msrun ended: from its zombie or, if msrun was quicker, from what msrun wrote."""
        status = processes.read_status(pid)
        if status is not None:
            return status.returncode
        if (returncode := self._read_complaints().get(pid)) is not None:
            return returncode
        return 0 if self._has_lasted(pid, _MSRUN_REPORT_DELAY_S) else None

    def _has_lasted(self, event: int | str, delay_s: float) -> bool:
        """Return whether ``event`` was first asked about at least ``delay_s`` seconds ago."""
        now_s = time.monotonic()
        return now_s - self._first_seen_s.setdefault(event, now_s) >= delay_s

    def _read_complaints(self) -> dict[int, int]:
        """Return the exit codes of the workers that msrun has found dead, by pid."""
        text = (self._log_dir / "msrun.log").read_text(errors="replace")
        return {int(pid): int(returncode) for pid, returncode in _MSRUN_COMPLAINT.findall(text)}

    def _find_culprit(self) -> tuple[str, int] | None:
        """Return the name and exit code of the process that failed first, or None when none has failed."""
        failed = {pid: returncode for pid, returncode in self._returncodes.items() if returncode != 0}
        if self._root.pid not in self._names and (complaints := self._read_complaints()):
            # Having complained of one worker, msrun kills the others: those did not fail.
            failed = {pid: code for pid, code in failed.items() if code != -signal.SIGKILL} | complaints
        if not failed:
            return None
        # A rank that a signal killed is the cause; what fails with an exit code in the same instant is its victim.
        pid = min(failed, key=lambda pid: (failed[pid] > 0, self._names.get(pid) == SCHEDULER))
        return self._names.get(pid) or self._name_by_elimination(), failed[pid]

    def _name_by_elimination(self) -> str:
        """Return the name of a worker that died before its environment could be read: the one that no other has."""
        missing = {SCHEDULER, *map(_rank_name, range(self._num_workers))} - set(self._names.values())
        return missing.pop() if len(missing) == 1 else _UNNAMED

    def _report_failure(self, name: str, returncode: int, elapsed_s: float) -> int:
        # The last lines of a failing rank may still be on their way to its log.
        time.sleep(_POLL_INTERVAL_S)
        self._follower.poll()
        log_name = _LOG_NAMES.get(name) or f"{name.replace('rank ', 'worker_')}.log"
        _say(f"{name} {_describe(returncode)} after {elapsed_s:.0f} s; its log: {self._log_dir / log_name}")
        return _exit_code(returncode)


def _rank_name(rank: int) -> str:
    return f"rank {rank}"


def _describe(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    hint = " (kill -9, or the kernel when memory ran out)" if returncode == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-returncode).name}{hint}"


def _exit_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def _say(message: str) -> None:
    print(f"mindrlhf: {message}", file=sys.stderr, flush=True)
