"""Servers of several nodes, all on this machine: real processes with an engine that needs no model."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.rollout_nodes import LISTENER_VARIABLE, ListenerAddress
from mindrlhf.rollout import rollout_only
from mindrlhf.rollout import servers as servers_module
from mindrlhf.rollout.newcomers import Newcomers, take_address
from mindrlhf.rollout.nodes import OtherNode, OwnNode
from mindrlhf.rollout.pool import ServerPool, servers_on
from mindrlhf.rollout.processes.node import NodeServers
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.system import rpc as rpc_module
from mindrlhf.system.handshake import UnauthenticatedPeer, accept_nodes, introduce, introduce_node
from mindrlhf.system.ports import find_free_port
from mindrlhf.system.rpc import Rpc
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.tensors import TensorInfo

pytestmark = pytest.mark.timeout(180)

ENGINE = f"{Path(__file__).parents[1] / 'helpers' / 'stub_engine.py'}:StubEngine"
LIMIT_S = 60
TOKEN = b"a token of this start"
SAMPLING = SamplingParams(max_tokens=9)
INFOS = (
    TensorInfo("embedding", "bfloat16", (300, 64)),
    TensorInfo("norm", "float32", (64,)),
    TensorInfo("scale", "float32", ()),
)
REQUESTS = [GenerationRequest(index, (index + 1, 7), 2, seed=2**62 + index) for index in range(9)]
SLOW = [GenerationRequest(index, (1020, index), 2, seed=index) for index in range(9)]  # 0.2 s a sample
# The workers of another node's engine: they note their place, and wait.
PART = """
import json, os, sys, time
config = json.loads(sys.argv[sys.argv.index("--config") + 1])
if os.path.exists(os.path.join(os.environ["NOTES"], "fails")):
    sys.exit("no such device")
while not os.path.exists(config["buffer_file"]):
    time.sleep(0.01)
told = {"pid": os.getpid(), "span": config["span"], "buffer": open(config["buffer_file"]).read()}
with open(os.path.join(os.environ["NOTES"], f"partial_{os.getpid()}"), "w") as notes:
    json.dump(told, notes)
