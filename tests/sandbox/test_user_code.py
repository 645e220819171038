"""Verifiers and tools that damage the process they run in: each costs its own sample or call, never the run."""

import os
import time
import zlib

import pytest

from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
from mindrlhf.sandbox import worker_process
from mindrlhf.sandbox.pipes import BrokenPipeMessage, MessageReader, pack_message
from mindrlhf.sandbox.worker_process import MAX_OUTPUT_BYTES
from mindrlhf.system.processes import read_status
from mindrlhf.tools.calls import ToolAnswer, ToolCall
from mindrlhf.tools.pool import ToolPool

pytestmark = pytest.mark.timeout(240)

CODE = """
import json, os, select, subprocess, sys, threading, time
from mindrlhf.sandbox.pipes import pack_message


def descriptors():
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2]


def write_everywhere(data):
    for fd in descriptors():
        try:
            os.write(fd, data)
        except OSError:
            pass


def do(deed, note):
    if deed == "write junk":
        write_everywhere(b"[[0, [1.0]]]\\\\n")
    elif deed == "write a huge length":
        write_everywhere(b"MRW1" + b"\\\\xff" * 8)
    elif deed == "write a message":
        write_everywhere(pack_message([[987654, [1.0]]]))
    elif deed == "write what is no answer":
        write_everywhere(pack_message({"context": 7}))
    elif deed == "close all":
        os.closerange(0, 1 << 16)
    elif deed == "replace all":
        null = os.open(os.devnull, os.O_RDWR)
        for fd in descriptors():
            os.dup2(null, fd)
    elif deed == "close all and hang":
        os.closerange(3, 1 << 16)
        time.sleep(600)
    elif deed == "close standard streams":
        os.closerange(0, 3)
    elif deed == "patch json":
        json.dumps = json.loads = json.dump = json.load = None
        json.JSONEncoder.encode = json.JSONDecoder.decode = lambda *arguments: "[]"
        json.encoder.c_make_encoder = json.encoder.encode_basestring_ascii = None
    elif deed == "patch modules":
        os.write = os.read = os.getpid = time.monotonic = None
    elif deed == "steal":
        for fd in descriptors():
            try:
                if select.select([fd], [], [], 0.2)[0]:
                    os.read(fd, 1 << 20)
            except OSError:
                pass
    elif deed == "write junk later":
        threading.Thread(target=lambda: (time.sleep(0.05), write_everywhere(b"junk"))).start()
    elif deed == "fork and return":
        os.fork()
    elif deed == "wait":
        time.sleep(0.005)
    elif deed == "print":
        print("heard on stdout", flush=True)
        os.write(2, b"heard on stderr\\\\n")
    elif deed == "print much":
        for _ in range(200):
            os.write(1, b"y" * (1 << 20))
            os.write(2, b"z" * (1 << 20))
    elif deed == "leave a process":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open(note, "w") as file:
            file.write(str(child.pid))
    elif deed == "leave a process and exit":
        do("leave a process", note)
        os._exit(4)


def verifier(completion, answer):
    do(completion, answer)
    return float(len(completion))


def second(completion, answer):
    return 5.0


def tool(deed: str, note: str = ""):
    do(deed, note)
    return {"length": len(deed)}
""".replace("\\\\", "\\")
LOST = "closed or replaced its worker's pipes"
BROKEN = "wrote to its worker's pipes"
COSTLY = {
    "write junk": BROKEN,
    "write a huge length": BROKEN,
    "write a message": BROKEN,
    "write what is no answer": BROKEN,
    "close all": LOST,
    "replace all": LOST,
    "close all and hang": LOST,
}
HARMLESS = ("close standard streams", "patch json", "patch modules", "fork and return", "print")


@pytest.fixture
def code_file(tmp_path):
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def reward_pool(code_file):
    selection = Selection((f"{code_file}:verifier", f"{code_file}:second"), (1.0, 1.0))
    with RewardPool(selection, num_workers=2, timeout_s=30.0, failure_value=-1.0) as pool:
        yield pool


@pytest.fixture
def tool_pool(code_file):
    with ToolPool([f"{code_file}:tool"], timeout_s=30.0) as pool:
        yield pool


def score(pool, deeds, note=""):
    return pool.score([RewardInput(index, deed, str(note)) for index, deed in enumerate(deeds)])


def ask(pool, deed, note=""):
    return pool.submit(ToolCall("tool", {"deed": deed, "note": str(note)})).result(timeout=120)


def is_gone(pid):
    deadline = time.monotonic() + 30
    while (status := read_status(pid)) is not None and status.returncode is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("deed", COSTLY)
