"""Detects that ranks do not find each other in time, and says who waits for whom.

MindSpore's ranks meet at its scheduler, which authenticates nobody: other programs that connect to its port delay a
start, and a program that was quicker to take the port prevents it. Such a start is tried once more, on another port.
"""

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mindrlhf.launch.failure_report import exit_code, is_worth_a_restart
from mindrlhf.launch.peers import ALONE, Peers
from mindrlhf.launch.processes import SCHEDULER, rank_name
from mindrlhf.system import heartbeat, processes
from mindrlhf.system.clock import WatchedTime

_ROUSE_INTERVAL_S = 0.2
# Each may cost a rank one of the tries that it has left, which are dozens.
_MAX_ROUSALS = 20
_CRASHES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


@dataclass(frozen=True)
class Meeting:
    """Ranks that look for the others, and ranks that have not begun to."""

    looking: tuple[str, ...]
    absent: tuple[str, ...]

    @property
    def is_over(self) -> bool:
        """True once all ranks have found each other."""
        return not self.looking and not self.absent

    @property
    def is_stuck_at_scheduler(self) -> bool:
        """True if the ranks wait for nothing but the scheduler."""
        return bool(self.looking) and not self.absent

    def describe(self, port: int, host: str = "127.0.0.1") -> tuple[str, str]:
        """Return the process that the others wait for, and who waits for whom."""
        looking = " and ".join(self.looking) or "nobody"
        wait = "wait" if len(self.looking) > 1 else "waits"
        if self.absent:
            return self.absent[0], f"has not begun to join: {looking} {wait} for {' and '.join(self.absent)}"
        return SCHEDULER, f"has not brought the ranks together: {looking} {wait} for it at {host}:{port}"


class JoiningWatch:
    """Watches the ranks until they have found each other.

    Args:
        num_workers: how many there are on this node; one alone has nobody to wait for.
        limit_s: how long it may take from now on; 0 means for ever, and that the ranks need not say where they are.
        peers: the run's other nodes.
        rouses: the ranks compute on CPU, so that ``rouser`` has something to do, on a node that knows them all.
    """

    def __init__(self, num_workers: int, limit_s: float, peers: Peers = ALONE, *, rouses: bool = False) -> None:
        self._names = [rank_name(rank) for rank in peers.ranks(num_workers)]
        self.limit_s = limit_s
        self.rouser = Rouser(num_workers if rouses and peers.num_nodes == 1 else 0)
        self._is_over = num_workers * peers.num_nodes == 1 or limit_s == 0
        self._time = WatchedTime()
        self._start_s = self._time.now_s()

    def look(self, activities: Mapping[str, str]) -> Meeting:
        """Return how far the ranks are.

        Args:
            activities: what each rank said last, by name.
        """
        said = {name: activities.get(name, heartbeat.STARTING) for name in self._names} if not self._is_over else {}
        meeting = Meeting(
            tuple(name for name, activity in said.items() if activity == heartbeat.JOINING),
            tuple(name for name, activity in said.items() if activity == heartbeat.STARTING),
        )
        self._is_over = meeting.is_over
        return meeting

    def is_late(self) -> bool:
        """Return True once the limit has passed without them; call it every second or so."""
        return self._time.now_s() - self._start_s > self.limit_s > 0 and not self._is_over


class Rouser:
    """Wakes ranks on CPU that sleep although the others are there.

    Each asks MindSpore's scheduler where the next one listens. If that has not said so yet, which is so for the first
    of any two, it sleeps three seconds before it asks again. A signal ends the sleep.

    Args:
        num_workers: all ranks of the run; 0 to wake nobody.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._num_left = _MAX_ROUSALS if num_workers else 0
        self._next_s = 0.0

    def rouse(self, activities: Mapping[str, str], pids: Mapping[str, int]) -> None:
        """Wake those that look for the others, once nobody is absent; call it as often as you like.

        Args:
            activities: what each rank said last, by name.
            pids: of the ranks, by name.
        """
        said = [activities.get(rank_name(rank), heartbeat.STARTING) for rank in range(self._num_workers)]
        looking = [name for name, pid in pids.items() if activities.get(name) == heartbeat.JOINING]
        now_s = time.monotonic()
        if looking and heartbeat.STARTING not in said and self._num_left and now_s >= self._next_s:
            self._num_left -= 1
            self._next_s = now_s + _ROUSE_INTERVAL_S
            processes.signal_all([pids[name] for name in looking], heartbeat.ROUSE_SIGNAL)


def may_be_a_foreign_connections_doing(name: str, returncode: int, meeting: Meeting) -> bool:
    """Return True if a stray connection or an occupied port may have caused the exit."""
    failed = returncode in _CRASHES or (returncode > 0 and is_worth_a_restart(exit_code(returncode)))
    return failed and not meeting.is_over and (name == SCHEDULER or meeting.is_stuck_at_scheduler)
