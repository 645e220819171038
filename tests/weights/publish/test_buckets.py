"""Buckets of transfers: each transfer in one of them, none too full, the ranks of a node with equal shares."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.weights.publish.collective import plan_buckets
from mindrlhf.weights.publish.sync import Transfer
from mindrlhf.weights.tensors import TensorInfo

INFOS = (TensorInfo("wide", "float32", (1 << 20,)), TensorInfo("half", "bfloat16", (1 << 20,)))
WIDTHS = {"wide": 4, "half": 2}


@st.composite
def planned_syncs(draw) -> tuple[list[Transfer], list[tuple[int, ...]]]:
    """Transfers of up to 60 elements on up to five nodes of up to four ranks, which need not count node by node."""
    num_nodes, num_ranks = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    ranks = range(num_nodes * num_ranks)
    node_by_node = [tuple(ranks[node * num_ranks : (node + 1) * num_ranks]) for node in range(num_nodes)]
    in_turn = [tuple(ranks[node::num_nodes]) for node in range(num_nodes)]
    chosen = st.lists(st.integers(0, num_nodes - 1), min_size=2, max_size=num_nodes, unique=True)
    transfers = [
        Transfer(name, ((100 * number, 100 * number + size),), nodes[0], tuple(nodes[1:]))
        for number, (name, size, nodes) in enumerate(
            draw(st.lists(st.tuples(st.sampled_from(sorted(WIDTHS)), st.integers(1, 60), chosen), max_size=12))
        )
    ]
    return transfers, draw(st.sampled_from([node_by_node, in_turn]))


@given(planned_sync=planned_syncs(), bucket_bytes=st.sampled_from([240, 248, 1 << 20]))
def test_each_transfer_is_in_one_bucket_from_its_origin_to_all_nodes(planned_sync, bucket_bytes):
    transfers, nodes = planned_sync
    buckets = plan_buckets(transfers, nodes, INFOS, bucket_bytes)
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    for bucket in buckets:
        assert bucket.ranks == tuple(sorted(bucket.ranks)) and bucket.root in bucket.ranks
        assert sorted(node_of[rank] for rank in bucket.ranks) == list(range(len(nodes)))
        assert len({nodes[node_of[rank]].index(rank) for rank in bucket.ranks}) == 1
        end = 0
        for transfer, offset in bucket.parts:
            assert node_of[bucket.root] == transfer.origin
            assert offset % 8 == 0 and offset >= end  # transfers do not overlap
            end = offset + WIDTHS[transfer.name] * (transfer.slice[0][1] - transfer.slice[0][0])
        assert 0 < end <= bucket_bytes
    assert Counter(transfer for bucket in buckets for transfer, _ in bucket.parts) == Counter(transfers)
    # The devices of a node take turns.
    turns = Counter(nodes[node_of[bucket.root]].index(bucket.root) for bucket in buckets)
    counts = [turns[number] for number in range(len(nodes[0]))]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("bucket_bytes, num_buckets", [(8 << 20, 64), (24 << 20, 22)])
def test_all_devices_of_two_nodes_send_alike(bucket_bytes, num_buckets):
    """64 tensors of 8 MiB, of which two nodes of eight ranks have every other."""
    infos = [TensorInfo(f"layer {index}", "bfloat16", (4096, 1024)) for index in range(64)]
    whole = ((0, 4096), (0, 1024))
    transfers = [Transfer(info.name, whole, index % 2, (1 - index % 2,)) for index, info in enumerate(infos)]
    nodes = [tuple(range(8)), tuple(range(8, 16))]
    sent = Counter(bucket.root for bucket in plan_buckets(transfers, nodes, infos, bucket_bytes))
    assert sent.total() == num_buckets and max(sent.values()) - min(sent.values()) <= 1 and len(sent) == 16
