"""What brings the pieces of an exchange from node to node; over TCP see :mod:`mindrlhf.weights.exchange.tcp`."""

from typing import Protocol

from mindrlhf.weights.exchange.plan import Box


class Carrier(Protocol):
    """The way of the weights into the board of this node and out of it; one per node."""

    def exchange(self, version: int) -> dict[tuple[str, Box], int]:
        """Send what other nodes lack of ``version`` and receive what this one lacks, into the memory of its board.

        All nodes do it at the same time, after all ranks have written.

        Returns:
            The regions that came, each with the sum of its bits as it now lies in memory, modulo the element's width.

        Raises:
            RunFailure: a node cannot be reached any more, or something arrived that was not sent.
        """

    def close(self) -> None:
        """End the connections."""
