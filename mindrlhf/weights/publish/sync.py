"""Weight sync between nodes: which node sends which slice of which tensor to which other, and what is checked of it.

The ranks of a node write what they hold to the weight buffer of their node. Where the model is sharded over nodes, that
buffer lacks slices, which come from the buffers of nodes that have them: each slice along a chain, from one node to all
that lack it, so that no node sends more than the model once, however many nodes there are. Where it is known what the
servers of each node read, of each slice only that travels.

Whatever travels is compared with the sums of bits that the ranks made as they wrote it.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindrlhf.errors import RunFailure
from mindrlhf.system.records import join, merged_by, result, union
from mindrlhf.weights.publish.buffer import WeightBuffer, WrittenSlice
from mindrlhf.weights.publish.slices import (
    RequiredSlices,
    TensorSlice,
    divide,
    intersect,
    num_elements,
    slices_within,
    sum_bits,
    to_slice,
)
from mindrlhf.weights.tensors import TensorInfo

# Large slices are cut, so that the nodes of a chain work at the same time, and so do several streams.
TRANSFER_BYTES = 8 << 20

Sums = Mapping[tuple[str, TensorSlice], int]  # of the bits of slices, by tensor and slice
Address = tuple[str, int]


@result
class LeaderAddress:
    """Host and port, by node, at which its first rank waits for the others; empty on other ranks."""

    places: dict[str, Any] = merged_by(union)


@result
class Received:
    """Slices that crossed between nodes, as they lie in memory there: by node, see ``WrittenSlice``.

    Attributes:
        slices: what came to the node; where several of its ranks got parts of a slice, their sums add up.
        sent: what it was the first to send, where that is less than what a rank wrote.
    """

    slices: dict[str, list] = merged_by(join)
    sent: dict[str, list] = merged_by(join, default_factory=dict)


@dataclass(frozen=True)
class Transfer:
    """A slice of a tensor, and its way.

    Attributes:
        name: of the tensor.
        source: the slice that it is a part of, which one rank wrote, or what some nodes require of such a one.
        slice: what travels.
        nodes: the one that has it, and those that lack it in the order in which they get it, each from the one before.
    """

    name: str
    source: TensorSlice
    slice: TensorSlice
    nodes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Size of the slice."""
        return num_elements(self.slice)


def sums_of(written: Iterable[WrittenSlice]) -> dict[tuple[str, TensorSlice], int]:
    """Return the sums of slices that were written, or came; those of what came through several ranks add up."""
    sums: Counter[tuple[str, TensorSlice]] = Counter()
    for name, bounds, checksum in written:
        sums[name, to_slice(bounds)] += checksum
    return dict(sums)


def written_of(sums: Sums) -> list[WrittenSlice]:
    """Return the inverse of :func:`sums_of`."""
    return [[name, one, checksum] for (name, one), checksum in sums.items()]


def plan_sync(
    written: Sequence[Sums], infos: Sequence[TensorInfo], required: Sequence[RequiredSlices] | None = None
) -> list[Transfer]:
    """Return the transfers in the order in which every node sends and receives them.

    Args:
        written: by node, what its ranks wrote to its buffer. Slices of two ranks are the same or disjoint.
        infos: the tensors of a buffer.
        required: by node, what its servers read; None where every node gets everything.
    """
    element_bytes = {info.name: info.numpy_dtype.itemsize for info in infos}
    sent_bytes = [0] * len(written)
    transfers = []
    for name, source in dict.fromkeys(key for sums in written for key in sums):
        holders = [node for node, sums in enumerate(written) if (name, source) in sums]
        for part, nodes in _lacking_parts(name, source, set(range(len(written))) - set(holders), required):
            origin = min(holders, key=lambda node: (sent_bytes[node], node))
            # In a ring, so that few pairs of nodes talk to each other.
            others = sorted(nodes, key=lambda node: (node - origin) % len(written))
            size_bytes = element_bytes[name] * num_elements(part)
            for node in (origin, *others[:-1]):
                sent_bytes[node] += size_bytes
            transfers += [Transfer(name, part, one, (origin, *others)) for one in _cut(part, size_bytes)]
    return transfers


