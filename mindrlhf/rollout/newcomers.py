"""Accepts nodes for rollout only on one port of rank 0 while the run goes on."""

import contextlib
import json
import os
import socket
import sys
import threading

from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.rollout_nodes import LISTENER_VARIABLE, ListenerAddress
from mindrlhf.rollout.nodes import OtherNode
from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.system.handshake import SignedConnection, greet_newcomers
from mindrlhf.system.rpc import Rpc
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, family_of
from mindrlhf.weights.publish.buffer import WeightBuffer

_HELLO_TIMEOUT_S = 5.0


def take_address() -> ListenerAddress | None:
    """Return where rank 0 is to listen, None for nowhere; processes that this one starts do not get to know."""
    value = os.environ.pop(LISTENER_VARIABLE, None)
    return ListenerAddress(**json.loads(value)) if value else None


class Newcomers:
    """Accepts nodes by a thread of its own until it is closed.

    Raises:
        RunFailure: the port was taken meanwhile.
    """

    def __init__(self, address: ListenerAddress, buffer: WeightBuffer) -> None:
        self._host = address.host
        self._key = bytes.fromhex(address.key)
        self._buffer = buffer
        self._waiting: list[tuple[OtherNode, int]] = []  # and how many servers each has
        self._nodes: list[OtherNode] = []
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._listener = socket.create_server((address.host, address.port), family=family_of(address.host))
        except OSError as error:
            raise RunFailure(
                f"rank 0 cannot listen at {address.host}:{address.port} for rollout nodes ({error.strerror})"
            ) from None
        greet_newcomers(self._listener, self._key, self._admit)

    def take(self, options: VllmOptions) -> list[Server]:
        """Return the servers, with these options, of nodes that have come since the last call and are still there."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        present = [(node, count) for node, count in waiting if not node.lost]
        return [Server(options, [node], index) for node, count in present for index in range(count)]

    def send_weights(self, node: OtherNode, version: int) -> None:
        node.send_weights(version, self._buffer)

    def close(self) -> None:
        """Accept nobody any more, and end the conversations with all nodes that have come."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._lock:
            nodes = list(self._nodes)
        for node in nodes:
            node.close()

    def _admit(self, signed: SignedConnection) -> None:
        try:
            header, _ = signed.receive(_HELLO_TIMEOUT_S)
            name, num_servers = f"rollout node {header['host']}, {signed.peer}", int(header["num_servers"])
        except (ConnectionClosed, ProtocolError, OSError, KeyError, ValueError, TypeError):
            return signed.close()

        def say_lost(how: str) -> None:
            if not self._is_closed:
                say(f"{name} {how}; the run goes on without it")

        rpc = Rpc(signed, name, watches=True, on_lost=say_lost)
        node = OtherNode(rpc, self._host, self._key, may_leave=True)
        with self._lock:
            self._waiting.append((node, num_servers))
            self._nodes = [*(other for other in self._nodes if not other.lost), node]
        return say(f"{name} is ready: it takes part from the next version of the weights on")


def say(line: str) -> None:
    """Say something on the console of the run."""
    print(f"mindrlhf: {line}", file=sys.stderr, flush=True)
