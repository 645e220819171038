"""The weight board of a node as its ranks see it: what they write to it, and what its first rank gets for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.rollout.remote import ReplicatedGenerator
from mindrlhf.training.records import BoardPath, Contribution, LeaderAddress, Published, Received
from mindrlhf.training.team import own_host
from mindrlhf.training.worker.model import RankModel
from mindrlhf.weights.publish.buffer import WeightBoard
from mindrlhf.weights.publish.carrier import Carrier
from mindrlhf.weights.publish.collective import CollectiveCarrier
from mindrlhf.weights.publish.needs import merge_needs, sum_parts
from mindrlhf.weights.publish.slices import Box, to_box
from mindrlhf.weights.publish.sync import Needs, Piece
from mindrlhf.weights.publish.tcp import TcpCarrier


class NodeBoard:
    """The part of an actor that publishes its model; its public methods are called through the team.

    Args:
        model: what is published.
    """

    def __init__(self, model: RankModel):
        self.model = model
        self._board: WeightBoard | None = None
        self._has_made_board = False  # as the first rank of its node
        self._node = 0
        self._ranks_of_node: Sequence[int] | None = None
        self._rank = 0
        self._nodes: Sequence[Sequence[int]] = ()  # the ranks of each, where weights travel by collectives
        self._node_generator: ReplicatedGenerator | None = None
        self._carrier: Carrier | None = None
        self._pieces: dict[int, list[Piece]] = {}  # that cross between nodes, by bucket
        self._needs: Needs | None = None  # of this node's board; None for everything
        self._aside: tuple[Any, ...] = ()  # while boards are of an export

    def create_board(self, dtype: str | None = None, bucket_bytes: int = 0) -> WeightBoard:
        """Make the weight board of this node; called on rank 0. For the arguments see :meth:`RankModel.create_board`"""
        self._board, self._has_made_board = self.model.create_board(dtype, bucket_bytes), True
        return self._board

    def open_board(self, is_wanted: bool, dtype: str | None = None, bucket_bytes: int = 0) -> BoardPath:
        """Make the weight board of another node than rank 0's; called on the first rank there."""
        if not is_wanted:
            return BoardPath("")
        board = self.create_board(dtype, bucket_bytes)
        if self._node_generator is not None:
            self._node_generator.use_board(board.path)
        return BoardPath(board.path)

    def attach_board(
        self,
        path: str,
        node: int = 0,
        ranks: Sequence[int] | None = None,
        rank: int = 0,
        nodes: Sequence[Sequence[int]] = (),
    ) -> None:
        """Map the board of this node.

        Args:
            path: where its first rank made it.
            node: number of this node.
            ranks: those of this node; None for all.
            rank: this one; read with ``nodes`` only.
            nodes: the ranks of each node, where weights travel between them by collectives.
        """
        self._node, self._ranks_of_node = node, ranks
        self._rank, self._nodes = rank, nodes
        if self._board is None:
            self._board = WeightBoard.attach(path, writable=True)

    def begin_export(self, of: str = "") -> None:
        """Set the board aside, so that one is made through which a model leaves.

        Args:
            of: which model, where a rank has several.
        """
        self._aside = self.model, self._board, self._has_made_board, self._node_generator, self._carrier
        self._aside += self._needs, self._rank, self._nodes
        self.model = self.exported_model(of)
        self._board, self._has_made_board, self._node_generator, self._carrier = None, False, None, None
        self._needs = {} if self._node else None  # rank 0's board alone is read

    def exported_model(self, of: str) -> RankModel:
        """Return the model that a rank means by a name."""
        return self.model

    def end_export(self) -> None:
        """Have the board that was set aside again; rank 0 ends the one that it has made meanwhile itself."""
        self.close_carrier()
        if self._board is not None and (self._node or not self._has_made_board):
            self._board.close()
        self.model, self._board, self._has_made_board, *others = self._aside
        self._node_generator, self._carrier, self._needs, self._rank, self._nodes = others

    def publish(self, version: int, bucket: int = 0) -> Published:
        """Write this rank's share of a bucket of the tensors to the board of its node."""
        self._board.begin(version, bucket)
        self.model.write_to(self._board, self._ranks_of_node)
        written = self._board.contribution()
        return Published({}, {str(self._node): written}) if self._node else Published(written)

    def seal_board(self, contributions: dict[str, Contribution]) -> None:
        """On the first rank of another node than rank 0's, make what was published visible there.

        Args:
            contributions: of the ranks of each such node, by node.
        """
        if self._node and self._has_made_board:
            self._board.seal([contributions[str(self._node)]], self._needs)

    def take_needs(self, needs: dict[str, Any] | None) -> None:
        """Take what the servers of this node read of each tensor, on its first rank; all of it is not needed then."""
        self._needs = None if needs is None else merge_needs([needs])

    def open_carrier(self) -> LeaderAddress:
        """On the first rank of a node, wait for those of the others, to exchange what their boards lack.

        Where collectives do it, all ranks take part, and have no address.
        """
        if self._nodes:
            from mindrlhf.training.sharded.broadcast import open_broadcast

            if self._carrier is None:
                self._carrier = CollectiveCarrier(self._board, self._rank, self._nodes, open_broadcast)
            return LeaderAddress({})
        if not self._has_made_board:
            return LeaderAddress({})
        if self._carrier is None:
            self._carrier = TcpCarrier(self._board, self._node, own_host())
        return LeaderAddress({str(self._node): list(self._carrier.address)})

    def connect_carrier(self, bucket: int, pieces: list, addresses: dict[str, Any], token: str) -> None:
        """On a rank with a carrier, connect with the others.

        Args:
            bucket: of the board.
            pieces: what of it is to be exchanged; the fields of :class:`mindrlhf.weights.publish.sync.Piece`.
            addresses: host and port by node.
            token: a secret of the nodes.
        """
        if self._carrier is not None:
            planned = [Piece(name, to_box(region), to_box(box), tuple(nodes)) for name, region, box, nodes in pieces]
            places = {int(node): (host, port) for node, (host, port) in addresses.items()}
            self._carrier.connect(planned, places, token.encode(), bucket)
            self._pieces[bucket] = planned

    def exchange(self, version: int, bucket: int = 0, written: dict[str, Contribution] | None = None) -> Received:
        """On a rank with a carrier, send what other nodes' boards lack, and receive what this one does.

        Args:
            written: by node, what its ranks wrote, where less than all of that is sent.
        """
        if self._carrier is None:
            return Received({})
        came = self._carrier.exchange(version, bucket)
        node, sent = str(self._node), {}
        if written is not None and self._has_made_board:
            sent = sum_parts(self._board, self._pieces[bucket], self._node, written[node])
        return Received({node: _listed(came)}, {node: _listed(sent)})

    def close_carrier(self) -> None:
        """End the connections with other nodes."""
        if self._carrier is not None:
            self._carrier.close()
            self._carrier = None


def _listed(sums: Mapping[tuple[str, Box], int]) -> list[list[Any]]:
    return [[name, region, checksum] for (name, region), checksum in sums.items()]
