"""Named time spans of a process, in the format that Perfetto and Chrome read.

As with the heartbeat there is one recording per process, so that the functions need no object. While nothing is
recorded, a span costs a look at a variable.

A process may speak for others that it drives, such as its rollout server: a span has a process and a thread to be
shown under. Source of the format: Google, "Trace Event Format" (complete events X, counters C, metadata M).
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """Spans recorded by one process.

    Attributes:
        start_unix_ns: when it began, by the machine's clock.
        events: names of processes and threads, then the rest by its beginning, in microseconds since ``start_unix_ns``.
            Spans of one thread lie in each other or apart.
    """

    start_unix_ns: int
    events: list[Event]


class Span:
    """Something that goes on from its making to ``end``, or to the end of a ``with`` block."""

    def __init__(self, recording: "_Recording", name: str, place: tuple[int, int], arguments: dict[str, Any]) -> None:
        self._recording = recording
        self._name = name
        self._place = place
        self._arguments = arguments
        self._start_us = recording.now_us()

    def end(self, **arguments: Any) -> None:
        """Write it down with further ``arguments``; only the first call counts."""
        self._recording.write(self, arguments)

    def event(self, end_us: float, arguments: dict[str, Any]) -> Event:
        pid, tid = self._place
        times = {"ts": self._start_us, "dur": max(0.0, end_us - self._start_us)}
        return {"ph": "X", "name": self._name, "pid": pid, "tid": tid, **times, "args": self._arguments | arguments}

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()


class _NoSpan:
    """A span that records nothing."""

    def end(self, **arguments: Any) -> None:
        pass

    def __enter__(self) -> "_NoSpan":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class _Recording:
    """The events of one process since ``start``."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._open: dict[int, Span] = {}
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[int, str], int] = {}
        # The clock of the machine tells how processes stand to each other, the steady one how long things take.
        self._start_unix_ns, self._start_ns = time.time_ns(), time.monotonic_ns()

    def now_us(self) -> float:
        return (time.monotonic_ns() - self._start_ns) / 1000

    def begin(self, name: str, process: str, thread: str, arguments: dict[str, Any]) -> Span:
        with self._lock:
            span = Span(self, name, self._place(process, thread), arguments)
            self._open[id(span)] = span
        return span

    def write(self, span: Span, arguments: dict[str, Any]) -> None:
        with self._lock:
            if self._open.pop(id(span), None) is not None:
                self._events.append(span.event(self.now_us(), arguments))

    def count(self, name: str, value: float, process: str) -> None:
        with self._lock:
            pid, tid = self._place(process, "")
            counter = {"ph": "C", "name": name, "pid": pid, "tid": tid, "ts": self.now_us(), "args": {name: value}}
            self._events.append(counter)

    def finish(self) -> Recorded:
        """Return everything; what still goes on ends here and says so."""
        for span in list(self._open.values()):
            self.write(span, {"unfinished": True})
        with self._lock:
            events = self._names() + sorted(self._events, key=by_time)
            return Recorded(self._start_unix_ns, events)

    def _place(self, process: str, thread: str) -> tuple[int, int]:
        pid = self._pids.setdefault(process or self._process, len(self._pids) + 1)
        own_thread = "main" if process else threading.current_thread().name.replace("MainThread", "main")
        return pid, self._tids.setdefault((pid, thread or own_thread), len(self._tids) + 1)

    def _names(self) -> list[Event]:
        processes = [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
            for name, pid in self._pids.items()
        ]
        threads = [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            for (pid, name), tid in self._tids.items()
        ]
        return processes + threads


_NO_SPAN = _NoSpan()
_recording: _Recording | None = None


def start(process: str) -> None:
    """Record from now on, as what ``process`` does unless a span says otherwise."""
    global _recording
    _recording = _Recording(process)


def by_time(event: Event) -> tuple[float, float]:
    """Sort key of events: by their beginning, of those that begin together the outer span first."""
    return event["ts"], -event.get("dur", 0.0)


def stop() -> Recorded:
    """Record no more and return what was recorded since ``start``."""
    global _recording
    assert _recording is not None, "stop() without start()"
    recording, _recording = _recording, None
    return recording.finish()


def span(name: str, process: str = "", thread: str = "", **arguments: Any) -> Span | _NoSpan:
    """Begin a span of this process and thread, or of what they speak for; it is also a context around what it names.

    Args:
        arguments: shown with it; JSON values.
    """
    return _NO_SPAN if _recording is None else _recording.begin(name, process, thread, arguments)


def count(name: str, value: float, process: str = "") -> None:
    """Note what a number is from now on."""
    if _recording is not None:
        _recording.count(name, value, process)
