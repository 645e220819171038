"""Buffers of several nodes, in one process: what each lacks comes from the others, once, by either transport."""

import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_bits import random_bits
from thread_broadcasts import Network

from mindrlhf.errors import RunFailure
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.weights.publish import sync as planning
from mindrlhf.weights.publish.buffer import WeightBuffer, WeightBufferError
from mindrlhf.weights.publish.collective import CollectiveTransport, plan_buckets
from mindrlhf.weights.publish.sync import Transfer, plan_sync, sums_of, written_of
from mindrlhf.weights.publish.tcp import TcpTransport
from mindrlhf.weights.tensors import TensorInfo

INFOS = (
    TensorInfo("matrix", "float32", (12, 10)),
    TensorInfo("half", "bfloat16", (6, 4, 2)),
    TensorInfo("vector", "float32", (9,)),
    TensorInfo("scalar", "float32", ()),
)
MODEL_BYTES = sum(info.size_bytes for info in INFOS)
TOKEN = b"a secret of the nodes"


def tensors(seed: int) -> dict[str, np.ndarray]:
    return random_bits(INFOS, seed)


@st.composite
def holdings(draw) -> list[list[tuple[str, tuple[slice, ...]]]]:
    """Regions by node: a grid over each tensor, each cell of which some of the nodes hold."""
    nodes: list[list] = [[] for _ in range(draw(st.integers(2, 4)))]
    for info in INFOS:
        cells = [()]
        for size in info.shape:
            edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
            cells = [(*cell, slice(a, b)) for cell in cells for a, b in zip(edges, edges[1:])]
        for cell in cells:
            for node in draw(st.sets(st.integers(0, len(nodes) - 1), min_size=1)):
                nodes[node].append((info.name, cell))
    return nodes


class Nodes:
    """A buffer on each node, and the transports of a kind: one of a node, or of each of its ranks."""

    def __init__(self, held, infos=INFOS, num_ranks=0, bucket_bytes=1 << 20, network=None):
        self.held, self.infos = held, infos
        self.buffers = [WeightBuffer.create(infos) for _ in held]
        if not num_ranks:
            self.transports = [TcpTransport(buffer, node, "127.0.0.1") for node, buffer in enumerate(self.buffers)]
            return
        network = network or Network()
        nodes = [tuple(range(node * num_ranks, (node + 1) * num_ranks)) for node in range(len(held))]
        if num_ranks == 2:  # ranks need not count node by node
            nodes = [tuple(range(node, 2 * len(held), len(held))) for node in range(len(held))]
        self.transports = [
            CollectiveTransport(self.buffers[node], rank, nodes, network.open, bucket_bytes)
            for node, ranks in enumerate(nodes)
            for rank in ranks
        ]

    def write(self, version: int, values: dict[str, np.ndarray]) -> list[dict]:
        for buffer, regions in zip(self.buffers, self.held):
            buffer.begin(version)
            for name, region in regions:
                buffer.write(name, values[name][(*region, ...)], region)
        return [sums_of(buffer.written()) for buffer in self.buffers]

    def publish(self, version: int, values: dict[str, np.ndarray], readers=()) -> list[dict]:
        """Write, sync and commit as rank 0 has it done; return what was written, by node."""
        written = self.write(version, values)
        if version == 1:
            self.connect(plan_sync(written, self.infos, readers))
        self.on_all(lambda transport: transport.sync(version))
        whole = written_of({key: value for sums in written for key, value in sums.items()})
        for node, buffer in enumerate(self.buffers):
            if not readers or node in readers:
                buffer.commit(whole)
        return written

    def connect(self, transfers, bucket=0) -> None:
        addresses = {}
        if isinstance(self.transports[0], TcpTransport):
            addresses = {node: transport.address for node, transport in enumerate(self.transports)}
        self.on_all(lambda transport: transport.connect(transfers, addresses, TOKEN, bucket))

    def on_all(self, action) -> list:
        with ThreadPoolExecutor(len(self.transports)) as pool:
            return list(pool.map(action, self.transports))

    def check(self, node: int, version: int, values: dict[str, np.ndarray]) -> None:
        self.buffers[node].verify(version)
        for name, _, array in self.buffers[node].tensors(version):
            assert array.tobytes() == values[name].tobytes(), name  # also of numbers that are none

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for closed in (*self.transports, *self.buffers):
            closed.close()


