"""Framed messages over a stream socket: one JSON header and any number of raw NumPy arrays.

A message is laid out as::

    prefix   20 bytes, big endian: magic, length of the JSON text, its CRC-32, payload size
    text     JSON: {"header": {...}, "arrays": [[name, dtype, shape], ...]}
    payload  the arrays' bytes, C order, little endian, one after the other

Nothing is unpickled, so a peer can at worst send wrong numbers. Arrays travel without a copy on either side:
they are sent from where they lie (``sendmsg``) and received into their final place (``recv_into``).

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

import json
import math
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_MAGIC = b"MRL1"
_PREFIX = struct.Struct("!4sIIQ")
_MAX_TEXT_BYTES = 64 << 20
# Of a message from a peer that has proved nothing yet: a few numbers.
MAX_HELLO_BYTES = 4096
_MAX_BUFFERS_PER_CALL = 512  # Linux refuses more than 1024 buffers in one sendmsg
_DTYPES = {
    np.dtype(name).str: np.dtype(name)
    for name in ("?", "<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
}

DEFAULT_MAX_PAYLOAD_BYTES = 64 << 30


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of a numeric address: names have no colon, and mean IPv4 here."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class ConnectionClosed(ConnectionError):
    """The peer closed the connection or died."""


class ProtocolError(RuntimeError):
    """The bytes on the stream are not a message of this protocol, or break its limits."""


def rank_0_host() -> str:
    """Return the address at which rank 0 is for the other ranks: that of MindSpore's scheduler."""
    return os.environ.get("MS_SCHED_HOST", "127.0.0.1")


def own_host() -> str:
    """Return the address of this machine by which it reaches rank 0."""
    host = rank_0_host()
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:  # connecting one sends nothing
        probe.connect((host, 9))
        return probe.getsockname()[0]


def send_message(
    connection: socket.socket,
    header: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray] | None = None,
    timeout_s: float | None = None,
) -> None:
    """Send ``header`` (anything JSON can hold) and ``arrays`` as one message.

    Arrays may have any shape, zero sizes included; bool, integer and float dtypes. Those that are not C-contiguous
    are copied. bfloat16 travels as the caller's uint16 view.

    Raises:
        ConnectionClosed: the peer is gone.
        TimeoutError: not all was sent within ``timeout_s``; the connection is of no further use.
        ProtocolError: a dtype that cannot travel, or a header that is too large.
    """
    contiguous = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
    for name, array in contiguous.items():
        if array.dtype.str not in _DTYPES:
            raise ProtocolError(f"array '{name}' has dtype {array.dtype}, which cannot be sent")
    layout = [[name, array.dtype.str, list(array.shape)] for name, array in contiguous.items()]
    text = json.dumps({"header": header, "arrays": layout}, separators=(",", ":")).encode()
    if len(text) > _MAX_TEXT_BYTES:
        raise ProtocolError(f"message header of {len(text)} bytes is over the limit of {_MAX_TEXT_BYTES}")
    payload_size_bytes = sum(array.nbytes for array in contiguous.values())
    prefix = _PREFIX.pack(_MAGIC, len(text), zlib.crc32(text), payload_size_bytes)
    buffers = [memoryview(prefix + text)]
    buffers += [memoryview(array.reshape(-1).view(np.uint8)) for array in contiguous.values() if array.nbytes]
    _send_all(connection, buffers, _Deadline(timeout_s))


