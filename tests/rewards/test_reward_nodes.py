"""Verifier workers of other nodes, here processes of this machine: what one pool of all of them promises."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from machines import Machines, check_ends_with_its_starter
from slow_tests import SLOW

from mindrlhf.config.reward import RewardSection
from mindrlhf.errors import UserError
from mindrlhf.launch.nodes.helper import NodeHelper
from mindrlhf.rewards.pool import RewardPool, pool_arguments, reason_to_stay
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
from mindrlhf.system import rpc as rpc_module
from mindrlhf.system.handshake import accept_nodes, introduce_node
from mindrlhf.system.ports import listen

pytestmark = pytest.mark.timeout(180)
TOKEN = b"of this test"
VERIFIERS = """
import os, time
from mindrlhf.rewards.judges import accounting


def obedient(completion, answer):
    if answer:
        with open(answer, "a") as calls:
            calls.write(f"{os.uname().nodename}.{os.getpid()} {completion}\\n")
    word = completion.split()[0]
    if word == "patient":  # on the node of the test, until another has had a bad sample
        while os.getppid() == int(completion.split()[1]) and not os.path.exists(answer + ".bad"):
            time.sleep(0.01)
    if word in ("hang", "exit", "allocate") and os.getppid() != int(completion.split()[1]):
        open(answer + ".bad", "w").close()
    if word == "hang":
        time.sleep(1000)
    if word == "exit":
        os._exit(3)
    if word == "allocate":
        return float(len(bytearray(5 << 30)))
    if word == "raise":
        raise KeyError("no such thing")
    if word == "meet":  # until three processes have been asked
        while len({line.split()[0] for line in open(answer)}) < 3:
            time.sleep(0.01)
    if word == "hold":  # until the test lets go
        while not os.path.exists(answer + ".go"):
            time.sleep(0.01)
    accounting.add("requests")
    return float(len(completion))


def of_everything(completion, answer, *, num_tokens, prompt, finish_reason, completions, level=0, factor: float = 1.0):
    return factor * (num_tokens * 100 + len(prompt) * 10 + (finish_reason == "length") + level / 7 + len(completions))


def by_turn(completion, answer, *, turn_texts):
    return [len(text) / 3 for text in turn_texts]


def of_return(completion, answer, *, episode_return):
    return float(episode_return != episode_return)
