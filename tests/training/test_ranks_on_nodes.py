"""Ranks on several machines: who shares one, a board on each, and weights that must be the same on all."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from mindrlhf.errors import RunFailure
from mindrlhf.system.messages import decode, encode
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.nodes import attach_boards, find_needs, find_nodes, start_spanning
from mindrlhf.training.records import BoardPath, LeaderAddress, Machine, Published, add_by_node
from mindrlhf.training.worker.node_board import NodeBoard
from mindrlhf.training.worker.node_servers import SharesServers
from mindrlhf.weights.publish.buffer import WeightBoard
from mindrlhf.weights.tensors import TensorInfo

INFOS = (TensorInfo("a", "float32", (4, 2)), TensorInfo("b", "float32", (3,)))
TENSORS = {"a": np.arange(8, dtype=np.float32).reshape(4, 2), "b": np.array([7, 8, 9], np.float32)}


class Rank:
    """A rank of data parallel: it has all tensors, and writes those that fall to it of its node's."""

    def __init__(self, index: int, machine: str):
        self.index, self._machine = index, machine
        self.board: WeightBoard | None = None
        self.tensors = {name: array.copy() for name, array in TENSORS.items()}
        self.opened = self.sealed = 0

    def machine(self) -> Machine:
        return Machine(self._machine)

    def open_board(self, is_wanted: bool, dtype: str | None, bucket_bytes: int) -> BoardPath:
        if not is_wanted:
            return BoardPath("")
        self.opened += 1
        self.board = WeightBoard.create(INFOS, bucket_bytes)
        return BoardPath(self.board.path)

    def attach_board(self, path: str, node: int, ranks: list[int]) -> None:
        self.node, self.ranks = node, ranks
        if self.board is None:
            self.board = WeightBoard.attach(path, writable=True)

    def publish(self, version: int, bucket: int) -> Published:
        self.board.begin(version, bucket)
        for name in sorted(self.tensors)[self.ranks.index(self.index) :: len(self.ranks)]:
            self.board.write(name, self.tensors[name])
        written = self.board.contribution()
        return Published({}, {str(self.node): written}) if self.node else Published(written)

    def seal_board(self, contributions: dict) -> None:
        if self.opened and self.node:
            self.sealed += 1
            self.board.seal([contributions[str(self.node)]])


class Ranks:
    """A team without connections."""

    def __init__(self, machines: list[str]):
        self.ranks = [Rank(index, machine) for index, machine in enumerate(machines)]
        self.world_size = len(machines)

    def call(self, method: str, per_rank=None, **common):
        arguments = per_rank or [{}] * self.world_size
        return [getattr(rank, method)(**common, **given) for rank, given in zip(self.ranks, arguments)]


def test_ranks_that_share_a_machine_are_a_node():
    assert find_nodes(Ranks(["x", "x", "y", "y"])) == [[0, 1], [2, 3]]
    assert find_nodes(Ranks(["x", "y", "x", "y", "z"])) == [[0, 2], [1, 3], [4]]
    assert find_nodes(Ranks(["x"])) == [[0]]


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


@pytest.fixture
def published():
    """Two nodes of two ranks with their boards: the team, and the policy."""
    team = Ranks(["x", "x", "y", "y"])
    board = team.ranks[0].board = WeightBoard.create(INFOS)
    attach_boards(team, find_nodes(team), board.path)
    yield team, Policy(team, board)
    for rank in team.ranks:
        rank.board.close()


def test_every_node_gets_the_whole_model_on_a_board_of_its_own(published):
    team, policy = published
    assert [rank.opened for rank in team.ranks] == [0, 0, 1, 0]
    boards = [team.ranks[0].board, team.ranks[2].board]
    assert boards[0].path != boards[1].path
    for version in (1, 2):
        digest = policy.publish(version)
        for board in boards:
            board.verify(version)
            for name, _, array in board.tensors(version):
                np.testing.assert_array_equal(array, team.ranks[0].tensors[name])
        for rank in team.ranks:
            rank.tensors["b"] += 1
        assert digest != policy.publish(version + 10)
    assert [rank.sealed for rank in team.ranks] == [0, 0, 4, 0]


def test_the_digest_is_that_of_one_node(published):
    _, policy = published
    alone = Ranks(["x", "x"])
    board = alone.ranks[0].board = WeightBoard.create(INFOS)
    attach_boards(alone, find_nodes(alone), board.path)
    assert Policy(alone, board).publish(1) == policy.publish(1)
    for rank in alone.ranks:
        rank.board.close()


def test_a_node_whose_weights_differ_ends_the_run(published):
    team, policy = published
    team.ranks[3].tensors = {name: array + np.float32(1e-6) for name, array in TENSORS.items()}
    with pytest.raises(RunFailure, match=r"the weights of node 1 are not those of node 0: tensor '[ab]', "):
        policy.publish(1)


