"""Connections between processes that share a secret: others are turned away, and what is sent is signed.

Each side proves that it knows the secret by an HMAC (RFC 2104, SHA-256) over fresh random numbers of both, so the
secret itself never travels and nothing that was overheard opens another connection. From then on every message carries
an HMAC over its content, its direction and its number, under a key of this connection alone: what a third machine
changes, sends twice or leaves out ends the connection. Nothing is encrypted.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.system.wire import (
    ConnectionClosed,
    ProtocolError,
    receive_buffers,
    receive_hello,
    receive_message,
    send_buffers,
    send_message,
)

_NONCE_BYTES = 32
_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 60.0  # of ranks on several nodes
# Connections at a time on which nothing is proved yet: each has a thread and a descriptor.
MAX_UNPROVEN = 64
# Of a moment, while others hold what there is; the listener itself goes on.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_SHORTAGE_S = 0.1
_CHECK_INTERVAL_S = 0.5
_SERVER, _CLIENT, _SESSION = b"server", b"client", b"session"
# After 5 s without traffic the kernel asks, three times, 2 s apart: a peer without power or network is noticed in 11 s.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))


class UnauthenticatedPeer(ConnectionError):
    """The peer does not know the secret, or says that this side does not."""


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and have the kernel notice a peer that has vanished without a word."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class SignedConnection:
    """A connection on which both sides have proved that they know the secret.

    One thread may receive while others send.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_server: bool):
        self._connection = connection
        self._key = key
        self._names = (_SERVER, _CLIENT) if is_server else (_CLIENT, _SERVER)  # own, the peer's
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return self._connection.getpeername()[0]

    def send(
        self,
        header: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        arrays = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
        with self._sending:
            signature = self._sign(self._names[0], self._num_sent, header, arrays)
            self._num_sent += 1
            try:
                send_message(self._connection, {"signature": signature, "header": header}, arrays, timeout_s)
            except TimeoutError:
                raise
            except (OSError, ValueError) as error:  # a ValueError where another thread has closed the connection
                raise ConnectionClosed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the next message; see :func:`mindrlhf.system.wire.receive_message`.

        Raises:
            ConnectionClosed: the peer has gone.
            ProtocolError: what came was not sent by it, or not now.
        """
        try:
            signed, arrays = receive_message(self._connection, timeout_s)
        except TimeoutError:
            if timeout_s is None:  # not ours: the kernel has given the peer up
                raise ConnectionClosed("the peer does not answer") from None
            raise
        except ConnectionClosed:
            raise
        except (OSError, ValueError) as error:
            raise ConnectionClosed(str(error)) from None
        header = signed.get("header")
        expected = self._sign(self._names[1], self._num_received, header, arrays)
        self._num_received += 1
        given = str(signed.get("signature")).encode(errors="replace")
        if not isinstance(header, dict) or not hmac.compare_digest(given, expected.encode()):
            raise ProtocolError("a message is not signed by the peer")
        return header, arrays

    def has_news(self, timeout_s: float = 0.0) -> bool:
        """Return True if a message, or the end of the connection, comes within ``timeout_s``."""
        try:
            return bool(select.select([self._connection], [], [], timeout_s)[0])
        except (OSError, ValueError):  # closed by another thread: ``receive`` says so
            return True

    def send_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Send bytes that are not signed; whoever receives them must be able to tell whether they are right."""
        try:
            send_buffers(self._connection, buffers)
        except (OSError, ValueError) as error:
            raise ConnectionClosed(str(error)) from None

    def receive_buffers(self, buffers: Sequence[memoryview]) -> None:
        """Receive what the peer sends by ``send_buffers``, until ``buffers`` are full."""
        try:
            receive_buffers(self._connection, buffers)
        except (OSError, ValueError) as error:
            raise ConnectionClosed(str(error)) from None

    def close(self) -> None:
        """End the connection, also for a thread that waits in ``receive``."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _sign(self, sender: bytes, number: int, header: Any, arrays: Mapping[str, np.ndarray]) -> str:
        state = hmac.new(self._key, digestmod=hashlib.sha256)
        state.update(b"%s %d " % (sender, number))
        state.update(json.dumps(header, sort_keys=True).encode())
        for name, array in arrays.items():
            state.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            state.update(memoryview(array.reshape(-1).view(np.uint8)))
        return state.hexdigest()


class Unproven:
    """Open connections whose peers have proved nothing yet: a bounded number, for a bounded time.

    One too many has the oldest hung up on: whoever knows the secret proves it in milliseconds.
    """

    def __init__(self) -> None:
        self._since_s: dict[socket.socket, float] = {}  # in the order in which they came
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        """Note a connection, and hang up on the oldest ones if there are too many."""
        with self._lock:
            self._since_s[connection] = time.monotonic()
            for oldest in [*self._since_s][:-MAX_UNPROVEN]:
                self._hang_up(oldest)

    def discard(self, connection: socket.socket) -> None:
        """Forget a connection, which is proven or closed."""
        with self._lock:
            self._since_s.pop(connection, None)

    def _hang_up(self, connection: socket.socket) -> None:
        # Not closed: the thread that reads notices, and closes it.
        del self._since_s[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def greet_newcomers(
    listener: socket.socket,
    secret: bytes,
    welcome: Callable[[SignedConnection], None],
    turn_away: Callable[[str, UnauthenticatedPeer], None] = lambda peer, error: None,
) -> None:
    """Have a thread accept connections until the listener is closed; each has a thread of its own from then on.

    An unauthenticated peer that says nothing keeps nobody waiting, and at most ``MAX_UNPROVEN`` of them are listened
    to at a time.

    Args:
        welcome: called with each connection whose peer knows ``secret``.
        turn_away: called with the address of each other peer and what was wrong.
    """
    unproven = Unproven()

    def greet(connection: socket.socket, peer: str) -> None:
        try:
            signed = admit(connection, secret)
        except UnauthenticatedPeer as error:
            return turn_away(peer, error)
        finally:
            unproven.discard(connection)
        return welcome(signed)

    def accept() -> None:
        while True:
            try:
                connection, address = listener.accept()
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    return  # closed
                time.sleep(_SHORTAGE_S)
                continue
            unproven.add(connection)
            threading.Thread(target=greet, args=(connection, address[0]), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def admit(connection: socket.socket, secret: bytes, timeout_s: float = _TIMEOUT_S) -> SignedConnection:
    """Let the peer of an accepted connection prove that it knows ``secret``, and prove it to the peer.

    Raises:
        UnauthenticatedPeer: it does not, or said nothing that makes sense within ``timeout_s`` in all.
    """
    end_s = time.monotonic() + timeout_s
    try:
        keep_alive(connection)
        own = secrets.token_bytes(_NONCE_BYTES)
        send_message(connection, {"challenge": own.hex()}, timeout_s=timeout_s)
        header = receive_hello(connection, end_s - time.monotonic())
        theirs = bytes.fromhex(str(header.get("challenge")))
        if len(theirs) != _NONCE_BYTES or not _is_proof(header.get("proof"), secret, _CLIENT, own + theirs):
            send_message(connection, {"refused": True}, timeout_s=end_s - time.monotonic())
            raise UnauthenticatedPeer("it does not know the secret")
        send_message(connection, {"proof": _proof(secret, _SERVER, own + theirs)}, timeout_s=end_s - time.monotonic())
    except UnauthenticatedPeer:
        connection.close()
        raise
    except (OSError, ProtocolError, ValueError) as error:
        connection.close()
        raise UnauthenticatedPeer(f"it does not speak as one of us ({error})") from None
    return SignedConnection(connection, _session_key(secret, own + theirs), is_server=True)


def introduce(connection: socket.socket, secret: bytes, timeout_s: float = _TIMEOUT_S) -> SignedConnection:
    """Prove to the peer that accepted this connection that this side knows ``secret``, and have it do the same.

    Raises:
        UnauthenticatedPeer: it refuses, or does not know the secret.
        ConnectionClosed, ProtocolError, TimeoutError: it is nobody who speaks so.
    """
    try:
        keep_alive(connection)
        header = receive_hello(connection, timeout_s)
        theirs, own = bytes.fromhex(str(header.get("challenge"))), secrets.token_bytes(_NONCE_BYTES)
        proof = _proof(secret, _CLIENT, theirs + own)
        send_message(connection, {"challenge": own.hex(), "proof": proof}, timeout_s=timeout_s)
        header = receive_hello(connection, timeout_s)
        if header.get("refused"):
            raise UnauthenticatedPeer("the secrets differ")
        if not _is_proof(header.get("proof"), secret, _SERVER, theirs + own):
            raise UnauthenticatedPeer("the other side does not know the secret")
    except ValueError as error:
        connection.close()
        raise ProtocolError(f"no challenge came ({error})") from None
    except BaseException:
        connection.close()
        raise
    return SignedConnection(connection, _session_key(secret, theirs + own), is_server=False)


def introduce_node(host: str, port: int, token: bytes, node: int) -> SignedConnection:
    """Connect to rank 0, or another that listens for this node, and say which it is.

    Raises:
        OSError, ProtocolError: it cannot be reached, or is somebody else.
    """
    connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
    connection.settimeout(None)
    signed = introduce(connection, token, CONNECT_TIMEOUT_S)
    signed.send({"node": node})
    return signed


def accept_nodes(
    listener: socket.socket,
    token: bytes,
    nodes: Collection[int],
    timeout_s: float = CONNECT_TIMEOUT_S,
    check: Callable[[], None] = lambda: None,
) -> dict[int, SignedConnection]:
    """Accept those who were given ``token`` for :func:`introduce_node`, until all of ``nodes`` have come.

    Args:
        check: called twice a second; what it raises ends the wait.

    Raises:
        RunFailure: one did not connect in time.
    """
    end_s = time.monotonic() + timeout_s  # for all of them: unauthenticated peers may come without end
    connections: dict[int, SignedConnection] = {}
    while missing := sorted(set(nodes) - connections.keys()):
        listener.settimeout(max(0.001, min(_CHECK_INTERVAL_S, end_s - time.monotonic())))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            check()
            if time.monotonic() >= end_s:
                raise RunFailure(f"the first rank of node {missing[0]} did not connect; see its log") from None
            continue
        connection.settimeout(None)
        with contextlib.suppress(UnauthenticatedPeer, ConnectionClosed, ProtocolError):
            signed = admit(connection, token)
            connections[int(signed.receive()[0]["node"])] = signed
    return connections


def derived_key(secret: bytes, purpose: str, number: str) -> bytes:
    """Return the key that those who know ``secret`` have for one purpose; ``number``, a fresh one, may be overheard."""
    return hmac.new(secret, f"{purpose} {number}".encode(), hashlib.sha256).digest()


def _proof(secret: bytes, role: bytes, nonces: bytes) -> str:
    return hmac.new(secret, role + nonces, hashlib.sha256).hexdigest()


def _is_proof(given: Any, secret: bytes, role: bytes, nonces: bytes) -> bool:
    return hmac.compare_digest(str(given).encode(errors="replace"), _proof(secret, role, nonces).encode())


def _session_key(secret: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, _SESSION + nonces, hashlib.sha256).digest()
