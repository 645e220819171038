"""Ranks on several machines: who shares one, a buffer on each, and weights that must be the same on all."""

import contextlib
import os
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from configs import grpo_config
from fakes import ThreadedTeam

from mindrlhf.config.reward import RewardSection, ToolSection
from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.facts import MISSING
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.types import RewardInput
from mindrlhf.rollout.agents.nodes import start_agents
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.system.records import merge
from mindrlhf.training.facts import agent_facts, verifier_facts
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.nodes import (
    connect_agents,
    connect_servers,
    connect_verifiers,
    find_nodes,
    start_verifiers,
)
from mindrlhf.training.results import Machine
from mindrlhf.training.serving import ServingWorker
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.publisher import (
    PUBLISH,
    Published,
    PublishingWorker,
    open_weight_buffers,
)
from mindrlhf.weights.tensors import TensorInfo

INFOS = (TensorInfo("a", "float32", (4, 2)), TensorInfo("b", "float32", (3,)))
TENSORS = {"a": np.arange(8, dtype=np.float32).reshape(4, 2), "b": np.array([7, 8, 9], np.float32)}


def test_the_number_of_nodes_is_read_from_msrun(monkeypatch):
    from mindrlhf.training import runtime

    line = ["python", "/bin/msrun", "--worker_num=16", "--node_rank=1", "python", "-m", "mindrlhf.training.main"]
    for words in (["--local_worker_num=8"], ["--local_worker_num", "8"], ["-local_worker_num", "8"]):
        assert runtime.msrun_option([*line[:4], *words, *line[4:]], "local_worker_num") == 8
    assert runtime.msrun_option(line, "local_worker_num") is None
    monkeypatch.setenv("MS_WORKER_NUM", "16")
    monkeypatch.delenv(runtime.processes.NUM_NODES_VARIABLE, raising=False)
    for words, expected in ((["--local_worker_num=8"], 2), (["--local_worker_num=16"], 1), ([], 1)):
        monkeypatch.setattr(runtime.processes, "command_line", lambda pid, words=words: [*line, *words])
        assert runtime.num_nodes_from_environment() == expected
    monkeypatch.setenv(runtime.processes.NUM_NODES_VARIABLE, "4")
    assert runtime.num_nodes_from_environment() == 4, "our launchers know best"


def test_what_ranks_wrote_is_put_together_by_node():
    one, two = ["a", [[0, 2], [0, 2]], 2**64 - 1], ["a", [[2, 4], [0, 2]], 3]
    wrote = [Published({}), Published({"1": [one]}), Published({"2": [two]}), Published({"1": [two]})]
    assert merge(wrote).written == {"1": [one, two], "2": [two]}


class Shards:
    """A model that is cut over ranks: what one of them holds of it, and writes if no other of its node does."""

    def __init__(self, held: dict[str, tuple[slice, ...]]):
        self.held = held
        self.tensors = {name: array.copy() for name, array in TENSORS.items()}

    def create_weight_buffer(self, dtype: str | None = None, bucket_bytes: int = 0) -> WeightBuffer:
        return WeightBuffer.create(INFOS, bucket_bytes)

    def write_to(self, buffer: WeightBuffer, ranks) -> None:
        for name, region in self.held.items():
            if buffer.wants(name):
                buffer.write(name, self.tensors[name][region], region)


class ShardRank(PublishingWorker):
    """A rank of such a model."""

    def __init__(self, machine: str, held: dict[str, tuple[slice, ...]]):
        super().__init__(Shards(held))
        self._machine, self.held = machine, held

    def machine(self) -> Machine:
        return Machine(self._machine)


@pytest.mark.parametrize(
    "machines, nodes", [("xxyy", [[0, 1], [2, 3]]), ("xyxyz", [[0, 2], [1, 3], [4]]), ("x", [[0]])]
)
def test_ranks_that_share_a_machine_are_a_node(machines, nodes):
    assert find_nodes(ThreadedTeam([ShardRank(machine, {}) for machine in machines])) == nodes


# As two stages of a pipeline, of two ranks that share the matrix of the first.
CUT = [
    {"a": (slice(0, 4), slice(0, 1))},
    {"a": (slice(0, 4), slice(1, 2))},
    {"b": (slice(0, 3),)},
]


def _look(ranks, seen, version, bucket):
    """Compare the bucket that the buffers of all ranks have, and note its tensors."""
    for own in {rank.weight_buffer().path: rank.weight_buffer() for rank in ranks}.values():
        own.verify(version)
        for tensor, _, array in own.tensors(version):
            np.testing.assert_array_equal(array, ranks[0].model.tensors[tensor])
            seen.append(tensor)


