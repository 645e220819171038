"""Which parts of its tensors a board has: whether that is enough, and the list of them behind the tensors.

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.weights.publish.slices import Box, first_lacking, intersect, num_elements, to_box, whole_box
from mindrlhf.weights.tensors import TensorInfo

_SIZE_BYTES = 8  # of the number before the list


def find_gap(info: TensorInfo, boxes: Sequence[Box], needed: Mapping[str, Sequence[Box] | None]) -> str | None:
    """Say what disjoint boxes of a tensor lack of what is needed of it; None where it is nothing.

    Args:
        needed: by tensor; None for all of it, and one that is not there is not needed.
    """
    read = needed.get(info.name, ())
    lacking = first_lacking(boxes, [whole_box(info.shape)] if read is None else read)
    if lacking is None:
        return None
    return f"the weight board lacks some of {lacking} of tensor '{info.name}', which is read"


def find_fault(info: TensorInfo, boxes: Sequence[Box], needed: Mapping[str, Sequence[Box] | None] | None) -> str | None:
    """Say what is wrong where boxes of a tensor were written; None where each element was written exactly once.

    Args:
        needed: as for :func:`find_gap`, of what has to be written; None for everything.
    """
    boxes = [box for box in boxes if num_elements(box)]
    for i, box in enumerate(boxes):
        for other in boxes[:i]:
            if intersect(box, other) is not None:
                return f"tensor '{info.name}' was written twice: regions {other} and {box} overlap"
    if needed is not None:
        return find_gap(info, boxes, needed)
    # Boxes that are pairwise disjoint and hold as many elements as the tensor cover it exactly.
    num_written = sum(map(num_elements, boxes))
    if num_written == info.num_elements:
        return None
    return f"tensor '{info.name}' has {info.num_elements} elements but {num_written} were written"


def write_parts(fd: int, offset: int, parts: Mapping[str, Sequence[Box]] | None) -> None:
    """Write a list of the parts of tensors to a place in a file, which may grow; None in place of an earlier one.

    Raises:
        OSError: there is no room.
    """
    text = b"" if parts is None else json.dumps(parts).encode()
    if text or any(os.pread(fd, _SIZE_BYTES, offset)):
        os.pwrite(fd, len(text).to_bytes(_SIZE_BYTES, "little") + text, offset)


def read_parts(fd: int, offset: int, infos: Sequence[TensorInfo]) -> dict[str, list[Box]] | None:
    """Return the list that lies at a place in a file, None where there is none.

    Raises:
        ValueError: what lies there is no list of parts of these tensors.
    """
    size_bytes = int.from_bytes(os.pread(fd, _SIZE_BYTES, offset), "little")
    if not size_bytes:
        return None
    if offset + _SIZE_BYTES + size_bytes > os.fstat(fd).st_size:
        raise ValueError(f"its list of parts is said to have {size_bytes} bytes, which the file has not")
    parts = json.loads(os.pread(fd, size_bytes, offset + _SIZE_BYTES))
    shapes = {info.name: info.shape for info in infos}
    for name, boxes in parts.items() if isinstance(parts, dict) else [("", None)]:
        is_list = name in shapes and isinstance(boxes, list)
        if not (is_list and all(_is_box(bounds, shapes[name]) for bounds in boxes)):
            raise ValueError(f"its list of parts is damaged at {name!r}")
    return {name: [to_box(bounds) for bounds in boxes] for name, boxes in parts.items()}


def _is_box(bounds: Any, shape: Sequence[int]) -> bool:
    """Whether a value that was read is a region of a tensor of this shape."""
    return (
        isinstance(bounds, list)
        and len(bounds) == len(shape)
        and all(
            isinstance(pair, list) and [type(end) for end in pair] == [int, int] and 0 <= pair[0] <= pair[1] <= size
            for pair, size in zip(bounds, shape, strict=True)
        )
    )
