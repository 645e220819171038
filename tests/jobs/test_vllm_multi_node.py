"""A real vLLM server whose processes are those of two nodes, both this machine: the tokens of one that is not cut."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from slow_tests import SLOW
from test_listeners import listening_addresses
from test_vllm_server import (
    PYTHON,
    REQUESTS,
    _is_alive,
    assert_same,
    collect,
    make_tensors,
    prompt,
    reference_logprobs,
    start,
    write_model,
)

from mindrlhf.rollout.nodes import OtherNode, OwnNode
from mindrlhf.rollout.pool import ServerPool, servers_on
from mindrlhf.rollout.processes.node import NodeServers
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.system.handshake import accept_nodes, introduce_node
from mindrlhf.system.processes import descendants, shared_memory_files
from mindrlhf.system.rpc import Rpc
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer

pytestmark = [
    SLOW,
    pytest.mark.skipif(not os.access(PYTHON, os.X_OK), reason="no rollout environment"),
    pytest.mark.timeout(900),
]

TOKEN = b"0123456789abcdef"
HOSTS = ("127.0.0.2", "127.0.0.3")  # addresses of this machine, which nobody else listens on


class Spanning:
    """A server over two nodes, with a buffer on each."""

    def __init__(self, options: VllmOptions, stack: contextlib.ExitStack):
        infos = [TensorInfo(name, "float32", tensor.shape) for name, tensor in make_tensors(0).items()]
        self.buffers = [stack.enter_context(WeightBuffer.create(infos)) for _ in HOSTS]
        self.servers = [NodeServers([options], host) for host in HOSTS]
        for servers, buffer in zip(self.servers, self.buffers):
            servers.buffer_path = buffer.path
            stack.callback(servers.close)
        with socket.create_server((HOSTS[0], 0)) as listener:
            threading.Thread(target=self._serve, args=listener.getsockname(), daemon=True).start()
            (connection,) = accept_nodes(listener, TOKEN, [1]).values()
        nodes = [OwnNode(self.servers[0]), OtherNode(Rpc(connection, "node 1"), HOSTS[0], TOKEN)]
        self.generator = ServerPool(servers_on(nodes, [options], [(0, 1)]), num_restarts=1)
        stack.callback(self.generator.close)

    def _serve(self, host: str, port: int) -> None:
        Rpc(introduce_node(host, port, TOKEN, 1), "rank 0", tell=self.servers[1].tell).serve(self.servers[1])

    def push(self, seeds: tuple[int, int], version: int) -> None:
        """Put weights on both buffers, of a seed each, and load them."""
        for buffer, seed in zip(self.buffers, seeds):
            buffer.begin(version)
            for name, tensor in make_tensors(seed).items():
                buffer.write(name, tensor)
            buffer.commit()
        self.generator.update_weights(version)

    @property
    def pids(self) -> list[int]:
        """The process with the engine, and the other node's."""
        return self.generator.servers[0]._pids

    def all_pids(self) -> list[list[int]]:
        """The processes of each node."""
        return [[pid, *(status.pid for status in descendants(pid))] for pid in self.pids]


