"""The fingerprint of a run, a line a step, so that two runs can be compared at a glance: ``trajectory.jsonl``."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.observe.records import JsonlWriter

FINGERPRINT_NAME = "trajectory.jsonl"
# In the order in which a step makes them: the first that differs between two runs is where they parted.
PARTS = ("prompts", "samples", "rollout_logprobs", "rewards", "loss", "grad_norm", "weights")
_DIGEST_BYTES = 8


def digest_arrays(arrays: Iterable[np.ndarray]) -> str:
    """Return 16 hexadecimal digits that change with any bit, length or type of the arrays (BLAKE2b, RFC 7693)."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for array in arrays:
        array = np.ascontiguousarray(array)
        state.update(f"{array.dtype.str}{array.shape};".encode())
        state.update(array.tobytes())
    return state.hexdigest()


def digest_json(value: Any) -> str:
    """Return 16 hexadecimal digits of a JSON value; floats count to the last bit."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def digest_weights(written: Iterable[Sequence]) -> str:
    """Return 16 hexadecimal digits of all weights, from the sums of bits that writing them to the buffer left.

    The checksum of a tensor is the sum of its elements' bits modulo 2^64, so it does not depend on how many ranks
    wrote it; see :meth:`mindrlhf.weights.publish.buffer.WeightBuffer.written`.

    Args:
        written: the tensor's name, a slice and its sum, of all slices.
    """
    checksums: dict[str, int] = {}
    for name, _, checksum in written:
        checksums[name] = (checksums.get(name, 0) + checksum) % 2**64
    return digest_json(checksums)


class FingerprintWriter:
    """Append a line a step: a digest of each of ``PARTS``, and "hash", which covers this step and all before it.

    The losses and gradient norms stand there as they are, None when they are not finite.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Open the file; see ``JsonlWriter`` for ``first_step`` and the errors."""
        self._writer = JsonlWriter(path, first_step=first_step)

    def write(self, step: int, previous: str, parts: Mapping[str, str | float]) -> str:
        """Append a line.

        Args:
            step: steps done; 0 is the starting model.
            previous: "hash" of the step before, "" when there is none.
            parts: those of ``PARTS`` that the step has.

        Returns:
            "hash" of this step.
        """
        assert parts.keys() <= set(PARTS), f"unknown parts {sorted(parts.keys() - set(PARTS))}"
        # The text of a float is exact, and NaN has one.
        course = digest_json([previous, step, {name: str(value) for name, value in parts.items()}])
        self._writer.write({"step": step, **parts, "hash": course})
        return course

    def close(self) -> None:
        self._writer.close()