def test_contributions_are_added_up_by_node():
    one = {"a": {"regions": [[[0, 2], [0, 2]]], "sums": [2**64 - 1], "checksum": 2**64 - 1}}
    two = {"a": {"regions": [[[2, 4], [0, 2]]], "sums": [3], "checksum": 3}}
    assert add_by_node([{}, {"1": one}, {"2": two}, {"1": two}]) == {
        "1": {"a": {"regions": [[[0, 2], [0, 2]], [[2, 4], [0, 2]]], "sums": [2**64 - 1, 3], "checksum": 2}},
        "2": two,
    }


class Shards:
    """A model that is cut over ranks: what one of them holds of it, and writes if no other of its node does."""

    def __init__(self, held: dict[str, tuple[slice, ...]]):
        self.held = held
        self.tensors = {name: array.copy() for name, array in TENSORS.items()}

    def create_board(self, dtype: str | None = None, bucket_bytes: int = 0) -> WeightBoard:
        return WeightBoard.create(INFOS, bucket_bytes)

    def write_to(self, board: WeightBoard, ranks) -> None:
        for name, region in self.held.items():
            if board.wants(name):
                board.write(name, self.tensors[name][region], region)


class ShardRank(NodeBoard):
    """A rank of such a model."""

    def __init__(self, machine: str, held: dict[str, tuple[slice, ...]]):
        super().__init__(Shards(held))
        self._machine, self.held = machine, held

    def machine(self) -> Machine:
        return Machine(self._machine)


class ThreadedRanks(Ranks):
    """Ranks that do at the same time what they are called for."""

    def __init__(self, ranks: list):
        self.ranks, self.world_size = ranks, len(ranks)

    def call(self, method: str, per_rank=None, **common):
        arguments = [decode(*encode(given)) for given in per_rank or [common] * self.world_size]
        with ThreadPoolExecutor(self.world_size) as pool:
            done = [pool.submit(getattr(rank, method), **given) for rank, given in zip(self.ranks, arguments)]
            return [decode(*encode({"result": one.result()}))["result"] for one in done]


# As two stages of a pipeline, of two ranks that share the matrix of the first.
CUT = [
    {"a": (slice(0, 4), slice(0, 1))},
    {"a": (slice(0, 4), slice(1, 2))},
    {"b": (slice(0, 3),)},
]


def _look(ranks, seen, version, bucket):
    """Compare the bucket that the boards of all ranks have, and note its tensors."""
    for own in {rank._board.path: rank._board for rank in ranks}.values():
        own.verify(version)
        assert own.bucket == bucket
        for tensor, _, array in own.tensors(version):
            np.testing.assert_array_equal(array, ranks[0].model.tensors[tensor])
            seen.append(tensor)


@pytest.mark.parametrize("bucket_bytes", [0, 1], ids=["whole", "in buckets"])
@pytest.mark.parametrize("machines", ["xyz", "xxy", "xyy"])
def test_boards_of_a_model_that_is_cut_over_nodes_are_completed(machines, bucket_bytes):
    digests = {}
    for name, size in (("xxx", 0), (machines, bucket_bytes)):
        ranks = [ShardRank(machine, held) for machine, held in zip(name, CUT)]
        team = ThreadedRanks(ranks)
        with ranks[0].create_board(bucket_bytes=size) as board:
            nodes = find_nodes(team)
            attach_boards(team, nodes, board.path, bucket_bytes=size)
            policy = Policy(team, board)
            for version in (1, 2, 3):
                seen = []
                look = partial(_look, ranks, seen)
                digests.setdefault(version, set()).add(policy.publish(version, look))
                assert sorted(seen) == sorted([*TENSORS] * len(set(name))), "every board had every tensor"
                for rank in ranks:
                    rank.model.tensors["a"] *= np.float32(1.5)
                    rank.model.tensors["b"] += np.float32(0.25)
        assert board.num_buckets == (2 if size else 1)
        for rank in ranks:
            rank.close_carrier()
            rank._board.close()
    assert all(len(same) == 1 for same in digests.values()), "the digests are those of one machine"
    assert len(set().union(*digests.values())) == 3


class ServingRank(Rank):
    """Notes what it is asked to do for a server over several nodes."""

    def __init__(self, index: int, machine: str):
        super().__init__(index, machine)
        self.asked = []
        self.node_generator = None

    def await_parts(self, is_owner: bool) -> LeaderAddress:
        self.asked += ["await"] * is_owner
        return LeaderAddress({str(self.node): [f"10.0.0.{self.node}", 7000 + self.node]} if is_owner else {})

    def join_server(self, address: list | None, token: str) -> None:
        self.asked += [] if address is None else [("join", address, token)]

    def start_server(self, nodes: list[int] | None, token: str) -> None:
        if nodes is not None:
            self.asked.append(("start", nodes, token))
            self.node_generator = f"servers of rank {self.index}"


