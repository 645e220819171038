"""Where nodes for rollout only come in, on rank 0: one port, while the run goes on."""

import contextlib
import json
import os
import socket
import sys
import threading

from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.rollout_nodes import DOOR_VARIABLE, DoorAddress
from mindrlhf.rollout.elastic.peer import Member
from mindrlhf.system.handshake import Stranger, admit, greet_newcomers
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, family_of

_HELLO_TIMEOUT_S = 5.0


def take_address() -> DoorAddress | None:
    """Return where the launcher wants the door, None for none; processes that this one starts do not get to know."""
    value = os.environ.pop(DOOR_VARIABLE, None)
    return DoorAddress(**json.loads(value)) if value else None


class Door:
    """Takes in nodes by a thread of its own until it is closed.

    Raises:
        RunFailure: the port was taken meanwhile.
    """

    def __init__(self, address: DoorAddress) -> None:
        self._key = bytes.fromhex(address.key)
        self._waiting: list[Member] = []
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            self._listener = socket.create_server((address.host, address.port), family=family_of(address.host))
        except OSError as error:
            raise RunFailure(
                f"rank 0 cannot listen at {address.host}:{address.port} for rollout nodes ({error.strerror})"
            ) from None
        greet_newcomers(self._listener, self._admit)

    def take_newcomers(self) -> list[Member]:
        """Return the nodes that have come since the last call and are still there."""
        with self._lock:
            found, self._waiting = self._waiting, []
        return [member for member in found if not member.is_lost]

    def close(self) -> None:
        """Take in nobody any more, and end the conversations with those whom nobody has taken."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for member in self.take_newcomers():
            member.close()

    def _admit(self, connection: socket.socket) -> None:
        try:
            signed = admit(connection, self._key)
            header, _ = signed.receive(_HELLO_TIMEOUT_S)
            host, num_servers = str(header["host"]), int(header["num_servers"])
        except (Stranger, ConnectionClosed, ProtocolError, OSError, KeyError, ValueError, TypeError):
            return connection.close()
        member = Member(signed, host, num_servers, self._key, self._say_lost)
        with self._lock:
            self._waiting.append(member)
        return say(f"rollout node {member.name} is ready: it takes part from the next version of the weights on")

    def _say_lost(self, member: Member, how: str) -> None:
        if not self._is_closed:
            say(f"rollout node {member.name} {how}; the run goes on without it")


def say(line: str) -> None:
    """Say something on the console of the run."""
    print(f"mindrlhf: {line}", file=sys.stderr, flush=True)