"""


@pytest.fixture
def reward(tmp_path):
    """Return a function that makes a reward section of verifiers in VERIFIERS."""
    (tmp_path / "own.py").write_text(VERIFIERS)

    def make(*names: str, **keys) -> RewardSection:
        options = {"verifier_function": tuple(f"{tmp_path / 'own.py'}:{name}" for name in names), "timeout_s": 60.0}
        return RewardSection(**{**options, "num_workers": 1, "failure_value": -1.0, **keys})

    return make


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def node_verifiers(section) -> NodeHelper:
    limits = (section.num_workers, section.timeout_s, section.memory_limit_mib)
    return NodeHelper("mindrlhf.sandbox.pool_node", pool_arguments(Selection.from_config(section), *limits))


def open_pool(stack, section, num_nodes=1, failure_log=None, theirs=None) -> tuple[RewardPool, list[NodeHelper]]:
    """Return a pool with workers on this node and on ``num_nodes`` others."""
    others = [node_verifiers(theirs or section) for _ in range(num_nodes)]
    for other in others:
        stack.callback(other.close)
    pool = stack.enter_context(RewardPool.from_config(section, failure_log))
    with listen("127.0.0.1") as listener:
        for node, other in enumerate(others, 1):
            other.connect("127.0.0.1", listener.getsockname()[1], TOKEN.decode(), node)
        for node, connection in accept_nodes(listener, TOKEN, range(1, num_nodes + 1)).items():
            pool.admit(connection, f"node {node}")
    return pool, others


def inputs(*completions: str, answer: object = "") -> list[RewardInput]:
    return [RewardInput(100 + i, completion, str(answer)) for i, completion in enumerate(completions)]


def calls(path: Path) -> list[list[str]]:
    return [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def test_nodes_give_the_results_of_one_pool_bit_for_bit(reward, stack):
    names = ("obedient", "of_everything", "by_turn", "of_return")
    section = reward(
        *names,
        verifier_weight=(0.3, 1.7, -0.1, 1.0),
        by_choice=("by_turn",),
        options={"of_everything.factor": "0.1"},
    )
    samples = [
        RewardInput(
            7 * i,
            ["raise", "x" * (i % 50 + 1), "\ud800 é\x00 中"][i % 3],
            "",
            prompt="p" * (i % 9),
            finish_reason=("stop", "length")[i % 2],
            num_tokens=i,
            verifiers=("by_turn",) * (i % 2),
            completions=("a", "b") * (i % 4),
            episode_return=(None, float("nan"), 1.5)[i % 3],
            turn_texts=("one", "three") * (i % 3),
            extra={"level": i / 3, "nothing": {"deep": [1, None, "\udfff"]}},
        )
        for i in range(600)
    ]
    with RewardPool.from_config(section) as alone:
        expected = alone.score(samples)
    pool, _ = open_pool(stack, section, num_nodes=2)
    assert pool.score(samples) == expected
    assert {result.failures.get("obedient") for result in expected} == {None, "KeyError: 'no such thing'"}
    assert any(result.steps for result in expected)
    assert alone.take_counts()["requests"] == pool.take_counts()["requests"] > 100


def test_every_sample_is_scored_once_and_by_all_nodes(reward, stack, tmp_path):
    pool, _ = open_pool(stack, reward("obedient"), num_nodes=2)
    samples = inputs(*(f"meet {i}" for i in range(60)), answer=tmp_path / "calls")
    results = pool.score(samples)
    assert [result.total for result in results] == [float(len(sample.completion)) for sample in samples]
    made = calls(tmp_path / "calls")
    assert Counter(text for _, text in made) == Counter(sample.completion for sample in samples)
    shares = Counter(pid for pid, _ in made)
    assert len(shares) == 3, shares


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_node_that_is_lost_costs_no_sample(reward, stack, tmp_path, monkeypatch, capfd, how):
    monkeypatch.setattr(rpc_module, "SILENCE_LIMIT_S", 6.0 if how == signal.SIGSTOP else 60.0)
    pool, (node,) = open_pool(stack, reward("obedient"), num_nodes=1)
    stack.callback(os.kill, node._process.pid, signal.SIGCONT)
    path = tmp_path / "calls"
    samples = inputs(*(f"hold {i}" for i in range(80)), answer=path)
    with ThreadPoolExecutor(1) as thread:
        scored = thread.submit(pool.score, samples)
        while len({pid for pid, _ in calls(path)}) < 2:
            time.sleep(0.01)
        os.kill(node._process.pid, how)
        Path(f"{path}.go").touch()
        found = [result.index for result in scored.result()]
    assert Counter(found) == Counter(sample.index for sample in samples)
    said = capfd.readouterr().err
    assert "mindrlhf: the verifiers of node 1: has " in said and " items are done elsewhere" in said
    assert pool.score(inputs("later"))[0].total == 5.0


# On each of two machines; on the first it scores, and says how often each sample was.
ON_MACHINES = """
import os, sys, time
from collections import Counter
from contextlib import ExitStack
from mindrlhf.config.reward import RewardSection
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.training.nodes import start_verifiers
from mindrlhf.rewards.types import RewardInput
from mindrlhf.system.handshake import accept_nodes
import socket

directory, node = sys.argv[1], int(os.environ["NODE_RANK"])
reward = RewardSection(verifier_function=(directory + "/own.py:obedient",), num_workers=2)
if node:
    stack = ExitStack()
    verifiers = start_verifiers(reward, stack)
    while not os.path.exists(directory + "/listens"):
        time.sleep(0.05)
    verifiers.connect("10.77.0.1", 7000, "of this test", 1)
    print("connected", flush=True)
    while not os.path.exists(directory + "/over"):
        time.sleep(0.05)
    stack.close()
else:
    with RewardPool.from_config(reward) as pool, socket.create_server(("10.77.0.1", 7000)) as listener:
        open(directory + "/listens", "w").close()
        (connection,) = accept_nodes(listener, b"of this test", [1]).values()
        pool.admit(connection, "node 1")
        samples = [RewardInput(i, f"hold {i}", directory + "/calls") for i in range(100)]
        for sample in samples:
            pool.submit(sample)
        results = list(pool.results())
    assert Counter(one.index for one in results) == Counter(range(100)), "not once each"
    assert all(one.total == len(samples[one.index].completion) for one in results)
    print("each sample was scored once", flush=True)
    open(directory + "/over", "w").close()