@contextlib.contextmanager
def spanning(directory: Path, width: int) -> Iterator[Spanning]:
    model_dir = write_model(directory / "bare", None)
    log_path = str(directory / "spanning.log")
    options = VllmOptions(
        PYTHON, model_dir, log_path, max_model_len=160, max_num_seqs=32, kv_cache_gib=0.1, tensor_parallel_size=width,
        env={"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "40"},
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        yield Spanning(options, stack)


def assert_gone(pids: list[int], segments: set[str]) -> None:
    end_s = time.monotonic() + 30
    while left := [*filter(_is_alive, pids), *filter(os.path.exists, segments)]:
        assert time.monotonic() < end_s, left
        time.sleep(0.2)


def test_two_nodes_give_the_samples_of_one_also_with_new_weights(tmp_path):
    new = write_model(tmp_path / "new", make_tensors(1))
    with spanning(tmp_path, 2) as server:
        with start(new, tmp_path / "one_node.log", load_format="auto", tensor_parallel_size=2) as one_node:
            expected = collect(one_node)
        server.generator.wait_ready()
        server.push((0, 0), 1)
        old = collect(server.generator)
        server.push((1, 1), 2)
        got = collect(server.generator)
        assert any(not np.array_equal(got[key].token_ids, old[key].token_ids) for key in got)
        server.generator.sleep()
        server.generator.wake()
        server.push((1, 1), 3)
        assert_same(collect(server.generator), got)
        # Each process reads the buffer of its own node: with other weights on one of them, nothing is the same.
        server.push((1, 0), 4)
        mixed = collect(server.generator)
        pids = server.all_pids()
        segments = {path for node in pids for pid in node for path in shared_memory_files(pid)}
        # Nothing listens to others. (Gloo takes the first address of an interface, here of that of both nodes.)
        for node, host in zip(pids, HOSTS):
            assert {address for pid in node for address, _ in listening_addresses(pid)} <= {host, "127.0.0.1"}
    for key, completion in got.items():
        np.testing.assert_array_equal(completion.token_ids, expected[key].token_ids)
        np.testing.assert_allclose(completion.logprobs, expected[key].logprobs, atol=1e-5)
    assert sum(np.array_equal(mixed[key].token_ids, got[key].token_ids) for key in got) <= len(got) // 4
    prompts = {request.request_id: list(request.prompt_ids) for request in REQUESTS}
    pairs = [[prompts[key[0]], completion.token_ids.tolist()] for key, completion in got.items()]
    for completion, logprobs in zip(got.values(), reference_logprobs(new, 1.0, pairs)):
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
    assert_gone([pid for node in pids for pid in node], segments)


def test_two_processes_on_each_of_two_nodes_give_the_tokens_of_one_process(tmp_path):
    greedy = SamplingParams(max_tokens=20, temperature=0.0)
    with spanning(tmp_path, 4) as server:
        with start(write_model(tmp_path / "new", make_tensors(1)), tmp_path / "one.log", load_format="auto") as one:
            expected = collect(one, sampling=greedy)
        server.generator.wait_ready()
        server.push((1, 1), 1)
        assert_same(collect(server.generator, sampling=greedy), expected)
        assert [len(node) for node in server.all_pids()] == [5, 4]  # each with a resource tracker, one with an engine


TRAINER = """
import sys, time
from pathlib import Path
from test_vllm_multi_node import spanning
with spanning(Path(sys.argv[1]), 2) as server:
    server.generator.wait_ready()
    print(*(pid for pids in server.all_pids() for pid in pids), flush=True)
    time.sleep(300)
"""


def test_trainers_that_are_killed_leave_nothing(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as trainer:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        segments = {path for pid in pids for path in shared_memory_files(pid)}
        assert len(pids) > 4 and segments
        trainer.kill()  # both nodes' first ranks are this process
    assert_gone(pids, segments)


@pytest.mark.parametrize(
    "victim", ["engine", "part", "worker of the engine", "worker of the part", "stopped worker of the part"]
)
def test_who_is_killed_is_named_and_the_server_comes_back_with_its_weights(tmp_path, victim, capfd):
    with spanning(tmp_path, 2) as server:
        server.generator.wait_ready()
        server.push((1, 1), 1)
        expected = collect(server.generator)
        node = int(victim.endswith("part"))
        before = server.all_pids()
        segments = {path for pids in before for pid in pids for path in shared_memory_files(pid)}
        pid = before[node][-1 if "worker" in victim else 0]
        stream = server.generator.generate([GenerationRequest(0, prompt(6, 42), 96, seed=5)], SamplingParams(90))
        next(stream)  # 32 are made at once: most have not begun
        os.kill(pid, signal.SIGSTOP if victim.startswith("stopped") else signal.SIGKILL)
        list(stream)  # begun once more by the new server
        assert_same(collect(server.generator), expected)
        assert_gone([pid for pids in before for pid in pids], segments)
    text = capfd.readouterr().err
    (line,) = [line for line in text.splitlines() if "starting it again" in line]
    if victim == "engine":
        assert f"(process {pid}) was killed by signal 9 (SIGKILL)" in line
    elif victim == "part":
        assert f"has lost its part on node 1, which (process {pid}) was killed by signal 9 (SIGKILL)" in line
    elif victim.startswith("stopped"):
        assert "could not carry out a request: EngineDeadError" in line  # who it was vLLM does not know
    elif victim == "worker of the part":
        assert "has lost its part on node 1, which" in line and "a worker process has ended" in line
    else:
        assert line.startswith("mindrlhf: the rollout server")
