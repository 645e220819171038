"""Arrays that several ranks are given alike: rank 0 sends them to one of these, and each passes them on to the next.

On one machine they lie in memory without a name that the next rank maps; from machine to machine they travel by TCP,
once. So a replica over many ranks costs rank 0 what one rank costs.
"""

import contextlib
import hmac
import math
import mmap
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.system import processes
from mindrlhf.system.handshake import keep_alive
from mindrlhf.system.ports import listen
from mindrlhf.system.wire import (
    ConnectionClosed,
    ProtocolError,
    own_host,
    receive_hello,
    receive_message,
    send_message,
)

RELAYED_BYTES = 1 << 16  # smaller ones are not worth the way
_TIMEOUT_S = 60.0
_HELLO_TIMEOUT_S = 5.0
_ALIGNMENT = 64
_MAX_WAITING = 16  # of connections that nobody has looked at yet

Header, Arrays = Mapping[str, Any], Mapping[str, np.ndarray]
Layout = list[list[Any]]  # name, dtype, shape and place in the memory of each array


class Relay:
    """A rank's links to the ranks before and after it; both are opened when they are first used, and stay.

    Args:
        rank: this one.
        token: what all ranks of the run know, and nobody else.

    Attributes:
        place: machine, host, port and socket name, by which other ranks find this one; JSON values.
    """

    def __init__(self, rank: int, token: Sequence[int]):
        self._rank = rank
        self._token = list(token)
        host = own_host()
        self._far = listen(host, backlog=_MAX_WAITING)
        self._near = socket.socket(socket.AF_UNIX)
        self._near.bind("")  # the kernel chooses a name that is no file
        self._near.listen(_MAX_WAITING)
        name = self._near.getsockname().hex()
        network = os.readlink("/proc/self/ns/net")  # where such names hold
        self.place = [f"{processes.machine()} {network}", host, self._far.getsockname()[1], name]
        self._before: dict[int, socket.socket] = {}
        self._after: dict[int, socket.socket] = {}

    def take(self, header: Header, arrays: Arrays, star: socket.socket) -> tuple[Any, Arrays]:
        """Return values and arrays (of :func:`mindrlhf.system.records.encode`) that ranks pass on, and pass them on.

        Args:
            header: rank 0's. Its "route" has "before": the rank that has the message, None where it is this very one;
                and "after": [rank, its place], or None.
            arrays: that came with that.
            star: the connection to rank 0.

        Raises:
            RunFailure: a rank died that had them.
        """
        with contextlib.ExitStack() as stack:
            memory, route = None, header["route"]
            if (before := route["before"]) is not None:
                try:
                    header, arrays, memory = self._receive(before, star)
                except (ConnectionClosed, ProtocolError, OSError) as error:
                    log = f"worker_{before}.log in the log directory"
                    raise RunFailure(f"rank {before} passed nothing on ({error}); see {log}") from None
            if memory is not None:
                stack.callback(os.close, memory[0])
            if route["after"] is not None:
                self.pass_on(header["values"], arrays, route["after"], memory)
        return header["values"], arrays

    def pass_on(self, values: Any, arrays: Arrays, after: Sequence[Any], memory: tuple[int, Layout] | None = None):
        """Give the next rank a message. That it is gone is for rank 0 to find, which waits for its answer.

        Args:
            values, arrays: the message.
            after: [rank, its place].
            memory: where the arrays lie already, and how.

        Raises:
            RunFailure: no memory for them, or no way to the next rank.
        """
        (rank, place), is_near = after, after[1][0] == self.place[0]
        with contextlib.ExitStack() as stack:
            try:
                if is_near and memory is None:
                    memory = lay_out(arrays)
                    stack.callback(os.close, memory[0])
                link = self._after.get(rank) or self._open(rank, place)
                if is_near:
                    send_message(link, {"values": values, "layout": memory[1]})
                    socket.send_fds(link, [b"m"], [memory[0]])
                else:
                    send_message(link, {"values": values}, arrays)
            except ConnectionError:
                return
            except OSError as error:
                raise RunFailure(f"rows cannot be passed on to rank {rank} at {place[1]}:{place[2]}: {error}") from None

    def close(self) -> None:
        """End all links."""
        for one in (self._far, self._near, *self._before.values(), *self._after.values()):
            one.close()

    def _open(self, rank: int, place: Sequence[Any]) -> socket.socket:
        machine, host, port, name = place
        if machine == self.place[0]:
            link = socket.socket(socket.AF_UNIX)
            link.connect(bytes.fromhex(name))
        else:
            link = socket.create_connection((host, port), timeout=_TIMEOUT_S)
            link.settimeout(None)
            keep_alive(link)
        send_message(link, {"rank": self._rank, "token": self._token})
        self._after[rank] = link
        return link

    def _receive(self, before: int, star: socket.socket) -> tuple[Header, Arrays, tuple[int, Layout] | None]:
        end_s = time.monotonic() + _TIMEOUT_S
        while before not in self._before:
            for listener in _readable(star, self._far, self._near, end_s=end_s):
                self._admit(listener)
        link = self._before[before]
        _readable(star, link)
        header, arrays = receive_message(link)
        if "layout" not in header:
            return header, arrays, None
        _, descriptors, _, _ = socket.recv_fds(link, 1, 1)
        if len(descriptors) != 1:
            raise ConnectionClosed("the peer closed the connection in the middle of a message")
        return header, mapped(descriptors[0], header["layout"]), (descriptors[0], header["layout"])

    def _admit(self, listener: socket.socket) -> None:
        """Take a connection, if it is from a rank of this run."""
        link, _ = listener.accept()
        try:
            header = receive_hello(link, _HELLO_TIMEOUT_S)
        except (ConnectionClosed, ProtocolError, TimeoutError):
            header = {}
        if not is_admitted(header, self._token):
            link.close()
            return
        if listener is self._far:
            keep_alive(link)
        self._before[header["rank"]] = link