def test_a_verifier_that_breaks_its_pipes_costs_its_own_samples_and_is_named(reward_pool, deed):
    deeds = ["a", "bb", deed, "ccc", *"dd" * 20, deed, "eeee"]
    results = score(reward_pool, deeds)
    for result, done in zip(results, deeds, strict=True):
        if done == deed:
            assert result.parts["verifier"] == -1.0 and COSTLY[deed] in result.failures["verifier"]
        else:
            assert result.parts == {"verifier": float(len(done)), "second": 5.0} and result.failures == {}
    assert [result.total for result in score(reward_pool, ["a", "bb"])] == [6.0, 7.0]


@pytest.mark.parametrize("deed", COSTLY)
def test_a_tool_that_breaks_its_pipes_costs_its_own_call_and_is_named(tool_pool, deed):
    for _ in range(2):
        answer = ask(tool_pool, deed)
        assert answer.is_failure and COSTLY[deed] in answer.text
        assert ask(tool_pool, "abc") == ToolAnswer('{"length": 3}')


@pytest.mark.parametrize("deed", HARMLESS)
def test_a_verifier_that_only_touches_what_is_its_own_costs_nothing(reward_pool, deed):
    deeds = [deed, "a", deed, "bb", "ccc"]
    results = score(reward_pool, deeds)
    assert [result.parts["verifier"] for result in results] == [float(len(done)) for done in deeds]
    assert not any(result.failures for result in results)


def test_every_sample_may_break_its_worker(reward_pool):
    """More deaths in a row than the pool allows where no sample is to blame."""
    results = score(reward_pool, ["replace all", "write junk"] * 4)
    assert all(result.parts["verifier"] == -1.0 for result in results)


@pytest.mark.parametrize("deed", ["steal", "write junk later"])
def test_samples_of_a_worker_that_lost_them_are_scored_again(reward_pool, monkeypatch, deed):
    """Nobody can say what the verifier did it to: what it read, or what was scored when the junk came."""
    monkeypatch.setattr(worker_process, "MAX_SILENCE_S", 3.0)
    deeds = ["a", "wait", *["bb"] * 18, deed, *["wait"] * 20] * 2
    results = score(reward_pool, deeds)
    right = [result.parts["verifier"] == len(done) for result, done in zip(results, deeds, strict=True)]
    assert sum(right) >= len(deeds) - 2, [result.failures for result in results if result.failures]


def output_of(run, capfd):
    run()
    deadline = time.monotonic() + 30
    output = ""
    while "is dropped" not in output and time.monotonic() < deadline:
        output += capfd.readouterr().err
        time.sleep(0.02)
    return output


def test_what_verifiers_print_is_shown_up_to_a_limit(reward_pool, capfd):
    assert score(reward_pool, ["print"])[0].total == 10.0
    output = output_of(lambda: score(reward_pool, ["print much", "a"]), capfd)
    assert output.startswith("heard on stdout\nheard on stderr\n")
    assert "verifiers have printed 10000000 bytes; the rest is dropped" in output
    assert MAX_OUTPUT_BYTES < len(output) < MAX_OUTPUT_BYTES + 200
    assert score(reward_pool, ["print much", "a"])[1].total == 6.0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("deed", ["leave a process", "leave a process and exit"])
def test_a_process_that_a_tool_leaves_behind_does_not_outlive_the_worker(code_file, tmp_path, deed):
    note = tmp_path / "pid"
    with ToolPool([f"{code_file}:tool"], timeout_s=30.0) as pool:
        assert ask(pool, deed, note).is_failure == deed.endswith("exit")
        pid = int(note.read_text())
        if deed.endswith("exit"):
            assert is_gone(pid)
        else:
            os.kill(pid, 0)
    assert is_gone(pid)


def test_messages_arrive_whole_however_the_pipe_cuts_them():
    messages = [{"a": [1.5, None, "ä\ud800"]}, [], "x" * 1000]
    stream = b"".join(map(pack_message, messages))
    for size in (1, 7, 13, len(stream)):
        reader = MessageReader(2000)
        chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [message for chunk in chunks for message in reader.feed(chunk)] == messages


def test_what_is_no_message_is_refused():
    message = pack_message([1, 2, 3])
    text = b"[1, 2"
    no_json = b"MRW1" + len(text).to_bytes(4) + zlib.crc32(text).to_bytes(4) + text
    for data in (b"x" * 12, message[:-1] + b"4", pack_message("x" * 100), no_json, b"x" + message, message + b"x" * 12):
        with pytest.raises(BrokenPipeMessage):
            MessageReader(99).feed(data)
