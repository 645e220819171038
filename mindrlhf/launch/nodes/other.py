"""Nodes 1 and up: join node 0, and start and end the ranks of this node when it says so."""

import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.launch.failure_report import say
from mindrlhf.launch.nodes.facts import Fact, as_message
from mindrlhf.launch.nodes.place import Place
from mindrlhf.launch.nodes.secret import FIRST_NEWS_S
from mindrlhf.launch.peers import SEND_TIMEOUT_S, Ending, Peers
from mindrlhf.system.handshake import SignedConnection, UnauthenticatedPeer, introduce
from mindrlhf.system.rpc import LOST, SILENCE_LIMIT_S, Link
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

_RETRY_INTERVAL_S = 0.5
_CONNECT_TIMEOUT_S = 5.0
_NEWS_INTERVAL_S = 60.0
# Until node 0 has noticed that an earlier connection of this node is dead.
_TAKEN_LIMIT_S = SILENCE_LIMIT_S + 5.0


class OtherNode(Peers):
    """Node 0 as the launcher of another node sees it.

    Attributes:
        role: what node 0 is told that this node is for; empty for training.
        orders: the kinds of messages on which it acts.

    Args:
        place: of this node.
        secret: that all know.
        find_facts: returns the facts about this node, from the probes of node 0.
        log_dir: of the ranks of this node.
        limit_s: longest wait for node 0; 0 means any time.
        rejoins: whether to join again when node 0 is lost: it, or this node's network, may come back.
    """

    role = ""
    orders = ("go", "over", LOST)

    def __init__(
        self,
        place: Place,
        secret: bytes,
        find_facts: Callable[[Mapping[str, str]], Sequence[Fact]],
        log_dir: Path,
        *,
        limit_s: float,
        rejoins: bool,
    ) -> None:
        self.node, self.num_nodes = place.node, place.num_nodes  # node: whose place it takes, of which node 0 tells
        self._place = place
        self._secret = secret
        self._find_facts = find_facts
        self._log_dir = log_dir
        self._limit_s = limit_s
        self._rejoins = rejoins
        self._channel: Link | None = None
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._ending: Ending | None = None
        self._report = ""
        self._rejoin_end_s = 0.0

    def serve(self, start: Callable[[bool], int]) -> int:
        """Start the ranks of this node whenever node 0 says so, and return the exit code of the run.

        Args:
            start: starts them, resuming if told so, and returns how they ended.

        Raises:
            UserError: the nodes differ, or the secrets.
            RunFailure: node 0 cannot be reached, or is lost.
        """
        code = 0
        self._join()
        while True:
            message = self._wait_for_order()
            if message["kind"] == "over":
                self._channel.close()
                if message["code"] and self._ending is None and not self._report:
                    say(f"node 0 ({self._place.master}) has ended the run, with exit code {message['code']}")
                return code or int(message["code"])
            if message["kind"] == LOST:
                self._join_again(message)
                continue
            self.node, self.scheduler_port, self.host = int(message["node"]), int(message["port"]), str(message["host"])
            self._ending, self._report = None, ""
            code = start(bool(message["resume"]))
            self._channel.send("ended", code=code, report=self._report)

    def tell_problem(self, problem: str) -> None:
        """Tell node 0 why this node cannot take part."""
        self._join(problem)
        while self._wait_for_order()["kind"] != LOST:
            pass

    def ending(self) -> Ending | None:
        while self._ending is None:
            try:
                message = self._news.get_nowait()
            except queue.Empty:
                break
            if message["kind"] == "stop":
                self._ending = Ending(int(message["code"]) or RunFailure.exit_code, str(message["line"]))
            elif message["kind"] in (LOST, "over"):
                self._news.put(message)  # serve wants it too
                self._ending = Ending(RunFailure.exit_code, self._lost_line(message))
        return self._ending

    def pass_on(self, number: int) -> None:
        self._channel.send("signal", number=number)

    def report(self, text: str) -> None:
        self._report = text

    def _lost_line(self, message: Mapping[str, Any]) -> str:
        return f"node 0 ({self._place.master}) {message.get('how', 'has ended the run')}"

    def _wait_for_order(self) -> dict[str, Any]:
        """Return the next message that says what to do; the others are said or forgotten.

        Raises:
            UserError: node 0 refuses this node, or all.
            RunFailure: it has given up.
        """
        while True:
            message = self._news.get()
            if message["kind"] in self.orders:
                return message
            if message["kind"] in ("waiting", "stop"):  # the ranks here may have ended before they were to stop
                say(str(message["line"]))
            elif message["kind"] == "failed":
                raise RunFailure(str(message["line"]))
            elif message["kind"] == "taken":
                self._channel.close()
                if time.monotonic() > self._rejoin_end_s:
                    raise UserError(f"{message['line']}: give each node its own --node-rank")
                time.sleep(_RETRY_INTERVAL_S)
                self._join()
            elif message["kind"] == "refused":
                self._channel.close()
                raise _refusal(message["lines"])

    def _join_again(self, lost: Mapping[str, Any]) -> None:
        if not self._rejoins:
            raise RunFailure(self._lost_line(lost))
        say(f"{self._lost_line(lost)}; joining it again")
        self._rejoin_end_s = time.monotonic() + _TAKEN_LIMIT_S
        self._join()

    def _join(self, problem: str = "") -> None:
        start_s, next_news_s = time.monotonic(), FIRST_NEWS_S
        while True:
            reason = self._try_to_join(problem)
            if reason is None:
                return
            waited_s = time.monotonic() - start_s
            where = f"{self._place.master}:{self._place.port}"
            if 0 < self._limit_s < waited_s:
                raise RunFailure(
                    f"node 0 has not answered at {where} within {waited_s:.0f} s (run.start_timeout_s is "
                    f"{self._limit_s:g}): {reason}"
                )
            if waited_s > next_news_s:
                next_news_s += _NEWS_INTERVAL_S
                say(f"waiting: node 0 has not answered at {where} for {waited_s:.0f} s: {reason}")
            time.sleep(_RETRY_INTERVAL_S)

    def _try_to_join(self, problem: str) -> str | None:
        """Join; return why that cannot be done yet, None when it is done."""
        try:
            _, address = self._place.address()
            connection = socket.create_connection((address, self._place.port), timeout=_CONNECT_TIMEOUT_S)
            connection.settimeout(None)
            signed = introduce(connection, self._secret)
            welcome, _ = signed.receive(_CONNECT_TIMEOUT_S)
        except UnauthenticatedPeer as error:
            raise UserError(
                f"node 0 at {self._place.master}:{self._place.port} and this node do not know each other ({error}): "
                "set MINDRLHF_SECRET to the same on all nodes, or on none of them"
            ) from None
        except (OSError, ProtocolError) as error:
            return str(error) or type(error).__name__
        if "refused" in welcome:
            raise _refusal([*welcome["refused"], *([f"node {self._place.node}: {problem}"] if problem else [])])
        self._greet(signed, welcome, problem)
        return None

    def _greet(self, signed: SignedConnection, welcome: Mapping[str, Any], problem: str) -> None:
        facts = [] if problem else self._find_facts(welcome["probes"])
        self._news, self._ending = queue.SimpleQueue(), None
        try:
            own = {"role": self.role, "node": self._place.node, "host": socket.gethostname()}
            signed.send({**own, "facts": as_message(facts), "problem": problem})
        except ConnectionClosed as error:
            raise RunFailure(f"node 0 ({self._place.master}) has closed the connection ({error})") from None
        self._channel = Link(signed, self._news.put, timeout_s=SEND_TIMEOUT_S)


def _refusal(lines: Sequence[Any]) -> UserError:
    return UserError("\n  ".join(["the nodes cannot train together:", *map(str, lines)]))
