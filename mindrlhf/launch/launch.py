"""Starting the ranks of a run with ``msrun``, following them, and ending all of them whatever happens.

Nothing here imports MindSpore: the launcher stays small beside the ranks. A single rank is started without
``msrun``, which saves the start of a scheduler and of ``msrun`` itself (two more imports of MindSpore).
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from mindrlhf.errors import STOPPED, RunFailure, UserError
from mindrlhf.launch.failure_report import describe_end, exit_code, failure_report, log_name, say
from mindrlhf.launch.health import HealthMonitor
from mindrlhf.launch.joining import JoiningWatch, may_be_a_foreign_connections_doing
from mindrlhf.launch.logs import LogFollower
from mindrlhf.launch.machine import msrun_argv
from mindrlhf.launch.nodes.secret import SECRET_VARIABLE
from mindrlhf.launch.peers import ALONE, Peers
from mindrlhf.launch.processes import POLL_INTERVAL_S, RunProcesses, rank_name
from mindrlhf.launch.stages import StageLines
from mindrlhf.system import heartbeat, processes
from mindrlhf.system.child import Child
from mindrlhf.system.ports import find_free_port
from mindrlhf.system.processor import openblas_environment

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_DUMP_TIME_S = 1.0
_CLUSTER_VARIABLES = frozenset(
    {"MS_ROLE", "MS_NODE_ID", SECRET_VARIABLE, "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_TOPO_TIMEOUT"}
    | {"RANK_ID", "RANK_SIZE", "DEVICE_ID", "RANK_TABLE_FILE"}
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
    # By default all processes on an NPU take one port of it (16666) and the same ones of its host, and a rollout server
    # has processes there too (CANN, environment variables).
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
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
    hang_timeout_s: float = 0.0,
    start_timeout_s: float = 0.0,
    computes_on_cpu: bool = False,
    rank_0_signals: Collection[int] = (),
    advice: Callable[[], str] = lambda: "",
    advice_after_mistake: Callable[[], str] | None = None,
    says_stages: bool = False,
    peers: Peers = ALONE, joins_alone: bool = False,
) -> int:  # fmt: skip
    """Run ``python COMMAND`` on ``num_workers`` ranks of this machine and return an exit code.

    Rank ``i`` writes ``log_dir/worker_i.log``. When a rank fails or hangs or this process gets SIGINT, SIGTERM or
    SIGHUP, every rank gets SIGHUP and, after ``grace_s`` seconds, SIGKILL; so does everything they have started.

    Args:
        command: the interpreter's arguments: ``["main.py", ...]`` or ``["-m", "package.module", ...]``.
        num_workers: ranks on this machine; through ``msrun``, but for one in all that does not ``joins_alone``.
        log_dir: made if missing; logs of an earlier launch in it go to ``attempt_1`` and so on below it.
        env, master_port: for the ranks, over this process's; TCP port of the scheduler, a free one when None.
        hang_timeout_s, start_timeout_s: longest time without progress of rank 0, and until all ranks met; 0: no limit.
        computes_on_cpu: the ranks meet as MindSpore's do on a CPU; see :class:`mindrlhf.launch.joining.Rouser`.
        rank_0_signals: of SIGTERM and SIGUSR1, those that rank 0 gets, once it listens, instead of ending the run;
            SIGTERM has it end the run in its own time, once it has trained a step, and another one changes nothing.
        advice, advice_after_mistake: last line of a failure's report, or of one with ``UserError.exit_code``.
        says_stages: tell what rank 0 does (:mod:`mindrlhf.launch.stages`).
        peers: launchers of the run's other nodes, each of which starts as many ranks.

    Returns:
        0 when every rank here ended with 0; the exit code of the first that failed on any node (128 + signal number if
        a signal killed it), 1 for one that hung; 128 + signal number when interrupted, STOPPED by a SIGTERM that is for
        rank 0. Standard error has the cause.

    Raises:
        UserError, RunFailure: there is no ``msrun``; processes could not be killed.
    """
    log_dir, advices = _prepared(Path(log_dir).absolute(), num_workers), (advice, advice_after_mistake or advice)
    bystanders = {status.pid for status in processes.descendants(os.getpid())}
    received, may_repeat = [], start_timeout_s > 0 and num_workers > 1 and peers.num_nodes == 1
    with processes.adopting_orphans(), processes.handling(_SIGNALS, lambda number, _: received.append(number)):
        while True:
            port = peers.scheduler_port or master_port or find_free_port()
            root = _start(command, num_workers, log_dir, env or {}, port, peers, joins_alone)
            follower = _follower(log_dir, peers.ranks(num_workers), out or sys.stdout, says_stages)
            health = HealthMonitor(log_dir, hang_timeout_s)
            joining = JoiningWatch(num_workers, start_timeout_s, peers, rouses=computes_on_cpu)
            ranks = RunProcesses(root, num_workers, log_dir, bystanders, peers, joins_alone)
            run = _Watch(ranks, follower, health, joining, port, received, rank_0_signals, log_dir, *advices, peers)
            if (code := run.watch_to_the_end(grace_s, may_repeat=may_repeat)) is not None:
                return code
            say(f"starting the ranks once more, on another port; logs of the first start: {keep_logs(log_dir)}")
            may_repeat, master_port = False, None


def _follower(log_dir: Path, ranks: range, out: TextIO, says_stages: bool) -> LogFollower:
    logs = {rank: log_dir / log_name(rank_name(rank)) for rank in ranks}
    # Only the node of rank 0 sees what rank 0 does.
    return LogFollower(logs, out, StageLines(out) if says_stages and 0 in ranks else None)


def _prepared(log_dir: Path, num_workers: int) -> Path:
    """Return the directory for the logs of a launch, made, and with those of an earlier one put aside."""
    log_dir.mkdir(parents=True, exist_ok=True)
    if launch_files(log_dir):
        keep_logs(log_dir)
    return log_dir


def launch_files(log_dir: Path) -> list[Path]:
    """Return what one launch leaves in ``log_dir``: the logs of its processes and their heartbeats."""
    names = ("*.log", "heartbeat_*.json")
    return [path for name in names for path in sorted(log_dir.glob(name))]


def keep_logs(log_dir: Path) -> Path:
    """Move what a launch has left in ``log_dir`` into ``attempt_1`` and so on below it, and return where."""
    number = 1
    while (log_dir / f"attempt_{number}").exists():
        number += 1
    kept = log_dir / f"attempt_{number}"
    kept.mkdir(parents=True)
    for path in launch_files(log_dir):
        path.rename(kept / path.name)
    return kept


def worker_environment(num_workers: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: this process's, our defaults where nothing is set, and ``env`` over all."""
    inherited = {name: value for name, value in os.environ.items() if name not in _CLUSTER_VARIABLES}
    num_cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, num_cores // num_workers)),
        # Threads that spin while they wait take the cores that the other ranks and the rollout server need.
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        **openblas_environment(),
        **_CLUSTER_DEFAULTS,
    }
    environment = defaults | inherited | dict(env)
    # msrun starts whatever `python` comes first on PATH.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    environment[processes.LAUNCHER_PID_VARIABLE] = str(os.getpid())
    return environment


