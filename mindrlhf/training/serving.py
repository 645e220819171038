"""The part of a rank's worker that works for rank 0 on its node: rollout servers, verifiers and agents there."""

import sys
import threading
from typing import TYPE_CHECKING

from mindrlhf.system import processes
from mindrlhf.system.handshake import introduce_node
from mindrlhf.system.rpc import Rpc
from mindrlhf.system.wire import ProtocolError, own_host
from mindrlhf.training.results import Machine
from mindrlhf.weights.publish.publisher import PublishingWorker

if TYPE_CHECKING:
    from mindrlhf.launch.nodes.helper import NodeHelper
    from mindrlhf.rollout.processes.node import NodeServers


class ServingWorker(PublishingWorker):
    """The part of an actor that works for rank 0 on its node; its public methods are called through the team."""

    # Of this node, on its first rank, where rank 0 is on another.
    servers: "NodeServers | None" = None
    verifiers: "NodeHelper | None" = None
    agents: "NodeHelper | None" = None

    def machine(self) -> Machine:
        """Return the machine of this rank."""
        return Machine(processes.machine())

    def serve_for_node(self, host: str, port: int, token: str) -> None:
        """On the first rank of another node than rank 0's, let rank 0 use the rollout servers here from now on."""
        if self.servers is not None:
            self.servers.buffer_path, self.servers.own_host = self.weight_buffer().path, own_host()
            self.servers.key = token.encode()
            args = (self.servers, host, port, self.node)
            threading.Thread(target=_serve_rank_0, args=args, daemon=True).start()

    def verify_for_node(self, host: str, port: int, token: str) -> None:
        """On the first rank of another node than rank 0's, let rank 0 use the verifier workers here from now on."""
        if self.verifiers is not None:
            self.verifiers.connect(host, port, token, self.node)

    def run_agents_for_node(self, host: str, port: int, token: str) -> None:
        """On the first rank of another node than rank 0's, let rank 0 have agents run here from now on."""
        if self.agents is not None:
            self.agents.connect(host, port, token, self.node)


def _serve_rank_0(servers: "NodeServers", host: str, port: int, node: int) -> None:
    try:
        connection = introduce_node(host, port, servers.key, node)
    except (OSError, ProtocolError) as error:
        print(f"warning: rank 0 cannot be reached at {host}:{port} ({error})", file=sys.stderr, flush=True)
        return
    # When rank 0 has gone, the rank itself notices and ends, with its servers.
    Rpc(connection, "rank 0", tell=servers.tell).serve(servers)
