"""Node 0: admits the launchers of the other nodes, compares what they have, starts all ranks together and ends them.

Where there are more launchers than nodes that train, those left over are spares: each place of a node that is lost goes
to one of them when the run starts again, and what comes back later is a spare itself.
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.errors import STOPPED, RunFailure, UserError, messages_of
from mindrlhf.launch.failure_report import is_worth_a_restart, say
from mindrlhf.launch.launch import find_free_port
from mindrlhf.launch.nodes.facts import Fact, as_message, differences, name_nodes
from mindrlhf.launch.nodes.place import Place
from mindrlhf.launch.nodes.rollout_nodes import ROLLOUT_ROLE, RolloutNodes
from mindrlhf.launch.nodes.secret import FIRST_NEWS_S, SECRET_NAME, make_secret, remove_secret
from mindrlhf.launch.peers import SEND_TIMEOUT_S, Ending, Peers
from mindrlhf.launch.processes import POLL_INTERVAL_S
from mindrlhf.system.handshake import SignedConnection, greet_newcomers
from mindrlhf.system.rpc import LOST, Link
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

_JOIN_TIMEOUT_S = 60.0  # from a launcher's first word to its facts: it reads files
_NEWS_INTERVAL_S = 60.0
# Once one node has been found to differ, others may differ too: all are told of all.
_REFUSAL_DELAY_S = 5.0
# Ranks that are ended have 5 s to clean up, and what they leave 2 s.
_END_LIMIT_S = 30.0
# A rank that fails over the death of another may be noticed before that one.
_VICTIM_DELAY_S = 1.5
_GOODBYE_LIMIT_S = 2.0
_MAX_TURNED_AWAY_LINES = 50  # a stranger that comes again and again must not fill the disk of the log
TELL_LIMIT_S = 30.0  # that a node with a mistake waits, to tell it to those that come
# At the first start a machine may just be slow to come; later its place is free for a spare at once.
_SPARE_PATIENCE_S = 60.0


@dataclass
class _Node:
    """Another node, or a spare, as node 0 knows it."""

    channel: Link
    host: str
    facts: Mapping[str, Sequence[Any]]
    is_running: bool = False  # its ranks were started and have not ended
    is_told: bool = False  # why they have to end
    code: int = 0  # how they ended this time


class FirstNode(Peers):
    """The launchers of the other nodes, on node 0.

    Args:
        place: of this node.
        secret: that all know.
        facts: about this node.
        probes: what the others look for in shared directories.
        limit_s: longest wait for a node, the first time and when all start again; 0 means any time.
        advice: returns what to do about a node that is lost, where nothing starts its launcher again and no spare
            waits; None where it may come back.
    """

    node = 0

    def __init__(
        self,
        place: Place,
        secret: bytes,
        facts: Sequence[Fact],
        probes: Mapping[str, str],
        limit_s: float,
        advice: Callable[[], str] | None = None,
    ) -> None:
        self._advice = advice if not place.num_spares else None
        self.num_nodes = place.num_nodes
        self._num_launchers = place.num_nodes + place.num_spares
        self._num_turned_away = 0
        self._facts = as_message(facts)
        self._probes = dict(probes)
        self._limit_s = limit_s
        self._nodes: dict[int, _Node] = {}  # by number, spares too
        self._seats: dict[int, int] = {}  # by place among the nodes that train, who has it
        self._has_started = self._is_over = False
        # Of each message, who has sent it: the number of a node, None for one for rollout only.
        self._news: queue.SimpleQueue[tuple[int | None, Link | None, dict[str, Any]]] = queue.SimpleQueue()
        self._problems: dict[int, str] = {}
        self._signals: list[int] = []
        self._ending: Ending | None = None
        self._report = ""
        self._is_watched = False  # by the launcher, which says why it ends
        self._listener, host = _listen(place)
        if self.num_nodes > 1:
            self.host = host
        self._rollout_nodes = RolloutNodes(host, secret) if place.is_elastic else None
        greet_newcomers(self._listener, secret, self._admit, self._turn_away)

    def __enter__(self) -> "FirstNode":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close(STOPPED if isinstance(error, SystemExit) else RunFailure.exit_code)

    def attempt(self, resume: bool, start: Callable[[bool], int]) -> int:
        """Start the ranks of all nodes, when all are there, and return how the run ended.

        Args:
            start: starts those of this node and returns their exit code.

        Raises:
            UserError: the nodes differ.
            RunFailure: a node did not come.
        """
        self._gather()
        if self.num_nodes > 1:
            self.scheduler_port = find_free_port(self.host)
        if self._rollout_nodes is not None:
            self.environment = self._rollout_nodes.open()
        self._ending, self._report, self._is_watched, self._has_started = None, "", True, True
        for place, number in self._seats.items():
            node = self._nodes[number]
            node.is_running, node.is_told = True, False
            node.channel.send("go", node=place, resume=resume, port=self.scheduler_port, host=self.host)
        code = RunFailure.exit_code
        try:
            code = start(resume)
        finally:
            self._is_watched = False
            if self._rollout_nodes is not None:
                self._rollout_nodes.shut()
            code = self._end_others(code)
        return code

    def close(self, code: int) -> None:
        """Tell the others that the run is over, and how it ended."""
        self._is_over = True
        for node in self._nodes.values():
            node.channel.send("over", code=code)
        end_s = time.monotonic() + _GOODBYE_LIMIT_S
        if self._rollout_nodes is not None:
            self._rollout_nodes.say_goodbye(code)
        # They close: what is closed here first may be lost on its way.
        while (self._nodes or self._rollout_nodes) and time.monotonic() < end_s:
            self._take_news()
            time.sleep(POLL_INTERVAL_S)
        for node in self._nodes.values():
            node.channel.close()
        self._nodes = {}
        if self._rollout_nodes is not None:
            self._rollout_nodes.close()
        self._listener.close()

    def ending(self) -> Ending | None:
        self._take_news()
        return self._ending

    def asked_signals(self) -> list[int]:
        signals, self._signals = self._signals, []
        return signals

    def report(self, text: str) -> None:
        self._report = text

    def _turn_away(self, peer: str, reason: object) -> None:
        self._num_turned_away += 1
        if self._num_turned_away <= _MAX_TURNED_AWAY_LINES:
            say(f"a connection from {peer} was turned away: {reason}")
        if self._num_turned_away == _MAX_TURNED_AWAY_LINES:
            say("more connections that are turned away are not mentioned")

    def _admit(self, signed: SignedConnection) -> None:
        with contextlib.suppress(OSError):
            peer = signed.peer
            try:
                signed.send({"kind": "welcome", "probes": self._probes})
                header, _ = signed.receive(_JOIN_TIMEOUT_S)
                node = None if header.get("role") == ROLLOUT_ROLE else int(header["node"])
                facts = dict(header["facts"])
            except (ConnectionClosed, ProtocolError, TimeoutError, KeyError, ValueError, TypeError):
                signed.close()
                return self._turn_away(peer, "it does not join as a node does")
            header = {"kind": "join", "host": f"{header.get('host')}, {peer}", "facts": facts, **_problem(header)}
            channel: Link | None = None
            ready = threading.Event()

            def deliver(message: dict[str, Any]) -> None:
                ready.wait()
                self._news.put((node, channel, message))

            channel = Link(signed, deliver, timeout_s=SEND_TIMEOUT_S)
            self._news.put((node, channel, header))
            ready.set()
        return None

    def _gather(self) -> None:
        start_s, next_news_s, refused_s = time.monotonic(), FIRST_NEWS_S, None
        while True:
            self._take_news()
            waited_s = time.monotonic() - start_s
            missing = self._fill_seats(self._has_started or waited_s > _SPARE_PATIENCE_S)
            lines = self._differences()
            refused_s = refused_s or (waited_s + _REFUSAL_DELAY_S if lines else None)
            if lines and (not missing or waited_s > refused_s):
                for node in self._nodes.values():
                    node.channel.send("refused", lines=lines)
                raise UserError("\n  ".join(["the nodes cannot train together:", *lines]))
            if not missing:
                return
            verb, them = ("have", "them") if len(missing) > 1 else ("has", "it")
            if self._has_started and self._advice is not None:
                line = f"{name_nodes(missing)} {verb} gone, and nothing starts {them} again"
                for node in self._nodes.values():
                    node.channel.send("failed", line=line)
                raise RunFailure(f"{line}: fix that, then start again on all nodes; {self._advice()}")
            line = f"{name_nodes(missing)} of {self.num_nodes} {verb} not come"
            if 0 < self._limit_s < waited_s:
                line = f"{line} within {waited_s:.0f} s (run.start_timeout_s is {self._limit_s:g})"
                for node in self._nodes.values():
                    node.channel.send("failed", line=line)
                raise RunFailure(f"{line}: start it there with the same command and its own --node-rank")
            if waited_s > next_news_s:
                next_news_s += _NEWS_INTERVAL_S
                self._tell_all(f"waiting: {line} to {self.host} for {waited_s:.0f} s")
            time.sleep(POLL_INTERVAL_S)

    def _fill_seats(self, takes_spares: bool) -> list[int]:
        """Give each place to the node of its number, or to a spare that is there; return the places left empty."""
        self._seats = {place: number for place, number in self._seats.items() if number in self._nodes}
        empty = [place for place in range(1, self.num_nodes) if place not in self._seats]
        seated = set(self._seats.values())
        own = {place: place for place in empty if place in self._nodes and place not in seated}
        self._seats |= own
        spares = sorted(self._nodes.keys() - seated - own.keys()) if takes_spares else []
        for place, number in zip([place for place in empty if place not in own], spares):
            self._seats[place] = number
            self._tell_all(f"node {number} ({self._nodes[number].host}) takes the place of node {place}")
        return [place for place in empty if place not in self._seats]

    def _tell_all(self, line: str) -> None:
        say(line)
        for node in self._nodes.values():
            node.channel.send("waiting", line=line)

    def _differences(self) -> list[str]:
        lines = [f"node {node}: {problem}" for node, problem in sorted(self._problems.items())]
        whole = {node: one.facts for node, one in self._nodes.items() if node not in self._problems}
        return [*lines, *differences({0: self._facts, **whole})]

    def _take_news(self) -> None:
        while True:
            try:
                node, channel, message = self._news.get_nowait()
            except queue.Empty:
                return
            if node is None:
                self._hear_rollout_node(channel, message)
            elif message["kind"] == "join":
                self._take_in(node, channel, message)
            elif node in self._nodes and self._nodes[node].channel is channel:
                self._hear(node, message)

    def _take_in(self, node: int, channel: Link, message: dict[str, Any]) -> None:
        if not 0 < node < self._num_launchers:
            spares = f" --spares {num_spares}" if (num_spares := self._num_launchers - self.num_nodes) else ""
            line = f"there is no node {node}: node 0 was started with --nodes {self.num_nodes}{spares}"
            channel.send("refused", lines=[line])
        elif node in self._nodes:
            channel.send("taken", line=f"node {node} is there already ({self._nodes[node].host})")
        elif self._is_spare(node) and (lines := self._objections(node, message)):
            # The run does not wait for it, and need not end over it.
            say("\n  ".join([f"node {node} ({message['host']}) cannot be a spare:", *lines]))
            channel.send("refused", lines=lines)
        else:
            self._nodes[node] = _Node(channel, message["host"], message["facts"])
            if problem := message.get("problem"):
                self._problems[node] = problem
            if self._is_spare(node):
                line = f"node {node} ({message['host']}) is a spare: it waits for a node to be lost"
                say(line)
                channel.send("waiting", line=line)

    def _hear_rollout_node(self, channel: Link, message: dict[str, Any]) -> None:
        if self._rollout_nodes is None:
            if message["kind"] == "join":
                channel.send("refused", lines=["the run takes no nodes for rollout only: give --elastic to all"])
        elif message["kind"] != "join":
            self._rollout_nodes.hear(channel, message)
        elif problem := message.get("problem"):
            self._rollout_nodes.accept(channel, message["host"], [problem])
        else:  # which writes nothing to shared directories
            facts = {name: fact for name, fact in self._facts.items() if name not in self._probes}
            self._rollout_nodes.accept(
                channel, message["host"], differences({0: facts, self._num_launchers: message["facts"]})
            )

    def _is_spare(self, node: int) -> bool:
        return node >= self.num_nodes or self._seats.get(node, node) != node

    def _objections(self, node: int, message: Mapping[str, Any]) -> list[str]:
        if problem := message.get("problem"):
            return [f"node {node}: {problem}"]
        return differences({0: self._facts, node: message["facts"]})

    def _hear(self, node: int, message: dict[str, Any]) -> None:
        who = self._nodes[node]
        if message["kind"] == "signal":
            self._signals.append(message["number"])
        elif message["kind"] == "ended":
            who.code, who.is_running = message["code"], False
            if who.code != 0 and (message["report"] or self._ending is None):
                self._end_with(node, who, who.code, message["report"] or f"ended with exit code {who.code}")
        elif message["kind"] == LOST:
            del self._nodes[node]
            self._problems.pop(node, None)
            if who.is_running:
                self._end_with(node, who, RunFailure.exit_code, message["how"])
            elif node not in self._seats.values() and not self._is_over:
                say(f"node {node} ({who.host}), a spare, {message['how']}")

    def _end_with(self, node: int, who: _Node, code: int, what: str) -> None:
        """Have all nodes end since one has failed, and say so."""
        line = f"node {node} ({who.host}) {what}"
        if not self._is_watched or self._ending is not None:
            say(line)
        if self._ending is None:
            self._ending = Ending(code, line)
            self._stop_others(line, code)

    def _stop_others(self, line: str, code: int) -> None:
        for node in self._nodes.values():
            if node.is_running and not node.is_told:
                node.is_told = True
                node.channel.send("stop", line=line, code=code)

    def _cause(self, code: int) -> str:
        """Return why the run ends: what was said first, unless a signal killed what this node lost."""
        own = f"node 0 ({self.host}): {self._report or f'ended with exit code {code}'}"
        is_own = self._report and code not in (0, RunFailure.exit_code)
        return own if self._ending is None or is_own else self._ending.line

    def _end_others(self, code: int) -> int:
        """Wait until the ranks of the other nodes have ended, and have them do so if this node's have failed."""
        stop_s = time.monotonic() + {0: _END_LIMIT_S, RunFailure.exit_code: _VICTIM_DELAY_S}.get(code, 0.0)
        end_s, is_told = stop_s + _END_LIMIT_S, False
        while any(node.is_running for node in self._nodes.values()):
            if not is_told and (self._ending is not None or time.monotonic() > stop_s):
                is_told = True
                self._stop_others(self._cause(code), code)
            self._take_news()
            if time.monotonic() > end_s:
                late = [number for number, node in self._nodes.items() if node.is_running]
                say(f"{name_nodes(late)} did not end the ranks there within {_END_LIMIT_S:g} s")
                for number in late:
                    self._nodes.pop(number).channel.close()
            time.sleep(POLL_INTERVAL_S)
        codes = [code, *([self._ending.code] if self._ending else [])]
        codes += [node.code for node in self._nodes.values()]
        failed = [one for one in codes if one != 0]
        for number in self._seats.values() if failed else ():
            node, line = self._nodes.get(number), self._cause(code)
            if node and not node.is_told and not line.startswith(f"node {number} "):
                node.channel.send("waiting", line=line)  # its ranks had ended by themselves
        # A mistake of the user's and an interrupt are the cause where they are, and final.
        return next((one for one in failed if not is_worth_a_restart(one)), max(failed, default=0))


