"""Boards of several nodes whose ranks broadcast, in one process: each gets what it lacks, bit for bit."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sync import INFOS, holdings, tensors
from thread_broadcasts import Network

from mindrlhf.errors import RunFailure
from mindrlhf.weights.publish import buckets as planning
from mindrlhf.weights.publish import sync as pieces_planning
from mindrlhf.weights.publish.buffer import WeightBoard
from mindrlhf.weights.publish.collective import CollectiveCarrier
from mindrlhf.weights.publish.sync import check_received, completed, plan_exchange, regions_of


@settings(max_examples=60, deadline=None)
@given(
    held=holdings(),
    num_lanes=st.integers(1, 3),
    bucket_bytes=st.sampled_from([16, 56, 1 << 20]),
    max_groups=st.sampled_from([0, 4]),
)
def test_every_board_gets_every_element_whatever_the_nodes_hold(held, num_lanes, bucket_bytes, max_groups):
    nodes = [tuple(range(node * num_lanes, (node + 1) * num_lanes)) for node in range(len(held))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MAX_GROUPS", max_groups)
        patch.setattr(pieces_planning, "PIECE_BYTES", 96)
        publish_twice(held, nodes, bucket_bytes)


def publish_twice(held, nodes, bucket_bytes) -> None:
    network = Network()
    boards = [WeightBoard.create(INFOS) for _ in held]
    carriers = [
        CollectiveCarrier(boards[node], rank, nodes, network.open, bucket_bytes)
        for node, ranks in enumerate(nodes)
        for rank in ranks
    ]
    for version in (1, 2):
        values = tensors(version)
        for board, regions in zip(boards, held):
            board.begin(version)
            for name, region in regions:
                board.write(name, values[name][(*region, ...)], region)
        written = [board.contribution() for board in boards]
        pieces = plan_exchange(written, INFOS)
        with ThreadPoolExecutor(len(carriers)) as pool:
            if version == 1:
                list(pool.map(CollectiveCarrier.connect, carriers, repeat(pieces), repeat({}), repeat(b"")))
            found = list(pool.map(CollectiveCarrier.exchange, carriers, repeat(version)))
        expected = {key: value for one in written for key, value in regions_of(one).items()}
        for node, ranks in enumerate(nodes):
            sums: Counter = Counter()
            for rank in ranks:
                sums.update(found[rank])
            check_received(sums, expected, INFOS, node)
            lacking = expected.keys() - regions_of(written[node]).keys()
            assert sums.keys() == {key for key in lacking if all(start < stop for start, stop in key[1])}
            boards[node].seal([completed(written[node], written)])
            boards[node].verify(version)
            for name, _, array in boards[node].tensors(version):
                assert array.tobytes() == values[name].tobytes(), name  # also of numbers that are none
    planned = planning.plan_buckets(pieces, nodes, INFOS, bucket_bytes)
    assert network.num_broadcasts == {root: 2 * count for root, count in Counter(one.root for one in planned).items()}
    sent_bytes = sum(carrier.sent_bytes for carrier in carriers)
    assert sent_bytes == 2 * sum(one.size_bytes for one in planned)
    for closed in (*carriers, *boards):
        closed.close()


def test_what_arrives_changed_shows_in_the_sums():
    whole = [(info.name, tuple(slice(0, size) for size in info.shape)) for info in INFOS]
    boards = [WeightBoard.create(INFOS) for _ in range(2)]
    values = tensors(1)
    for board, regions in zip(boards, (whole, [])):
        board.begin(1)
        for name, region in regions:
            board.write(name, values[name][(*region, ...)], region)
    written = [board.contribution() for board in boards]
    network = Network()

    def open_damaged(ranks, root, num_words):
        broadcast = network.open(ranks, root, num_words)

        def damaged(words):
            received = broadcast(words)
            if received is not None:
                received.view(np.uint8)[0] ^= 1
            return received

        return damaged

    carriers = [CollectiveCarrier(board, rank, [(0,), (1,)], open_damaged) for rank, board in enumerate(boards)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda carrier: carrier.connect(plan_exchange(written, INFOS), {}, b""), carriers))
        sent, received = pool.map(lambda carrier: carrier.exchange(1), carriers)
    assert sent == {}
    with pytest.raises(RunFailure, match="tensor 'matrix' came to node 1 with other values than were written"):
        check_received(received, regions_of(written[0]), INFOS, 1)
    for board in boards:
        board.close()