def _start(
    command: Sequence[str],
    num_workers: int,
    log_dir: Path,
    env: Mapping[str, str],
    master_port: int,
    peers: Peers,
    joins_alone: bool,
) -> Child:
    """Start msrun, or the only rank itself."""
    environment = worker_environment(num_workers, {**env, **peers.environment}) | {
        heartbeat.DIRECTORY_VARIABLE: str(log_dir)
    }
    is_alone = num_workers * peers.num_nodes == 1 and not joins_alone
    if is_alone:
        environment |= {"RANK_ID": "0", "RANK_SIZE": "1", "DEVICE_ID": "0"}
        argv, log_path = [sys.executable, *command], log_dir / "worker_0.log"
    else:
        argv = msrun_argv(command, num_workers, log_dir, master_port, peers)
        log_path = log_dir / "msrun.log"
    launcher_pid = os.getpid()
    return Child(
        argv,
        environment=environment,
        output=log_path,
        prepare=lambda: _begin(launcher_pid, ignores_sigterm=not is_alone),
    )


def _begin(launcher_pid: int, *, ignores_sigterm: bool) -> None:
    """Prepare a child: a signal to all processes of a job must not end msrun and its scheduler before rank 0 saved."""
    processes.die_with_parent(launcher_pid)
    if ignores_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@dataclass(eq=False)
