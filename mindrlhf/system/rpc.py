"""The talk between processes: messages over one connection, and methods of an object at its other end.

Values, arguments and results are what :mod:`mindrlhf.system.records` encodes. Messages of calls by "kind":

    call    {method} + arguments, answered by any number of items of a stream, then by a result or an error
    abort   of a stream, which then has its result at once; where it crosses that, it means nothing
    beat    each second from a side that lives, with what it tells of itself
    bye     {why} the connection ends

One thread reads, so that the end of the other side is noticed at any time; calls say it by one exception,
:class:`Lost`.
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
LOST = "lost"  # the kind of the last message, which says how
Message = dict[str, Any]  # its values by name, and its "kind"


class Lost(RunFailure):
    """The other side has ended, is cut off, or has left; the message begins with its name."""


class CallFailed(RunFailure):
    """A method of the other side has failed there; the message is its own."""


class Connection(Protocol):
    """Interface of :class:`mindrlhf.system.handshake.SignedConnection` and :class:`Pair`."""

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], timeout_s: float | None = None) -> None:
        """Send a message; raises ConnectionClosed, TimeoutError."""

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the next message; raises ConnectionClosed, ProtocolError, TimeoutError."""

    def close(self) -> None:
        """End it, also for a thread that receives."""


class Pair:
    """One end of a socket pair: only a process that was given the other end can be there."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray], timeout_s: float | None = None) -> None:
        with self._sending:
            try:
                send_message(self._end, header, arrays, timeout_s)
            except (OSError, ValueError) as error:
                raise ConnectionClosed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            return receive_message(self._end, timeout_s)
        except (OSError, ValueError) as error:
            raise ConnectionClosed(str(error)) from None

    def close(self) -> None:
        """End it, also for a thread that receives."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Link:
    """Messages in order and, each second, a beat, by threads of its own, until it is closed or the other side is lost.

    Args:
        connection: greeted, or to a child.
        deliver: called, by those threads, with each message but beats, and at the end with {"kind": "lost", "how": ...}
            unless this side has closed the link.
        tell: returns what this side's beats tell, by name; None sends no beats.
        watches: the other side beats, and is lost when it is silent for ``SILENCE_LIMIT_S``; one that computes in its
            own process may miss beats.
        timeout_s: longest time that sending a message may take.

    Attributes:
        told: what the last beat of the other side told.
        num_beats: that came so far.
        lost: how the other side was lost; empty while it is there.
    """

    def __init__(
        self,
        connection: Connection,
        deliver: Callable[[Message], None],
        *,
        tell: Callable[[], Mapping[str, Any]] | None = dict,
        watches: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        self.told: dict[str, Any] = {}
        self.num_beats = 0
        self.lost = ""
        self._connection = connection
        self._deliver = deliver
        self._timeout_s = timeout_s
        self._losing = threading.Lock()
        self._num_received = 0
        threading.Thread(target=self._read, name="link reads", daemon=True).start()
        if tell is not None:
            threading.Thread(target=self._beat, args=(tell,), name="link beats", daemon=True).start()
        if watches:
            self.watch(SILENCE_LIMIT_S)

    def watch(self, limit_s: float) -> None:
        """Count the other side as lost from now on when it is silent for ``limit_s``."""
        threading.Thread(target=self._watch, args=(limit_s,), name="link watches", daemon=True).start()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message; one that cannot be sent is lost with the other side, of which ``deliver`` hears."""
        encoded, arrays = encode(values)
        try:
            self._connection.send({"kind": kind, "values": encoded}, arrays, self._timeout_s)
        except (ConnectionClosed, TimeoutError):
            self.drop(_CLOSED)

    def drop(self, how: str, *, tells: bool = False) -> None:
        """Count the other side as lost, for a reason that this side has; where ``tells``, it hears it."""
        if self._lose(how, tells=tells):
            self._deliver({"kind": LOST, "how": how})

    def close(self) -> None:
        """End the link without a word."""
        self._lose("was given up")

    def _lose(self, how: str, *, tells: bool = False) -> bool:
        with self._losing:
            if self.lost:
                return False
            self.lost = how
        if tells:
            self.send("bye", why=how)
        self._connection.close()
        return True

    def _read(self) -> None:
        while True:
            try:
                message = _read_message(self._connection)
            except ConnectionClosed:
                return self.drop(_CLOSED)
            except ProtocolError as error:
                return self.drop(f"sends what nobody can read ({error})")
            self._num_received += 1
            if message["kind"] == "beat":
                del message["kind"]
                self.told, self.num_beats = message, self.num_beats + 1
            else:
                self._deliver(message)

    def _beat(self, tell: Callable[[], Mapping[str, Any]]) -> None:
        while not self.lost:
            self.send("beat", **tell())
            time.sleep(BEAT_INTERVAL_S)

    def _watch(self, limit_s: float) -> None:
        watched, heard, heard_s = WatchedTime(), 0, 0.0
        while not self.lost:
            time.sleep(BEAT_INTERVAL_S)
            now_s, num_received = watched.now_s(), self._num_received
            if num_received != heard:
                heard, heard_s = num_received, now_s
            elif now_s - heard_s >= limit_s:
                self.drop(f"has not been heard of for {now_s - heard_s:.0f} s: it is stopped, cut off, or has no power")


def _read_message(connection: Connection, timeout_s: float | None = None) -> Message:
    header, arrays = connection.receive(timeout_s)
    try:
        return decode(header["values"], arrays) | {"kind": header["kind"]}
    except (KeyError, TypeError) as error:
        raise ProtocolError(repr(error)) from None


def say_ready(connection: Connection, failure: Exception | None, **values: Any) -> None:
    """Say that this side is ready, and what with; or why it is not."""
    if failure is not None:
        values = {"failure": str(failure), "is_user_error": isinstance(failure, UserError)}
    encoded, arrays = encode(values)
    connection.send({"kind": "ready", "values": encoded}, arrays)


def await_ready(connection: Connection, name: str, limit_s: float) -> Message:
    """Return what the other side is ready with, as :func:`say_ready` says it.

    Raises:
        UserError, RunFailure: it is not.
    """
    try:
        said = _read_message(connection, limit_s)
    except (ConnectionClosed, ProtocolError, TimeoutError) as error:
        raise RunFailure(f"{name} did not start ({error}); see the log of its first rank") from None
    if "failure" in said:
        raise (UserError if said["is_user_error"] else RunFailure)(f"{name}: {said['failure']}")
    return said


class Rpc(Link):
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
        is_answering: a call of this side is not answered yet; for the others see :class:`Link`.
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
        self.farewell = ""
        self._check = check
        self._on_lost = on_lost
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None, the last: the other side is lost
        self._is_lost = threading.Event()
        self.is_answering = False
        super().__init__(connection, self._hear, tell=tell, watches=watches)

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
        self._send("call", method=method, arguments=arguments)

    def result(self) -> Any:
        """Return the result of the call that was begun."""
        message = self._next()
        assert message["kind"] == "result", f"{self.name} answers a call by items"
        return message["value"]

    def stream(self, method: str, **arguments: Any) -> Iterator[Any]:
        """Begin a call and return its items as they come; closing the iterator early aborts the rest."""
        self.begin(method, **arguments)
        return self._items()

    def serve(self, target: Any) -> None:
        """Do what the other side calls, until it is lost; what fails here is told, and the serving goes on."""
        with contextlib.suppress(Lost):
            while True:
                message = self._take()
                if message["kind"] == "call":
                    self._answer(target, message["method"], message["arguments"])

    @property
    def is_interrupted(self) -> bool:
        """True if the other side has said something since the call that is being answered: it aborts, or is lost."""
        return not self._inbox.empty()

    def close(self) -> None:
        """End the connection without a word."""
        super().close()
        self._end()

    def leave(self, why: str, limit_s: float) -> None:
        """Say why this side ends the connection, and wait a moment for the other to close it: what is closed here first
        may be lost on its way."""
        self.send("bye", why=why)
        self._is_lost.wait(limit_s)
        self.close()

    def _items(self) -> Iterator[Any]:
        try:
            while (message := self._next())["kind"] == "item":
                yield message["value"]
        finally:
            if self.is_answering and not self.lost:
                with contextlib.suppress(RunFailure):  # what ends the consumer matters more
                    self._send("abort")
                    while self._next()["kind"] == "item":
                        pass
            self.is_answering = False

    def _next(self) -> Message:
        """Return the next message of an answer."""
        message = self._take(self._check)
        self.is_answering = message["kind"] == "item"
        if message["kind"] == "error":
            raise (UserError if message["is_user_error"] else CallFailed)(message["message"])
        return message

    def _take(self, check: Callable[[], None] | None = None) -> Message:
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
                        self._send("item", value=item)
                        if self.is_interrupted:
                            break
                result = None
            self._send("result", value=result)
        except Lost:
            raise
        except Exception as error:
            is_ours = isinstance(error, (UserError, RunFailure))
            if not is_ours:
                traceback.print_exc()
            text = " ".join(str(error).split()) or type(error).__name__
            message = text if is_ours else f"{type(error).__name__}: {text}"
            self._send("error", message=message, is_user_error=isinstance(error, UserError))

    def _send(self, kind: str, **values: Any) -> None:
        self.send(kind, **values)
        if self.lost:
            self.is_answering = False
            raise Lost(f"{self.name} {self.lost}")

    def _hear(self, message: Message) -> None:
        if message["kind"] == "bye":
            self.farewell = message["why"]
            self.drop(self.farewell)
        elif message["kind"] == LOST:
            self._end()
            self._on_lost(message["how"])
        else:
            self._inbox.put(message)

    def _end(self) -> None:
        self._inbox.put(None)
        self._is_lost.set()
