"""The recordings of all processes as one timeline."""

import json
import re
from pathlib import Path

from mindrlhf.system.files import write_file
from mindrlhf.system.timeline import Event, by_time

TIMELINE_NAME = "timeline.json"
_RANK = re.compile(r"rank_(\d+)\.json")


def merge(directory: Path, path: Path) -> Path:
    """Write the traces below ``directory``, which ranks have written step by step, as one.

    A process of the same name is the same in all of them: one rank and what it speaks for, such as its rollout
    servers, come one below the other. Times are microseconds since the first event.

    Returns:
        ``path``.

    Raises:
        OSError: a file cannot be read or written.
    """
    pieces = [
        (int(rank[1]), json.loads(piece.read_text(encoding="utf-8")))
        for piece in sorted(directory.glob("step_*/rank_*.json"))
        if (rank := _RANK.fullmatch(piece.name))
    ]
    start_ns = min((piece["otherData"]["start_unix_ns"] for _, piece in pieces), default=0)
    places = _Places()
    events: list[Event] = []
    for rank, piece in sorted(pieces, key=lambda piece: piece[0]):
        shift_us = (piece["otherData"]["start_unix_ns"] - start_ns) / 1000
        where = places.of(rank, [event for event in piece["traceEvents"] if event["ph"] == "M"])
        for event in piece["traceEvents"]:
            if event["ph"] != "M":
                pid, tid = where[event["pid"], event["tid"]]
                events.append({**event, "pid": pid, "tid": tid, **_moved(event, shift_us)})
    events.sort(key=by_time)
    other = {"start_unix_ns": start_ns}
    write_file(path, json.dumps({"traceEvents": places.names + events, "displayTimeUnit": "ms", "otherData": other}))
    return path


def _moved(event: Event, shift_us: float) -> dict[str, float]:
    """Return the times of an event, in whole nanoseconds: what ended together still does."""
    start_us = round(event["ts"] + shift_us, 3)
    if "dur" not in event:
        return {"ts": start_us}
    return {"ts": start_us, "dur": round(round(event["ts"] + event["dur"] + shift_us, 3) - start_us, 3)}


class _Places:
    """Numbers of processes and threads in the whole timeline, and the events that give them their names."""

    def __init__(self) -> None:
        self.names: list[Event] = []
        self._pids: dict[tuple[int, str], int] = {}
        self._tids: dict[tuple[int, str], int] = {}

    def of(self, rank: int, names: list[Event]) -> dict[tuple[int, int], tuple[int, int]]:
        """Return the place in the timeline of each (process, thread) that a rank's recording names."""
        pids = {
            event["pid"]: self._pid(rank, event["args"]["name"]) for event in names if event["name"] == "process_name"
        }
        return {
            (event["pid"], event["tid"]): (pid, self._tid(pid, event["args"]["name"]))
            for event in names
            if event["name"] == "thread_name" and (pid := pids[event["pid"]])
        }

    def _pid(self, rank: int, name: str) -> int:
        if (rank, name) not in self._pids:
            pid = self._pids[rank, name] = len(self._pids) + 1
            for kind, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
                self.names.append({"ph": "M", "pid": pid, "tid": 0, "name": kind, "args": value})
        return self._pids[rank, name]

    def _tid(self, pid: int, name: str) -> int:
        if (pid, name) not in self._tids:
            tid = self._tids[pid, name] = len(self._tids) + 1
            self.names.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})
        return self._tids[pid, name]
