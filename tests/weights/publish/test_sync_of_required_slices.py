"""What a node's servers need crosses the network and nothing else: in NumPy, and between buffers over connections."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sync import INFOS, TOKEN, WHOLE, Nodes, holdings, tensors

from mindrlhf.errors import RunFailure
from mindrlhf.weights.publish import sync as planning
from mindrlhf.weights.publish import tcp
from mindrlhf.weights.publish.buffer import WeightBuffer, WeightBufferError
from mindrlhf.weights.publish.slices import divide, first_missing, merge_required, merge_slices
from mindrlhf.weights.publish.sync import (
    check_received,
    plan_sync,
    sum_sent,
    sums_of,
    written_of,
)

SHAPES = {info.name: info.shape for info in INFOS}
ELEMENT_BYTES = {info.name: info.numpy_dtype.itemsize for info in INFOS}


def random_slices(shape):
    spans = [st.tuples(*[st.integers(0, size)] * 2).map(lambda span: tuple(sorted(span))) for size in shape]
    return st.tuples(*spans)


def slices(one):
    return (*(slice(start, stop) for start, stop in one), ...)


def mask(shape, covered) -> np.ndarray:
    """How often each element lies in some slices."""
    counts = np.zeros(shape, np.int64)
    for one in covered:
        counts[slices(one)] += 1
    return counts


@st.composite
def reads(draw, num_nodes):
    """By node, of one to three workers by tensor: some slices, all, or no word of it."""
    read = {
        name: st.one_of(st.none(), st.lists(random_slices(shape), max_size=3), st.just("absent"))
        for name, shape in SHAPES.items()
    }
    workers = [draw(st.lists(st.fixed_dictionaries(read), min_size=1, max_size=3)) for _ in range(num_nodes)]
    return [[{k: v for k, v in one.items() if v != "absent"} for one in node] for node in workers]


def is_needed(workers) -> dict[str, np.ndarray]:
    """By tensor, whether any worker of a node needs each element."""
    found = {name: np.zeros(shape, bool) for name, shape in SHAPES.items()}
    for one in workers:
        for name, read in one.items():
            found[name] |= read is None or mask(SHAPES[name], read) > 0
    return found


@given(st.data())
def test_merged_boxes_cover_the_same_once(data):
    shape = data.draw(st.lists(st.integers(1, 6), max_size=3))
    given_slices = data.draw(st.lists(random_slices(shape), max_size=6))
    merged = merge_slices(given_slices)
    np.testing.assert_array_equal(mask(shape, merged), mask(shape, given_slices) > 0)
    assert merged == merge_slices(given_slices[::-1] + given_slices)
    whole = tuple((0, size) for size in shape)
    lacking = first_missing(merged, [whole])
    assert lacking == (None if mask(shape, merged).all() else whole)


def test_boxes_of_shards_that_touch_are_joined():
    shards = [((first, first + 4), (0, 3)) for first in range(0, 32, 4)]
    assert merge_slices(shards) == [((0, 32), (0, 3))]
    assert merge_slices([*shards[:2], *shards[4:]]) == [((0, 8), (0, 3)), ((16, 32), (0, 3))]
    assert merge_slices([((0, 3), (2, 4)), ((0, 3), (0, 2))]) == [((0, 3), (0, 4))]
    assert merge_slices([(), ()]) == [()]
    assert merge_slices([((2, 2),)]) == []


@given(st.data())
def test_what_groups_cover_is_divided_by_who_covers_it(data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=2))
    groups = {name: data.draw(st.lists(random_slices(shape), max_size=3)) for name in range(3)}
    parts = divide(groups)
    for name, own in groups.items():
        found = mask(shape, [one for one, names in parts if name in names])
        np.testing.assert_array_equal(found, mask(shape, own) > 0)
    assert mask(shape, [one for one, _ in parts]).max(initial=0) <= 1


@settings(max_examples=150, deadline=None)
@given(data=st.data(), held=holdings(), transfer_bytes=st.sampled_from([40, 1 << 20]))
def test_every_needed_element_travels_once_and_nothing_else(data, held, transfer_bytes):
    """The exchange simulated: each node's memory is what it wrote, and what each hop of a transfer brings."""
    workers = data.draw(reads(len(held)))
    written = []
    for regions in held:
        written.append({(name, tuple((part.start, part.stop) for part in region)): 0 for name, region in regions})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "TRANSFER_BYTES", transfer_bytes)
        transfers = plan_sync(written, INFOS, [merge_required(json.loads(json.dumps(node))) for node in workers])
    values = tensors(1)
    memory = [{name: np.zeros_like(values[name]) for name in SHAPES} for _ in held]
    counts = [{name: np.zeros(shape, np.int64) for name, shape in SHAPES.items()} for _ in held]
    own = [{name: np.zeros(shape, bool) for name, shape in SHAPES.items()} for _ in held]
    for node, regions in enumerate(held):
        for name, region in regions:
            memory[node][name][(*region, ...)] = values[name][(*region, ...)]
            own[node][name][(*region, ...)] = True
    for transfer in transfers:
        part = slices(transfer.slice)
        array = values[transfer.name]
        assert array[part].nbytes <= max(transfer_bytes, np.atleast_1d(array)[:1].nbytes)
        for source, target in itertools.pairwise(transfer.nodes):
            assert own[source][transfer.name][part].all() or counts[source][transfer.name][part].all()
            memory[target][transfer.name][part] = memory[source][transfer.name][part]
            counts[target][transfer.name][part] += 1
    for node, needed in enumerate(map(is_needed, workers)):
        for name, array in values.items():
            np.testing.assert_array_equal(counts[node][name], needed[name] & ~own[node][name])
            assert memory[node][name][needed[name]].tobytes() == array[needed[name]].tobytes()
        sent = sum(one.num_elements * ELEMENT_BYTES[one.name] for one in transfers if node in one.nodes[:-1])
        assert sent <= sum(info.size_bytes for info in INFOS)


