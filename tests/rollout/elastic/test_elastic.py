"""Rollout servers that come, fail, fall silent and leave while rank 0 samples: the samples stay the same."""

import contextlib
import socket
import threading
import time
import zlib

import numpy as np
import pytest

from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes import channel
from mindrlhf.launch.nodes.rollout_nodes import LISTENER_VARIABLE, ListenerAddress
from mindrlhf.rollout.elastic import node
from mindrlhf.rollout.elastic.generator import ElasticGenerator
from mindrlhf.rollout.elastic.listener import Listener, take_address
from mindrlhf.rollout.types import Cancelled, Completion, GenerationRequest, SamplingParams
from mindrlhf.system.handshake import UnauthenticatedPeer, introduce
from mindrlhf.system.ports import find_free_port
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.tensors import TensorInfo

pytestmark = pytest.mark.timeout(180)

SAMPLING = SamplingParams(max_tokens=9)
INFOS = (
    TensorInfo("embedding", "bfloat16", (3000, 64)),
    TensorInfo("norm", "float32", (64,)),
    TensorInfo("scale", "float32", ()),
)
REQUESTS = [GenerationRequest(index, tuple(range(index + 1)), 2, seed=2**62 + index) for index in range(9)]


class Servers:
    """What stands for vLLM: samples depend on the request and on what lies in the buffer."""

    def __init__(self) -> None:
        self.buffer_path = ""
        self.version = -1
        self.weights = 0
        self.batches: list[list[int]] = []
        self.made = 0
        self.stops_after: int | None = None  # samples, after which nothing more comes
        self.fails_after: int | None = None
        self.is_cancelled = threading.Event()
        self.is_stopped = threading.Event()

    def wait_ready(self) -> None:
        pass

    def use_weight_buffer(self, buffer_path: str) -> None:
        self.buffer_path = buffer_path

    def update_weights(self, version: int) -> None:
        with WeightBuffer.attach(self.buffer_path) as buffer:
            buffer.verify(version)
            self.weights = 0
            for name, _, array in buffer.tensors(version):
                self.weights = zlib.crc32(array.tobytes(), self.weights) ^ zlib.crc32(name.encode())
                del array
        self.version = version

    def generate(self, requests, sampling):
        assert sampling == SAMPLING and self.version >= 0
        self.batches.append([request.request_id for request in requests])
        for request in requests:
            for index in range(request.num_samples):
                if self.made == self.stops_after:
                    self.is_stopped.set()
                    self.is_cancelled.wait(60)
                if self.is_cancelled.is_set():
                    raise Cancelled
                if self.made == self.fails_after:
                    raise RunFailure("vLLM died")
                self.made += 1
                random = np.random.default_rng([request.seed, index, self.weights])
                length = int(random.integers(1, 10))
                tokens = random.integers(0, 100, length).astype(np.int32)
                logprobs = random.standard_normal(length).astype(np.float32)
                yield Completion(request.request_id, index, tokens, logprobs, ("stop", "length")[index], self.version)

    def sleep(self) -> None:
        pass

    wake = sleep

    def cancel(self) -> None:
        self.is_cancelled.set()


class Node:
    """A node for rollout only, in a thread."""

    def __init__(self, address: ListenerAddress, num_servers: int) -> None:
        self.servers = Servers()
        self.is_ending = threading.Event()
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._serve, args=(address, num_servers), daemon=True)
        self.thread.start()

    def _serve(self, address: ListenerAddress, num_servers: int) -> None:
        try:
            node.serve(self.servers, num_servers, address, lambda: self.is_ending.is_set() or None)
        except Exception as error:
            self.failure = error


