"""Ranks on several machines: who shares one, a board on each, and weights that must be the same on all."""

import numpy as np
import pytest

from mindrlhf.errors import RunFailure
from mindrlhf.training.loop.policy import Policy
from mindrlhf.training.nodes import attach_boards, find_nodes
from mindrlhf.training.records import BoardPath, Machine, Published, add_by_node
from mindrlhf.weights.board import WeightBoard
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

    def open_board(self, is_wanted: bool) -> BoardPath:
        if not is_wanted:
            return BoardPath("")
        self.opened += 1
        self.board = WeightBoard.create(INFOS)
        return BoardPath(self.board.path)

    def attach_board(self, path: str, node: int, ranks: list[int]) -> None:
        self.node, self.ranks = node, ranks
        if self.board is None:
            self.board = WeightBoard.attach(path, writable=True)

    def publish(self, version: int) -> Published:
        self.board.begin(version)
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
        arguments = per_rank or [common] * self.world_size
        return [getattr(rank, method)(**given) for rank, given in zip(self.ranks, arguments)]


def test_ranks_that_share_a_machine_are_a_node():
    assert find_nodes(Ranks(["x", "x", "y", "y"])) == [[0, 1], [2, 3]]
    assert find_nodes(Ranks(["x", "y", "x", "y", "z"])) == [[0, 2], [1, 3], [4]]
    assert find_nodes(Ranks(["x"])) == [[0]]


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
    with pytest.raises(RunFailure, match=r"the weights of node 1 \(\w+\) are not those of node 0"):
        policy.publish(1)


def test_contributions_are_added_up_by_node():
    one = {"a": {"regions": [[[0, 2], [0, 2]]], "checksum": 2**64 - 1}}
    two = {"a": {"regions": [[[2, 4], [0, 2]]], "checksum": 3}}
    assert add_by_node([{}, {"1": one}, {"2": two}, {"1": two}]) == {
        "1": {"a": {"regions": [[[0, 2], [0, 2]], [[2, 4], [0, 2]]], "checksum": 2}},
        "2": two,
    }
