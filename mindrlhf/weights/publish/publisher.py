"""Publishing the weights of all ranks: what each rank does for it, and what rank 0 does.

The ranks of a node share a weight buffer, one for each purpose: one from which the rollout servers load every version
("publish"), and while a sharded model leaves, one through which rank 0 reads it ("export"). Rank 0 calls the methods of
:class:`PublishingWorker` on all ranks, for a version in this order::

    once             open_weights, attach_weights
    for each bucket  publish; where the model is sharded over nodes: sync_weights; on other nodes: commit_weights
    before a sync    open_transport, connect_transport, when what has to travel is not what it was
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from mindrlhf.observe.fingerprint import digest_weights
from mindrlhf.system.records import join, last, merged_by, result, union
from mindrlhf.system.wire import own_host
from mindrlhf.system.workers import Workers
from mindrlhf.weights.publish.buffer import WeightBuffer, WrittenSlice
from mindrlhf.weights.publish.slices import to_slice

if TYPE_CHECKING:
    from mindrlhf.weights.publish.collective import Broadcast, CollectiveTransport
    from mindrlhf.weights.publish.sync import BufferSync
    from mindrlhf.weights.publish.tcp import TcpTransport

PUBLISH, EXPORT = "publish", "export"


@result
class BufferPath:
    """Path of each node's weight buffer, for its ranks; empty where a rank made none."""

    path: str = merged_by(last)


@result
class Published:
    """Slices that a rank wrote to the weight buffer of its node: by node, see ``WrittenSlice``."""

    written: dict[str, list] = merged_by(join)


@result
class LeaderAddress:
    """Host and port, by node, at which its first rank waits for the others; empty on other ranks."""

    places: dict[str, Any] = merged_by(union)


@dataclass
class _NodeBuffer:
    """The weight buffer of a rank's node for one purpose, and what the rank knows of it.

    Attributes:
        model: what goes through it, a :class:`mindrlhf.training.engine.model.Placement`.
        is_owner: this rank, the first of its node, has made it.
        node: number of the node.
        ranks: those of the node; None for all.
        rank, nodes: this rank, and the ranks of each node, where weights travel between nodes by collectives.
        transport: between nodes; there when something has to travel.
    """

    model: Any
    buffer: WeightBuffer
    is_owner: bool
    node: int = 0
    ranks: Sequence[int] | None = None
    rank: int = 0
    nodes: Sequence[Sequence[int]] = ()
    transport: "TcpTransport | CollectiveTransport | None" = None


class PublishingWorker:
    """The part of a rank's worker that publishes and exports its model; its public methods are called through the team.

    Args:
        model: what is published, and exported where nothing else is said; see :class:`_NodeBuffer`.
    """

    def __init__(self, model: Any):
        self.model = model
        self._buffers: dict[str, _NodeBuffer] = {}  # by purpose

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self._buffers[PUBLISH].node

    def weight_buffer(self, purpose: str = PUBLISH) -> WeightBuffer:
        return self._buffers[purpose].buffer

    def open_weights(
        self, purpose: str, is_owner: bool, of: str = "", dtype: str | None = None, bucket_bytes: int = 0
    ) -> BufferPath:
        """On the first rank of a node, make its weight buffer.

        Args:
            purpose: "publish" or "export".
            is_owner: this is the first rank.
            of: which model, where a rank has several.
            dtype: of those who read it; see :func:`mindrlhf.weights.infos.hf_tensor_infos`.
            bucket_bytes: see :meth:`WeightBuffer.create`.
        """
        if not is_owner:
            return BufferPath("")
        model = self._published_model(of)
        buffer = model.create_weight_buffer(dtype, bucket_bytes)
        self._buffers[purpose] = _NodeBuffer(model, buffer, is_owner=True)
        return BufferPath(buffer.path)

    def attach_weights(self, purpose: str, path: str, of: str = "", **place: Any) -> None:
        """Map the weight buffer of this node, and take the ``place`` of this rank: fields of :class:`_NodeBuffer`."""
        if purpose not in self._buffers:
            buffer = WeightBuffer.attach(path, writable=True)
            self._buffers[purpose] = _NodeBuffer(self._published_model(of), buffer, is_owner=False)
        self._buffers[purpose] = replace(self._buffers[purpose], **place)

    def close_weights(self, purpose: str) -> None:
        """Unmap the buffer and end the connections with other nodes."""
        shared = self._buffers.pop(purpose)
        if shared.transport is not None:
            shared.transport.close()
        shared.buffer.close()

    def publish(self, version: int, bucket: int = 0, purpose: str = PUBLISH) -> Published:
        """Write this rank's share of a bucket of the tensors to the buffer of its node."""
        shared = self._buffers[purpose]
        shared.buffer.begin(version, bucket)
        shared.model.write_to(shared.buffer, shared.ranks)
        return Published({str(shared.node): shared.buffer.written()})

    def sync_weights(self, purpose: str, version: int, bucket: int) -> None:
        """On a rank with a transport, send what other nodes' buffers lack, and receive what this one does."""
        transport = self._buffers[purpose].transport
        if transport is not None:
            transport.sync(version, bucket)

    def commit_weights(self, purpose: str, written: list[WrittenSlice]) -> None:
        """On the first rank of another node than rank 0's, make what was written visible there."""
        shared = self._buffers[purpose]
        if shared.node and shared.is_owner:
            shared.buffer.commit(written)

    def open_transport(self, purpose: str) -> LeaderAddress:
        """On the first rank of a node, wait for those of the others.

        Where collectives are the transport, all ranks take part, and have no address.
        """
        from mindrlhf.weights.publish.collective import CollectiveTransport
        from mindrlhf.weights.publish.tcp import TcpTransport

        shared = self._buffers[purpose]
        if shared.nodes:
            if shared.transport is None:
                shared.transport = CollectiveTransport(shared.buffer, shared.rank, shared.nodes, self._open_broadcast)
            return LeaderAddress({})
        if not shared.is_owner:
            return LeaderAddress({})
        if shared.transport is None:
            shared.transport = TcpTransport(shared.buffer, shared.node, own_host())
        return LeaderAddress({str(shared.node): list(shared.transport.address)})

    def connect_transport(
        self, purpose: str, bucket: int, transfers: list, addresses: dict[str, Any], token: str
    ) -> None:
        """On a rank with a transport, connect with the others.

        Args:
            bucket: of the buffer.
            transfers: what of it has to travel; the fields of :class:`mindrlhf.weights.publish.sync.Transfer`.
            addresses: host and port by node.
            token: a secret of the nodes.
        """
        from mindrlhf.weights.publish.sync import Transfer

        shared = self._buffers[purpose]
        if shared.transport is not None:
            planned = [Transfer(name, to_slice(part), origin, tuple(nodes)) for name, part, origin, nodes in transfers]
            places = {int(node): (host, port) for node, (host, port) in addresses.items()}
            shared.transport.connect(planned, places, token.encode(), bucket)

    def _published_model(self, name: str) -> Any:
        """Return the model that a rank means by a name."""
        return self.model

    def _open_broadcast(self, ranks: tuple[int, ...], root: int, num_words: int) -> "Broadcast":
        raise NotImplementedError(f"a {type(self).__name__} has no collectives")


