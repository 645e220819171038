"""Damage at random: bytes of any file, and values of any JSON tree."""

import copy
import json
import random
import struct
from typing import Any

# Values that parsers trip over: limits of integers, floats that are none, containers where scalars are expected.
STRANGE_VALUES = (
    None, True, False, 0, -1, 1, 2**31, -(2**31) - 1, 2**63, 2**64 - 1, -(2**70), 10**30, 0.5, -0.0, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "\0", "..", "../../x", "/etc/passwd", "\ud800", "٣", "²", "a" * 5000,
    [], [[]], [None], [-1], [2**62, 2**62], [0, 2**62], ["x"], {}, {"": None}, {"a": {"a": {}}},
)  # fmt: skip
STRANGE_BYTES = (
    b"\0",
    b"\xff",
    b"\xff\xff\xff\xff",
    b"\0\0\0\0\0\0\0\x80",
    b"\x80" * 11,
    b'"',
    b"[" * 900,
    b"{",
    b"\n",
)
MAX_NODES = 4000


def corrupt_bytes(rng: random.Random, data: bytes, max_edits: int = 4) -> bytes:
    """Return ``data`` after 1 to ``max_edits`` edits: bits flipped, a part cut, inserted, repeated or overwritten."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, max_edits)):
        position = rng.randrange(len(changed) + 1)
        end = min(len(changed), position + rng.choice((1, 2, 4, 8, 64, 1024)))
        edit = rng.randrange(7)
        if edit <= 1 and position < len(changed):
            changed[position] ^= 1 << rng.randrange(8)
        elif edit == 2:
            del changed[position:]
        elif edit == 3:
            changed[position:position] = rng.choice(STRANGE_BYTES)
        elif edit == 4:
            changed[position:position] = changed[position:end]
        elif edit == 5:
            del changed[position:end]
        else:
            changed[position:end] = rng.randbytes(end - position)
    return bytes(changed)


def corrupt_tree(rng: random.Random, tree: Any, max_edits: int = 3) -> Any:
    """Return a copy of a JSON tree in which 1 to ``max_edits`` nodes have another value, type, name or place."""
    changed = [copy.deepcopy(tree)]
    for _ in range(rng.randint(1, max_edits)):
        places = _places(changed)
        parent, key = rng.choice(places)
        edit = rng.randrange(6)
        if edit <= 1:
            parent[key] = copy.deepcopy(rng.choice(STRANGE_VALUES))
        elif edit == 2:
            other, other_key = rng.choice(places)
            parent[key] = copy.deepcopy(other[other_key])
        elif edit == 3:
            parent[key] = _near(rng, parent[key])
        elif parent is changed:
            continue
        elif edit == 4:
            del parent[key]
        elif isinstance(parent, dict):
            parent[rng.choice(("", "..", "../x", "/x", "\0", "__metadata__", f"{key} "))] = parent.pop(key)
        else:
            parent.insert(key, copy.deepcopy(parent[key]))
    return changed[0]


def corrupt_json(rng: random.Random, tree: Any) -> bytes:
    """Return JSON text of a damaged tree; one time in four the text is damaged too, or the text alone."""
    kind = rng.randrange(8)
    text = json.dumps(corrupt_tree(rng, tree) if kind != 0 else tree).encode()
    return corrupt_bytes(rng, text) if kind <= 1 else text


def corrupt_safetensors(rng: random.Random, whole: bytes) -> bytes:
    """Return a damaged file of a length (uint64, little endian), a JSON header of that length, and data."""
    if rng.randrange(3) == 0:
        return corrupt_bytes(rng, whole)
    (length,) = struct.unpack("<Q", whole[:8])
    text = corrupt_json(rng, json.loads(whole[8 : 8 + length]))
    return struct.pack("<Q", len(text)) + text + whole[8 + length :]


def _near(rng: random.Random, value: Any) -> Any:
    """A value of the same type, or of one that is easily taken for it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, float(value), str(value), value << 40))
    if isinstance(value, float):
        return rng.choice((-value, str(value), value * 1e300))
    if isinstance(value, str):
        return rng.choice(
            (value + "x", value[:-1], value.upper(), [value], value.encode(errors="replace").decode("latin-1"))
        )
    if isinstance(value, list):
        return rng.choice((value[::-1], value * 2, value[:1], {str(i): item for i, item in enumerate(value)}))
    if isinstance(value, dict):
        return rng.choice((list(value), list(value.values()), [value]))
    return 0


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below ``node``."""
    found: list[tuple[Any, Any]] = []
    pending = [node]
    while pending and len(found) < MAX_NODES:
        container = pending.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        found += [(container, key) for key in keys]
        pending += [container[key] for key in keys if isinstance(container[key], (dict, list))]
    return found