# Two nodes whose ranks have the whole model between them.
REPLICAS = [{"a": (slice(0, 4), slice(0, 2))}, {"b": (slice(0, 3),)}] * 2


@pytest.mark.parametrize("bucket_bytes", [0, 1], ids=["whole", "in buckets"])
@pytest.mark.parametrize("machines, cut", [("xyz", CUT), ("xxy", CUT), ("xyy", CUT), ("xxyy", REPLICAS)])
def test_buffers_of_a_model_that_is_sharded_over_nodes_are_completed(machines, cut, bucket_bytes):
    digests = {}
    for name, held, size in (("xxx", CUT, 0), (machines, cut, bucket_bytes)):
        ranks = [ShardRank(machine, own) for machine, own in zip(name, held)]
        team = ThreadedTeam(ranks)
        with open_weight_buffers(team, find_nodes(team), bucket_bytes=size) as buffer:
            policy = Policy(team, buffer)
            for version in (1, 2, 3):
                seen = []
                look = partial(_look, ranks, seen)
                digests.setdefault(version, set()).add(policy.publish(version, look))
                assert sorted(seen) == sorted([*TENSORS] * len(set(name))), "every buffer had every tensor"
                for rank in ranks:
                    rank.model.tensors["a"] *= np.float32(1.5)
                    rank.model.tensors["b"] += np.float32(0.25)
        assert buffer.num_buckets == (2 if size else 1)
        for rank in ranks:
            rank.close_weights(PUBLISH)
    assert all(len(same) == 1 for same in digests.values()), "the digests are those of one machine"
    assert len(set().union(*digests.values())) == 3


def test_a_node_whose_weights_differ_ends_the_run():
    ranks = [ShardRank(machine, own) for machine, own in zip("xxyy", REPLICAS)]
    ranks[3].model.tensors = {name: array + np.float32(1e-6) for name, array in TENSORS.items()}
    team = ThreadedTeam(ranks)
    with open_weight_buffers(team, find_nodes(team)) as buffer:
        with pytest.raises(RunFailure, match="the weights of node 1 are not those of node 0: tensor 'b', "):
            Policy(team, buffer).publish(1)
    for rank in ranks:
        rank.close_weights(PUBLISH)


class Servers:
    """Notes what rank 0 asks of a node's servers."""

    def __init__(self, count: int):
        self.options = tuple(VllmOptions("python", "model", f"rollout_{index}.log") for index in range(count))
        self.own_host = self.buffer_path = ""
        self.started = []

    def address(self):
        return self.own_host, 7001

    def start(self, index, span=None):
        self.started.append((index, span and (span.number, span.num_nodes, span.host, span.port)))
        return 1

    def buffer(self):
        return self.buffer_path

    def tell(self):
        return {}


@pytest.mark.parametrize(
    "places, dealt, started",
    [
        (
            [(0,), (0,), (1,), (1,), (2,), (2,)],
            ["", "node 1", "node 2"] * 2,
            [[(0, None), (1, None)]] * 3,
        ),
        (
            [(0, 1, 2)],
            [""],
            [[(0, (number, 3, "127.0.0.1", 7001))] for number in range(3)],
        ),
    ],
)
def test_rank_0_starts_the_servers_of_all_nodes(places, dealt, started):
    ranks = [SpanningRank(machine, held) for machine, held in zip("xyz", CUT)]
    team = ThreadedTeam(ranks)
    nodes = find_nodes(team)
    own, *others = (Servers(2) for _ in ranks)
    for rank, servers in zip(ranks[1:], others):
        rank.servers = servers
    with contextlib.ExitStack() as stack:
        buffer = stack.enter_context(open_weight_buffers(team, nodes))
        found = connect_servers(team, nodes, own, places, buffer.path)
        assert [server.node.name for server in found] == dealt
        assert [servers.started for servers in (own, *others)] == started
        paths = [rank.weight_buffer().path for rank in ranks]
        assert [servers.buffer_path for servers in (own, *others)] == paths and len(set(paths)) == 3
        for node in {server.node for server in found if server.node.name}:
            assert node.call("buffer") == paths[int(node.name.split()[1])]
            node.close()


def test_fewer_machines_than_the_launchers_said_are_named():
    with pytest.raises(RunFailure, match="laid over nodes up to 1, but the ranks are on 1 machines: start a"):
        connect_servers(None, [[0, 1]], Servers(1), [(0, 1)], "")


class SpanningRank(ShardRank, ServingWorker):
    """A rank whose node may own a server over several nodes."""


