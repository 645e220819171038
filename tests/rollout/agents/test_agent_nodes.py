"""Agents on other nodes, here processes of this machine: what they reach, how they end, and what a lost node costs."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from agent_fakes import CHAT, END, TOKENIZER, Engine, prompt
from machines import Machines, check_ends_with_its_starter
from slow_tests import SLOW

from mindrlhf.config.reward import ToolSection
from mindrlhf.errors import UserError
from mindrlhf.rollout.agents.nodes import start_agents
from mindrlhf.rollout.agents.source import AgentEpisodes
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.sandbox.server import active_layers
from mindrlhf.system import rpc as rpc_module
from mindrlhf.system.handshake import accept_nodes
from mindrlhf.system.ports import listen

pytestmark = pytest.mark.timeout(180)
NEEDS_NAMESPACES = pytest.mark.skipif("namespaces" not in active_layers(), reason="this system allows no namespaces")
TOKEN = "of this test"
SAMPLING = SamplingParams(400, temperature=0.7, stop_token_ids=(END,))
AGENT = """
import json, os, socket, time, urllib.error, urllib.request

def ask(url, key, text, stream=False):
    body = {"messages": [{"role": "user", "content": text}], "stream": stream}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()

def hang_up(url, key):
    body = json.dumps({"messages": [{"role": "user", "content": "never read"}]})
    connection = socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])))
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {key}\\r\\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
    connection.recv(1)
    connection.close()

def agent(record, url, key):
    word = record["question"].split()[0]
    reply = json.loads(ask(url, key, record["question"]))["choices"][0]["message"]["content"]
    if word == "hang":
        open(f"{os.path.dirname(__file__)}/hangs-{os.uname().nodename}", "w").close()
        time.sleep(1000)
    if word == "exit":
        os._exit(3)
    if word == "nap":
        time.sleep(0.3)
    if word == "gone":
        hang_up(url, key)
    if word == "large":
        reply = json.loads(ask(url, key, "apples " * 200_000))
    if word == "stream":
        assert ask(url, key, "again", stream=True).rstrip().endswith("[DONE]")
    if word == "other":
        try:
            ask(url, "no" + key, "a")
        except urllib.error.HTTPError as error:
            return {"reward": float(error.code)}
    return {"reward": float(len(reply)), "text": reply}
"""


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a source with agents on this node and on others."""
    (tmp_path / "agent.py").write_text(AGENT)
    with contextlib.ExitStack() as stack:

        def start(num_nodes=1, theirs=None, **keys):
            keys = {"agent": f"{tmp_path / 'agent.py'}:agent", "agent_gather_s": 2.0, "agent_timeout_s": 120.0, **keys}
            tools = ToolSection(**{"memory_limit_mib": 2048, "agent_open": True, **keys})
            nodes = [start_agents(theirs or tools, stack) for _ in range(num_nodes)]
            engine = Engine(lambda text: f"said {len(text)}")
            source = stack.enter_context(AgentEpisodes(engine, TOKENIZER, CHAT, tools, 400))
            with listen("127.0.0.1") as listener:
                for number, node in enumerate(nodes, 1):
                    node.connect("127.0.0.1", listener.getsockname()[1], TOKEN, number)
                for number, one in accept_nodes(listener, TOKEN.encode(), range(1, num_nodes + 1)).items():
                    source.admit(one, f"node {number}")
            return source, nodes

        yield start


def episodes(source, *texts):
    requests = [prompt(text, number) for number, text in enumerate(texts)]
    return sorted(source.generate(requests, SAMPLING), key=lambda one: one.request_id)