@contextlib.contextmanager
def telling_others(place: Place, output_dir: Path) -> Iterator[None]:
    """Have the other nodes hear of a mistake that the body finds on node 0, for which they would wait in vain."""
    try:
        yield
    except UserError as error:
        say(f"node 0 cannot start: {error}")
        say(f"telling the other nodes, for {TELL_LIMIT_S:g} s at most")
        was_there = (output_dir / SECRET_NAME).exists()  # of a run that goes on there, or was killed
        with contextlib.suppress(UserError, OSError):
            _refuse_all(place, make_secret(output_dir), messages_of(error))
        if not was_there:
            remove_secret(output_dir)
        raise


def _refuse_all(place: Place, secret: bytes, lines: Sequence[str]) -> None:
    """Tell each node that comes the ``lines``; return when all have come, or the limit is over."""
    listener, _ = _listen(place)
    told, end_s = threading.Semaphore(0), time.monotonic() + TELL_LIMIT_S

    def refuse(signed: SignedConnection) -> None:
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            signed.send({"kind": "welcome", "refused": [f"node 0: {line}" for line in lines]})
        told.release()

    greet_newcomers(listener, secret, refuse, lambda peer, reason: None)
    for _ in range(1, place.num_nodes + place.num_spares):
        told.acquire(timeout=max(0.0, end_s - time.monotonic()))
    listener.close()


def _listen(place: Place) -> tuple[socket.socket, str]:
    """Return the socket for the other nodes, and its address: no other network of this machine reaches it."""
    family, address = place.check_address()
    try:
        return socket.create_server((address, place.port), family=family), address
    except OSError as error:
        raise UserError(
            f"node 0 cannot listen at {place.master}:{place.port} ({error.strerror}): give --master an address of the "
            "machine with --node-rank 0, and a free port"
        ) from None


def _problem(header: Mapping[str, Any]) -> dict[str, str]:
    return {"problem": str(header["problem"])} if header.get("problem") else {}