def test_nodes_that_need_the_same_get_it_along_a_chain():
    written = [{("matrix", ((0, 12), (0, 10))): 0}, {}, {}, {}]
    rows, columns = ((0, 6), (0, 10)), ((0, 12), (0, 5))
    transfers = plan_sync(written, INFOS, [{}, {"matrix": [rows]}, {"matrix": [columns]}, {"matrix": [rows]}])
    assert [(transfer.slice, transfer.nodes) for transfer in transfers] == [
        (((0, 6), (0, 5)), (0, 1, 2, 3)),
        (((0, 6), (5, 10)), (0, 1, 3)),
        (((6, 12), (0, 5)), (0, 2)),
    ]


class PartialNodes(Nodes):
    """Buffers of nodes whose servers do not need everything."""

    def __init__(self, held, needed):
        super().__init__(held)
        self.needed = needed

    def publish(self, version, values):
        for buffer, regions in zip(self.buffers, self.held):
            buffer.begin(version)
            for name, region in regions:
                buffer.write(name, values[name][(*region, ...)], region)
        written = [sums_of(buffer.written()) for buffer in self.buffers]
        transfers = plan_sync(written, self.infos, self.needed)
        addresses = {node: transport.address for node, transport in enumerate(self.transports)}
        if version == 1:
            self.on_all(lambda transport: transport.connect(transfers, addresses, TOKEN))
        expected = {key: value for one in written for key, value in one.items()}
        for node, (buffer, own) in enumerate(zip(self.buffers, written)):
            expected |= sum_sent(buffer, transfers, node, own)
        for node, (found, own) in enumerate(zip(self.on_all(lambda transport: transport.sync(version)), written)):
            check_received(found, expected, self.infos, node)
            came = {key: expected[key] for key in found}
            self.buffers[node].commit(written_of({**own, **came}), self.needed[node])
        return transfers


@settings(max_examples=12, deadline=None)
@given(data=st.data(), held=holdings(), transfer_bytes=st.sampled_from([40, 1 << 20]))
def test_buffers_get_what_their_servers_need_over_connections(data, held, transfer_bytes):
    workers = data.draw(reads(len(held)))
    needed = [merge_required(node) for node in workers]
    with pytest.MonkeyPatch.context() as patch, PartialNodes(held, needed) as nodes:
        patch.setattr(planning, "TRANSFER_BYTES", transfer_bytes)
        patch.setattr(tcp, "NUM_STREAMS", 2)
        for buffer in nodes.buffers:
            for _, array in zip(INFOS, buffer._views):
                array[...] = np.full(1, 0x55, np.uint8).repeat(array.itemsize).view(array.dtype)[0]
        for version in (1, 2):
            values = tensors(version)
            nodes.publish(version, values)
            for buffer, own, wanted in zip(nodes.buffers, held, map(is_needed, workers)):
                with WeightBuffer.attach(buffer.path) as reader:
                    reader.verify(version)
                    for one in workers[nodes.buffers.index(buffer)]:
                        reader.require(version, one)
                    parts = reader.slices(version)
                    for name, _, array in reader.tensors(version):
                        there = wanted[name].copy()
                        for region in (region for other, region in own if other == name):
                            there[(*region, ...)] = True
                        np.testing.assert_array_equal(mask(array.shape, parts[name]), there)
                        assert array[there].tobytes() == values[name][there].tobytes()
                        assert set(array[~there].tobytes()) <= {0x55}  # nothing came that nobody needs