def _lacking_parts(
    name: str, source: TensorSlice, nodes: set[int], required: Sequence[RequiredSlices] | None
) -> list[tuple[TensorSlice, Sequence[int]]]:
    """Return the parts of a slice that some nodes, which lack it, have to get, each with these nodes."""
    if not nodes:
        return []
    if required is None:
        return [(source, sorted(nodes))]
    slices_of = {node: required[node].get(name, ()) for node in sorted(nodes)}
    return divide(
        {node: [source] if slices is None else slices_within(slices, source) for node, slices in slices_of.items()}
    )


def _cut(one: TensorSlice, size_bytes: int) -> list[TensorSlice]:
    if not one or size_bytes <= TRANSFER_BYTES:
        return [one]
    (start, stop), *others = one
    num_rows = max(1, (stop - start) * TRANSFER_BYTES // size_bytes)
    firsts = range(start, stop, num_rows)
    return [((first, min(first + num_rows, stop)), *others) for first in firsts]


def sum_sent(
    buffer: WeightBuffer, transfers: Sequence[Transfer], node: int, written: Sums
) -> dict[tuple[str, TensorSlice], int]:
    """Return the sums of what a node is the first to send, where that is less than a slice that a rank wrote.

    The ranks sum what they write; of parts of it the node where they begin does. So that nothing changes unseen, it
    compares what was written with its sums in the same pass.

    Args:
        buffer: of this node, after all of its ranks have written.
        transfers: of all nodes.
        written: what the ranks of this node wrote.

    Raises:
        RunFailure: a slice of which a part is to be sent is not as it was written.
    """
    parts_of: dict[str, set[TensorSlice]] = {}
    for transfer in transfers:
        if transfer.nodes[0] == node and (transfer.name, transfer.source) not in written:
            parts_of.setdefault(transfer.name, set()).add(transfer.source)
    sums = {
        (name, part): sum_bits(buffer.view(name, part)) for name, parts in parts_of.items() for part in sorted(parts)
    }
    for (name, one), checksum in written.items():
        own = [part for part in parts_of.get(name, ()) if intersect(part, one)]
        if own:
            rest = [part for part, groups in divide({"all": [one], "sent": own}) if groups == ("all",)]
            total = sum(sums[name, part] for part in own) + sum(sum_bits(buffer.view(name, part)) for part in rest)
            if (total - checksum) % (1 << 8 * buffer.view(name, one).itemsize):
                raise RunFailure(f"tensor '{name}' changed on node {node} after it was written: {one}")
    return sums


def check_received(found: Sums, expected: Sums, infos: Sequence[TensorInfo], node: int) -> None:
    """Compare what lies in a node's memory now with what the writing ranks have summed.

    Args:
        found: the sums of what came, over the node's memory.
        expected: those of all slices; see :func:`sums_of`.

    Raises:
        RunFailure: it differs, or something is missing; the message names node and tensor.
    """
    modulus = _moduli(infos)
    for (name, one), checksum in found.items():
        if (checksum - expected[name, one]) % modulus[name]:
            raise RunFailure(f"tensor '{name}' came to node {node} with other values than were written: {one}")


def check_replicas(written: Sequence[Sums], infos: Sequence[TensorInfo]) -> None:
    """Check that nodes that wrote the same slice wrote the same into it.

    Raises:
        RunFailure: they did not; two replicas of the model have diverged.
    """
    modulus = _moduli(infos)
    first: dict[tuple[str, TensorSlice], tuple[int, int]] = {}
    for node, sums in enumerate(written):
        for (name, one), checksum in sums.items():
            other, expected = first.setdefault((name, one), (node, checksum))
            if (checksum - expected) % modulus[name]:
                raise RunFailure(f"the weights of node {node} are not those of node {other}: tensor '{name}', {one}")


def _moduli(infos: Sequence[TensorInfo]) -> dict[str, int]:
    return {info.name: 1 << (8 * info.numpy_dtype.itemsize) for info in infos}


class BufferSync:
    """Rank 0's part of it: has every node's buffer get what its ranks did not write, and commits it.

    Args:
        call: calls a method of :class:`mindrlhf.weights.publish.publisher.PublishingWorker` on all ranks.
        buffer: of rank 0's node.

    Attributes:
        required: by node, what its servers read; None for everything on all of them.
    """

    def __init__(self, call: Callable[..., list[Any]], buffer: WeightBuffer):
        self._call = call
        self._buffer = buffer
        self._planned: dict[int, list[list[tuple[str, TensorSlice]]]] = {}  # by bucket and node, what was written
        self._transfers: dict[int, list[Transfer]] = {}  # by bucket
        self.required: Sequence[RequiredSlices | None] | None = None

    def require(self, required: Sequence[RequiredSlices | None]) -> None:
        """See :meth:`mindrlhf.weights.publish.publisher.WeightPublisher.require`."""
        self.required = required
        self._planned = {}

    def complete(self, version: int, bucket: int, by_node: Mapping[str, list[WrittenSlice]]) -> list[WrittenSlice]:
        """Complete and commit a bucket of which each node's ranks have written a part; return all of it."""
        written = [sums_of(by_node[str(node)]) for node in range(len(by_node))]
        check_replicas(written, self._buffer.infos)
        received = self._fill(version, bucket, written)
        # What came has the sums of the ranks that wrote it: whoever reads a buffer compares its memory with them.
        whole = {key: checksum for sums in reversed(written) for key, checksum in sums.items()}
        own = [whole] * len(written)
        if self.required is not None:
            own = [{**sums, **received.get(node, {})} for node, sums in enumerate(written)]
        self._buffer.commit(written_of(own[0]), self.required and self.required[0])
        self._call("commit_weights", written={str(node): written_of(own[node]) for node in range(1, len(own))})
        return written_of(whole)

    def _fill(self, version: int, bucket: int, written: Sequence[Sums]) -> dict[int, Sums]:
        """Have every node's buffer get what its ranks did not write, check it, and return its sums by node."""
        infos, transfers = self._buffer.infos, self._plan(bucket, written)
        if not transfers:
            return {}
        by_node = None if self.required is None else {str(node): written_of(one) for node, one in enumerate(written)}
        results: list[Received] = self._call("sync_weights", version=version, bucket=bucket, written=by_node)
        expected = {key: checksum for sums in written for key, checksum in sums.items()}
        for one in results:
            for sent in one.sent.values():
                expected |= sums_of(sent)
        received = {int(node): sums_of(came) for node, came in join([one.slices for one in results]).items()}
        for node, found in received.items():
            check_received(found, expected, infos, node)
        return received

    def _plan(self, bucket: int, written: Sequence[Sums]) -> list[Transfer]:
        """Return what has to travel of a bucket; the nodes are connected for it."""
        slices = [list(sums) for sums in written]
        if self._planned.get(bucket) != slices:  # as a rule what it was: a large model's plan takes seconds
            required, infos = None, self._buffer.infos
            if self.required is not None:
                everything: RequiredSlices = {info.name: None for info in infos}
                required = [everything if one is None else one for one in self.required]
            transfers = plan_sync(written, infos, required)
            if transfers != self._transfers.get(bucket, []):
                self._connect(bucket, transfers)
            self._planned[bucket], self._transfers[bucket] = slices, transfers
        return self._transfers[bucket]

    def _connect(self, bucket: int, transfers: Sequence[Transfer]) -> None:
        addresses: dict[str, list] = {}
        found: list[LeaderAddress] = self._call("open_transport")
        for one in found:
            addresses |= one.places
        planned = [[one.name, one.source, one.slice, one.nodes] for one in transfers]
        token = secrets.token_hex(16)
        self._call("connect_transport", bucket=bucket, transfers=planned, addresses=addresses, token=token)
