"""Methods of an object in another process, called by name over one connection.

Arguments and results are what :mod:`mindrlhf.system.records` encodes. Messages by "kind":

    call    {method} + arguments, answered by any number of items of a stream, then by a result or an error
    abort   of a stream, which then has its result at once; where it crosses that, it means nothing
    beat    each second from a side that lives, with what it tells of itself
    bye     {why} the connection ends

One thread reads, so that the end of the other side is noticed at any time, and said by one exception, :class:`Lost`.
"""

import contextlib
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system.clock import WatchedTime
from mindrlhf.system.records import decode, encode
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, receive_message, send_message

BEAT_INTERVAL_S = 1.0
# Who dies closes its connections, which is noticed at once; a machine without power or network just says no more.
SILENCE_LIMIT_S = 10.0
_POLL_S = 0.5
_CLOSED = "has closed the connection: it has ended, or was killed"
_Message = tuple[str, dict[str, Any]]  # its kind, and its values


class Lost(RunFailure):
    """The other side has ended, is cut off, or has left; the message begins with its name."""


class CallFailed(RunFailure):
    """A method of the other side has failed there; the message is its own."""


class Connection(Protocol):
    """Interface of :class:`mindrlhf.system.handshake.SignedConnection` and :class:`Pair`."""

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Send a message; raises ConnectionClosed."""

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the next message; raises ConnectionClosed or ProtocolError."""

    def close(self) -> None:
        """End it, also for a thread that receives."""


