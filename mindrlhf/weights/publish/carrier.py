"""What brings the pieces of an exchange from node to node; over TCP it is :mod:`mindrlhf.weights.publish.tcp`."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from mindrlhf.weights.publish.slices import Box
from mindrlhf.weights.publish.sync import Piece

Address = tuple[str, int]


class Carrier(Protocol):
    """The way of the weights into the board of this node and out of it; one per node.

    Attributes:
        address: host and port where the other nodes reach this one.
    """

    address: Address

    def connect(
        self, pieces: Sequence[Piece], addresses: Mapping[int, Address], token: bytes, bucket: int = 0
    ) -> None:
        """Make ready for the exchange of some pieces, in place of others; all nodes do it at the same time.

        Args:
            pieces: of all nodes.
            addresses: by node.
            token: a secret of the nodes.
            bucket: of the board, to which the pieces belong; those of other buckets remain.

        Raises:
            RunFailure: a node cannot be reached, or does not come.
        """

    def exchange(self, version: int, bucket: int = 0) -> dict[tuple[str, Box], int]:
        """Send what other nodes lack of ``version`` and receive what this one lacks, into the memory of its board.

        All nodes do it at the same time, after all ranks have written.

        Returns:
            The regions that came, each with the sum of its bits as it now lies in memory, modulo the element's width.

        Raises:
            RunFailure: a node cannot be reached any more, or something arrived that was not sent.
        """

    def close(self) -> None:
        """End the connections."""
