"""Broadcasts between ranks as compiled graphs: over HCCL, and so RoCE, on Ascend."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import (
    GlobalComm,
    create_group,
    get_group_rank_from_world_rank,
    get_group_size,
    get_rank,
)

from mindrlhf.models.context import by_itself
from mindrlhf.weights.publish.collective import WORD

SHARED_WORDS = 1 << 18  # of a bucket of rows: one graph whatever their size


class BroadcastCell(nn.Cell):
    """Gives each rank of a group the value of one of them, of a fixed shape.

    Args:
        root: its number within the group: what HCCL takes, and what MindSpore's own functions hand to the operator,
            whose documentation says otherwise.
        group: its name; None for all ranks.
    """

    def __init__(self, root: int, group: str | None = None):
        super().__init__()
        self.broadcast = ops.Broadcast(root, group or GlobalComm.WORLD_COMM_GROUP)

    def construct(self, value):
        return self.broadcast((value,))[0]


class BucketBroadcast:
    """A :data:`mindrlhf.weights.publish.collective.Broadcast` on this process's device.

    Args:
        ranks: that take part, ascending; all of them make one at the same time.
        root: the rank among them that sends.
        num_words: int32 words of a bucket.
    """

    def __init__(self, ranks: tuple[int, ...], root: int, num_words: int):
        group = group_of(ranks)
        self.cell = BroadcastCell(get_group_rank_from_world_rank(root, group), group)
        self._num_words = num_words
        self._is_root = root == get_rank()

    def __call__(self, words: np.ndarray | None) -> np.ndarray | None:
        """Send or receive a bucket."""
        assert (words is not None) == self._is_root, "the root sends, the others receive"
        with by_itself():
            received = self.cell(ms.Tensor(words) if self._is_root else placeholder(self._num_words))
        if self._is_root:
            if ms.get_context("device_target") != "CPU":  # which has no streams to wait for
                ms.runtime.synchronize()  # or buckets that wait to be sent would fill the device
            return None
        return received.asnumpy()


def broadcast_arrays(
    ranks: tuple[int, ...], layout: Sequence[Sequence[Any]], arrays: Mapping[str, np.ndarray] | None
) -> dict[str, np.ndarray]:
    """Return the arrays of the first of ``ranks`` on all of them; all call it at the same time.

    Args:
        ranks: ascending.
        layout: name, dtype and shape of each array.
        arrays: on the first rank; None on the others.
    """
    ends = np.cumsum([0, *(_num_words(dtype, shape) for _, dtype, shape in layout)]).tolist()
    words = np.zeros(-(-ends[-1] // SHARED_WORDS) * SHARED_WORDS, WORD)
    parts = {
        name: words[start:end].view(np.uint8)[: math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)
        for (name, dtype, shape), start, end in zip(layout, ends, ends[1:])
    }
    for name, part in parts.items() if arrays is not None else ():
        part[...] = arrays[name]
    share = open_broadcast(ranks, ranks[0], SHARED_WORDS)
    for start in range(0, len(words), SHARED_WORDS):
        received = share(words[start : start + SHARED_WORDS] if arrays is not None else None)
        if received is not None:
            words[start : start + SHARED_WORDS] = received
    return parts


def _num_words(dtype: str, shape: Sequence[int]) -> int:
    """Words of an array, up to the next multiple of 8 bytes, at which any dtype is aligned."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 8) * 2


@cache
def open_broadcast(ranks: tuple[int, ...], root: int, num_words: int) -> BucketBroadcast:
    """See :data:`mindrlhf.weights.publish.collective.OpenBroadcast`; one that there is already has its graph."""
    return BucketBroadcast(ranks, root, num_words)


@lru_cache(maxsize=1)
def placeholder(num_words: int) -> ms.Tensor:
    """Return what ranks that receive give the graph. Buckets of one size follow each other: one is kept."""
    return ms.Tensor(np.zeros(num_words, WORD))


@cache
def group_of(ranks: tuple[int, ...]) -> str:
    """Return the name of a group of ranks, which they make when it is first asked for; it lasts with the process."""
    if len(ranks) == get_group_size():
        return GlobalComm.WORLD_COMM_GROUP
    name = f"mindrlhf-weights-{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    create_group(name, list(ranks))
    return name