class _Watch:
    """Follows the processes of one launch until they have ended, and says why when that was no good end."""

    run: RunProcesses
    follower: LogFollower
    health: HealthMonitor
    joining: JoiningWatch
    port: int
    received_signals: list[int]
    rank_0_signals: Collection[int]
    log_dir: Path
    advice: Callable[[], str]
    advice_after_mistake: Callable[[], str]
    peers: Peers
    num_handled_signals: int = 0
    is_ending: bool = False  # rank 0 was asked to end the run
    is_stopped: bool = False  # a signal ends all
    start_s: float = field(default_factory=time.monotonic)

    def watch_to_the_end(self, grace_s: float, *, may_repeat: bool) -> int | None:
        """Follow the run until every rank has ended well, one has failed or a signal came, and end what is left of it.

        Returns:
            The exit code; with ``may_repeat`` None when the ranks did not find each other for a reason that another
            port may mend.
        """
        try:
            return self._watch(may_repeat=may_repeat)
        finally:
            self._end(grace_s)

    def _watch(self, *, may_repeat: bool) -> int | None:
        while True:
            self.run.update()
            activities = self.health.activities()
            self.joining.rouser.rouse(activities, self.run.rank_pids())
            self.follower.poll(activity=activities.get("rank 0", ""), done=self.health.progress())
            for number in self.received_signals[self.num_handled_signals :]:
                self.num_handled_signals += 1
                if not self._handle(number):
                    say(f"{signal.Signals(number).name} received: stopping all processes")
                    if advice := self.advice():
                        print(f"  {advice}", file=sys.stderr, flush=True)
                    return self._code(128 + number)
            for number in self.peers.asked_signals():
                if not self._handle(number):
                    say(f"{signal.Signals(number).name} received by another node: stopping all processes")
                    return self._code(128 + number)
            if (self.run.msrun_returncode or 0) < 0:
                return self._report_end("msrun", self.run.msrun_returncode)
            if (culprit := self.run.find_culprit()) is not None:
                meeting = self.joining.look(self.health.activities())
                if may_repeat and may_be_a_foreign_connections_doing(*culprit, meeting):
                    say(f"{culprit[0]} {describe_end(culprit[1])} before the ranks had found each other")
                    return None
                return self._report_end(*culprit)
            if self.run.is_complete:
                return 0
            if (ending := self.peers.ending()) is not None:
                say(ending.line)
                return ending.code
            if (returncode := self.run.msrun_returncode) is not None:
                return self._report_end("msrun", returncode) if returncode else 0
            if (hang := self._find_hang()) is not None:
                name, how, may_be_mended = hang
                if may_repeat and may_be_mended:
                    say(f"{name} {how}")
                    return None
                return self._report_hang(name, how)
            time.sleep(POLL_INTERVAL_S)

    def _find_hang(self) -> tuple[str, str, bool] | None:
        """Return who hangs, how, and whether another port may mend it; None when nobody does."""
        hang = self.health.find_hang(self.run.rank_pids())
        if hang is None and not self.joining.is_late():
            return None
        meeting = self.joining.look(self.health.activities())
        if meeting.is_over:
            return (*hang, False) if hang is not None else None
        waited_for, how = meeting.describe(self.port, self.peers.host)
        if hang is None:
            hang = waited_for, f"{how} (run.start_timeout_s is {self.joining.limit_s:g})"
        else:
            hang = hang[0], f"{hang[1]}; {waited_for} {how}"
        return (*hang, meeting.is_stuck_at_scheduler)

    def _end(self, grace_s: float) -> None:
        """End every process of the run; a second signal cuts the grace short."""
        patience = self.num_handled_signals + 1 if self.num_handled_signals else 2

        def wait() -> bool:
            self._follow_if_possible()
            return len(self.received_signals) < patience

        self.run.end(grace_s, wait)
        self._follow_if_possible(final=True)

    def _handle(self, number: int) -> bool:
        """Return whether the run goes on after a signal."""
        if number == signal.SIGTERM and self.is_ending:  # schedulers signal a job and its step, on each node
            return True
        if self.peers.node > 0 and number in self.rank_0_signals and not self.is_ending:
            self.is_ending = number == signal.SIGTERM
            self.peers.pass_on(number)
            return True
        pid = self.health.listening_pid("rank 0", self.run.rank_pids())
        is_heard = pid is not None and (number != signal.SIGTERM or self.health.saves())
        if number in self.rank_0_signals and is_heard and not self.is_ending:
            self.is_ending = number == signal.SIGTERM
            processes.signal_all([pid], number)
            return True
        self.is_stopped = number != signal.SIGUSR1
        return not self.is_stopped

    def _follow_if_possible(self, *, final: bool = False) -> None:
        if self.is_stopped:  # what ranks say that are ended in the middle of an import is no news
            return
        # A closed terminal or pipe must not keep the processes alive.
        with contextlib.suppress(OSError, ValueError):
            self.follower.poll(final=final)

    def _code(self, code: int) -> int:
        """Return an exit code, STOPPED for that of a SIGTERM which asks a run to end."""
        return STOPPED if code == 128 + signal.SIGTERM and signal.SIGTERM in self.rank_0_signals else code

    def _report_end(self, name: str, returncode: int) -> int:
        if (code := self._code(exit_code(returncode))) == STOPPED:
            say("SIGTERM ended the run before it had anything to save")
        else:
            # The last lines of a failing rank may still be on their way to its log.
            time.sleep(POLL_INTERVAL_S)
            self.follower.poll()
            is_mistake = returncode == UserError.exit_code
            advice = self.advice_after_mistake if is_mistake else self.advice
            shows_log = not is_mistake and not self.follower.shows_all_of(name)
            self._report(name, describe_end(returncode), advice(), shows_log=shows_log)
        return code

    def _report_hang(self, name: str, how: str) -> int:
        self._report(name, how, self.advice(), shows_log=False)
        pids = self.run.rank_pids()
        listening = [pid for rank in pids if (pid := self.health.listening_pid(rank, pids)) is not None]
        processes.signal_all(listening, heartbeat.DUMP_SIGNAL)
        # One that was stopped must go on to write its stacks.
        processes.signal_all(listening, signal.SIGCONT)
        time.sleep(_DUMP_TIME_S)
        return RunFailure.exit_code

    def _report(self, name: str, what: str, advice: str, *, shows_log: bool) -> None:
        elapsed_s, log_path = time.monotonic() - self.start_s, self.log_dir / log_name(name)
        found = name, what, elapsed_s, self.health.activities(), log_path, advice
        self._tell(failure_report(*found, shows_log=shows_log, shown=self.follower.shown))

    def _tell(self, text: str) -> None:
        say(text)
        self.peers.report(text)
