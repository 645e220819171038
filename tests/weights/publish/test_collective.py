"""Buffers of several nodes whose ranks broadcast, in one process: each gets what it lacks, bit for bit."""

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
from mindrlhf.weights.publish import collective
from mindrlhf.weights.publish import sync as planning
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.collective import CollectiveTransport
from mindrlhf.weights.publish.sync import check_received, plan_sync, sums_of, written_of


@settings(max_examples=60, deadline=None)
@given(
    held=holdings(),
    num_lanes=st.integers(1, 3),
    bucket_bytes=st.sampled_from([16, 56, 1 << 20]),
    max_groups=st.sampled_from([0, 4]),
)
def test_every_buffer_gets_every_element_whatever_the_nodes_hold(held, num_lanes, bucket_bytes, max_groups):
    nodes = [tuple(range(node * num_lanes, (node + 1) * num_lanes)) for node in range(len(held))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "MAX_GROUPS", max_groups)
        patch.setattr(planning, "TRANSFER_BYTES", 96)
        publish_twice(held, nodes, bucket_bytes)


def publish_twice(held, nodes, bucket_bytes) -> None:
    network = Network()
    buffers = [WeightBuffer.create(INFOS) for _ in held]
    transports = [
        CollectiveTransport(buffers[node], rank, nodes, network.open, bucket_bytes)
        for node, ranks in enumerate(nodes)
        for rank in ranks
    ]
    for version in (1, 2):
        values = tensors(version)
        for buffer, regions in zip(buffers, held):
            buffer.begin(version)
            for name, region in regions:
                buffer.write(name, values[name][(*region, ...)], region)
        written = [sums_of(buffer.written()) for buffer in buffers]
        transfers = plan_sync(written, INFOS)
        with ThreadPoolExecutor(len(transports)) as pool:
            if version == 1:
                list(pool.map(CollectiveTransport.connect, transports, repeat(transfers), repeat({}), repeat(b"")))
            found = list(pool.map(CollectiveTransport.sync, transports, repeat(version)))
        expected = {key: value for one in written for key, value in one.items()}
        for node, ranks in enumerate(nodes):
            sums: Counter = Counter()
            for rank in ranks:
                sums.update(found[rank])
            check_received(sums, expected, INFOS, node)
            lacking = expected.keys() - written[node].keys()
            assert sums.keys() == {key for key in lacking if all(start < stop for start, stop in key[1])}
            buffers[node].commit(written_of({**expected, **written[node]}))
            buffers[node].verify(version)
            for name, _, array in buffers[node].tensors(version):
                assert array.tobytes() == values[name].tobytes(), name  # also of numbers that are none
    planned = collective.plan_buckets(transfers, nodes, INFOS, bucket_bytes)
    assert network.num_broadcasts == {root: 2 * count for root, count in Counter(one.root for one in planned).items()}
    sent_bytes = sum(transport.sent_bytes for transport in transports)
    assert sent_bytes == 2 * sum(one.size_bytes for one in planned)
    for closed in (*transports, *buffers):
        closed.close()


def test_what_arrives_changed_shows_in_the_sums():
    whole = [(info.name, tuple(slice(0, size) for size in info.shape)) for info in INFOS]
    buffers = [WeightBuffer.create(INFOS) for _ in range(2)]
    values = tensors(1)
    for buffer, regions in zip(buffers, (whole, [])):
        buffer.begin(1)
        for name, region in regions:
            buffer.write(name, values[name][(*region, ...)], region)
    written = [sums_of(buffer.written()) for buffer in buffers]
    network = Network()

    def open_damaged(ranks, root, num_words):
        broadcast = network.open(ranks, root, num_words)

        def damaged(words):
            received = broadcast(words)
            if received is not None:
                received.view(np.uint8)[0] ^= 1
            return received

        return damaged

    transports = [CollectiveTransport(buffer, rank, [(0,), (1,)], open_damaged) for rank, buffer in enumerate(buffers)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda transport: transport.connect(plan_sync(written, INFOS), {}, b""), transports))
        sent, received = pool.map(lambda transport: transport.sync(1), transports)
    assert sent == {}
    with pytest.raises(RunFailure, match="tensor 'matrix' came to node 1 with other values than were written"):
        check_received(received, written[0], INFOS, 1)
    for buffer in buffers:
        buffer.close()
