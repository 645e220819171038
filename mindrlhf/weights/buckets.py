"""Which tensors share the memory of a weight board, one bucket of them after the other.

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

from collections.abc import Sequence

from mindrlhf.weights.tensors import TensorInfo

_ALIGNMENT_BYTES = 64


def align(offset: int) -> int:
    """Return the next place, in bytes, at which a tensor may begin."""
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def cut_into_buckets(infos: Sequence[TensorInfo], bucket_bytes: int = 0) -> list[range]:
    """Cut a list of tensors, in its order, into buckets.

    Args:
        infos: the tensors of a model.
        bucket_bytes: of a bucket at most; a tensor that is larger has one for itself. 0 puts all into one.

    Returns:
        The places in ``infos`` of each bucket's tensors.
    """
    buckets, first, size_bytes = [], 0, 0
    for place, info in enumerate(infos):
        own = align(info.size_bytes)
        if bucket_bytes and place > first and size_bytes + own > bucket_bytes:
            buckets.append(range(first, place))
            first, size_bytes = place, 0
        size_bytes += own
    return [*buckets, range(first, len(infos))]


def size_of(bucket: range, infos: Sequence[TensorInfo]) -> int:
    """Return the bytes of a bucket, with the gaps between its tensors."""
    return sum(align(infos[place].size_bytes) for place in bucket)
