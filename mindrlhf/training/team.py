"""Rank 0 calls a method on the worker of every rank at once.

A star of TCP connections between rank 0 and the others, beside the device's own collectives: it carries batches
and results as JSON and plain NumPy arrays, and it closes the moment a process dies, which a collective does not notice.
"""

import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system import heartbeat, timeline
from mindrlhf.system.handshake import keep_alive, receive_hello
from mindrlhf.system.ports import listen
from mindrlhf.system.records import decode, encode
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, rank_0_host, receive_message, send_message

if TYPE_CHECKING:
    from mindrlhf.training.runtime import Rank

_ADMISSION_TIMEOUT_S = 60.0
_HELLO_TIMEOUT_S = 5.0  # an unauthenticated peer that says nothing keeps the ranks waiting no longer than this
_TOKEN_WORDS = 4
BROADCAST_BYTES = 1 << 16  # smaller messages are sent to each rank

Results = list[Any]  # the records that the ranks returned from one call, by rank; None where they return nothing


class Team:
    """Rank 0's view of all ranks. ``call`` is the only way work reaches another rank.

    Attributes:
        rank_0: the worker of rank 0, in this process.
    """

    def __init__(self, worker: Any, connections: Sequence[socket.socket] = ()):
        self.rank_0 = worker
        self._connections = list(connections)

    @property
    def world_size(self) -> int:
        """Number of ranks, rank 0 included."""
        return 1 + len(self._connections)

    @property
    def ranks(self) -> "Team":
        """All ranks, each for itself, also where replicas stand for them."""
        return self

    @property
    def num_devices(self) -> int:
        """Number of ranks, also where replicas stand for them; see :mod:`mindrlhf.training.replica_team`."""
        return self.world_size

    def call(self, method: str, per_rank: Sequence[Mapping[str, Any]] | None = None, **common: Any) -> Results:
        """Run ``worker.method(**arguments)`` on every rank and return the results by rank.

        Args:
            method: a public method of the worker; it takes records, arrays and JSON values by name, and returns a
                record (:mod:`mindrlhf.training.batch`) or nothing.
            per_rank: arguments of their own for each rank; arrays of what is the same object for several ranks leave
                rank 0 once, if they are large: their first rank broadcasts them to the others.
            common: arguments that all ranks get.

        Raises:
            RunFailure: a rank died or failed; the message names it.
        """
        arguments = per_rank or [{}] * self.world_size
        alike: dict[int, list[int]] = {}
        for rank, of_rank in enumerate(arguments):
            alike.setdefault(id(of_rank), []).append(rank)
        for ranks in reversed(alike.values()):  # those of rank 0, which takes part in their broadcast, last
            if ranks != [0]:
                self._send(ranks, method, {**common, **arguments[ranks[0]]}, may_broadcast=per_rank is not None)
        results = [getattr(self.rank_0, method)(**{**common, **arguments[0]})]
        with timeline.span("waiting for the other ranks", method=method):
            results += [self._result_of(rank) for rank in range(1, self.world_size)]
        heartbeat.tick()
        return results

    def close(self) -> None:
        """Tell the other ranks that the run is over."""
        for connection in self._connections:
            with contextlib.suppress(ConnectionClosed, OSError):  # a rank that is gone need not be told
                send_message(connection, {"method": "close", "values": {}})
            connection.close()
        self._connections = []

    def _send(self, ranks: Sequence[int], method: str, arguments: Mapping[str, Any], *, may_broadcast: bool) -> None:
        """Send ranks a call whose arguments are the same for all of them; rank 0 among them has them already."""
        encoded, arrays = encode(arguments)
        header = {"method": method, "values": encoded}
        others = [rank for rank in ranks if rank]
        size_bytes = sum(array.nbytes for array in arrays.values())
        if not may_broadcast or len(others) < 2 or size_bytes < BROADCAST_BYTES:
            for rank in others:
                self._guard(rank, send_message, self._connections[rank - 1], header, arrays)
            return
        layout = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
        header["broadcast"] = {"ranks": list(ranks), "layout": layout}
        for rank in others:
            is_root = rank == ranks[0]
            self._guard(rank, send_message, self._connections[rank - 1], header, arrays if is_root else {})
        if ranks[0] == 0:
            _share(ranks, layout, arrays)

    def _result_of(self, rank: int) -> Any:
        header, values = self._guard(rank, _receive, self._connections[rank - 1])
        if "error" in header:
            error = UserError if header["is_user_error"] else RunFailure
            raise error(f"rank {rank}: {header['error']}")
        return values["result"]

    def _guard(self, rank: int, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (ConnectionClosed, ProtocolError, OSError) as error:
            raise RunFailure(f"rank {rank} died ({error}); see worker_{rank}.log in the log directory") from None


def serve(worker: Any, connection: socket.socket) -> None:
    """Do what rank 0 asks until it closes the team; the loop of every other rank.

    Raises:
        RunFailure: rank 0 died.
    """
    while True:
        heartbeat.enter("waiting for rank 0")
        header, arrays = _with_rank_0(receive_message, connection)
        heartbeat.enter(header["method"])
        if header["method"] == "close":
            connection.close()
            return
        try:
            if shared := header.get("broadcast"):
                arrays = _share(shared["ranks"], shared["layout"], arrays)
            result = getattr(worker, header["method"])(**decode(header["values"], arrays))
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            with contextlib.suppress(ConnectionClosed, OSError):  # what went wrong here matters more
                _send(connection, {"error": message, "is_user_error": isinstance(error, UserError)}, {})
            raise
        _with_rank_0(_send, connection, {}, {"result": result})


def _with_rank_0(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (ConnectionClosed, ProtocolError, OSError) as error:
        raise RunFailure(f"rank 0 died ({error}); see worker_0.log in the log directory") from None


def connect(rank: "Rank") -> list[socket.socket]:
    """Return the connections of a rank: of rank 0 to each other rank in order, of others the one to rank 0.

    The address of rank 0 and a random token travel by a device broadcast, so only the ranks of this run can join.
    """
    if rank.world_size == 1:
        return []
    if rank.is_rank_0:
        return _admit(rank)
    port, *token = _broadcast(np.zeros(1 + _TOKEN_WORDS, np.int32))
    connection = socket.create_connection((rank_0_host(), int(port)), timeout=_ADMISSION_TIMEOUT_S)
    connection.settimeout(None)
    keep_alive(connection)
    send_message(connection, {"rank": rank.index, "token": [int(word) for word in token]})
    return [connection]


def _admit(rank: "Rank") -> list[socket.socket]:
    token = [secrets.randbits(31) for _ in range(_TOKEN_WORDS)]
    with listen(rank_0_host(), backlog=rank.world_size) as listener:
        _broadcast(np.array([listener.getsockname()[1], *token], np.int32))
        end_s = time.monotonic() + _ADMISSION_TIMEOUT_S  # for all of them: unauthenticated peers may come without end
        connections: dict[int, socket.socket] = {}
        while len(connections) < rank.world_size - 1:
            listener.settimeout(max(0.001, end_s - time.monotonic()))
            connection = _accept(listener, rank.world_size - 1 - len(connections))
            try:
                header = receive_hello(connection, _HELLO_TIMEOUT_S)
            except (ConnectionClosed, ProtocolError, TimeoutError):
                header = {}
            if not _is_admitted(header, token):  # an unauthenticated peer
                connection.close()
                continue
            connections[header["rank"]] = connection
    return [connections[index] for index in range(1, rank.world_size)]


def _accept(listener: socket.socket, num_missing: int) -> socket.socket:
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        raise RunFailure(
            f"{num_missing} ranks did not join within {_ADMISSION_TIMEOUT_S:g} s; see their logs"
        ) from None
    keep_alive(connection)
    return connection


def _is_admitted(header: Mapping[str, Any], token: Sequence[int]) -> bool:
    """Return whether a first message is of a rank of this run; the time tells nothing about where it differs."""
    return hmac.compare_digest(repr(header.get("token")).encode(errors="replace"), repr(list(token)).encode())


def _broadcast(words: np.ndarray) -> np.ndarray:
    """Return rank 0's int32 ``words`` on every rank."""
    import mindspore as ms

    from mindrlhf.training.broadcast import BroadcastCell

    return BroadcastCell(root=0)(ms.Tensor(words)).asnumpy()


def _share(ranks: Sequence[int], layout: list[list[Any]], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays that the first of ``ranks`` has, on each of them; all call it at the same time."""
    from mindrlhf.training.broadcast import broadcast_arrays

    return broadcast_arrays(tuple(ranks), layout, arrays or None)


def _send(connection: socket.socket, header: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    encoded, arrays = encode(values)
    send_message(connection, {**header, "values": encoded}, arrays)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], dict[str, Any]]:
    header, arrays = receive_message(connection)
    return header, decode(header.pop("values"), arrays)