os.rename(notes.name, os.path.join(os.environ["NOTES"], f"{time.monotonic_ns()}.json"))
time.sleep(600)
"""


def wait_until(happened, what=lambda: "") -> None:
    end_s = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < end_s, what()
        time.sleep(0.01)


@pytest.fixture
def options(tmp_path, monkeypatch):
    for name in ("model", "notes", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "part.py").write_text(PART)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *--headless*) exec {sys.executable} {tmp_path}/part.py "$@";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))

    def of(node: int, index: int = 0, **changes) -> VllmOptions:
        log_path = tmp_path / f"log_{node}" / f"rollout_{index}.log"
        env = {"NOTES": str(tmp_path / "notes")}
        given = {"engine": ENGINE, "max_model_len": 50, "env": env}
        return VllmOptions(str(python), str(tmp_path / "model"), str(log_path), **{**given, **changes})

    yield of
    pids = [told["pid"] for told in notes(tmp_path)]
    wait_until(lambda: not [pid for pid in pids if os.path.exists(f"/proc/{pid}")])
    assert os.listdir(tmp_path / "temporary") == [], "what servers need while they run is left"


def notes(tmp_path: Path) -> list[dict]:
    """What processes noted at their start, in the order of their starts."""
    return [json.loads(text) for path in sorted((tmp_path / "notes").glob("*.json")) if (text := path.read_text())]


def batches(tmp_path: Path, pid: int) -> list[list[int]]:
    """The first tokens of the prompts that a server was asked for, by batch."""
    return [json.loads(line) for line in (tmp_path / "notes" / f"batches_{pid}").read_text().splitlines()]


class Weights:
    """Buffers with the same weights, and the samples that they give."""

    def __init__(self, stack: contextlib.ExitStack, count: int = 1) -> None:
        self.buffers = [stack.enter_context(WeightBuffer.create(INFOS)) for _ in range(count)]
        random = np.random.default_rng(0)
        self.values = [random.integers(0, 2**7, info.shape).astype(f"u{info.numpy_dtype.itemsize}") for info in INFOS]

    def put(self, version: int) -> None:
        """Publish weights of which a few have changed."""
        for value in self.values:
            value.reshape(-1)[:: max(1, value.size // 50)] += 1
        for buffer in self.buffers:
            buffer.begin(version)
            for info, value in zip(INFOS, self.values):
                buffer.write(info.name, value.view(info.numpy_dtype))
            buffer.commit()

    def expected(self, requests=REQUESTS) -> dict:
        """What the stub samples with these weights, computed here."""
        told = -sum(float(value.astype(np.float64).ravel() @ np.arange(1, value.size + 1)) for value in self.values)
        version = self.buffers[0].version
        return {
            (one.request_id, index): (list(one.prompt_ids) * (index + 1), np.float32(told), version)
            for one in requests
            for index in range(one.num_samples)
        }


def sample(pool: ServerPool, requests=REQUESTS, meanwhile=lambda: None) -> dict:
    found = {}
    for one in pool.generate(requests, SAMPLING):
        assert (one.request_id, one.sample_index) not in found, "each sample comes once"
        assert len(set(one.logprobs.tolist())) == 1 and not one.unscored
        told = one.token_ids.tolist(), one.logprobs[0], one.weights_version
        found[one.request_id, one.sample_index] = told
        meanwhile()
    return found


class Training:
    """Nodes that train; rank 0 is on the first."""

    def __init__(self, options, places, stack: contextlib.ExitStack, num_restarts=1, **changes) -> None:
        num_nodes = 1 + max(node for place in places for node in place)
        self.weights = Weights(stack, num_nodes)
        self.servers = []
        for node, buffer in enumerate(self.weights.buffers):
            count = max(1, places.count((node,)))
            servers = NodeServers([options(node, index, **changes) for index in range(count)], f"127.0.0.{node + 1}")
            servers.buffer_path, servers.key = buffer.path, TOKEN
            stack.callback(servers.close)
            self.servers.append(servers)
        self.serving = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
            for node in range(num_nodes - 1, 0, -1):
                thread = threading.Thread(target=self._serve, args=(address, node), daemon=True)
                thread.start()
            connections = accept_nodes(listener, TOKEN, range(1, num_nodes))
        self.others = [
            OtherNode(Rpc(connections[node], f"node {node}"), "127.0.0.1", TOKEN) for node in range(1, num_nodes)
        ]
        nodes = [OwnNode(self.servers[0]), *self.others]
        self.pool = ServerPool(servers_on(nodes, self.servers[0].options, places), num_restarts)
        stack.callback(self.pool.close)

    def _serve(self, address, node: int) -> None:
        rpc = Rpc(introduce_node(*address, TOKEN, node), "rank 0", tell=self.servers[node].tell)
        self.serving.append((node, rpc))
        rpc.serve(self.servers[node])

    def update(self, version: int) -> None:
        self.weights.put(version)
        self.pool.update_weights(version)


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def test_prompts_are_dealt_out_to_the_servers_of_all_nodes(options, tmp_path, stack):
    training = Training(options, [(0,), (1,), (1,), (0,)], stack)
    for version in (3, 4):
        training.update(version)
        assert sample(training.pool) == training.weights.expected()
    training.pool.sleep()
    training.pool.wake()
    # In turn: each node's first server, then each node's second.
    pids = [server._pids[0] for server in training.pool.servers]
    assert [server.node.name for server in training.pool.servers] == ["", "node 1", "", "node 1"]
    assert [batches(tmp_path, pid)[-1] for pid in pids] == [[1, 5, 9], [2, 6], [3, 7], [4, 8]]


def test_who_reads_no_further_ends_the_generation_everywhere(options, tmp_path, stack):
    training = Training(options, [(0,), (1,)], stack)
    training.update(1)
    with contextlib.closing(training.pool.generate(SLOW, SAMPLING)) as completions:
        next(completions)
    assert sample(training.pool) == training.weights.expected()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("node", [0, 1])
def test_a_server_that_is_lost_is_named_and_gives_the_samples_that_it_would_have_given(
    options, stack, capfd, monkeypatch, node, how
):
    monkeypatch.setattr(servers_module, "SILENCE_LIMIT_S", 6.0 if how == signal.SIGSTOP else 60.0)
    training = Training(options, [(0,), (1,)], stack)
    training.update(1)
    pid = training.pool.servers[node]._pids[0]
    kill = iter([lambda: os.kill(pid, how)])
    assert sample(training.pool, SLOW, lambda: next(kill, lambda: None)()) == training.weights.expected(SLOW)
    said = capfd.readouterr().err
    silent = r"has not been heard of for \d+ s: it is stopped, cut off, or has no power"
    cause = silent if how == signal.SIGSTOP else r"was killed by signal 9 \(SIGKILL\)"
    assert re.search(rf"mindrlhf: {'node 1: ' * node}the rollout server \(process {pid}\) {cause}; log ", said)
    assert f"log_{node}/rollout_0.log ends: stub up; starting it again (0 restarts left)" in said
    training.update(2)
    assert sample(training.pool) == training.weights.expected()


def test_a_node_that_is_lost_is_named(options, stack):
    training = Training(options, [(0,), (1,)], stack)
    training.update(1)
    requests = [GenerationRequest(0, (1,), 1, seed=0), GenerationRequest(1, (5050,), 1, seed=0)]

    def lose() -> None:
        for _, rpc in training.serving:
            rpc.close()

    with pytest.raises(RunFailure, match="node 1: the rollout server .* is lost with its node, which has closed the"):
        sample(training.pool, requests, lose)


def test_a_user_of_the_port_who_knows_no_token_is_no_node():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        stranger = socket.create_connection(address)
        stranger.sendall(b"let me in, I am node 1" * 10)
        with ThreadPoolExecutor(1) as executor:
            accepted = executor.submit(accept_nodes, listener, TOKEN, [1])
            with pytest.raises(UnauthenticatedPeer):
                introduce_node(*address, b"another token", 1)
            known = introduce_node(*address, TOKEN, 1)
            (connection,) = accepted.result().values()
        connection.send({"welcome": 1})
        assert known.receive()[0] == {"welcome": 1}
        with pytest.raises(RunFailure, match="the first rank of node 2 did not connect; see its log"):
            accept_nodes(listener, TOKEN, [2], timeout_s=0.5)
    stranger.close()


class Spanning(Training):
    """One server over three nodes."""

    def __init__(self, options, tmp_path, stack, **changes) -> None:
        super().__init__(options, [(0, 1, 2)], stack, tensor_parallel_size=6, **changes)
        self.notes = tmp_path
        (self.server,) = self.pool.servers

    def wait_for(self, num_starts: int) -> list[dict]:
        wait_until(lambda: len(notes(self.notes)) >= num_starts, lambda: notes(self.notes))
        return notes(self.notes)


def test_each_node_of_a_server_gets_its_place_and_its_own_buffer(options, tmp_path, stack):
    nodes = Spanning(options, tmp_path, stack)
    nodes.update(1)
    assert sample(nodes.pool) == nodes.weights.expected()
    started = sorted(nodes.wait_for(3), key=lambda one: one["span"]["number"])
    spans = [one["span"] for one in started]
    assert [(one["number"], one["own_host"]) for one in spans] == [
        (0, "127.0.0.1"), (1, "127.0.0.2"), (2, "127.0.0.3")]  # fmt: skip
    assert {(one["host"], one["num_nodes"]) for one in spans} == {("127.0.0.1", 3)}
    assert len({one["port"] for one in spans}) == 1
    assert [one["buffer"] for one in started[1:]] == [buffer.path for buffer in nodes.weights.buffers[1:]]


def test_a_part_that_is_killed_is_named_and_all_are_started_again_at_another_port(options, tmp_path, stack, capfd):
    nodes = Spanning(options, tmp_path, stack)
    nodes.update(1)
    before = nodes.wait_for(3)
    (pid,) = [one["pid"] for one in before if one["span"]["number"] == 2]
    kill = iter([lambda: os.kill(pid, signal.SIGKILL)])
    waits = [*SLOW[:1], GenerationRequest(77, (1900,), 1, seed=0)]  # for 9 seconds, in which the part is missed
    assert sample(nodes.pool, waits, lambda: next(kill, lambda: None)()) == nodes.weights.expected(waits)
    lines = [line for line in capfd.readouterr().err.splitlines() if "starting it again" in line]
    assert len(lines) == 1
    assert f"has lost its part on node 2, which (process {pid}) was killed by signal 9" in lines[0]
    after = [one for one in nodes.wait_for(6) if one not in before]
    assert {one["span"]["port"] for one in after}.isdisjoint(one["span"]["port"] for one in before)
    assert len({one["span"]["port"] for one in after}) == 1


def test_the_process_with_the_engine_is_named_when_it_is_killed_itself(options, tmp_path, stack, capfd):
    nodes = Spanning(options, tmp_path, stack)
    nodes.update(1)
    (pid,) = [one["pid"] for one in nodes.wait_for(3) if one["span"]["number"] == 0]
    os.kill(pid, signal.SIGKILL)
    assert sample(nodes.pool) == nodes.weights.expected()
    text = capfd.readouterr().err
    assert f"the rollout server (process {pid}) was killed by signal 9 (SIGKILL)" in text and "lost" not in text
    assert len(nodes.wait_for(6)) == 6


def test_a_part_that_cannot_start_is_named_with_its_log(options, tmp_path, stack):
    (tmp_path / "notes" / "fails").touch()
    nodes = Spanning(options, tmp_path, stack, num_restarts=0)
    with pytest.raises(RunFailure, match=r"its part on node \d, which .* exit code 1; log .*_part.log ends: no such"):
        nodes.update(1)
        sample(nodes.pool, [GenerationRequest(0, (5050,), 1, seed=0)])


class Run(Training):
    """A node that trains, and any number for rollout only."""

    def __init__(self, options, stack: contextlib.ExitStack, num_restarts=0) -> None:
        super().__init__(options, [(0,)], stack, num_restarts)
        self.options = options
        self.address = ListenerAddress("127.0.0.1", find_free_port(), "ab" * 32)
        self.pool.admit(Newcomers(self.address, self.weights.buffers[0]))
        self.stack = stack
        self.lines: list[str] = []

    def start(self, num_servers: int = 1) -> "RolloutOnly":
        node = RolloutOnly(self.options, self.address, num_servers)
        self.stack.callback(node.close)
        return node

    def wait_for_line(self, capfd, words: str, times: int = 1) -> None:
        def come() -> bool:
            self.lines += capfd.readouterr().err.splitlines()
            return sum(words in line for line in self.lines) >= times

        wait_until(come, lambda: self.lines)


class RolloutOnly:
    """A node for rollout only, in a thread."""

    def __init__(self, options, address: ListenerAddress, num_servers: int) -> None:
        self.servers = NodeServers([options(9, index) for index in range(num_servers)])
        self.pids = [self.servers.start(index) for index in range(num_servers)]
        self.is_ending = threading.Event()
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._serve, args=(address,), daemon=True)
        self.thread.start()

    def _serve(self, address: ListenerAddress) -> None:
        try:
            rollout_only.serve(self.servers, address, lambda: self.is_ending.is_set() or None)
        except Exception as error:
            self.failure = error
        self.servers.close()

    def close(self) -> None:
        self.is_ending.set()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


def test_nodes_for_rollout_only_take_part_from_the_next_weights_on(options, tmp_path, stack, capfd):
    run = Run(options, stack)
    run.update(0)
    assert sample(run.pool) == run.weights.expected()
    node = run.start(num_servers=2)
    run.wait_for_line(capfd, "is ready: it takes part from the next version of the weights on")
    assert sample(run.pool) == run.weights.expected()
    for version in (1, 2, 3):
        run.update(version)
        assert sample(run.pool) == run.weights.expected()
    own = run.pool.servers[0]._pids[0]
    # Of three servers in all, two are there.
    assert [batches(tmp_path, pid) for pid in node.pids] == [[[2, 5, 8]] * 3, [[3, 6, 9]] * 3]
    assert [len(batch) for batch in batches(tmp_path, own)] == [9, 9, 3, 3, 3]
    run.wait_for_line(capfd, "takes part from version 1 of the weights on, with 2 servers")
    total = sum(info.size_bytes for info in INFOS)
    assert run.pool.servers[1].node._transport.sent_bytes == 3 * total, "each version travels whole, once"


def joined(options, stack, capfd, num_restarts=0):
    run = Run(options, stack, num_restarts)
    node = run.start()
    run.wait_for_line(capfd, "is ready")
    run.update(0)
    return run, node


def test_a_node_leaves_while_it_generates(options, tmp_path, stack, capfd):
    run, node = joined(options, stack, capfd)
    assert sample(run.pool, SLOW, node.is_ending.set) == run.weights.expected(SLOW)
    run.wait_for_line(capfd, "leaves; the run goes on without it")
    run.wait_for_line(capfd, "prompts of rollout nodes that are lost are issued again")
    node.thread.join(LIMIT_S)
    assert not node.thread.is_alive() and node.failure is None
    run.update(1)
    assert sample(run.pool) == run.weights.expected()


def test_a_node_that_is_cut_off_is_done_without_and_comes_again(options, tmp_path, stack, capfd):
    run, node = joined(options, stack, capfd)
    connection = run.pool.servers[1].node._rpc._connection._connection
    cut = iter([lambda: connection.shutdown(socket.SHUT_RDWR)])
    assert sample(run.pool, SLOW, lambda: next(cut, lambda: None)()) == run.weights.expected(SLOW)
    run.wait_for_line(capfd, "has closed the connection: it has ended, or was killed; the run goes on without it")
    run.wait_for_line(capfd, "is ready", times=2)  # it has connected again by itself, with the same servers
    run.update(1)
    assert sample(run.pool) == run.weights.expected()
    assert run.pool.servers[1]._pids == node.pids and len(batches(tmp_path, node.pids[0])) == 2


@pytest.mark.parametrize("num_restarts", [0, 1])
def test_a_node_whose_server_dies_is_done_without_where_no_restart_is_left(
    options, tmp_path, stack, capfd, num_restarts
):
    run, node = joined(options, stack, capfd, num_restarts)
    kill = iter([lambda: os.kill(node.pids[0], signal.SIGKILL)])
    assert sample(run.pool, SLOW, lambda: next(kill, lambda: None)()) == run.weights.expected(SLOW)
    if num_restarts:
        run.wait_for_line(capfd, "starting it again (0 restarts left)")
        run.update(1)
        assert sample(run.pool) == run.weights.expected() and len(run.pool.servers) == 2
        return
    run.wait_for_line(capfd, f"(process {node.pids[0]}) was killed by signal 9")
    run.wait_for_line(capfd, "; the run goes on without it")
    node.thread.join(LIMIT_S)
    assert isinstance(node.failure, RunFailure) and "rank 0 does without this node" in str(node.failure)


def test_a_failure_of_the_own_servers_is_the_runs(options, stack, capfd):
    run = Run(options, stack)
    run.start()
    run.wait_for_line(capfd, "is ready")
    run.update(0)
    with pytest.raises(RunFailure, match="was killed by signal 9"):
        sample(run.pool, [GenerationRequest(0, (666,), 1, seed=0)])


def test_a_node_that_falls_silent_is_lost(options, stack, capfd, monkeypatch):
    monkeypatch.setattr(rpc_module, "SILENCE_LIMIT_S", 2.0)
    monkeypatch.setattr(rpc_module, "BEAT_INTERVAL_S", 0.2)
    run = Run(options, stack)
    with socket.create_connection((run.address.host, run.address.port)) as connection:
        introduce(connection, bytes.fromhex(run.address.key)).send({"host": "stopped", "num_servers": 1})
        run.wait_for_line(capfd, "rollout node stopped, 127.0.0.1 is ready")
        run.update(0)  # would wait for its buffer
        run.wait_for_line(capfd, "rollout node stopped, 127.0.0.1 has not been heard of for")
    assert sample(run.pool) == run.weights.expected()


def test_strangers_and_nonsense_at_the_listener_change_nothing(options, stack, capfd):
    run = Run(options, stack)
    with socket.create_connection((run.address.host, run.address.port)) as connection:
        with pytest.raises(UnauthenticatedPeer):
            introduce(connection, b"another key")
    with socket.create_connection((run.address.host, run.address.port)) as connection:
        introduce(connection, bytes.fromhex(run.address.key)).send({"host": "odd", "num_servers": "many"})
        assert connection.recv(1) == b""  # hung up on
    run.update(0)
    assert sample(run.pool) == run.weights.expected()
    assert "rollout node" not in capfd.readouterr().err


def test_who_rank_0_starts_does_not_get_to_know_the_key(monkeypatch):
    monkeypatch.setenv(LISTENER_VARIABLE, '{"host": "10.0.0.1", "port": 7, "key": "00ff"}')
    assert take_address() == ListenerAddress("10.0.0.1", 7, "00ff")
    assert take_address() is None