def kept(completion):
    sequences = [(one.prompt_ids.tolist(), one.token_ids.tolist()) for one in completion.agent.sequences]
    return completion.request_id, completion.episode_return, sequences, completion.agent.failure


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=NEEDS_NAMESPACES)])
def test_agents_of_all_nodes_give_the_episodes_of_one(opened, is_open):
    texts = [f"nap {number}" for number in range(12)] + ["stream 1", "other 2", "stream 3", "other 4"]
    alone, _ = opened(0, agent_open=is_open)
    expected = [kept(one) for one in episodes(alone, *texts)]
    source, _ = opened(2, agent_open=is_open)
    found = episodes(source, *texts)
    assert [kept(one) for one in found] == expected
    assert [one.episode_return for one in found if "other" in texts[one.request_id]] == [401.0] * 2
    shares = [runner._number for runner in source._runners]
    assert len(shares) == 3 and sum(shares) == len(texts) and min(shares) >= 3, "each node has run some"


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=NEEDS_NAMESPACES)])
def test_what_nobody_read_on_another_node_is_not_trained(opened, is_open):
    source, _ = opened(1, agent_open=is_open)
    found = episodes(source, *(f"gone {number}" for number in range(8)))
    assert min(runner._number for runner in source._runners) > 0, "each node has run some"
    assert [one.agent.num_unread for one in found] == [1] * 8 and [one.num_turns for one in found] == [1] * 8
    assert not any(one.agent.failure or one.agent.num_refused for one in found)


def test_a_question_of_some_megabytes_and_its_refusal_cross_the_link(opened):
    source, _ = opened(1)
    found = episodes(source, *["large"] * 2)
    assert all("HTTPError" in one.agent.failure and "400" in one.agent.failure for one in found), found


@pytest.mark.parametrize(("word", "reason"), [("hang", "had not ended after 15 s"), ("exit", "status")])
def test_a_bad_agent_on_another_node_costs_its_own_sample(opened, word, reason):
    source, _ = opened(1, agent_timeout_s=15.0)
    texts = [f"{word if number % 4 == 1 else 'nap'} {number}" for number in range(12)]
    found = episodes(source, *texts)
    bad = [one.request_id for one in found if one.agent.failure]
    assert bad == [number for number, text in enumerate(texts) if text.startswith(word)]
    assert all(reason in found[number].agent.failure for number in bad)
    assert not source._running and set(source._runners.values()) == {0}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_a_node_that_is_lost_costs_the_samples_there_and_the_run_goes_on(opened, monkeypatch, how):
    monkeypatch.setattr(rpc_module, "SILENCE_LIMIT_S", 3.0)
    source, (node,) = opened(1)
    pid = node._process.pid
    requests = [prompt(text, number) for number, text in enumerate(["nap"] * 3 + ["hang", "nap", "hang"])]
    failures = {}

    def collect():
        for completion in source.generate(requests, SAMPLING):
            failures[completion.request_id] = completion.agent.failure

    thread = threading.Thread(target=collect)
    source._tools.__dict__["agent_timeout_s"] = 15.0
    thread.start()
    # All that end have ended: what is under way then hangs, some of it on the node.
    while len(failures) < 4 or max(source._runners.values()) == 0:
        assert thread.is_alive(), failures
        time.sleep(0.02)
    os.kill(pid, how)
    thread.join(60)
    if how == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    assert {number for number, failure in failures.items() if failure} == {3, 5}
    assert sum("node 1 has " in failure for failure in failures.values()) >= 1 and len(source._runners) == 1
    assert not any(one.agent.failure for one in episodes(source, *["nap"] * 3))


def test_an_agent_that_does_not_load_on_another_node_is_named_with_it(opened, tmp_path):
    theirs = ToolSection(agent=f"{tmp_path}/gone.py:agent", agent_open=True)
    with pytest.raises(UserError, match=r"^node 1: .*gone\.py"):
        opened(1, theirs)