@settings(max_examples=40)
@given(
    held=holdings(),
    transfer_bytes=st.sampled_from([8, 96, 1 << 20]),
    num_ranks=st.integers(0, 3),
    bucket_bytes=st.sampled_from([96, 248, 1 << 20]),
    one_reader=st.booleans(),
)
def test_every_buffer_gets_every_element_whatever_the_nodes_hold(
    held, transfer_bytes, num_ranks, bucket_bytes, one_reader
):
    readers = (0,) if one_reader else tuple(range(len(held)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "TRANSFER_BYTES", min(transfer_bytes, bucket_bytes))
        with Nodes(held, num_ranks=num_ranks, bucket_bytes=bucket_bytes) as nodes:
            for version in (1, 2):
                written = nodes.publish(version, tensors(version), readers[:1] if one_reader else ())
                for node in readers:
                    nodes.check(node, version, tensors(version))
            sent_bytes = sum(transport.sent_bytes for transport in nodes.transports)
    sizes = {info.name: info.numpy_dtype.itemsize for info in INFOS}
    held_bytes = [
        sum(sizes[name] * int(np.prod([b - a for a, b in bounds])) for name, bounds in sums) for sums in written
    ]
    lacking_bytes = sum(MODEL_BYTES - held_bytes[node] for node in readers)
    if num_ranks:  # whole buckets, each sent once, however many receive it
        assert sent_bytes % bucket_bytes == 0 and bool(sent_bytes) == bool(lacking_bytes)
    else:  # each node receives what it lacks, once
        assert sent_bytes == 2 * lacking_bytes


def test_what_travels_is_cut_to_its_size_and_comes_from_whoever_sends_least():
    infos = (TensorInfo("deep", "bfloat16", (1, 3, 4096, 1024)), TensorInfo("row", "float32", (1 << 21,)))
    whole = [(info.name, tuple((0, size) for size in info.shape)) for info in infos]
    transfers = plan_sync([whole, whole, [], []], infos)
    for info, origin in zip(infos, (0, 1)):
        parts = [transfer for transfer in transfers if transfer.name == info.name]
        assert {(part.origin, part.nodes) for part in parts} == {(origin, (2, 3))}
        seen = np.zeros(info.shape, np.uint8)
        for part in parts:
            place = tuple(slice(*bounds) for bounds in part.slice)
            assert 2 << 20 <= seen[place].size * info.numpy_dtype.itemsize <= 4 << 20
            seen[place] += 1
        assert (seen == 1).all()
    assert plan_sync([whole] * 3, infos) == []


@pytest.mark.parametrize("bucket_bytes, num_buckets", [(8 << 20, 64), (24 << 20, 22)])
def test_all_devices_of_two_nodes_send_alike(bucket_bytes, num_buckets):
    """64 tensors of 8 MiB, of which two nodes of eight ranks have every other."""
    infos = [TensorInfo(f"layer {index}", "bfloat16", (4096, 1024)) for index in range(64)]
    whole = ((0, 4096), (0, 1024))
    transfers = [Transfer(info.name, whole, index % 2, (1 - index % 2,)) for index, info in enumerate(infos)]
    nodes = [tuple(range(8)), tuple(range(8, 16))]
    sent = Counter(bucket.root for bucket in plan_buckets(transfers, nodes, infos, bucket_bytes))
    assert sent.total() == num_buckets and max(sent.values()) - min(sent.values()) <= 1 and len(sent) == 16


WHOLE = [(info.name, tuple(slice(0, size) for size in info.shape)) for info in INFOS]


def test_another_plan_and_plans_of_several_buckets_share_the_connections():
    """First node 1 lacks all, then also node 0 something; bucket 1 goes between nodes that had no connection."""
    with Nodes([WHOLE, [], []]) as nodes:
        nodes.publish(1, tensors(1))
        nodes.held = [WHOLE[:2], WHOLE[2:], []]
        written = nodes.write(2, tensors(2))
        transfers = plan_sync(written, INFOS)
        for bucket in (0, 1):
            nodes.connect([each for each in transfers if (each.origin == 1) == bool(bucket)], bucket)
        for bucket in (0, 1):
            nodes.on_all(lambda transport, bucket=bucket: transport.sync(2, bucket))
        for node, buffer in enumerate(nodes.buffers):
            buffer.commit(written_of({key: value for sums in written for key, value in sums.items()}))
            nodes.check(node, 2, tensors(2))


def test_a_node_that_dies_ends_the_exchange_of_the_others():
    with Nodes([WHOLE[:2], WHOLE[2:], []]) as nodes:
        nodes.publish(1, tensors(1))
        nodes.transports[1].close()
        failures = []

        def sync(node):
            try:
                nodes.transports[node].sync(2)
            except RunFailure as failure:
                failures.append(str(failure))

        threads = [threading.Thread(target=sync, args=(node,)) for node in (0, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(failures) == 2 and all("weight sync of nodes" in failure for failure in failures), failures


def _change_bit(send):
    def damaged(self, buffers):
        first, *others = (bytearray(buffer) for buffer in buffers)
        first[0] ^= 1  # as a network that changes a bit
        send(self, [memoryview(buffer) for buffer in (first, *others)])

    return damaged


def _forge(send):
    return lambda self, header, *more: (setattr(self, "_num_sent", self._num_sent + 1), send(self, header, *more))


@pytest.mark.parametrize(
    "method, damage, message",
    [
        ("send_buffers", _change_bit, "tensor '.*' came with other values than were sent"),
        ("send", _forge, "a message is not signed by the peer"),
        ("send", lambda send: lambda self, header: send(self, {**header, "version": 1}), "transfer .* was due, and"),
    ],
)
def test_a_damaged_stream_is_refused(monkeypatch, method, damage, message):
    with Nodes([WHOLE[:2], WHOLE[2:]]) as nodes:
        nodes.publish(1, tensors(1))
        monkeypatch.setattr(SignedConnection, method, damage(getattr(SignedConnection, method)))
        nodes.write(2, tensors(2))
        failures = []
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(transport.sync, 2) for transport in nodes.transports]:
                failures.append(str(done.exception(30)))
    assert any(re.search(message, failure) for failure in failures), failures


def test_a_damaged_broadcast_is_refused_by_whoever_reads_the_buffer():
    class Damaged(Network):
        def open(self, ranks, root, num_words):
            broadcast = super().open(ranks, root, num_words)

            def damaged(words):
                received = broadcast(words)
                if received is not None:
                    received.view(np.uint8)[0] ^= 1
                return received

            return damaged

    with Nodes([WHOLE, []], num_ranks=1, network=Damaged()) as nodes:
        nodes.publish(1, tensors(1))
        nodes.check(0, 1, tensors(1))
        with pytest.raises(WeightBufferError, match="'matrix' of weights version 1 changed after it was written"):
            nodes.buffers[1].verify(1)
