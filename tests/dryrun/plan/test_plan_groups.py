"""Groups of the plan: every kind partitions the ranks, and its members differ as they should."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.dryrun.plan.groups import describe_ranks, num_communicators, num_nodes, optimizer_groups, plan_groups
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.parameter import ParameterLayout

powers = st.sampled_from([1, 2, 4])


@st.composite
def layouts(draw):
    data, context, model, stages = draw(powers), draw(st.sampled_from([1, 2])), draw(powers), draw(st.integers(1, 3))
    stage_size = data * context * model
    expert = draw(st.sampled_from([size for size in (1, 2, 4, 8) if stage_size % size == 0]))
    return Layout(data, model, stages, context, expert)


def _matrix(layout: Layout, shard: int) -> ParameterLayout:
    return ParameterLayout("weight", (1024, 64), (0,), layout.device_matrix, (0, -1), shard)


@given(layouts(), st.sampled_from([1, 2, 8]))
@settings(max_examples=60, deadline=None)
def test_every_kind_partitions_the_ranks(layout, node_size):
    replicas = layout.data_parallel * layout.context_parallel
    kinds = plan_groups(layout, [_matrix(layout, replicas)], node_size)
    for kind in kinds:
        assert sorted(rank for group in kind.groups for rank in group) == list(range(layout.world_size)), kind.name
        assert len({len(group) for group in kind.groups}) == 1
        assert kind.max_nodes == max(len({rank // node_size for rank in group}) for group in kind.groups)
    assert num_communicators(layout, [_matrix(layout, replicas)]) == 1 + len(kinds)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_ranks_of_an_axis_differ_in_that_axis_only(layout):
    names = {"tensor parallel": "model", "data parallel": "data", "context parallel": "context", "pipeline": "stage"}
    for kind in plan_groups(layout, [], 8):
        if kind.name not in names:
            continue
        for group in kind.groups:
            places = [layout.coordinates(rank) for rank in group]
            for axis in ("stage", "data", "context", "model"):
                assert len({getattr(place, axis) for place in places}) == (
                    len(group) if axis == names[kind.name] else 1
                )


@given(layouts(), st.data())
@settings(max_examples=60, deadline=None)
def test_an_optimiser_group_holds_one_shard_between_its_ranks(layout, data):
    replicas = layout.data_parallel * layout.context_parallel
    shard = data.draw(st.sampled_from([size for size in (1, 2, 4, 8) if replicas % size == 0]))
    parameter = _matrix(layout, shard)
    groups = [group for group in optimizer_groups(layout, parameter) if group[0] < layout.stage_size]
    rows = 1024 // layout.model_parallel
    for group in groups:
        starts = sorted(parameter.shard_of(rank)[0].start for rank in group)
        # The shards lie one after the other and make up one tensor-parallel shard.
        assert starts == [starts[0] + index * rows // shard for index in range(shard)]
        assert starts[0] % rows == 0


@pytest.mark.parametrize(
    "ranks, text",
    [
        (range(8), "0-7"),
        ((0, 4), "0, 4"),
        (range(0, 512, 32), "0, 32, 64 ... 480"),
        ((0, 1, 4, 5), "0, 1, 4, 5"),
        ((0, 1, 2, 3, 16, 17, 18, 19, 20, 21), "0, 1, 2, 3, 16, 17, 18 ... 21"),
    ],
)
def test_ranks_in_few_characters(ranks, text):
    assert describe_ranks(tuple(ranks)) == text


def test_nodes_hold_consecutive_ranks():
    assert num_nodes((0, 7), 8) == 1
    assert num_nodes((7, 8), 8) == 2
    assert num_nodes(range(0, 64, 8), 8) == 8