def _readable(star: socket.socket, *sources: socket.socket, end_s: float | None = None) -> list[socket.socket]:
    """Return where there is something to read; wait for it while rank 0 is there and says nothing."""
    poller = select.poll()
    for one in (star, *sources):
        poller.register(one, select.POLLIN)
    ready = {number for number, _ in poller.poll(None if end_s is None else max(0.0, end_s - time.monotonic()) * 1000)}
    found = [one for one in sources if one.fileno() in ready]
    if not found:
        raise ConnectionClosed("rank 0 ended the call" if ready else f"no connection in {_TIMEOUT_S:g} s")
    return found


def is_admitted(header: Mapping[str, Any], token: Sequence[int]) -> bool:
    """Whether a first message is of a rank of this run, found in a time that tells nothing about where it differs."""
    return hmac.compare_digest(repr(header.get("token")).encode(errors="replace"), repr(list(token)).encode())


def route_of(ranks: Sequence[int], places: Sequence[Sequence[Any]]) -> list[int]:
    """Return ranks in the order in which arrays go from one to the next: those of a machine side by side, 0 first."""
    first: dict[str, int] = {}
    for rank in ranks:
        first.setdefault(places[rank][0], rank)
    return sorted(ranks, key=lambda rank: (first[places[rank][0]], rank))


def lay_out(arrays: Arrays) -> tuple[int, Layout]:
    """Copy arrays into memory without a name; return its descriptor and where each of them lies."""
    layout, size = [], 0
    for name, array in arrays.items():
        layout.append([name, array.dtype.str, list(array.shape), size])
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    descriptor = os.memfd_create("mindrlhf-rows", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, max(size, 1))
        with mmap.mmap(descriptor, max(size, 1)) as memory:
            for (_, _, _, start), array in zip(layout, arrays.values()):
                _view(memory, array.dtype.str, array.shape, start)[...] = array
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, layout


def mapped(descriptor: int, layout: Layout) -> dict[str, np.ndarray]:
    """Return the arrays of ``lay_out``, writable: what is written is this process's own."""
    memory = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return {name: _view(memory, dtype, shape, start) for name, dtype, shape, start in layout}


def _view(memory: mmap.mmap, dtype: str, shape: Sequence[int], start: int) -> np.ndarray:
    return np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
