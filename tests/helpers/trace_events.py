"""What the trace event format asks of a file, and what Perfetto leaves out when it is not so."""

import json
from collections import defaultdict
from pathlib import Path

ROUNDING_US = 2e-3


def read_trace(path: Path) -> dict:
    """Read a trace and check it: fields and types of each kind of event, names of all places, nesting of spans."""
    trace = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    assert isinstance(trace["traceEvents"], list) and trace["displayTimeUnit"] in ("ms", "ns")
    named, used = {"process_name": set(), "thread_name": set()}, {"process_name": set(), "thread_name": set()}
    stacks = defaultdict(list)
    previous_us = 0.0
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["args"], dict)
        place = event["pid"], event["tid"]
        if event["ph"] == "M":
            value = event["args"]["sort_index" if event["name"] == "process_sort_index" else "name"]
            assert isinstance(value, int if event["name"] == "process_sort_index" else str)
            if event["name"] in named:
                identity = event["pid"] if event["name"] == "process_name" else place
                assert identity not in named[event["name"]], f"{event} is named twice"
                named[event["name"]].add(identity)
            continue
        assert event["ts"] >= previous_us, "events are not in order"
        previous_us = event["ts"]
        used["process_name"].add(event["pid"])
        used["thread_name"].add(place)
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values()) and event["args"]
            continue
        assert event["ph"] == "X" and event["dur"] >= 0
        stack, end_us = stacks[place], event["ts"] + event["dur"]
        while stack and stack[-1] <= event["ts"] + ROUNDING_US:
            stack.pop()
        assert not stack or end_us <= stack[-1] + ROUNDING_US, f"{event} overlaps the span that it begins in"
        stack.append(end_us)
    assert all(used[kind] <= named[kind] for kind in used), "something happens at a place without a name"
    return trace


def spans(trace: dict) -> list[tuple[str, str, str, float, float]]:
    """Return (process, thread, name, begin, end) of every span, times in microseconds."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    return [
        (
            names["process_name", event["pid"], 0],
            names["thread_name", event["pid"], event["tid"]],
            event["name"],
            event["ts"],
            event["ts"] + event["dur"],
        )
        for event in trace["traceEvents"]
        if event["ph"] == "X"
    ]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