class Run:
    """Rank 0, its buffer and its own servers."""

    def __init__(self) -> None:
        self.address = ListenerAddress("127.0.0.1", find_free_port(), "ab" * 32)
        self.buffer = WeightBuffer.create(INFOS)
        self.own = Servers()
        self.own.use_weight_buffer(self.buffer.path)
        self.listener = Listener(self.address)
        self.generator = ElasticGenerator(self.own, 1, self.listener, self.buffer)
        self.nodes: list[Node] = []
        self.random = np.random.default_rng(0)
        self.values = [
            self.random.integers(0, 2**16, info.shape).astype(f"u{info.numpy_dtype.itemsize}") for info in INFOS
        ]

    def start(self, num_servers: int = 1, address: ListenerAddress | None = None) -> Node:
        self.nodes.append(Node(address or self.address, num_servers))
        return self.nodes[-1]

    def update(self, version: int) -> None:
        """Publish weights of which a few have changed."""
        self.buffer.begin(version)
        for info, value in zip(INFOS, self.values):
            value.reshape(-1)[:: max(1, value.size // 50)] += 1
            self.buffer.write(info.name, value.view(info.numpy_dtype))
        self.buffer.commit()
        self.generator.update_weights(version)

    def sample(self) -> dict[tuple[int, int], tuple]:
        found = [self.key(one) for one in self.generator.generate(REQUESTS, SAMPLING)]
        assert len(found) == len(dict(found)) == 18, "each sample comes once"
        return dict(found)

    @staticmethod
    def key(one: Completion) -> tuple:
        values = one.token_ids.tolist(), one.logprobs.tolist(), one.finish_reason, one.weights_version
        return (one.request_id, one.sample_index), values

    def alone(self) -> dict[tuple[int, int], tuple]:
        """Return what the own servers would have sampled with these weights."""
        servers = Servers()
        servers.use_weight_buffer(self.buffer.path)
        servers.update_weights(self.buffer.version)
        return dict(self.key(one) for one in servers.generate(REQUESTS, SAMPLING))


@pytest.fixture
def run():
    run = Run()
    yield run
    for one in run.nodes:
        one.is_ending.set()
        one.servers.cancel()
    run.generator.close()
    for one in run.nodes:
        one.thread.join(60)
        assert not one.thread.is_alive()
    run.buffer.close()


def wait_for_line(capsys, words: str, lines: list[str], times: int = 1) -> None:
    end_s = time.monotonic() + 60
    while sum(words in line for line in lines) < times:
        lines += capsys.readouterr().err.splitlines()
        assert time.monotonic() < end_s, lines
        time.sleep(0.01)


def test_prompts_are_dealt_out_to_all_servers_from_the_next_weights_on(run, capsys):
    lines: list[str] = []
    run.update(0)
    assert run.sample() == run.alone()
    one = run.start(num_servers=2)
    wait_for_line(capsys, "is ready: it takes part from the next version of the weights on", lines)
    assert run.sample() == run.alone()
    assert one.servers.batches == []
    for version in (1, 2, 3):
        run.update(version)
        assert run.sample() == run.alone()
    # Of three servers in all, two are there.
    assert one.servers.batches == [[1, 2, 4, 5, 7, 8]] * 3 and run.own.batches[-1] == [0, 3, 6]
    wait_for_line(capsys, "takes part from version 1 of the weights on, with 2 servers", lines)


def test_each_version_of_the_weights_travels_whole(run, capsys):
    run.update(0)
    run.start()
    wait_for_line(capsys, "is ready", [])
    for number, version in enumerate((1, 2), start=1):
        run.update(version)
        (peer,) = run.generator._peers
        assert peer._transport.sent_bytes == number * sum(info.size_bytes for info in INFOS)


def test_the_prompts_of_a_node_that_dies_are_issued_again(run, capsys):
    lines: list[str] = []
    one = run.start()
    wait_for_line(capsys, "is ready", lines)
    run.update(0)
    one.servers.stops_after = 3  # one prompt whole, half of another
    threading.Thread(target=lambda: one.servers.is_stopped.wait(60) and hang_up(run)).start()
    assert run.sample() == run.alone()
    assert run.own.batches == [[0, 2, 4, 6, 8], [3, 5, 7]]
    wait_for_line(capsys, "has closed the connection: it has ended, or was killed; the run goes on without it", lines)
    wait_for_line(capsys, "3 prompts of rollout nodes that are lost are issued again", lines)
    run.update(1)
    assert run.sample() == run.alone()


def hang_up(run: Run) -> None:
    """Cut all connections of rank 0 to the nodes, as the kernel does for a node whose processes are killed."""
    (peer,) = run.generator._peers
    peer._channel._connection._connection.shutdown(socket.SHUT_RDWR)


def test_a_node_that_comes_again_takes_part_again(run, capsys):
    lines: list[str] = []
    run.start()
    wait_for_line(capsys, "is ready", lines)
    run.update(0)
    hang_up(run)
    wait_for_line(capsys, "the run goes on without it", lines)
    assert run.sample() == run.alone()
    wait_for_line(capsys, "is ready", lines, times=2)  # it has connected again by itself
    run.update(1)
    assert run.sample() == run.alone()
    assert [len(batch) for batch in run.own.batches] == [9, 5]


def test_a_node_leaves_while_it_generates(run, capsys):
    lines: list[str] = []
    one = run.start()
    wait_for_line(capsys, "is ready", lines)
    run.update(0)
    one.servers.stops_after = 3
    threading.Thread(target=lambda: one.servers.is_stopped.wait(60) and one.is_ending.set()).start()
    assert run.sample() == run.alone()
    wait_for_line(capsys, "leaves; the run goes on without it", lines)
    one.thread.join(60)
    assert not one.thread.is_alive() and one.failure is None


def test_a_node_whose_servers_fail_is_done_without_and_ends(run, capsys):
    lines: list[str] = []
    one = run.start()
    wait_for_line(capsys, "is ready", lines)
    run.update(0)
    one.servers.fails_after = 3
    assert run.sample() == run.alone()
    wait_for_line(capsys, "has failed: vLLM died; the run goes on without it", lines)
    one.thread.join(60)
    assert isinstance(one.failure, RunFailure)


def test_a_failure_of_the_own_servers_is_the_runs(run, capsys):
    run.start()
    wait_for_line(capsys, "is ready", [])
    run.update(0)
    run.own.fails_after = 3
    with pytest.raises(RunFailure, match="vLLM died"):
        run.sample()


def test_who_reads_no_further_ends_the_generation_everywhere(run, capsys):
    one = run.start()
    wait_for_line(capsys, "is ready", [])
    run.update(0)
    with contextlib.closing(run.generator.generate(REQUESTS, SAMPLING)) as completions:
        next(completions)
    run.update(1)
    assert run.sample() == run.alone()
    assert one.servers.batches[-1] == [1, 3, 5, 7]


def test_a_node_that_falls_silent_is_lost(run, capsys, monkeypatch):
    monkeypatch.setattr(channel, "SILENCE_LIMIT_S", 2.0)
    monkeypatch.setattr(channel, "BEAT_INTERVAL_S", 0.2)
    lines: list[str] = []
    with socket.create_connection((run.address.host, run.address.port)) as connection:
        signed = introduce(connection, bytes.fromhex(run.address.key))
        signed.send({"host": "stopped", "num_servers": 1})
        wait_for_line(capsys, "rollout node stopped, 127.0.0.1 is ready", lines)
        run.update(0)  # would wait for its buffer
        wait_for_line(capsys, "rollout node stopped, 127.0.0.1 has not been heard of for", lines)
    assert run.sample() == run.alone()


def test_strangers_and_nonsense_at_the_listener_change_nothing(run, capsys):
    with socket.create_connection((run.address.host, run.address.port)) as connection:
        with pytest.raises(UnauthenticatedPeer):
            introduce(connection, b"another key")
    with socket.create_connection((run.address.host, run.address.port)) as connection:
        introduce(connection, bytes.fromhex(run.address.key)).send({"host": "odd", "num_servers": "many"})
        assert connection.recv(1) == b""  # hung up on
    run.update(0)
    assert run.sample() == run.alone()
    assert "rollout node" not in capsys.readouterr().err


def test_who_rank_0_starts_does_not_get_to_know_the_key(monkeypatch):
    monkeypatch.setenv(LISTENER_VARIABLE, '{"host": "10.0.0.1", "port": 7, "key": "00ff"}')
    assert take_address() == ListenerAddress("10.0.0.1", 7, "00ff")
    assert take_address() is None
