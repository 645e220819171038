"""Buffers of several nodes, in one process: what each lacks comes from the others, once, over real connections."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_bits import random_bits
from slow_tests import SLOW

from mindrlhf.errors import RunFailure
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.weights.publish import sync as planning
from mindrlhf.weights.publish import tcp
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.sync import check_received, plan_sync, sums_of, written_of
from mindrlhf.weights.publish.tcp import TcpTransport
from mindrlhf.weights.tensors import TensorInfo

INFOS = (
    TensorInfo("matrix", "float32", (12, 10)),
    TensorInfo("half", "bfloat16", (6, 4, 2)),
    TensorInfo("vector", "float32", (9,)),
    TensorInfo("scalar", "float32", ()),
)
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
    """Buffers and transports."""

    def __init__(self, held, infos=INFOS):
        self.held, self.infos = held, infos
        self.buffers = [WeightBuffer.create(infos) for _ in held]
        self.transports = [TcpTransport(buffer, node, "127.0.0.1") for node, buffer in enumerate(self.buffers)]

    def publish(self, version: int, values: dict[str, np.ndarray]) -> list[dict]:
        """Write, sync, check and commit as rank 0 has it done; return the transfers."""
        for buffer, regions in zip(self.buffers, self.held):
            buffer.begin(version)
            for name, region in regions:
                buffer.write(name, values[name][(*region, ...)], region)
        written = [sums_of(buffer.written()) for buffer in self.buffers]
        transfers = plan_sync(written, self.infos)
        addresses = {node: transport.address for node, transport in enumerate(self.transports)}
        if version == 1:
            self.on_all(lambda transport: transport.connect(transfers, addresses, TOKEN))
        found = self.on_all(lambda transport: transport.sync(version))
        expected = {key: value for one in written for key, value in one.items()}
        for node, sums in enumerate(found):
            check_received(sums, expected, self.infos, node)
        for buffer, own in zip(self.buffers, written):
            buffer.commit(written_of({**expected, **own}))
        return transfers

    def on_all(self, action) -> list:
        with ThreadPoolExecutor(len(self.transports)) as pool:
            return list(pool.map(action, self.transports))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for closed in (*self.transports, *self.buffers):
            closed.close()


@settings(max_examples=12, deadline=None)
@given(held=holdings(), transfer_bytes=st.sampled_from([40, 96, 1 << 20]))
def test_every_buffer_gets_every_element_whatever_the_nodes_hold(held, transfer_bytes):
    with pytest.MonkeyPatch.context() as patch, Nodes(held) as nodes:
        patch.setattr(planning, "TRANSFER_BYTES", transfer_bytes)
        patch.setattr(tcp, "NUM_STREAMS", 2)
        for version in (1, 2):
            values = tensors(version)
            transfers = nodes.publish(version, values)
            for buffer in nodes.buffers:
                buffer.verify(version)
                for name, _, array in buffer.tensors(version):
                    assert array.tobytes() == values[name].tobytes(), name  # also of numbers that are none
    # Each node receives what it lacks, once, and sends no more than the model.
    sizes = {info.name: info.numpy_dtype.itemsize for info in INFOS}
    model_bytes = sum(info.size_bytes for info in INFOS)
    for node, regions in enumerate(held):
        own = sum(values[name][(*region, ...)].nbytes for name, region in regions)
        came = sum(one.num_elements * sizes[one.name] for one in transfers if node in one.nodes[1:])
        sent = sum(one.num_elements * sizes[one.name] for one in transfers if node in one.nodes[:-1])
        assert own + came == model_bytes
        assert sent <= model_bytes


WHOLE = [(info.name, tuple(slice(0, size) for size in info.shape)) for info in INFOS]


def test_nodes_that_hold_everything_exchange_nothing():
    written = [{(name, ((0, 4),)): 3 for name in ("a", "b")}] * 3
    assert plan_sync(written, [TensorInfo("a", "float32", (4,)), TensorInfo("b", "float32", (4,))]) == []


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
        assert len(failures) == 2 and all("weight sync of nodes" in one for one in failures), failures


def test_what_arrives_changed_is_named(monkeypatch):
    with Nodes([WHOLE[:2], WHOLE[2:]]) as nodes:
        nodes.publish(1, tensors(1))
        send = SignedConnection.send_buffers

        def damaged(self, buffers):
            first, *others = (bytearray(buffer) for buffer in buffers)
            first[0] ^= 1  # as a network that changes a bit
            send(self, [memoryview(buffer) for buffer in (first, *others)])

        monkeypatch.setattr(SignedConnection, "send_buffers", damaged)
        with pytest.raises(RunFailure, match="tensor '.*' came to node 0 with other values than were written"):
            nodes.publish(2, tensors(2))


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Round to nearest even, as bits; written apart from the product's."""
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.mark.parametrize("num_updates", [100, pytest.param(1000, marks=SLOW)])
def test_updates_reach_the_other_nodes_as_changes_without_a_difference(num_updates):
    """AdamW on float32 weights, whose bfloat16 forms are published; a chain of three nodes."""
    infos = (TensorInfo("wide", "bfloat16", (40, 60)), TensorInfo("cut", "bfloat16", (30, 64)))
    held = [[("wide", (slice(0, 40), slice(0, 60)))], [("cut", (slice(0, 30), slice(0, 32)))], []]
    held[2].append(("cut", (slice(0, 30), slice(32, 64))))
    random = np.random.default_rng(0)
    weights = {info.name: 0.02 * random.standard_normal(info.shape) for info in infos}
    means = {name: np.zeros_like(array) for name, array in weights.items()}
    squares = {name: np.zeros_like(array) for name, array in weights.items()}
    size_bytes = sum(info.size_bytes for info in infos)
    with Nodes(held, infos) as nodes:
        for version in range(1, num_updates + 1):
            for name, array in weights.items():
                gradient = random.standard_normal(array.shape)
                means[name] = 0.9 * means[name] + 0.1 * gradient
                squares[name] = 0.999 * squares[name] + 0.001 * gradient**2
                corrected = means[name] / (1 - 0.9**version), squares[name] / (1 - 0.999**version)
                array -= 1e-6 * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
            values = {name: to_bfloat16(array) for name, array in weights.items()}
            nodes.publish(version, values)
            for buffer in nodes.buffers:
                buffer.verify(version)
                for name, _, array in buffer.tensors(version):
                    np.testing.assert_array_equal(array, values[name])
        sent_bytes = sum(transport.sent_bytes for transport in nodes.transports)
    # Each byte travels to two nodes; whole it would be as often as there are updates.
    assert 2 * size_bytes < sent_bytes < 0.1 * num_updates * 2 * size_bytes


def test_a_version_that_changes_everything_travels_whole():
    infos = (TensorInfo("a", "bfloat16", (50, 40)),)
    with Nodes([[("a", (slice(0, 50), slice(0, 40)))], []], infos) as nodes:
        values = np.arange(2000, dtype=np.uint16).reshape(50, 40)
        for version, sent in ((1, 4000), (2, 8000), (3, 8004), (4, 8012)):
            values = values + np.uint16(version == 2)
            if version == 4:
                values[3, 4] += 1
            nodes.publish(version, {"a": values})
            assert nodes.transports[0].sent_bytes == sent
