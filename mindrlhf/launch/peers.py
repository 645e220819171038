"""Interface to the launchers of other nodes, and its null version for a single machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

SEND_TIMEOUT_S = 5.0  # of a message between launchers


@dataclass(frozen=True)
class Ending:
    """Why the ranks of this node have to end, and the exit code."""

    code: int
    line: str


class Peers:
    """The launchers of the other nodes; this base class stands for a run that has no other nodes.

    Attributes:
        node: number of this node.
        num_nodes: number of all.
        host: address at which the ranks of all nodes find MindSpore's scheduler, which runs on node 0.
        scheduler_port: its port; None to choose one.
        environment: variables that the ranks of this node get.
    """

    node = 0
    num_nodes = 1
    host = "127.0.0.1"
    scheduler_port: int | None = None
    environment: Mapping[str, str] = MappingProxyType({})

    def ranks(self, num_workers: int) -> range:
        """Return the ranks of this node, of which each has ``num_workers``."""
        return range(self.node * num_workers, (self.node + 1) * num_workers)

    def ending(self) -> Ending | None:
        """Return why the ranks of this node have to end, None while they need not; call it every second or so."""
        return None

    def asked_signals(self) -> list[int]:
        """Return, on node 0, the signals that other nodes have received for the run since the last call."""
        return []

    def pass_on(self, number: int) -> None:
        """Give node 0 a signal that is meant for rank 0."""

    def report(self, text: str) -> None:
        """Keep what happened here, for the other nodes."""


ALONE = Peers()
