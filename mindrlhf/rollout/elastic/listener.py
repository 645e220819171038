"""Accepts rollout-only nodes on one port of rank 0 while the run goes on."""

import contextlib
import json
import os
import socket
import sys
import threading

from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.rollout_nodes import LISTENER_VARIABLE, ListenerAddress
from mindrlhf.rollout.elastic.peer import Peer
from mindrlhf.system.handshake import SignedConnection, greet_newcomers
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, family_of

_HELLO_TIMEOUT_S = 5.0


def take_address() -> ListenerAddress | None:
    """Return where rank 0 is to listen, None for nowhere; processes that this one starts do not get to know."""
    value = os.environ.pop(LISTENER_VARIABLE, None)
    return ListenerAddress(**json.loads(value)) if value else None


class Listener:
    """Accepts nodes by a thread of its own until it is closed.

    Raises:
        RunFailure: the port was taken meanwhile.
    """

    def __init__(self, address: ListenerAddress) -> None:
        self._key = bytes.fromhex(address.key)
        self._waiting: list[Peer] = []
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._listener = socket.create_server((address.host, address.port), family=family_of(address.host))
        except OSError as error:
            raise RunFailure(
                f"rank 0 cannot listen at {address.host}:{address.port} for rollout nodes ({error.strerror})"
            ) from None
        greet_newcomers(self._listener, self._key, self._admit)

    def take_newcomers(self) -> list[Peer]:
        """Return the nodes that have come since the last call and are still there."""
        with self._lock:
            found, self._waiting = self._waiting, []
        return [peer for peer in found if not peer.is_lost]

    def close(self) -> None:
        """Accept nobody any more, and end the conversations with those whom nobody has taken."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for peer in self.take_newcomers():
            peer.close()

    def _admit(self, signed: SignedConnection) -> None:
        try:
            header, _ = signed.receive(_HELLO_TIMEOUT_S)
            host, num_servers = str(header["host"]), int(header["num_servers"])
        except (ConnectionClosed, ProtocolError, OSError, KeyError, ValueError, TypeError):
            return signed.close()
        peer = Peer(signed, host, num_servers, self._key, self._say_lost)
        with self._lock:
            self._waiting.append(peer)
        return say(f"rollout node {peer.name} is ready: it takes part from the next version of the weights on")

    def _say_lost(self, peer: Peer, how: str) -> None:
        if not self._is_closed:
            say(f"rollout node {peer.name} {how}; the run goes on without it")


def say(line: str) -> None:
    """Say something on the console of the run."""
    print(f"mindrlhf: {line}", file=sys.stderr, flush=True)