def spanning_team(machines: list[str]) -> tuple[Ranks, list[list[int]]]:
    team = Ranks([])
    team.ranks = [ServingRank(index, machine) for index, machine in enumerate(machines)]
    team.world_size, team.rank_0 = len(machines), team.ranks[0]
    nodes = find_nodes(team)
    for node, ranks in enumerate(nodes):
        for rank in ranks:
            team.ranks[rank].node = node
    return team, nodes


def test_the_first_ranks_of_the_nodes_of_a_server_find_each_other(monkeypatch):
    team, nodes = spanning_team(["a", "a", "b", "b", "c", "c", "d", "d", "e", "e"])
    connected = []
    monkeypatch.setattr("mindrlhf.training.nodes.connect_generators", lambda *given: connected.append(given) or "all")
    assert start_spanning(team, nodes, [(0, 1), (2, 3)]) == "all"
    assert connected == [(team, [2], "servers of rank 0")]
    asked = {rank.index: rank.asked for rank in team.ranks if rank.asked}
    token = asked[0][1][2]
    assert len(token) == 32
    assert asked == {
        0: ["await", ("start", [1], token)],
        2: [("join", ["10.0.0.0", 7000], token)],
        4: ["await", ("start", [3], token)],
        6: [("join", ["10.0.0.2", 7002], token)],
    }


def test_one_server_over_all_nodes_is_rank_0s_own():
    team, nodes = spanning_team(["a", "b", "c"])
    assert start_spanning(team, nodes, [(0, 1, 2)]) == "servers of rank 0"
    assert team.ranks[0].asked[1][:2] == ("start", [1, 2])


def test_fewer_machines_than_the_launchers_said_are_named():
    team, nodes = spanning_team(["a", "a"])
    with pytest.raises(
        RunFailure, match="laid over nodes up to 1, but the ranks are on 1 machines: start a"
    ):
        start_spanning(team, nodes, [(0, 1)])


class Servers:
    """Servers over several nodes that read the same boxes on each of their nodes, whatever they are asked."""

    def __init__(self, needs):
        self.needs = needs  # by part of the server

    def find_needs(self, infos, node, num_nodes):
        assert [tuple(info) for info in infos] == [tuple(info) for info in INFOS] and num_nodes == len(self.needs)
        return self.needs[node]


class SpanningRank(SharesServers, ShardRank):
    """A rank whose node may own a server over several nodes."""


# What the workers of each node read of the tensors of CUT: parts of "a" [4, 2] and "b" [3].
NEEDS = [
    {"a": [((0, 2), (0, 2))], "b": None},
    {"a": [((1, 4), (1, 2))], "b": [((0, 1),), ((2, 3),)]},
    {"a": [], "b": [((1, 2),)]},
]


@pytest.mark.parametrize("bucket_bytes", [0, 1], ids=["whole", "in buckets"])
def test_boards_get_what_servers_over_several_nodes_read_and_no_more(bucket_bytes):
    assert [(info.name, info.shape) for info in INFOS] == [("a", (4, 2)), ("b", (3,))]
    ranks = [SpanningRank(machine, held) for machine, held in zip("xyz", CUT)]
    ranks[0].use_share(object())
    ranks[0]._node_generator = Servers(NEEDS)
    team = ThreadedRanks(ranks)
    with ranks[0].create_board(bucket_bytes=bucket_bytes) as board:
        nodes = find_nodes(team)
        attach_boards(team, nodes, board.path, bucket_bytes=bucket_bytes)
        whole = Policy(team, board).publish(1)
        for rank in ranks:
            rank.close_carrier()
            for name, tensor in TENSORS.items():
                rank._board.view(name, [[0, size] for size in tensor.shape])[...] = -1
        policy = Policy(team, board)
        needs = find_needs(team, nodes, [(0, 1, 2)])
        assert needs == NEEDS
        policy.use_needs(needs)
        seen = [{name: set() for name in TENSORS} for _ in ranks]

        def look(version, bucket):
            for node, rank in enumerate(ranks):
                rank._board.verify(version)
                rank._board.require(version, NEEDS[node])
                for name, boxes in rank._board.parts(version).items():
                    for box in boxes:
                        place = tuple(slice(*bounds) for bounds in box)
                        np.testing.assert_array_equal(rank._board.view(name, box), rank.model.tensors[name][place])
                        seen[node][name].add(box)

        assert policy.publish(2, look) == whole, "the digest is of what was written, not of what was sent"
        for rank, needed, found in zip(ranks, NEEDS, seen):
            for name, tensor in TENSORS.items():
                has = np.zeros(tensor.shape, bool)
                for box in found[name]:
                    has[tuple(slice(*bounds) for bounds in box)] = True
                wanted = np.zeros(tensor.shape, bool)
                for box in [tuple((0, size) for size in tensor.shape)] if needed[name] is None else needed[name]:
                    wanted[tuple(slice(*bounds) for bounds in box)] = True
                if name in rank.held:
                    wanted[rank.held[name]] = True
                np.testing.assert_array_equal(has, wanted, err_msg=name)
    for rank in ranks:
        rank.close_carrier()
        rank._board.close()