class Ranks(Protocol):
    """The part of :class:`mindrlhf.training.team.Team` that is used here."""

    world_size: int
    rank_0: Any

    def call(self, method: str, per_rank: Sequence[Mapping[str, Any]] | None = None, **common: Any) -> list[Any]:
        """Run a method on every rank, or replica."""


def open_weight_buffers(
    ranks: Ranks,
    nodes: Sequence[Sequence[int]],
    purpose: str = PUBLISH,
    of: str = "",
    dtype: str | None = None,
    bucket_bytes: int = 0,
    between_devices: bool = False,
) -> WeightBuffer:
    """Make a weight buffer on every node and give it to the ranks there; return that of rank 0's node.

    Args:
        ranks: all ranks, each for itself.
        nodes: the ranks of each node, rank 0's first.
        purpose, of, dtype, bucket_bytes: see :meth:`PublishingWorker.open_weights`.
        between_devices: what buffers lack comes over the devices' network, not the hosts'.
    """
    firsts = {members[0] for members in nodes}
    wanted = [{"is_owner": rank in firsts} for rank in range(ranks.world_size)]
    common = {"purpose": purpose, "of": of}
    workers: PublishingWorker = Workers(ranks.call)
    opened = workers.open_weights(per_rank=wanted, **common, dtype=dtype, bucket_bytes=bucket_bytes)
    arguments: list[dict] = [{} for _ in range(ranks.world_size)]
    for node, members in enumerate(nodes):
        for rank in members:
            arguments[rank] = {"path": opened[members[0]].path, "node": node, "ranks": members}
            if between_devices:
                arguments[rank] |= {"rank": rank, "nodes": nodes}
    workers.attach_weights(per_rank=arguments, **common)
    return ranks.rank_0.weight_buffer(purpose)


class WeightPublisher:
    """Rank 0's part: versions of the weights, each in the buffers of all nodes, one bucket of tensors after the other.

    Every rank writes what it holds to the buffer of its node; where the model is sharded over nodes, what the buffers
    lack then travels between them. A version is committed when its elements were each written, or came, exactly once.
    """

    def __init__(self, team: Ranks, buffer: WeightBuffer, purpose: str = PUBLISH):
        self._workers: PublishingWorker = Workers(team.call)
        self._buffer = buffer
        self._purpose = purpose
        self._sync: BufferSync | None = None  # between nodes

    def publish(self, version: int, load: Callable[[int, int], None] | None = None) -> str:
        """Put the weights into the buffers; return their digest.

        Args:
            load: called with the version and a bucket, from 0, as soon as that is there; the next takes its place.

        Raises:
            RunFailure: the buffers of two nodes differ, or one lacks something.
        """
        written: list[WrittenSlice] = []
        for bucket in range(self._buffer.num_buckets):
            written += self.put(version, bucket)
            if load is not None:
                load(version, bucket)
        return digest_weights(written)

    def put(self, version: int, bucket: int) -> list[WrittenSlice]:
        """Put a bucket of the weights into the buffers; return what the ranks together have written."""
        self._buffer.begin(version, bucket)
        results = self._workers.publish(version=version, bucket=bucket, purpose=self._purpose)
        by_node = join([published.written for published in results])
        if len(by_node) == 1:
            self._buffer.commit(by_node["0"])
            return by_node["0"]
        if self._sync is None:
            from mindrlhf.weights.publish.sync import BufferSync

            self._sync = BufferSync(self._workers, self._purpose, self._buffer, (0,) if self._purpose == EXPORT else ())
        return self._sync.complete(version, bucket, by_node)
