"""The link between the launchers of two nodes: messages in order, and a beat each second, which says that they live."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mindrlhf.system.clock import WatchedTime
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

BEAT_INTERVAL_S = 1.0
# A node that dies closes its connections, which is noticed at once; one without power or network just says no more.
SILENCE_LIMIT_S = 10.0
_SEND_TIMEOUT_S = 5.0
LOST = "lost"


class Channel:
    """Reads and beats in threads of its own, until it is closed or the peer is lost.

    Args:
        connection: authenticated.
        deliver: called, by those threads, with each message, and once with {"kind": "lost", "how": ...}. Arrays that
            came with a message are its "arrays".
        watches: whether silence means that the peer is lost; a peer that computes in its own process may miss beats.
    """

    def __init__(
        self,
        connection: SignedConnection,
        deliver: Callable[[dict[str, Any]], None],
        *,
        watches: bool = True,
    ) -> None:
        self._connection = connection
        self._deliver = deliver
        self._watches = watches
        self._num_received = 0
        self._is_closed = False
        self._closing = threading.Lock()
        for function in (self._read, self._keep_beating):
            threading.Thread(target=function, daemon=True).start()

    def send(self, kind: str, arrays: Mapping[str, np.ndarray] | None = None, **values: Any) -> None:
        """Send a message; one that cannot be sent is lost with the peer, of which ``deliver`` hears."""
        try:
            self._connection.send({"kind": kind, **values}, arrays, timeout_s=_SEND_TIMEOUT_S)
        except (ConnectionClosed, TimeoutError):
            self._lose("has closed the connection")

    def close(self) -> None:
        """End the link without a word."""
        with self._closing:
            self._is_closed = True
        self._connection.close()

    def _read(self) -> None:
        while True:
            try:
                header, arrays = self._connection.receive()
            except ConnectionClosed:
                return self._lose("has closed the connection: it has ended, or was killed")
            except ProtocolError as error:
                return self._lose(f"sends what nobody can read ({error})")
            self._num_received += 1
            self._deliver({**header, "arrays": arrays} if arrays else header)

    def _keep_beating(self) -> None:
        watched, heard, heard_s = WatchedTime(), 0, 0.0
        while not self._is_closed:
            self.send("beat")
            time.sleep(BEAT_INTERVAL_S)
            now_s, num_received = watched.now_s(), self._num_received
            if num_received != heard:
                heard, heard_s = num_received, now_s
            elif self._watches and now_s - heard_s >= SILENCE_LIMIT_S:
                self._lose(f"has not been heard of for {now_s - heard_s:.0f} s: it is cut off, or has no power")

    def _lose(self, how: str) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        self._connection.close()
        self._deliver({"kind": LOST, "how": how})
