"""Spans of a distributed trace: what this process did, and what the processes it asked say that they did for it.

A step is a trace. A span knows its trace and its parent, so that spans of rank 0, rollout servers and verifiers are one
tree: a request carries ``context()``, the peer begins with ``answer`` of it, and its answer carries ``take()`` back to
``add``. Nothing is written here: who started it takes the spans. The context is W3C's `traceparent`
(https://www.w3.org/TR/trace-context/). One tracing per process; while there is none, a request carries nothing.
"""

import os
import re
import threading
import time
from typing import Any

MAX_SPANS = 100_000  # that wait to be taken
LENGTHS = {"trace": 32, "span": 16, "parent": 16}  # of ids, in hexadecimal digits

# name and process, the ids (of a span without a parent that is ""), start_ns and end_ns since 1970, and arguments,
# JSON values by name.
Record = dict[str, Any]


class Traced:
    """A span until ``end``, or the end of a ``with`` block: in that, other spans of its thread are inside it."""

    def __init__(
        self, tracing: "_Tracing", name: str, process: str, parent: str, arguments: dict[str, Any], recorded: Any = None
    ) -> None:
        self._tracing, self._recorded = tracing, recorded
        _, trace, above, _ = parent.split("-") if parent else ("", os.urandom(16).hex(), "", "")
        self._record = {"name": name, "process": process, "trace": trace, "span": os.urandom(8).hex(), "parent": above}
        self._record |= {"start_ns": tracing.now_ns(), "arguments": arguments}

    @property
    def context(self) -> str:
        """Of what is inside it."""
        return f"00-{self._record['trace']}-{self._record['span']}-01"

    def carried(self) -> dict[str, str]:
        """Return what a request carries, so that what the peer does is inside it."""
        return {"traceparent": self.context}

    def end(self, **arguments: Any) -> None:
        """End it with further ``arguments``; only the first call counts."""
        if self._recorded is not None:
            self._recorded.end(**arguments)
        if "end_ns" not in self._record:
            self._record |= {"end_ns": self._tracing.now_ns(), "arguments": self._record["arguments"] | arguments}
            self._tracing.keep(self._record)

    def part(self, name: str, **arguments: Any) -> None:
        """Note what went on inside it from its beginning until now."""
        inside = Traced(self._tracing, name, self._record["process"], self.context, arguments)
        inside._record["start_ns"] = self._record["start_ns"]
        inside.end()

    def __enter__(self) -> "Traced":
        self._tracing.enter(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._tracing.leave(self)
        self.end()


class _Tracing:
    def __init__(self, process: str, root: str = "") -> None:
        self.process, self._root = process, root
        self._lock, self._kept, self._local = threading.Lock(), [], threading.local()
        self._outermost: Traced | None = None
        # Steady, and comparable with other processes.
        self._start_unix_ns, self._start_ns = time.time_ns(), time.monotonic_ns()

    def now_ns(self) -> int:
        return self._start_unix_ns + time.monotonic_ns() - self._start_ns

    def context(self) -> str:
        """Of the innermost span of this thread; other threads work for what the process as a whole is in."""
        inside = getattr(self._local, "inside", None) or [self._outermost]
        return inside[-1].context if inside[-1] is not None else self._root

    def enter(self, span: Traced) -> None:
        if self._outermost is None:
            self._outermost = span
        self._local.inside = [*getattr(self._local, "inside", ()), span]

    def leave(self, span: Traced) -> None:
        self._local.inside = [one for one in self._local.inside if one is not span]
        if self._outermost is span:
            self._outermost = None

    def keep(self, record: Record) -> None:
        with self._lock:
            if len(self._kept) < MAX_SPANS:
                self._kept.append(record)

    def take(self) -> list[Record]:
        with self._lock:
            taken, self._kept = self._kept, []
        return taken


_tracing: _Tracing | None = None


def start(process: str) -> None:
    """Trace from now on what this process does."""
    global _tracing
    _tracing = _Tracing(process)


def stop() -> None:
    """Trace no more; what was not taken is forgotten."""
    global _tracing
    _tracing = None


def begin(name: str, process: str, arguments: dict[str, Any], recorded: Any) -> Traced | None:
    """Begin a span, which ends ``recorded``, that of the timeline, as well; None while nothing is traced."""
    tracing = _tracing
    return tracing and Traced(tracing, name, process or tracing.process, tracing.context(), arguments, recorded)


def context() -> dict[str, str]:
    """Return what a request carries, so that what the peer does is inside what goes on here."""
    inside = "" if _tracing is None else _tracing.context()
    return {"traceparent": inside} if inside else {}


def answer(request: dict[str, Any], process: str) -> None:
    """In the peer: trace what follows where the request asks for it."""
    global _tracing
    _tracing = _Tracing(process, request["traceparent"]) if "traceparent" in request else None


def take() -> dict[str, list[Record]]:
    """Return the spans that have ended since this was last asked, as an answer carries them."""
    return {} if _tracing is None else {"spans": _tracing.take()}


def add(reply: dict[str, Any], process: str) -> None:
    """Take over the spans that an answer carries, as those of ``process``; the peer may run a user's code.

    Raises:
        TypeError, ValueError, KeyError, AttributeError: these are no spans.
    """
    tracing = _tracing
    for record in reply.get("spans", ()) if tracing is not None else ():
        start_ns, end_ns = int(record["start_ns"]), int(record["end_ns"])
        ids = {name: record[name] for name in LENGTHS}
        is_known = all(re.fullmatch(f"[0-9a-f]{{{length}}}", ids[name]) for name, length in LENGTHS.items())
        if not is_known or not 0 < start_ns <= end_ns < 1 << 63:
            raise ValueError("this is no span")
        own = {"name": record["name"][:80], "process": process, "arguments": dict(record["arguments"])}
        tracing.keep({**ids, **own, "start_ns": start_ns, "end_ns": end_ns})
