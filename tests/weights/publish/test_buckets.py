"""Buckets of transfers: each byte in one of them, none too large, the ranks of a node with equal shares."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.weights.publish import collective as planning
from mindrlhf.weights.publish.collective import plan_buckets
from mindrlhf.weights.publish.sync import Transfer
from mindrlhf.weights.tensors import TensorInfo

INFOS = (TensorInfo("wide", "float32", (1 << 20,)), TensorInfo("half", "bfloat16", (1 << 20,)))
WIDTHS = {"wide": 4, "half": 2}


def piece_of(name: str, start: int, size: int, nodes: tuple[int, ...]) -> Transfer:
    return Transfer(name, ((start, start + size),), ((start, start + size),), nodes)


@st.composite
def planned_syncs(draw) -> tuple[list[Transfer], list[tuple[int, ...]]]:
    """Pieces of up to 700 elements on up to five nodes of up to four ranks, which need not count node by node."""
    num_nodes, num_lanes = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    ranks = range(num_nodes * num_lanes)
    node_by_node = [tuple(ranks[node * num_lanes : (node + 1) * num_lanes]) for node in range(num_nodes)]
    in_turn = [tuple(ranks[node::num_nodes]) for node in range(num_nodes)]
    chains = st.lists(st.integers(0, num_nodes - 1), min_size=2, max_size=num_nodes, unique=True)
    sizes = st.one_of(st.integers(0, 40), st.integers(0, 700))
    drawn = draw(st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), sizes, chains), max_size=12))
    starts: Counter = Counter()
    transfers = []
    for name, size, chain in drawn:
        transfers.append(piece_of(name, starts[name], size, tuple(chain)))
        starts[name] += size
    return transfers, draw(st.sampled_from([node_by_node, in_turn]))


@settings(max_examples=100, deadline=None)
@given(planned_sync=planned_syncs(), bucket_bytes=st.sampled_from([8, 64, 248, 1 << 20]), max_groups=st.integers(0, 4))
def test_each_element_is_in_one_bucket_which_every_node_that_lacks_it_gets(planned_sync, bucket_bytes, max_groups):
    transfers, nodes = planned_sync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MAX_GROUPS", max_groups)
        buckets = plan_buckets(transfers, nodes, INFOS, bucket_bytes)
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    came: Counter = Counter()  # by node, tensor and element
    for bucket in buckets:
        assert bucket.ranks == tuple(sorted(bucket.ranks)) and bucket.root in bucket.ranks
        # One rank of each node, of one number within it.
        assert len({node_of[rank] for rank in bucket.ranks}) == len(bucket.ranks)
        assert len({nodes[node_of[rank]].index(rank) for rank in bucket.ranks}) == 1
        assert bucket.size_bytes <= bucket_bytes
        end = 0
        for part in bucket.parts:
            width = WIDTHS[part.transfer.name]
            assert node_of[bucket.root] == part.transfer.nodes[0]
            assert {node_of[rank] for rank in bucket.ranks} >= set(part.transfer.nodes)
            assert part.offset % width == 0 and part.offset >= end  # parts do not overlap
            end = part.offset + (part.stop - part.start) * width
            for element in range(part.start, part.stop):
                for node in part.transfer.nodes[1:]:
                    came[node, part.transfer.name, part.transfer.slice[0][0] + element] += 1
        assert bucket.parts and end <= bucket.size_bytes
    lacking = {
        (node, one.name, element) for one in transfers for element in range(*one.slice[0]) for node in one.nodes[1:]
    }
    assert came == dict.fromkeys(lacking, 1)
    if max_groups:
        return
    # Where no groups of some nodes are allowed, there is one for each lane.
    assert len({bucket.ranks for bucket in buckets}) <= len(nodes[0])


@settings(max_examples=100, deadline=None)
@given(planned_sync=planned_syncs(), bucket_bytes=st.sampled_from([64, 248, 1 << 20]))
def test_lanes_send_equal_shares_and_hardly_more_than_the_pieces(planned_sync, bucket_bytes):
    transfers, nodes = planned_sync
    buckets = plan_buckets(transfers, nodes, INFOS, bucket_bytes)
    sent: Counter = Counter()
    kinds: dict[tuple, set[int]] = {}
    for bucket in buckets:
        sent[bucket.root] += bucket.size_bytes
        kinds.setdefault((bucket.root, bucket.ranks), set()).add(bucket.size_bytes)
    assert all(len(sizes) == 1 for sizes in kinds.values())  # one compiled graph for each
    num_lanes = len(nodes[0])
    for node, ranks in enumerate(nodes):
        sent_bytes = sum(one.num_elements * WIDTHS[one.name] for one in transfers if one.nodes[0] == node)
        num_buckets = max((sum(bucket.root == rank for bucket in buckets) for rank in ranks), default=0)
        # Each transfer, and each bucket, may end with a gap below 8 bytes.
        gaps = 7 * sum(transfer.nodes[0] == node for transfer in transfers)
        for rank in ranks:
            assert sent[rank] <= (sent_bytes + gaps) / num_lanes + 8 * num_buckets
        assert sum(sent[rank] for rank in ranks) >= sent_bytes


def test_a_large_piece_by_hand():
    """Two nodes of two ranks, 100 float32 from node 1 to node 0: 400 bytes in rounds of two buckets of up to 64."""
    buckets = plan_buckets([piece_of("wide", 0, 100, (1, 0))], [(0, 1), (2, 3)], INFOS, 64)
    # Four rounds of 128 bytes hold them; 400 / 8 is 50, which makes buckets of 56 bytes, or 14 elements.
    assert [(one.root, one.ranks) for one in buckets] == [(2, (0, 2)), (3, (1, 3))] * 4
    assert {one.size_bytes for one in buckets} == {56}
    ranges = [[(part.start, part.stop, part.offset) for part in one.parts] for one in buckets]
    assert ranges == [[(first, min(first + 14, 100), 0)] for first in range(0, 100, 14)]


def test_all_devices_of_two_nodes_send_alike():
    """64 tensors of 8 MiB, of which two nodes of eight ranks have every other."""
    infos = [TensorInfo(f"layer {index}", "bfloat16", (4096, 1024)) for index in range(64)]
    whole = ((0, 4096), (0, 1024))
    transfers = [Transfer(info.name, whole, whole, (index % 2, 1 - index % 2)) for index, info in enumerate(infos)]
    nodes = [tuple(range(8)), tuple(range(8, 16))]
    sent: Counter = Counter()
    for bucket in plan_buckets(transfers, nodes, infos):
        sent[bucket.root] += bucket.size_bytes
    assert set(sent.values()) == {32 * (8 << 20) // 8}
    assert len(sent) == 16
