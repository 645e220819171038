"""Nodes for rollout only and the launcher of node 0, in one process: come, are compared, start, leave, come again."""

import contextlib
import json
import queue
import threading
import time
from pathlib import Path

import pytest

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.launch.nodes.facts import Fact
from mindrlhf.launch.nodes.first import FirstNode
from mindrlhf.launch.nodes.place import Place
from mindrlhf.launch.nodes.rollout_node import RolloutNode
from mindrlhf.launch.nodes.rollout_nodes import LISTENER_VARIABLE, ListenerAddress
from mindrlhf.launch.restarts import run_with_restarts
from mindrlhf.system.ports import find_free_port

pytestmark = pytest.mark.timeout(60)

SECRET = b"a secret of some length"
FACTS = (Fact("'optimizer.start_lr'", 0.1, "use one config"), Fact("run.output_dir", "the directory of node 0", "-"))
ROLLOUT_NODE_FACTS = FACTS[:1]


class Node0:
    """The launcher of node 0, in a thread; ``orders`` gets the exit code of each start of its ranks."""

    def __init__(self, tmp_path: Path, *, is_elastic: bool = True, max_restarts: int = 0) -> None:
        self.port = find_free_port()
        self.orders: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.addresses: list[ListenerAddress] = []
        self.hosts: list[str] = []
        self.code: int | None = None
        place = Place(0, 1, "127.0.0.1", self.port, is_elastic=is_elastic)
        self.nodes = FirstNode(place, SECRET, FACTS, {"run.output_dir": "7"}, 30.0)
        self._options = max_restarts, tmp_path / "logs_0"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self.nodes as nodes:
            code = run_with_restarts(
                lambda resume: nodes.attempt(resume, self._ranks), lambda: True, *self._options, resume=False
            )
            nodes.close(code)
            self.code = code

    def _ranks(self, resume: bool) -> int:
        self.hosts.append(self.nodes.host)
        if LISTENER_VARIABLE in self.nodes.environment:
            self.addresses.append(ListenerAddress(**json.loads(self.nodes.environment[LISTENER_VARIABLE])))
        while True:
            assert self.nodes.ending() is None  # nothing that such a node does ends the ranks
            with contextlib.suppress(queue.Empty):
                return self.orders.get_nowait()
            time.sleep(0.02)


class RolloutNodeRun:
    """The launcher of a node for rollout only, in a thread."""

    def __init__(self, port: int, facts=ROLLOUT_NODE_FACTS, secret: bytes = SECRET, fails: bool = False) -> None:
        place = Place(1, 1, "127.0.0.1", port, is_elastic=True, is_for_rollout=True)
        self.node = RolloutNode(place, secret, lambda _: facts, Path("none"), limit_s=30.0, rejoins=False)
        self.addresses: list[ListenerAddress] = []
        self.ends: list[str] = []
        self.result: object = None
        self.fails = fails
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.node.serve_rollout(self._servers)
        except Exception as error:
            self.result = error

    def _servers(self, address: ListenerAddress) -> None:
        self.addresses.append(address)
        if self.fails:
            raise RunFailure("vLLM died")
        while (ending := self.node.ending()) is None:
            time.sleep(0.02)
        self.ends.append(ending.line)

    def end(self) -> object:
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.result


def wait_until(condition) -> None:
    end_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_it_learns_of_rank_0s_address_whenever_it_comes_and_ends_with_the_run(tmp_path, capsys):
    lead = Node0(tmp_path)
    wait_until(lambda: lead.addresses)
    nodes = [RolloutNodeRun(lead.port), RolloutNodeRun(lead.port)]
    wait_until(lambda: all(node.addresses for node in nodes))
    assert nodes[0].addresses == nodes[1].addresses == lead.addresses
    (address,) = lead.addresses
    assert address.host == "127.0.0.1" and address.port != lead.port and len(bytes.fromhex(address.key)) == 32
    assert SECRET.hex() not in address.key
    lead.orders.put(0)
    assert [node.end() for node in nodes] == [0, 0]
    lead.thread.join(20)
    assert lead.code == 0
    assert capsys.readouterr().err.count("has come") == 2


def test_each_start_of_the_ranks_has_an_address_of_its_own(tmp_path):
    lead = Node0(tmp_path, max_restarts=1)
    node = RolloutNodeRun(lead.port)
    wait_until(lambda: len(node.addresses) == 1)
    lead.orders.put(1)
    wait_until(lambda: len(node.addresses) == len(lead.addresses) == 2)  # the node may be told first
    assert node.ends == ["the ranks have ended"]
    assert node.addresses == lead.addresses and node.addresses[0].key != node.addresses[1].key
    lead.orders.put(0)
    assert node.end() == 0


def test_it_leaves_and_the_run_goes_on(tmp_path, capsys):
    lead = Node0(tmp_path)
    node = RolloutNodeRun(lead.port)
    wait_until(lambda: node.addresses)
    node.node.leave()
    assert node.end() == 0
    again = RolloutNodeRun(lead.port)
    wait_until(lambda: again.addresses)
    assert lead.code is None
    lead.orders.put(0)
    assert again.end() == 0
    text = capsys.readouterr().err
    assert "rollout node " in text and "has left" in text and "this node has left the run" in text


def test_servers_that_fail_end_their_node_only(tmp_path):
    lead = Node0(tmp_path)
    node = RolloutNodeRun(lead.port, fails=True)
    assert isinstance(node.end(), RunFailure)
    lead.orders.put(0)
    lead.thread.join(20)
    assert lead.code == 0


@pytest.mark.parametrize(
    ("is_elastic", "facts", "line"),
    [
        (
            True,
            (Fact("'optimizer.start_lr'", 0.2, "use one config"),),
            r"'optimizer.start_lr' is 0.1 on node 0, 0.2 on",
        ),
        (False, ROLLOUT_NODE_FACTS, "the run takes no nodes for rollout only: give --elastic to all"),
    ],
)
def test_one_that_differs_or_is_not_wanted_is_refused_alone(tmp_path, is_elastic, facts, line):
    lead = Node0(tmp_path, is_elastic=is_elastic)
    wait_until(lambda: lead.hosts)
    node = RolloutNodeRun(lead.port, facts)
    result = node.end()
    assert isinstance(result, UserError) and line in str(result)
    lead.orders.put(0)
    lead.thread.join(20)
    assert lead.code == 0 and bool(lead.addresses) == is_elastic


def test_one_node_that_trains_keeps_its_ranks_to_itself(tmp_path):
    lead = Node0(tmp_path)
    lead.orders.put(0)
    lead.thread.join(20)
    # What MindSpore opens, to anyone, stays on the loopback device.
    assert lead.hosts == ["127.0.0.1"] and lead.nodes.scheduler_port is None


def test_a_wrong_secret_is_named(tmp_path):
    lead = Node0(tmp_path)
    node = RolloutNodeRun(lead.port, secret=b"another secret, as long")
    assert "do not know each other" in str(node.end())
    lead.orders.put(0)
    lead.thread.join(20)
