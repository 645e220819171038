"""Consistency check between nodes before anything starts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_LINES = 20
_MAX_VALUE_CHARS = 80
MISSING = "missing"


@dataclass(frozen=True)
class Fact:
    """One thing that has to be the same on all nodes.

    Attributes:
        name: as messages call it.
        value: anything JSON can hold.
        fix: what the user does about a difference.
    """

    name: str
    value: Any
    fix: str


def as_message(facts: Sequence[Fact]) -> dict[str, list[Any]]:
    return {fact.name: [json.dumps(fact.value, sort_keys=True), fact.fix] for fact in facts}


def differences(facts: Mapping[int, Mapping[str, Sequence[Any]]]) -> list[str]:
    """Return one line for each fact that is not the same on all nodes, with its fix; at most 20.

    Args:
        facts: what :func:`as_message` gave on each node.
    """
    lines = []
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        holders: dict[str, list[int]] = {}
        for node, own in sorted(facts.items()):
            holders.setdefault(str(own[name][0]) if name in own else MISSING, []).append(node)
        if len(holders) > 1:
            fix = next(own[name][1] for own in facts.values() if name in own)
            lines.append(f"{name} is {', '.join(_held(*held) for held in holders.items())}: {fix}")
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES - 1 :] = [f"and {len(lines) - _MAX_LINES + 1} differences more"]
    return lines


def name_nodes(nodes: Sequence[int]) -> str:
    """Return "node 1" or "nodes 1, 2"."""
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def _held(value: str, nodes: list[int]) -> str:
    shown = value if len(value) <= _MAX_VALUE_CHARS else f"{value[: _MAX_VALUE_CHARS - 3]}..."
    return f"{shown} on {name_nodes(nodes)}"
