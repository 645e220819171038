"""The processes of one launch: which is which, how they ended, which failed first, and ending all of them."""

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mindrlhf.errors import RunFailure
from mindrlhf.launch.peers import Peers
from mindrlhf.system import processes
from mindrlhf.system.child import Child
from mindrlhf.system.files import remove_unheld

SCHEDULER = "the scheduler"
# A rank that ended before its environment could be read.
UNNAMED = "a rank"
POLL_INTERVAL_S = 0.1
_ORPHAN_GRACE_S = 2.0
_KILL_TIMEOUT_S = 10.0
_KILL_INTERVAL_S = 0.05
# msrun looks at its workers once a second; a worker that it reaped without a complaint ended well.
_MSRUN_REPORT_DELAY_S = 3.0
_SCHEDULER_DELAY_S = 3.0
_MSRUN_COMPLAINT = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")


class RunProcesses:
    """The processes of one launch: ``root`` is msrun, or rank 0 itself when it is alone.

    Args:
        num_workers: ranks on this node.
        bystanders: children of this process that do not belong to the run; those that come later do.
        peers: the run's other nodes.
        joins_alone: one rank is not ``root`` either.
    """

    def __init__(
        self,
        root: Child,
        num_workers: int,
        log_dir: Path,
        bystanders: set[int],
        peers: Peers,
        joins_alone: bool = False,
    ) -> None:
        self._root = root
        self._num_workers = num_workers
        self._expected = {*map(rank_name, peers.ranks(num_workers)), *([SCHEDULER] if peers.node == 0 else [])}
        self._log_dir = log_dir
        self._bystanders = bystanders
        self._names = {root.pid: rank_name(0)} if num_workers * peers.num_nodes == 1 and not joins_alone else {}
        self._returncodes: dict[int, int] = {}
        self._first_seen_s: dict[int | str, float] = {}

    @property
    def is_complete(self) -> bool:
        """True once every rank has ended; ``find_culprit`` names those that failed."""
        return sum(self._names[pid] != SCHEDULER for pid in self._returncodes) == self._num_workers

    @property
    def msrun_returncode(self) -> int | None:
        """Return code of msrun; None while it runs and where there is none."""
        return None if self._root.pid in self._names else self._root.poll()

    def rank_pids(self) -> dict[str, int]:
        """Return the ranks that still run, as "rank 0" and so on."""
        running = {name: pid for pid, name in self._names.items() if pid not in self._returncodes}
        return {name: pid for name, pid in running.items() if name not in (SCHEDULER, UNNAMED)}

    def end(self, grace_s: float, wait: Callable[[], bool]) -> None:
        """End every process of the run: the ranks by SIGHUP first, then whatever is left, by SIGKILL at the last.

        Not by SIGTERM, which asks rank 0 for a checkpoint, nor by SIGINT, which MindSpore turns into SIGTERM.

        Args:
            wait: called while processes may end by themselves; False means that the user is out of patience.

        Raises:
            RunFailure: processes could not be killed.
        """
        if self._root.pid not in self._names and self._root.poll() is None:
            # msrun would answer the end of one worker by killing the others before they could clean up.
            processes.signal_all([self._root.pid], signal.SIGSTOP)
        self._ask(signal.SIGHUP, self._running_ranks, grace_s, wait)
        processes.signal_all(self._running_ranks(), signal.SIGKILL)
        # What a dead rank leaves behind (its rollout server) is now a child of this process.
        self._ask(signal.SIGTERM, self._running_others, min(grace_s, _ORPHAN_GRACE_S), wait)
        deadline = time.monotonic() + _KILL_TIMEOUT_S
        while remaining := self.pids():
            if time.monotonic() > deadline:
                raise RunFailure(f"processes {sorted(remaining)} of this run could not be killed; end them by hand")
            processes.signal_all(remaining, signal.SIGKILL)
            time.sleep(_KILL_INTERVAL_S)
        # Of a rollout server that was too slow to tidy up.
        remove_unheld(Path(tempfile.gettempdir()), processes.SERVER_PREFIX)

    def _ask(
        self, number: int, list_running: Callable[[], list[int]], grace_s: float, wait: Callable[[], bool]
    ) -> None:
        """Send a signal and wait until the processes are gone, the grace is over or the user loses patience."""
        deadline = time.monotonic() + grace_s
        processes.signal_all(list_running(), number)
        while list_running() and time.monotonic() < deadline and wait():
            time.sleep(POLL_INTERVAL_S)

    def _running_ranks(self) -> list[int]:
        return [pid for pid in self.pids() if pid in self._names]

    def _running_others(self) -> list[int]:
        return [pid for pid in self.pids() if pid != self._root.pid]

    def pids(self) -> list[int]:
        """Return the pids of the run that still run; its zombies that are this process's children are reaped."""
        self._root.poll()
        running = []
        for status in processes.descendants(os.getpid(), except_trees=self._bystanders):
            if status.returncode is None:
                running.append(status.pid)
            elif status.parent_pid == os.getpid() and status.pid != self._root.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(status.pid, os.WNOHANG)
        return running

    def update(self) -> None:
        """Learn the names of new workers and how ended ones ended."""
        if self._root.pid in self._names:
            if self._root.poll() is not None:
                self._returncodes[self._root.pid] = self._root.poll()
            return
        if len(self._names) < len(self._expected):
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
                    self._names[status.pid] = rank_name(int(environment["RANK_ID"]))

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
        text = (self._log_dir / "msrun.log").read_text(errors="replace", encoding="utf-8")
        return {int(pid): int(returncode) for pid, returncode in _MSRUN_COMPLAINT.findall(text)}

    def find_culprit(self) -> tuple[str, int] | None:
        """Return the name and exit code of the process that failed first, or None when none has failed."""
        culprit = self._first_failed()
        # What ends the scheduler (a missing module, a bad config) mostly ends the ranks too, and they tell more.
        if culprit is None or (culprit[0] == SCHEDULER and not self._has_lasted(SCHEDULER, _SCHEDULER_DELAY_S)):
            return None
        return culprit

    def _first_failed(self) -> tuple[str, int] | None:
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
        missing = self._expected - set(self._names.values())
        return missing.pop() if len(missing) == 1 else UNNAMED


def rank_name(rank: int) -> str:
    """Return what messages call a rank."""
    return f"rank {rank}"