HALF = {"matrix": [((0, 6), (0, 10))], "vector": [((2, 5),)], "scalar": None}


def test_a_needed_part_that_did_not_come_is_named():
    with WeightBuffer.create(INFOS) as buffer:
        buffer.begin(1)
        values = tensors(1)
        buffer.write("matrix", values["matrix"][:5], (slice(0, 5),))
        buffer.write("vector", values["vector"][1:8], (slice(1, 8),))
        with pytest.raises(WeightBufferError, match=r"lacks some of \(\(0, 6\), \(0, 10\)\) of tensor 'matrix'"):
            buffer.commit(required=HALF)
        assert buffer.version is None
        buffer.write("matrix", values["matrix"][5:7], (slice(5, 7),))
        with pytest.raises(WeightBufferError, match="'scalar'"):
            buffer.commit(required=HALF)
        buffer.write("scalar", values["scalar"])
        buffer.commit(required=HALF)
        buffer.require(1, HALF)
        with pytest.raises(WeightBufferError, match="of tensor 'half', which is read"):
            buffer.require(1, {**HALF, "half": None})
        buffer.begin(2)
        buffer.write("matrix", values["matrix"])
        buffer.write("matrix", values["matrix"][:1], (slice(0, 1),))
        with pytest.raises(WeightBufferError, match="'matrix' was written twice"):
            buffer.commit(required=HALF)


def test_a_buffer_notices_changes_where_it_has_parts_and_is_whole_again_afterwards():
    values = tensors(1)
    with WeightBuffer.create(INFOS) as buffer, WeightBuffer.attach(buffer.path) as reader:
        buffer.begin(1)
        buffer.write("matrix", values["matrix"][:6, 2:], (slice(0, 6), slice(2, 10)))
        buffer.commit(required={"matrix": [((0, 6), (3, 10))]})
        buffer.view("matrix", ((6, 12), (0, 10)))[...] = 7
        buffer.view("vector", ((0, 9),))[...] = 7
        reader.verify(1)
        assert reader.slices(1) == {"matrix": [((0, 6), (2, 10))], "half": [], "vector": [], "scalar": []}
        buffer.view("matrix", ((5, 6), (9, 10))).view(np.uint32)[...] ^= 1
        with pytest.raises(WeightBufferError, match="tensor 'matrix' of weights version 1 changed"):
            reader.verify(1)
        buffer.begin(2)
        for name, array in values.items():
            buffer.write(name, array)
        buffer.commit()
        reader.verify(2)
        assert reader.slices(2) is None
        reader.require(2, dict.fromkeys(values))


def test_a_slice_that_changed_before_a_part_of_it_was_sent_is_named():
    with PartialNodes([WHOLE, []], [{}, HALF]) as nodes:
        nodes.publish(1, tensors(1))
        write = WeightBuffer.written

        def late(buffer):
            if buffer is nodes.buffers[0]:
                buffer.view("matrix", ((11, 12), (9, 10)))[...] = 3.0  # not in the part that travels
            return write(buffer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightBuffer, "written", late)
            with pytest.raises(RunFailure, match="tensor 'matrix' changed on node 0 after it was written"):
                nodes.publish(2, tensors(2))
        written = nodes.buffers[0].written()
        assert sums_of(written_of(sums_of(written))) == sums_of(written)


def test_what_workers_read_is_merged_and_all_wins():
    workers = [{"a": [[[0, 4]]], "b": None, "c": []}, {"a": [[[2, 6]]], "b": [[[0, 1]]]}]
    assert merge_required(workers) == {"a": [((0, 6),)], "b": None, "c": []}