class Pair:
    """One end of a socket pair: only a process that was given the other end can be there."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Send a message; see :func:`mindrlhf.system.wire.send_message`."""
        with self._sending:
            try:
                send_message(self._end, header, arrays)
            except (OSError, ValueError) as error:
                raise ConnectionClosed(str(error)) from None

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the next message; see :func:`mindrlhf.system.wire.receive_message`."""
        try:
            return receive_message(self._end)
        except (OSError, ValueError) as error:
            raise ConnectionClosed(str(error)) from None

    def close(self) -> None:
        """End it, also for a thread that receives."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Rpc:
    """One side of a connection: it calls methods of the other side, or serves an object to it.

    One thread may call at a time.

    Args:
        connection: greeted, or to a child.
        name: of the other side.
        check: called twice a second while an answer is awaited; what it raises ends the wait.
        tell: returns what this side's beats tell, by name; None sends no beats.
        watches: the other side beats, and is lost when it is silent for ``SILENCE_LIMIT_S``.
        on_lost: called once with how the other side was lost, by any thread; not after ``close``.

    Attributes:
        told: what the last beat of the other side told.
        num_beats: that came so far.
        lost: how the other side was lost; empty while it is there.
        is_answering: a call of this side is not answered yet.
        farewell: why the other side ended the connection, where it said so.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        check: Callable[[], None] = lambda: None,
        tell: Callable[[], Mapping[str, Any]] | None = None,
        watches: bool = False,
        on_lost: Callable[[str], None] = lambda how: None,
    ) -> None:
        self.name = name
        self.told: dict[str, Any] = {}
        self.num_beats = 0
        self.lost = self.farewell = ""
        self._connection = connection
        self._check = check
        self._on_lost = on_lost
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()  # None, the last: the other side is lost
        self._losing = threading.Lock()
        self._is_lost = threading.Event()
        self.is_answering = False
        self._num_received = 0
        threading.Thread(target=self._read, name=f"reads {name}", daemon=True).start()
        if tell is not None or watches:
            threading.Thread(target=self._beat, args=(tell, watches), name=f"beats {name}", daemon=True).start()

    def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the other side and return its result.

        Raises:
            Lost: the other side has gone.
            CallFailed, UserError: the method has failed.
        """
        self.begin(method, **arguments)
        return self.result()

    def begin(self, method: str, **arguments: Any) -> None:
        """Begin a call, whose result is to be taken by :meth:`result`."""
        assert not self.is_answering, f"{method} of {self.name} while an earlier call is not answered"
        self.is_answering = True
        self._send("call", {"method": method, "arguments": arguments})

    def result(self) -> Any:
        """Return the result of the call that was begun."""
        kind, values = self._next()
        assert kind == "result", f"{self.name} answers a call by items"
        return values["value"]

    def stream(self, method: str, **arguments: Any) -> Iterator[Any]:
        """Begin a call and return its items as they come; closing the iterator early aborts the rest."""
        self.begin(method, **arguments)
        return self._items()

    def serve(self, target: Any) -> None:
        """Do what the other side calls, until it is lost; what fails here is told, and the serving goes on."""
        with contextlib.suppress(Lost):
            while True:
                kind, values = self._take()
                if kind == "call":
                    self._answer(target, values["method"], values["arguments"])

    @property
    def is_interrupted(self) -> bool:
        """True if the other side has said something since the call that is being answered: it aborts, or is lost."""
        return not self._inbox.empty()

    def close(self) -> None:
        """End the connection without a word."""
        self._lose("was given up", says=False)

    def drop(self, how: str, *, tells: bool = False) -> None:
        """Count the other side as lost, for a reason that this side has; where ``tells``, it hears it."""
        self._lose(how, tells=tells)

    def leave(self, why: str, limit_s: float) -> None:
        """Say why this side ends the connection, and wait a moment for the other to close it: what is closed here first
        may be lost on its way."""
        with contextlib.suppress(Lost):
            self._send("bye", {"why": why})
        self._is_lost.wait(limit_s)
        self.close()

    def _items(self) -> Iterator[Any]:
        try:
            while (message := self._next())[0] == "item":
                yield message[1]["value"]
        finally:
            if self.is_answering and not self.lost:
                with contextlib.suppress(RunFailure):  # what ends the consumer matters more
                    self._send("abort", {})
                    while self._next()[0] == "item":
                        pass
            self.is_answering = False

    def _next(self) -> _Message:
        """Return the next message of an answer."""
        kind, values = self._take(self._check)
        self.is_answering = kind == "item"
        if kind == "error":
            raise (UserError if values["is_user_error"] else CallFailed)(values["message"])
        return kind, values

    def _take(self, check: Callable[[], None] | None = None) -> _Message:
        while True:
            try:
                message = self._inbox.get(timeout=None if check is None else _POLL_S)
            except queue.Empty:
                check()
                continue
            if message is None:
                self._inbox.put(None)  # for later calls
                self.is_answering = False
                raise Lost(f"{self.name} {self.lost}")
            return message

    def _answer(self, target: Any, method: str, arguments: Mapping[str, Any]) -> None:
        try:
            assert not method.startswith("_"), method
            result = getattr(target, method)(**arguments)
            if isinstance(result, Iterator):
                with contextlib.closing(result):
                    for item in result:
                        self._send("item", {"value": item})
                        if self.is_interrupted:
                            break
                result = None
            self._send("result", {"value": result})
        except Lost:
            raise
        except Exception as error:
            is_ours = isinstance(error, (UserError, RunFailure))
            if not is_ours:
                traceback.print_exc()
            text = " ".join(str(error).split()) or type(error).__name__
            message = text if is_ours else f"{type(error).__name__}: {text}"
            self._send("error", {"message": message, "is_user_error": isinstance(error, UserError)})

    def _send(self, kind: str, values: Mapping[str, Any]) -> None:
        encoded, arrays = encode(values)
        try:
            self._connection.send({"kind": kind, "values": encoded}, arrays)
        except ConnectionClosed:
            self._lose(_CLOSED)
            self.is_answering = False
            raise Lost(f"{self.name} {self.lost}") from None

    def _read(self) -> None:
        while True:
            try:
                header, arrays = self._connection.receive()
                kind, values = header["kind"], decode(header["values"], arrays)
            except ConnectionClosed:
                return self._lose(_CLOSED)
            except (ProtocolError, KeyError) as error:
                return self._lose(f"sends what nobody can read ({error})")
            self._num_received += 1
            if kind == "bye":
                self.farewell = values["why"]
                return self._lose(self.farewell)
            if kind == "beat":
                self.told, self.num_beats = values, self.num_beats + 1
            else:
                self._inbox.put((kind, values))

    def _beat(self, tell: Callable[[], Mapping[str, Any]] | None, watches: bool) -> None:
        watched, heard, heard_s = WatchedTime(), 0, 0.0
        while not self.lost:
            if tell is not None:
                with contextlib.suppress(Lost):
                    self._send("beat", tell())
            time.sleep(BEAT_INTERVAL_S)
            now_s, num_received = watched.now_s(), self._num_received
            if num_received != heard:
                heard, heard_s = num_received, now_s
            elif watches and now_s - heard_s >= SILENCE_LIMIT_S:
                self._lose(f"has not been heard of for {now_s - heard_s:.0f} s: it is cut off, or has no power")

    def _lose(self, how: str, *, says: bool = True, tells: bool = False) -> None:
        with self._losing:
            if self.lost:
                return
            self.lost = how
        if tells:
            with contextlib.suppress(Lost):
                self._send("bye", {"why": how})
        self._connection.close()
        self._inbox.put(None)
        self._is_lost.set()
        if says:
            self._on_lost(how)