def send_buffers(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send bytes alone, from where they lie; the peer knows from a message before them how many there are.

    Raises:
        ConnectionClosed: the peer is gone.
    """
    _send_all(connection, buffers, _Deadline(None))


def receive_buffers(connection: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Receive bytes alone into ``buffers``, one after the other, until all are full.

    Raises:
        ConnectionClosed: the peer is gone.
    """
    pending, first = list(buffers), 0
    while first < len(pending):
        try:
            size = connection.recvmsg_into(pending[first : first + _MAX_BUFFERS_PER_CALL])[0]
        except ConnectionResetError as error:
            raise ConnectionClosed("the peer closed the connection") from error
        if size == 0:
            raise ConnectionClosed("the peer closed the connection")
        while size and size >= len(pending[first]):
            size -= len(pending[first])
            first += 1
        if size:
            pending[first] = pending[first][size:]


def receive_message(
    connection: socket.socket,
    timeout_s: float | None = None,
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    max_text_bytes: int = _MAX_TEXT_BYTES,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Receive one message: its header and its arrays, newly allocated and writable.

    Raises:
        ConnectionClosed: the peer closed the connection, between messages or within one.
        TimeoutError: no whole message within ``timeout_s``. When nothing at all had arrived the connection may be
            used further; when the message had begun, it may not.
        ProtocolError: the stream is corrupt or the message larger than allowed.
    """
    deadline = _Deadline(timeout_s)
    prefix = bytearray(_PREFIX.size)
    _receive_into(connection, memoryview(prefix), deadline, at_start=True)
    magic, text_size_bytes, text_crc, payload_size_bytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ProtocolError(f"corrupt stream: a message begins with {bytes(magic)!r} in place of {_MAGIC!r}")
    if text_size_bytes > max_text_bytes or payload_size_bytes > max_payload_bytes:
        raise ProtocolError(
            f"message of {text_size_bytes} + {payload_size_bytes} bytes is over the limits of "
            f"{max_text_bytes} + {max_payload_bytes}"
        )
    text = bytearray(text_size_bytes)
    _receive_into(connection, memoryview(text), deadline)
    if zlib.crc32(text) != text_crc:
        raise ProtocolError("corrupt stream: the checksum of the message header does not match")
    header, arrays = _allocate(bytes(text), payload_size_bytes)
    for array in arrays.values():
        if array.nbytes:
            _receive_into(connection, memoryview(array.reshape(-1).view(np.uint8)), deadline)
    return header, arrays


def receive_hello(connection: socket.socket, timeout_s: float) -> dict[str, Any]:
    """Return the header of a message from a peer that has proved nothing: it is small, and has no arrays."""
    return receive_message(connection, timeout_s, max_payload_bytes=0, max_text_bytes=MAX_HELLO_BYTES)[0]


def _allocate(text: bytes, payload_size_bytes: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Parse the JSON text of a message and allocate its arrays, which must fill the payload exactly."""
    try:
        parsed = json.loads(text)
        header, layout = parsed["header"], parsed["arrays"]
        entries = [(str(name), _DTYPES[dtype], tuple(map(int, shape))) for name, dtype, shape in layout]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"corrupt stream: unreadable message header ({error!r})") from error
    if len({name for name, _, _ in entries}) != len(entries):
        raise ProtocolError("corrupt stream: two arrays of one name")
    if any(size < 0 for _, _, shape in entries for size in shape) or not isinstance(header, dict):
        raise ProtocolError("corrupt stream: impossible shape or header")
    declared_bytes = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in entries)
    if declared_bytes != payload_size_bytes:
        raise ProtocolError(f"corrupt stream: arrays of {declared_bytes} bytes in a payload of {payload_size_bytes}")
    try:
        return header, {name: np.empty(shape, dtype) for name, dtype, shape in entries}
    except (ValueError, MemoryError) as error:  # sizes beyond NumPy's, though one of them is zero; or beyond memory
        raise ProtocolError(f"corrupt stream: arrays that cannot be made ({error})") from error


class _Deadline:
    """A moment in time, or never."""

    def __init__(self, timeout_s: float | None):
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def wait(self, connection: socket.socket, event: int) -> int:
        """Wait until ``event`` is possible; return the flags for the socket call that follows.

        Polling leaves the socket's own timeout alone, which another thread may be relying on.
        """
        if self._end is None:
            return 0
        poller = select.poll()
        poller.register(connection, event)
        if not poller.poll(max(0.0, self._end - time.monotonic()) * 1000):
            raise TimeoutError("the peer did not answer in time")
        return socket.MSG_DONTWAIT


def _send_all(connection: socket.socket, buffers: Sequence[memoryview], deadline: _Deadline) -> None:
    pending = list(buffers)
    first = 0
    while first < len(pending):
        flags = deadline.wait(connection, select.POLLOUT)
        try:
            num_sent = connection.sendmsg(pending[first : first + _MAX_BUFFERS_PER_CALL], (), flags)
        except BlockingIOError:
            continue
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ConnectionClosed("the peer closed the connection") from error
        while num_sent and num_sent >= len(pending[first]):
            num_sent -= len(pending[first])
            first += 1
        if num_sent:
            pending[first] = pending[first][num_sent:]


def _receive_into(connection: socket.socket, buffer: memoryview, deadline: _Deadline, at_start: bool = False) -> None:
    num_received = 0
    while num_received < len(buffer):
        flags = deadline.wait(connection, select.POLLIN)
        try:
            size = connection.recv_into(buffer[num_received:], 0, flags)
        except BlockingIOError:
            continue
        except ConnectionResetError as error:
            raise ConnectionClosed("the peer closed the connection") from error
        if size == 0:
            where = "" if at_start and num_received == 0 else " in the middle of a message"
            raise ConnectionClosed(f"the peer closed the connection{where}")
        num_received += size
