"""Weight sync between nodes: which node sends which slices to which others.

The ranks of a node write what they hold to the weight buffer of their node. Where the model is sharded over nodes, that
buffer lacks slices, which a node that has them sends. The writing ranks sum the bits of what they write; whoever reads
a buffer compares its memory with these sums.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mindrlhf.errors import RunFailure
from mindrlhf.system.workers import Workers
from mindrlhf.weights.publish.buffer import WeightBuffer, WrittenSlice
from mindrlhf.weights.publish.slices import TensorSlice, num_elements, to_slice
from mindrlhf.weights.tensors import TensorInfo

# Larger slices are cut, so that messages and buckets take little memory.
TRANSFER_BYTES = 4 << 20

Sums = Mapping[tuple[str, TensorSlice], int]  # of the bits of slices, by tensor and slice
Address = tuple[str, int]


@dataclass(frozen=True)
class Transfer:
    """A slice of a tensor that travels.

    Attributes:
        name: of the tensor.
        slice: what travels, at most ``TRANSFER_BYTES``.
        origin: the node that sends it.
        nodes: those that lack it.
    """

    name: str
    slice: TensorSlice
    origin: int
    nodes: tuple[int, ...]


def sums_of(written: Iterable[WrittenSlice]) -> dict[tuple[str, TensorSlice], int]:
    """Return the sums of slices that were written."""
    return {(name, to_slice(bounds)): checksum for name, bounds, checksum in written}


def written_of(sums: Sums) -> list[WrittenSlice]:
    """Return the inverse of :func:`sums_of`."""
    return [[name, bounds, checksum] for (name, bounds), checksum in sums.items()]


def plan_sync(
    written: Sequence[Iterable[tuple[str, TensorSlice]]], infos: Sequence[TensorInfo], readers: Iterable[int] = ()
) -> list[Transfer]:
    """Return the transfers in the order in which every node sends and receives them.

    Args:
        written: by node, tensor and slice of what its ranks wrote. Slices of two ranks are the same or disjoint.
        infos: the tensors of a buffer.
        readers: the nodes that need the whole; none named: all.
    """
    element_bytes = {info.name: info.numpy_dtype.itemsize for info in infos}
    readers, sent_bytes = sorted(readers) or range(len(written)), [0] * len(written)
    holders: dict[tuple[str, TensorSlice], list[int]] = {}
    for node, slices in enumerate(written):
        for key in slices:
            holders.setdefault(key, []).append(node)
    transfers = []
    for (name, bounds), nodes in holders.items():
        lacking = tuple(node for node in readers if node not in nodes)
        size_bytes = element_bytes[name] * num_elements(bounds)
        if lacking and size_bytes:
            origin = min(nodes, key=lambda node: (sent_bytes[node], node))
            sent_bytes[origin] += size_bytes * len(lacking)
            transfers += [Transfer(name, part, origin, lacking) for part in _cut(bounds, size_bytes)]
    return transfers


def _cut(bounds: TensorSlice, size_bytes: int) -> list[TensorSlice]:
    """Halve a slice, along the first axis that can be cut, until no part is too large."""
    axis = next((axis for axis, (start, stop) in enumerate(bounds) if stop - start > 1), None)
    if size_bytes <= TRANSFER_BYTES or axis is None:
        return [bounds]
    start, stop = bounds[axis]
    middle, row_bytes = (start + stop) // 2, size_bytes // (stop - start)
    parts = []
    for first, last in ((start, middle), (middle, stop)):
        parts += _cut((*bounds[:axis], (first, last), *bounds[axis + 1 :]), row_bytes * (last - first))
    return parts


def check_replicas(written: Sequence[Sums], infos: Sequence[TensorInfo]) -> None:
    """Check that nodes that wrote the same slice wrote the same into it.

    Raises:
        RunFailure: they did not; two replicas of the model have diverged.
    """
    moduli = {info.name: 1 << (8 * info.numpy_dtype.itemsize) for info in infos}
    first: dict[tuple[str, TensorSlice], tuple[int, int]] = {}
    for node, sums in enumerate(written):
        for (name, bounds), checksum in sums.items():
            other, expected = first.setdefault((name, bounds), (node, checksum))
            if (checksum - expected) % moduli[name]:
                raise RunFailure(f"the weights of node {node} are not those of node {other}: tensor '{name}', {bounds}")


class BufferSync:
    """Rank 0's part of it: has every node's buffer get what its ranks did not write, and commits it."""

    def __init__(self, workers: Workers, purpose: str, buffer: WeightBuffer, readers: Sequence[int] = ()):
        self._workers, self._purpose = workers, purpose
        self._buffer = buffer
        self._readers = readers
        self._planned: dict[int, list[list[tuple[str, TensorSlice]]]] = {}  # by bucket and node, what was written
        self._travels: dict[int, bool] = {}  # by bucket, whether anything has to

    def complete(self, version: int, bucket: int, by_node: Mapping[str, list[WrittenSlice]]) -> list[WrittenSlice]:
        """Complete and commit a bucket of which each node's ranks have written a part; return all of it."""
        written = [sums_of(by_node[str(node)]) for node in range(len(by_node))]
        check_replicas(written, self._buffer.infos)
        self._plan(bucket, [list(sums) for sums in written])
        if self._travels[bucket]:
            self._workers.sync_weights(purpose=self._purpose, version=version, bucket=bucket)
        # What came has the sums of the ranks that wrote it: whoever reads a buffer compares its memory with them.
        whole = written_of({key: checksum for sums in reversed(written) for key, checksum in sums.items()})
        self._buffer.commit(whole)
        if not self._readers:
            self._workers.commit_weights(purpose=self._purpose, written=whole)
        return whole

    def _plan(self, bucket: int, slices: list[list[tuple[str, TensorSlice]]]) -> None:
        """Have the nodes know what has to travel of a bucket, where that is not what it was."""
        if self._planned.get(bucket) == slices:
            return
        transfers = plan_sync(slices, self._buffer.infos, self._readers)
        if transfers or self._travels.get(bucket):
            addresses: dict[str, list] = {}
            for leader in self._workers.open_transport(purpose=self._purpose):
                addresses |= leader.places
            fields = [[each.name, each.slice, each.origin, each.nodes] for each in transfers]
            token = secrets.token_hex(16)
            self._workers.connect_transport(
                purpose=self._purpose, bucket=bucket, transfers=fields, addresses=addresses, token=token
            )
        self._planned[bucket], self._travels[bucket] = slices, bool(transfers)
