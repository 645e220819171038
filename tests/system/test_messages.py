"""Records as JSON and arrays and back, and what is refused; results of a replica's ranks."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from mindrlhf.data.packing import PackedRows
from mindrlhf.system.records import decode, encode, last, merge, merged_by, record, result
from mindrlhf.system.wire import ProtocolError
from mindrlhf.training import results as records
from mindrlhf.training.batch import Batch
from mindrlhf.weights.publish import publisher


@record
@dataclasses.dataclass(frozen=True)
class Inner:
    flag: bool
    text: str
    parts: dict[str, np.ndarray]


@record
@dataclasses.dataclass(frozen=True)
class Everything:
    number: int
    ratio: float
    array: np.ndarray
    inner: Inner
    inners: tuple[Inner, ...]
    pairs: tuple[tuple[int, ...], ...]
    anything: dict[str, Any]
    maybe: Inner | None
    files: tuple[bytes, ...]
    mixed: tuple[tuple[int, float], ...]
    counts: list[int]


shapes = arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
dtypes = st.sampled_from([np.float32, np.float64, np.int32, np.bool_])
arrays = dtypes.flatmap(lambda dtype: arrays_of.arrays(dtype, shapes))
names = st.text(max_size=6)  # dots, empty names and names of tags among them
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["$array", "$record", "$mapping", "x.0"]), inner)
    ),
    max_leaves=5,
)
inners = st.builds(Inner, st.booleans(), st.text(max_size=5), st.dictionaries(names, arrays, max_size=3))
everything = st.builds(
    Everything,
    st.integers(),
    st.floats(),
    arrays,
    inners,
    st.lists(inners, max_size=3).map(tuple),
    st.lists(st.lists(st.integers(), max_size=3).map(tuple), max_size=3).map(tuple),
    st.dictionaries(names, json_values, max_size=3),
    st.none() | inners,
    st.lists(st.binary(max_size=5), max_size=2).map(tuple),
    st.lists(st.tuples(st.integers(), st.floats()), max_size=2).map(tuple),
    st.lists(st.integers(), max_size=3),
)


def over_the_wire(values):
    """What another rank reads: the JSON text parsed again, the arrays copied."""
    encoded, found = encode(values)
    return decode(json.loads(json.dumps(encoded)), {name: array.copy() for name, array in found.items()})


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            assert_same(left, right)
    else:
        assert one == other or (one != one and other != other)


@given(values=st.dictionaries(names, everything | json_values | arrays, max_size=3))
def test_what_is_sent_arrives(values):
    assert_same(over_the_wire(values), values)


rows = st.builds(
    PackedRows,
    *[arrays_of.arrays(dtype, (2, 3)) for dtype in (np.int32, np.int32, np.int32, np.float32)],
    st.dictionaries(names, arrays_of.arrays(np.float32, (2, 3)), max_size=3),
)


places = st.lists(st.tuples(*[st.integers(0, 9)] * 4), max_size=2).map(tuple)
batches = st.builds(Batch, st.lists(rows, max_size=3).map(tuple), st.integers(0, 1000), places)


@given(sent=st.lists(batches, max_size=2))
@settings(max_examples=50)
def test_batches_arrive(sent):
    assert_same(over_the_wire({"batches": sent}), {"batches": sent})


INNER = Inner(True, "t", {"a": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[1].pop("text"), "Inner lacks 'text'"),
        (lambda content: content[1].update(more=1), "Inner has no field 'more'"),
        (lambda content: content.__setitem__(0, "Outer"), "there is no record 'Outer'"),
        (lambda content: content[1].update(flag=1), "Inner.flag is of type int, not bool"),
        (lambda content: content[1].update(text=None), "Inner.text is of type NoneType, not str"),
        (lambda content: content[1].update(parts=[]), "Inner.parts is of type list"),
        (lambda content: content[1].update(parts={"a": 1}), "Inner.parts.a is of type int, not ndarray"),
        (lambda content: content[1].update(parts={"$array": "nowhere"}), "'nowhere'"),
        (lambda content: content[1].update(parts={}), "nothing refers to its array '0:inner.parts.a'"),
        (lambda content: content.pop(), "unpack"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(change, message):
    encoded, found = encode({"inner": INNER})
    change(encoded["inner"]["$record"])
    with pytest.raises(ProtocolError, match=message):
        decode(encoded, found)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (dataclasses.replace(INNER, flag=1), "x.flag is of type int, not bool"),
        (dataclasses.replace(INNER, parts={"a": [1.0]}), "x.parts.a is of type list, not ndarray"),
        (np.float32(1.0), "x: float32 cannot be encoded"),
        ([{1: 2}], "x.0: dict cannot be encoded"),
        (object(), "x: object cannot be encoded"),
    ],
)
def test_what_is_of_another_type_is_not_sent(value, message):
    with pytest.raises(TypeError, match=message):
        encode({"x": value})


def test_an_array_that_occurs_twice_is_there_once():
    array = np.arange(3)
    encoded, found = encode({"a": array, "b": [array, array.copy()]})
    assert len(found) == 2
    decoded = decode(json.loads(json.dumps(encoded)), found)
    assert decoded["a"] is decoded["b"][0] and decoded["b"][1] is not array


def test_a_result_must_say_how_each_field_is_merged():
    with pytest.raises(TypeError, match="Careless.size does not say how the results .* are merged"):

        @result
        class Careless:
            total: float = merged_by(last)
            size: int

    with pytest.raises(TypeError, match="Heir.more does not say"):

        @result
        class Heir(records.UpdateResult):
            more: int = 0


def test_results_are_merged_field_by_field():
    process = [records.ProcessStatistics(recompiles, peak) for recompiles, peak in ((3, 1.0), (2, 5.0), (1, 2.0))]
    updates = [
        records.UpdateResult(np.array([rank, 1.0]), float(rank), process[rank], (np.array([rank]),))
        for rank in range(3)
    ]
    merged = merge(updates)
    assert (merged.statistics.tolist(), merged.grad_norm, merged.logprobs[0].tolist()) == ([2.0, 1.0], 2.0, [2])
    assert merged.process == records.ProcessStatistics(3, 5.0)
    assert merge([records.SavingState(True), records.SavingState(False)]) == records.SavingState(True)
    assert merge([records.SavingState(False), records.SavingState(False)]) == records.SavingState(False)
    checksums = [records.SavedShards({f"rank_{rank}": str(rank)}) for rank in range(2)]
    assert merge(checksums) == records.SavedShards({"rank_0": "0", "rank_1": "1"})
    written = [
        publisher.Published({"0": [["a", [[0, 2]], 2**63 + 5]]}),
        publisher.Published({"0": [["a", [[2, 4]], 2**63 + 6], ["b", [], 1]], "1": []}),
    ]
    assert merge(written).written == {
        "0": [["a", [[0, 2]], 2**63 + 5], ["a", [[2, 4]], 2**63 + 6], ["b", [], 1]],
        "1": [],
    }
    assert written[0].written["0"] == [["a", [[0, 2]], 2**63 + 5]], "the parts are left as they were"
    assert merge([None, None]) is None
    with pytest.raises(AssertionError, match="different things"):
        merge([None, records.SavingState(True)])