def test_the_verifiers_of_all_nodes_are_asked_by_rank_0(tmp_path):
    source = (
        "import os, time\n"
        "def pid(completion, answer):\n"
        "    open(f'{answer}/{os.getppid()}', 'w').close()\n"
        "    while len(os.listdir(answer)) < 3:  # until all have been asked\n"
        "        time.sleep(0.01)\n"
        "    return os.getppid()\n"
    )
    (tmp_path / "own.py").write_text(source)
    (tmp_path / "asked").mkdir()
    reward = RewardSection(verifier_function=(f"{tmp_path / 'own.py'}:pid",), num_workers=1)
    ranks = [SpanningRank(machine, held) for machine, held in zip("xyz", CUT)]
    team = ThreadedTeam(ranks)
    nodes = find_nodes(team)
    with contextlib.ExitStack() as stack:
        for rank in ranks[1:]:  # the first of their nodes
            rank.verifiers = start_verifiers(reward, stack)
        stack.enter_context(open_weight_buffers(team, nodes))
        pool = stack.enter_context(RewardPool.from_config(reward))
        connect_verifiers(team, nodes, pool, reward)
        results = pool.score([RewardInput(i, "x", str(tmp_path / "asked")) for i in range(60)])
        expected = {os.getpid(), *(rank.verifiers._process.pid for rank in ranks[1:])}
    assert {int(result.total) for result in results} == expected


def test_agents_of_all_nodes_are_asked_for_by_rank_0(tmp_path):
    """The source here only takes the connections; what goes over them is in tests/rollout/agents."""
    (tmp_path / "own.py").write_text("def agent(record, url, key):\n    return 1.0\n")
    tools = ToolSection(agent=f"{tmp_path / 'own.py'}:agent", agent_open=True)
    ranks = [SpanningRank(machine, held) for machine, held in zip("xyz", CUT)]
    team, admitted = ThreadedTeam(ranks), {}
    nodes = find_nodes(team)
    source = SimpleNamespace(admit=lambda connection, name: admitted.setdefault(name, connection.receive(60)[0]))
    with contextlib.ExitStack() as stack:
        for rank in ranks[1:]:
            rank.agents = start_agents(tools, stack)
        stack.enter_context(open_weight_buffers(team, nodes))
        connect_agents(team, nodes, source, tools)
        connect_agents(None, [[0, 1]], source, tools)
    assert admitted == {f"node {node}": {"kind": "ready", "values": {}} for node in range(1, len(nodes))}


def test_verifiers_that_stay_on_node_0_are_told(capsys, tmp_path):
    options = {"llm_judge.url": "http://localhost/v1", "llm_judge.model": "judge"}
    reward = RewardSection(verifier_function=("llm_judge",), options=options)
    with contextlib.ExitStack() as stack:
        assert start_verifiers(reward, stack) is None
        pool = stack.enter_context(RewardPool.from_config(reward))
        connect_verifiers(None, [[0], [1]], pool, reward)
    assert "verifiers run on node 0 alone: reward.options has llm_judge.url" in capsys.readouterr().out


def test_nodes_are_compared_by_the_files_of_agents(tmp_path):
    path = tmp_path / "own.py"

    def facts(agent, **keys):
        config = grpo_config(tools={"agent": agent, **keys})
        return {fact.name: fact.value for fact in agent_facts(config)}

    path.write_text("one")
    for agent in (f"{path}:agent", f"python {path} --quick 'a b'"):
        first = facts(agent)
        assert list(first) == [f"what {path} holds"]
        path.write_text(f"{path.read_text()} two")
        assert facts(agent) != first
    assert facts("sh -c true") == facts("") == {}
    assert list(facts(f"{tmp_path}/gone.sh").values()) == [MISSING]


def test_nodes_are_compared_by_the_files_of_verifiers_and_the_keys_of_judges(tmp_path, monkeypatch):
    path = tmp_path / "own.py"
    options = {"llm_judge.url": "http://judge/v1", "ranking_judge.api_key_variable": "THEIR_KEY"}

    def facts(**keys):
        names = (f"{path}:score", "llm_judge", "ranking_judge")
        config = grpo_config(reward={"verifier_function": names, "options": options, **keys})
        return {fact.name: fact.value for fact in verifier_facts(config)}

    monkeypatch.setenv("THEIR_KEY", "x")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    path.write_text("one")
    first = facts()
    assert (first["whether THEIR_KEY is set"], first["whether OPENAI_API_KEY is set"]) == (True, False)
    path.write_text("two")
    assert {name for name, value in facts().items() if first[name] != value} == {f"what {path} holds"}
    assert len(first) == 3