"""


# Undisturbed, a job on two machines sees the same each day.
@pytest.mark.parametrize("how", [pytest.param("undisturbed", marks=SLOW), "cut", "power_off"])
def test_two_machines_score_each_sample_once_whatever_becomes_of_one(reward, tmp_path, how):
    reward()
    (tmp_path / "both.py").write_text(ON_MACHINES)
    root = Path(__file__).parents[2]
    machines = Machines(tmp_path, f"PYTHONPATH={root} {sys.executable} {tmp_path}/both.py {tmp_path}", keep=(root,))
    try:
        machines.wait_for(lambda: len({pid for pid, _ in calls(tmp_path / "calls")}) > 2)  # workers of both
        if how != "undisturbed":
            getattr(machines, how)(1)
        (tmp_path / "calls.go").touch()
        machines.wait_for(lambda: "each sample was scored once" in machines.text(0), 120)
        said = machines.text(0)
        if how == "undisturbed":
            assert machines.wait(60) == [0, 0], machines.all_text()
            scored = int(machines.text(1).partition("this node has done ")[2].split()[0])
            assert 0 < scored < 100, machines.all_text()
        else:
            reason = "has not been heard of for" if how == "cut" else "has closed the connection"
            assert f"the verifiers of node 1: {reason}" in said, said
    finally:
        machines.clean_up()


@pytest.mark.parametrize(
    "word, reason",
    [("hang", "timeout"), ("exit", "worker died: exit code 3"), ("allocate", "MemoryError: ")],
)
def test_a_bad_sample_on_another_node_costs_itself_only(reward, stack, tmp_path, word, reason):
    log = tmp_path / "failures.jsonl"
    pool, (node,) = open_pool(stack, reward("obedient", timeout_s=8.0), failure_log=log)
    pids = subprocess.run(["pgrep", "-P", str(os.getpid())], capture_output=True, text=True).stdout.split()
    workers_here = [f"{os.uname().nodename}.{pid}" for pid in pids]
    path = tmp_path / "calls"
    words = [word if i % 20 == 5 else "patient" for i in range(40)]
    samples = inputs(*(f"{word} {os.getpid()} {i}" for i, word in enumerate(words)), answer=path)
    results = pool.score(samples)
    bad = {sample.index for sample in samples if sample.completion.startswith(word)}
    assert {result.index: list(result.failures.values()) for result in results if result.failures} == {
        index: [reason] for index in bad
    }
    assert {result.total for result in results if result.index in bad} == {-1.0}
    there = {text for pid, text in calls(path) if pid not in workers_here and text.startswith(word)}
    assert there, "no bad sample came to the other node"
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["index"] for line in logged) == sorted(bad) and {line["reason"] for line in logged} == {reason}
    assert node._process.poll() is None


def test_verifiers_that_do_not_load_on_another_node_are_named_with_it(reward, stack, tmp_path):
    theirs = RewardSection(verifier_function=(f"{tmp_path}/gone.py:score",))
    with pytest.raises(UserError, match=r"^the verifiers of node 1: .*gone\.py"):
        open_pool(stack, reward("obedient"), theirs=theirs)


def test_what_a_node_sends_and_is_no_result_ends_its_part_only(reward, stack, tmp_path, capfd):
    pool = stack.enter_context(RewardPool.from_config(reward("obedient")))
    with listen("127.0.0.1") as listener:
        place = ("127.0.0.1", listener.getsockname()[1], TOKEN, 1)
        theirs = []
        thread = threading.Thread(target=lambda: theirs.append(introduce_node(*place)))
        thread.start()
        (ours,) = accept_nodes(listener, TOKEN, [1]).values()
        thread.join()
    (liar,) = theirs
    stack.callback(liar.close)
    rpc_module.say_ready(liar, None, num_workers=1)
    pool.admit(ours, "node 1")

    def answer():
        while liar.receive()[0]["kind"] != "work":
            pass
        liar.send({"kind": "done", "values": {"results": [[123456, [1.0]]]}})
        (tmp_path / "calls.go").touch()

    threading.Thread(target=answer, daemon=True).start()
    samples = inputs(*(f"hold {i}" for i in range(20)), answer=tmp_path / "calls")
    assert [result.total for result in pool.score(samples)] == [float(len(sample.completion)) for sample in samples]
    assert "the verifiers of node 1: send what are no results" in capfd.readouterr().err


def test_the_process_of_a_node_ends_with_its_starter_and_leaves_nothing(reward, tmp_path):
    code = (
        "import sys, time; from mindrlhf.config.reward import RewardSection; "
        "from mindrlhf.training.nodes import start_verifiers; from contextlib import ExitStack; "
        f"r = RewardSection(verifier_function=({str(tmp_path / 'own.py')!r} + ':obedient',)); "
        "n = start_verifiers(r, ExitStack()); "
        "print(n._process.pid, flush=True); time.sleep(100)"
    )
    reward("obedient")
    check_ends_with_its_starter(code)


@pytest.mark.parametrize(
    "keys, reason",
    [
        ({}, ""),
        ({"options": {"llm_judge.url": "http://10.0.0.2:8000/v1", "llm_judge.model": "localhost"}}, ""),
        ({"options": {"llm_judge.url": "http://127.0.0.1:8000/v1"}}, "reward.options has llm_judge.url: http://127.0"),
        ({"options": {"llm_judge.url": "http://localhost/v1"}}, "reward.options has llm_judge.url: http://localhost"),
        ({"options": {"llm_judge.url": "http://[::1]:8/v1"}}, "reward.options has llm_judge.url: http://[::1]"),
        ({"options": {"llm_judge.url": "http://["}}, ""),
    ],
)
def test_verifiers_that_ask_a_server_of_node_0_stay_there(keys, reason):
    found = reason_to_stay(RewardSection(verifier_function=("llm_judge",), **keys))
    assert found.startswith(reason) and bool(found) == bool(reason)
