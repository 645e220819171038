"""Replicas of a model that each lie on several ranks: who gets which rows, and whose answer counts."""

import numpy as np
import pytest

from mindrlhf.layout.layout import Layout
from mindrlhf.training.replica_team import ReplicaTeam
from mindrlhf.training.results import ProcessStatistics, UpdateResult
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer
from mindrlhf.weights.publish.publisher import Published


class Ranks:
    """A team whose workers note their arguments and answer with their number."""

    def __init__(self, world_size, answer):
        self.world_size = world_size
        self.answer = answer
        self.rank_0 = object()
        self.calls = []
        self.is_closed = False

    def call(self, method, per_rank=None, **common):
        arguments = [{**common, **own} for own in per_rank] if per_rank else [common] * self.world_size
        self.calls.append((method, arguments))
        return [self.answer(rank) for rank in range(self.world_size)]

    def close(self):
        self.is_closed = True


# Ranks of stage 0 are 0 to 3, of stage 1 4 to 7; of each four, the first two are replica 0.
LAYOUT = Layout(data_parallel=2, model_parallel=2, pipeline_stage=2)


def test_all_ranks_of_a_replica_get_its_rows_and_its_last_rank_answers():
    ranks = Ranks(8, lambda rank: UpdateResult(np.ones(2), float(rank), ProcessStatistics(rank % 3, 10.0 - rank)))
    team = ReplicaTeam(ranks, LAYOUT)
    assert (team.world_size, team.num_devices, team.rank_0) == (2, 8, ranks.rank_0)
    results = team.call("update", per_rank=[{"rows": "first"}, {"rows": "second"}], lr=0.5)
    rows = [arguments["rows"] for arguments in ranks.calls[0][1]]
    assert rows == ["first", "first", "second", "second"] * 2
    assert all(arguments["lr"] == 0.5 for arguments in ranks.calls[0][1])
    assert [result.grad_norm for result in results] == [5, 7]
    assert [result.process.peak_rss_gb for result in results] == [10.0, 8.0]
    assert [result.process.recompiles for result in results] == [2, 2]
    ranks.answer = lambda rank: None
    assert team.call("end_dump", step=3) == [None, None]
    assert ranks.calls[1] == ("end_dump", [{"step": 3}] * 8)
    team.close()
    assert ranks.is_closed


def test_what_all_ranks_wrote_is_committed():
    """Eight ranks write a part each; the replicas' answers hold all of it."""
    tensor = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    with WeightBuffer.create([TensorInfo("weight", "float32", (16, 4))]) as buffer:
        buffer.begin(1)
        contributions = []
        for rank in range(8):
            with WeightBuffer.attach(buffer.path, writable=True) as mine:
                mine.begin(1)
                part = slice(2 * rank, 2 * rank + 2)
                mine.write("weight", tensor[part], (part,))
                contributions.append(mine.written())
        team = ReplicaTeam(Ranks(8, lambda rank: Published({"0": contributions[rank]})), LAYOUT)
        results = team.call("publish", version=1)
        assert len(results) == 2
        buffer.commit([one for result in results for one in result.written["0"]])
        buffer.verify(1)
        np.testing.assert_array_equal({name: array for name, _, array in buffer.tensors(1)}["weight"], tensor)


def test_the_layout_must_have_all_ranks():
    with pytest.raises(AssertionError, match="4 ranks for a layout of 8"):
        ReplicaTeam(Ranks(4, lambda rank: None), LAYOUT)
