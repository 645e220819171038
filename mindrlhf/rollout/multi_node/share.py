"""The first rank of a node owns a server that spans nodes, or keeps its node's part of it."""

import dataclasses
import socket
from collections.abc import Collection

from mindrlhf.rollout.multi_node.parts import ServerParts
from mindrlhf.rollout.multi_node.supervisor import PartSupervisor
from mindrlhf.rollout.remote import accept_nodes
from mindrlhf.rollout.replicas import Replicas
from mindrlhf.rollout.vllm import VllmGenerator
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.system.ports import listen


class NodeShare:
    """A node's share of the one server that lies on it.

    The first rank of the server's first node calls ``open`` and ``start``, those of the others ``join`` in between.

    Args:
        options: of the server, the same on all its nodes but for the log.
        num_restarts: how often it may be started again.
    """

    def __init__(self, options: VllmOptions, num_restarts: int):
        self._options = options
        self._num_restarts = num_restarts
        self._listener: socket.socket | None = None
        self._parts: ServerParts | None = None
        self._generator: Replicas | None = None
        self._supervisor: PartSupervisor | None = None

    def open(self, own_host: str) -> tuple[str, int]:
        """Listen for the supervisors of the parts, and return the address."""
        self._listener = listen(own_host)
        return own_host, self._listener.getsockname()[1]

    def start(self, token: bytes, nodes: Collection[int], buffer_path: str) -> Replicas:
        """Take the connections of the parts on ``nodes``, and start the server in the background.

        Raises:
            RunFailure: a part did not come, or the server could not be started.
            UserError: see :meth:`mindrlhf.rollout.vllm.VllmGenerator.start`.
        """
        with self._listener:
            self._parts = ServerParts(accept_nodes(self._listener, token, nodes), self._listener.getsockname()[0])
        self._generator = Replicas([VllmGenerator.start(self._options, self._parts)], self._num_restarts)
        self._generator.use_weight_buffer(buffer_path)
        return self._generator

    def join(self, address: tuple[str, int], token: bytes, node: int, own_host: str, buffer_path: str) -> None:
        """Keep this node's part of the server whose owner listens at ``address``."""
        log_path = self._options.log_path.removesuffix(".log") + "_part.log"
        self._supervisor = PartSupervisor(dataclasses.replace(self._options, log_path=log_path), own_host, buffer_path)
        self._supervisor.join(*address, token, node)

    def close(self) -> None:
        """End the server, or the part."""
        for one in (self._generator, self._parts, self._supervisor):
            if one is not None:
                one.close()
        self._generator = self._parts = self._supervisor = None