def test_the_process_of_a_node_ends_with_its_starter_and_leaves_nothing(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    code = (
        "import contextlib, time; from mindrlhf.config.reward import ToolSection; "
        "from mindrlhf.rollout.agents.nodes import start_agents; "
        f"tools = ToolSection(agent={str(tmp_path / 'agent.py')!r} + ':agent', agent_open=True); "
        "n = start_agents(tools, contextlib.ExitStack()); print(n._process.pid, flush=True); time.sleep(100)"
    )
    check_ends_with_its_starter(code, {**os.environ, "TMPDIR": str(tmp_path)})
    assert {path.name for path in tmp_path.iterdir()} <= {"agent.py", "__pycache__"}


# On each of two machines; the first has the model.
ON_MACHINES = """
import contextlib, os, socket, sys, time
sys.path.insert(0, sys.argv[2])
from agent_fakes import CHAT, END, TOKENIZER, Engine, prompt
from mindrlhf.config.reward import ToolSection
from mindrlhf.rollout.agents.source import AgentEpisodes
from mindrlhf.system.handshake import accept_nodes
from mindrlhf.rollout.types import SamplingParams
from mindrlhf.rollout.agents.nodes import start_agents

directory, node = sys.argv[1], int(os.environ["NODE_RANK"])
tools = ToolSection(agent=directory + "/agent.py:agent", agent_open=True, agent_timeout_s=40.0, memory_limit_mib=2048)
if node:
    with contextlib.ExitStack() as stack:
        agents = start_agents(tools, stack)
        while not os.path.exists(directory + "/listens"):
            time.sleep(0.05)
        agents.connect("10.77.0.1", 7000, "of this test", 1)
        while not os.path.exists(directory + "/over"):
            time.sleep(0.05)
else:
    engine = Engine(lambda text: f"said {len(text)}")
    with AgentEpisodes(engine, TOKENIZER, CHAT, tools, 400) as source:
        with socket.create_server(("10.77.0.1", 7000)) as listener:
            open(directory + "/listens", "w").close()
            (connection,) = accept_nodes(listener, b"of this test", [1]).values()
            source.admit(connection, "node 1")
        begun = sys.argv[3] != "undisturbed"
        texts = [("hang" if begun and number % 2 else "nap") + f" {number}" for number in range(40)]
        requests = [prompt(text, number) for number, text in enumerate(texts)]
        sampling = SamplingParams(400, temperature=0.7, stop_token_ids=(END,))
        if begun:
            print("it has begun", flush=True)
        found = list(source.generate(requests, sampling))
    lost = [one.agent.failure for one in found if "node 1 has " in one.agent.failure]
    naps = [one.agent.failure for one in found if texts[one.request_id].startswith("nap")]
    print(f"{len(found)} episodes, {len(lost)} lost, {sum(map(bool, naps))} naps failed", flush=True)
    open(directory + "/over", "w").close()
"""


# Undisturbed, jobs train on two machines at night.
@pytest.mark.parametrize("how", [pytest.param("undisturbed", marks=SLOW), "cut"])
def test_agents_on_two_machines_reach_the_model_by_the_link_alone(tmp_path, how):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "both.py").write_text(ON_MACHINES)
    root = Path(__file__).parents[3]
    command = f"PYTHONPATH={root} {sys.executable} {tmp_path}/both.py {tmp_path} {Path(__file__).parent} {how}"
    machines = Machines(tmp_path, command, keep=(root,))
    try:
        if how == "cut":
            machines.wait_for(lambda: "it has begun" in machines.text(0), 60)
            machines.wait_for(lambda: (tmp_path / "hangs-node1").exists(), 60)
            machines.cut(1)
        machines.wait_for(lambda: " naps failed" in machines.text(0), 120)
        said = machines.text(0)
        if how == "undisturbed":
            assert machines.wait(60) == [0, 0], machines.all_text()
            assert "40 episodes, 0 lost, 0 naps failed" in said
            ran = int(machines.text(1).partition("this node has run ")[2].split()[0])
            assert 0 < ran < 40, machines.all_text()
        else:
            assert "node 1 has not been heard of for" in said, said
            assert "40 episodes, " in said and " 0 lost" not in said, said
    finally:
        machines.clean_up()
