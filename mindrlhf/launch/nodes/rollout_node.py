"""A node for rollout only: joins node 0, and starts and ends its servers when node 0 starts and ends the ranks."""

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Mapping

from mindrlhf.errors import RunFailure
from mindrlhf.launch.failure_report import say
from mindrlhf.launch.nodes.other import OtherNode
from mindrlhf.launch.nodes.rollout_nodes import ROLLOUT_ROLE, ListenerAddress
from mindrlhf.launch.peers import Ending
from mindrlhf.system import processes
from mindrlhf.system.rpc import LOST

_LEAVE = "leave"
_GOODBYE_LIMIT_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RolloutNode(OtherNode):
    """Node 0 as a node for rollout only sees it; arguments as for :class:`OtherNode`."""

    role = ROLLOUT_ROLE
    orders = ("go", "over", LOST, _LEAVE)

    def serve_rollout(self, start: Callable[[ListenerAddress], None]) -> int:
        """Start the servers of this node whenever node 0 says so, and return the exit code.

        Args:
            start: starts them for the run at that address, and ends them when ``ending`` says so.

        Raises:
            UserError: this node differs from node 0, or the secrets.
            RunFailure: node 0 cannot be reached, or is lost; the servers failed.
        """
        with self._leaving_on_signals():
            self._join()
            while True:
                message = self._wait_for_order()
                if message["kind"] == LOST:
                    self._join_again(message)
                elif message["kind"] == "go":
                    self._ending = None
                    try:
                        start(ListenerAddress.of_order(message, self._secret))
                    except RunFailure:
                        self._say_goodbye()
                        raise
                else:
                    return self._part(message)

    def ending(self) -> Ending | None:
        """Return why the servers have to end, None while they need not; call it every second or so."""
        while self._ending is None:
            try:
                message = self._news.get_nowait()
            except queue.Empty:
                break
            if message["kind"] == "stop":
                self._ending = Ending(0, str(message["line"]))
            elif message["kind"] in ("over", LOST, _LEAVE):
                self._news.put(message)  # serve_rollout wants it too
                self._ending = Ending(0, _LEAVE if message["kind"] == _LEAVE else self._lost_line(message))
        return self._ending

    def leave(self) -> None:
        """Have this node leave the run in good order; for a signal's handler, or another thread."""
        self._news.put({"kind": _LEAVE})

    def _part(self, message: Mapping) -> int:
        if message["kind"] == _LEAVE:
            self._say_goodbye()
            say("this node has left the run")
            return 0
        self._channel.close()
        say(f"node 0 ({self._place.master}) has ended the run, with exit code {message['code']}")
        return int(message["code"])

    def _say_goodbye(self) -> None:
        """Say so, and wait a moment for node 0 to close: what is closed here first may be lost on its way."""
        self._channel.send("leaving")
        end_s = time.monotonic() + _GOODBYE_LIMIT_S
        with contextlib.suppress(queue.Empty):
            while self._news.get(timeout=max(0.001, end_s - time.monotonic()))["kind"] != LOST:
                pass
        self._channel.close()

    def _leaving_on_signals(self) -> contextlib.AbstractContextManager[None]:
        """Have the first signal end this node's part in good order; a second one ends it at once."""

        def leave(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            say(f"{signal.Signals(number).name} received: leaving the run")
            self.leave()

        return processes.handling(_SIGNALS, leave)
