"""A server over nodes, with stand-ins for its processes: what is started where, who is named, and what is left."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.multi_node.share import NodeShare
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import VllmOptions

# Both roles note what they were told. The engine's process answers until a prompt begins with 666, by which it ends, or
# with 4711, over which it waits; the others wait always.
STAND_IN = '''
import json, os, sys, socket, time
import numpy as np
from mindrlhf.system.wire import receive_message, send_message

config = json.loads(sys.argv[sys.argv.index("--config") + 1])
number = config["span"]["number"]
with open(os.path.join(os.environ["NOTES"], f"{time.monotonic_ns()}_{number}"), "w") as notes:
    json.dump({"pid": os.getpid(), **config["span"]}, notes)
if "--headless" in sys.argv:
    if os.path.exists(os.path.join(os.environ["NOTES"], f"fail_{number}")):
        sys.exit("no such device")
    while not os.path.exists(config["buffer_file"]):
        time.sleep(0.01)
    with open(os.path.join(os.environ["NOTES"], f"buffer_{number}"), "w") as notes:
        notes.write(open(config["buffer_file"]).read())
    time.sleep(600)
connection = socket.socket(fileno=int(sys.argv[sys.argv.index("--socket-fd") + 1]))
send_message(connection, {"kind": "ready"})
while True:
    header, arrays = receive_message(connection)
    if header["kind"] == "generate":
        if arrays["prompt_ids"][0] == 666:
            sys.exit("hit by a bus")
        if arrays["prompt_ids"][0] == 4711:
            time.sleep(600)
        send_message(connection, {"kind": "completions", "weights_version": 0}, {
            "request_ids": arrays["request_ids"], "sample_indices": np.zeros(1, np.int32),
            "lengths": np.ones(1, np.int32), "finish_reasons": np.ones(1, np.uint8),
            "token_ids": arrays["prompt_ids"][:1], "logprobs": np.zeros(1, np.float32)})
        send_message(connection, {"kind": "generated"})
    else:
        send_message(connection, {"kind": "done"})
    if header["kind"] == "shutdown":
        break
'''
TOKEN = b"0123456789abcdef"
SAMPLING = SamplingParams(max_tokens=4)


def ask(generator, first: int) -> None:
    (completion,) = generator.generate([GenerationRequest(0, (first, 2), 1, seed=0)], SAMPLING)
    assert completion.token_ids.tolist() == [first]


class Nodes:
    """Three nodes of a server, all on this machine."""

    def __init__(self, options: VllmOptions, notes: Path):
        self.notes = notes
        self.shares = [
            NodeShare(dataclasses.replace(options, log_path=options.log_path.replace("log", f"log_{node}", 1)), 2)
            for node in range(3)
        ]
        address = self.shares[0].open("127.0.0.1")
        for node in (2, 1):
            self.shares[node].join(address, TOKEN, node, f"127.0.0.{node + 1}", f"/buffer/of/{node}")
        self.generator = self.shares[0].start(TOKEN, [1, 2], "/buffer/of/0")

    def started(self) -> list[dict]:
        """What the processes noted at their start, in the order of their starts."""
        return [json.loads(path.read_text()) for path in sorted(self.notes.glob("[0-9]*")) if path.read_text()]

    def wait_for(self, num_starts: int) -> list[dict]:
        end_s = time.monotonic() + 60
        while len(self.started()) < num_starts:
            assert time.monotonic() < end_s, self.started()
            time.sleep(0.02)
        return self.started()

    def close(self) -> None:
        for share in self.shares:
            share.close()


@pytest.fixture
def options(tmp_path, monkeypatch):
    (tmp_path / "server.py").write_text(STAND_IN)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    python.chmod(0o755)
    for name in ("model", "notes", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return VllmOptions(
        str(python), str(tmp_path / "model"), str(tmp_path / "log" / "rollout_0.log"), load_format="auto",
        max_model_len=50, tensor_parallel_size=6, env={"NOTES": str(tmp_path / "notes")}, stall_timeout_s=60,
    )  # fmt: skip


@pytest.fixture
def nodes(options, tmp_path):
    nodes = Nodes(options, tmp_path / "notes")
    yield nodes
    nodes.close()
    pids = [one["pid"] for one in nodes.started()]
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")], "no process is left"
    assert os.listdir(tmp_path / "temporary") == [], "nor a directory of one"


def test_each_node_gets_its_place_and_its_own_buffer(nodes, tmp_path):
    nodes.generator.wait_ready()
    ask(nodes.generator, 1)
    started = sorted(nodes.wait_for(3), key=lambda one: one["number"])
    assert [(one["number"], one["own_host"]) for one in started] == [
        (0, "127.0.0.1"), (1, "127.0.0.2"), (2, "127.0.0.3")]  # fmt: skip
    assert {(one["host"], one["num_nodes"]) for one in started} == {("127.0.0.1", 3)}
    assert len({one["port"] for one in started}) == 1
    end_s = time.monotonic() + 60
    buffers = [tmp_path / "notes" / f"buffer_{number}" for number in (1, 2)]
    while not all(buffer.exists() and buffer.read_text() for buffer in buffers):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    assert [buffer.read_text() for buffer in buffers] == ["/buffer/of/1", "/buffer/of/2"]


@pytest.mark.parametrize("first", [1, 4711])  # between two requests; while one is being answered
def test_a_part_that_is_killed_is_named_and_all_are_started_again_at_another_port(nodes, capfd, first):
    nodes.generator.wait_ready()
    before = nodes.wait_for(3)
    (pid,) = [one["pid"] for one in before if one["number"] == 2]
    if first == 4711:
        stream = nodes.generator.generate([GenerationRequest(0, (first, 2), 1, seed=0)], SAMPLING)
        nodes.generator._num_restarts = 0
        threading.Timer(1, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(RunFailure, match=rf"has lost its part on node 2, which \(process {pid}\) was killed by "):
            next(stream)
        return
    os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + 60
    while len(nodes.started()) < 6 and time.monotonic() < end_s:
        ask(nodes.generator, 1)
    assert re_named(capfd.readouterr().err, pid)
    after = [one for one in nodes.wait_for(6) if one not in before]
    assert {one["port"] for one in after} != {one["port"] for one in before}
    assert len({one["port"] for one in after}) == 1


def re_named(text: str, pid: int) -> bool:
    lines = [line for line in text.splitlines() if "starting it again" in line]
    return len(lines) == 1 and f"has lost its part on node 2, which (process {pid}) was killed by signal 9" in lines[0]


def test_the_process_with_the_engine_is_named_when_it_is_killed_itself(nodes, capfd):
    nodes.generator.wait_ready()
    before = nodes.wait_for(3)
    (pid,) = [one["pid"] for one in before if one["number"] == 0]
    os.kill(pid, signal.SIGKILL)
    ask(nodes.generator, 1)
    text = capfd.readouterr().err
    assert f"the rollout server (process {pid}) was killed by signal 9 (SIGKILL)" in text and "lost" not in text
    assert len(nodes.wait_for(6)) == 6


def test_an_engine_that_ends_by_itself_is_named_with_its_log(nodes):
    nodes.generator.wait_ready()
    nodes.generator._num_restarts = 0
    with pytest.raises(RunFailure, match="ended with exit code 1; log .*rollout_0.log ends: hit by a bus"):
        ask(nodes.generator, 666)


def test_a_part_that_cannot_start_is_named_with_its_log(options, tmp_path):
    (tmp_path / "notes" / "fail_1").touch()
    nodes = Nodes(options, tmp_path / "notes")
    nodes.generator._generators[0].wait_ready()  # the stand-in's engine does not wait for the others
    nodes.generator._num_restarts = 0
    with pytest.raises(RunFailure, match=r"its part on node 1, which .* exit code 1; log .*_part.log ends: no such"):
        ask(nodes.generator, 4711)
    nodes.close()
    assert os.listdir(tmp_path / "temporary") == []


def test_a_node_that_goes_is_named_and_its_part_ends(nodes):
    nodes.generator.wait_ready()
    (pid,) = [one["pid"] for one in nodes.wait_for(3) if one["number"] == 1]
    nodes.shares[1].close()
    assert not os.path.exists(f"/proc/{pid}")
    how = "(could not be started|has lost a part): the first rank of node 1, which starts the part there"
    with pytest.raises(RunFailure, match=how):
        ask(nodes.generator, 4711)


def test_the_owner_that_goes_takes_all_parts_with_it(nodes):
    nodes.generator.wait_ready()
    pids = [one["pid"] for one in nodes.wait_for(3)]
    nodes.shares[0].close()
    end_s = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_stranger_is_no_part(options, tmp_path, monkeypatch):
    monkeypatch.setattr("mindrlhf.rollout.remote._CONNECT_TIMEOUT_S", 0.5)
    owner, stranger = NodeShare(options, 0), NodeShare(options, 0)
    address = owner.open("127.0.0.1")
    stranger.join(address, b"another token", 1, "127.0.0.1", "")
    with pytest.raises(RunFailure, match="the first rank of node 1 did not connect"):
        owner.start(TOKEN, [1], "")
    stranger.close()
    assert list((tmp_path / "notes").iterdir()) == []
