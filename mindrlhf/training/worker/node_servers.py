"""What the first rank of a node does for a rollout server that lies over several nodes."""

from mindrlhf.rollout.remote import ReplicatedGenerator
from mindrlhf.rollout.spanning.share import NodeShare
from mindrlhf.training.records import LeaderAddress, ServerNeeds
from mindrlhf.training.team import own_host
from mindrlhf.weights.publish.buffer import WeightBoard


class SharesServers:
    """The part of an actor that starts such servers; its public methods are called through the team, in this order.

    Beside :class:`mindrlhf.training.worker.node_board.NodeBoard`, whose board and number of the node it uses.
    """

    _node: int
    _board: WeightBoard | None
    _node_generator: ReplicatedGenerator | None
    _share: NodeShare | None = None

    @property
    def node_generator(self) -> ReplicatedGenerator | None:
        """The rollout servers that this rank owns."""
        return self._node_generator

    def use_share(self, share: NodeShare) -> None:
        """Take what starts this node's share of a server; on its first rank."""
        self._share = share

    def await_parts(self, is_owner: bool) -> LeaderAddress:
        """On the first rank of a server's first node, listen for those of its other nodes."""
        return LeaderAddress({str(self._node): list(self._share.open(own_host()))} if is_owner else {})

    def join_server(self, address: list | None, token: str) -> None:
        """On the first rank of another node of a server, keep its part there; ``address`` is the owner's."""
        if address is not None:
            host, port = address
            self._share.join((host, port), token.encode(), self._node, own_host(), self._board.path)

    def find_needs(self, part: int, num_nodes: int) -> ServerNeeds:
        """On the first rank of a server's first node, say what its workers read on one of its nodes, counted from 0."""
        if self._share is None or self._node_generator is None:
            return ServerNeeds({})
        return ServerNeeds({str(self._node): self._node_generator.find_needs(self._board.infos, part, num_nodes)})

    def start_server(self, nodes: list[int] | None, token: str) -> None:
        """On the first rank of a server's first node, start it in the background; it has parts on ``nodes``."""
        if nodes is not None:
            self._node_generator = self._share.start(token.encode(), nodes, self._board.path)
