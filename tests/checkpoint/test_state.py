"""state.json and its arrays: round trip, and every other form refused."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import make_sample

from mindrlhf.checkpoint.algorithm_state import (
    AlgorithmState,
    GuardsState,
    KlState,
    LearningState,
    PairAccuracy,
    SampleTotals,
)
from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.checkpoint.state import (
    ARRAYS_NAME,
    STATE_NAME,
    RunState,
    pack_state,
    read_progress,
    read_state,
    write_state,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=3)
counts, floats = st.integers(0, 2**40), st.floats(allow_nan=False)
algorithms = st.builds(
    AlgorithmState,
    st.none() | st.text(),
    st.none() | st.builds(SampleTotals, counts, counts, counts, counts),
    st.none() | st.builds(GuardsState, counts),
    st.none() | st.builds(KlState, floats),
    *[st.none() | st.builds(PairAccuracy, st.text(), counts, st.lists(floats, max_size=4))] * 2,
    num_replaced=st.none() | counts,
    free_places=st.none() | st.lists(st.lists(counts, max_size=2), max_size=2),
    learning=st.none()
    | st.builds(
        LearningState,
        st.dictionaries(st.text(), st.integers(-1, 2**40), max_size=2),
        st.dictionaries(st.text(), floats, max_size=2),
        st.dictionaries(st.text(), st.text(), max_size=2),
    ),
)
states = st.builds(
    RunState,
    *(counts, counts, counts, json_objects, json_objects, algorithms, json_objects),
)


def make_state(**changes):
    state = RunState(step=7, weights_version=8, seed=3, prompt_stream={}, config={"run": {"seed": 3}})
    return dataclasses.replace(state, **changes)


@settings(max_examples=60)
@given(state=states, notes=st.lists(json_values, max_size=3))
def test_states_come_back_as_they_were(tmp_path_factory, state, notes):
    directory = tmp_path_factory.mktemp("state")
    write_state(directory, pack_state(state, {"notes": notes}))
    assert read_state(directory) == state
    assert read_progress(directory) == {"notes": notes}


def test_records_come_back_with_their_arrays_and_a_state_without_them_has_no_file(tmp_path):
    write_state(tmp_path, pack_state(make_state(), {"leftover": []}))
    assert not (tmp_path / ARRAYS_NAME).exists()
    samples = [make_sample([1, 2], [3, 4], 0.5, {"length": 0.5}, response=text) for text in "ab"]
    write_state(tmp_path, pack_state(make_state(), {"leftover": samples}))
    assert read_state(tmp_path) == make_state()
    found = read_progress(tmp_path)["leftover"]
    assert [sample.response_text for sample in found] == ["a", "b"]
    np.testing.assert_array_equal(found[1].completion.token_ids, np.array([3, 4], np.int32), strict=True)


def test_tuples_become_lists_and_the_values_of_a_run_in_trouble_survive(tmp_path):
    troubled = {"lengths": (8, 16), "loss": math.nan, "best": -math.inf}
    write_state(tmp_path, pack_state(make_state(config=troubled)))
    state = read_state(tmp_path)
    assert state.config["lengths"] == [8, 16]
    assert math.isnan(state.config["loss"]) and state.config["best"] == -math.inf


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"a": {"b": [1, {2}]}}, r"state\.config\.a\.b\.1: set cannot be encoded"),
        ({"a": {1: 2}}, r"state\.config\.a: dict cannot be encoded"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_path(extra, message):
    with pytest.raises(TypeError, match=message):
        pack_state(make_state(config=extra))


def remove(name):
    return lambda values: values["state"]["$record"][1].pop(name)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda values: values.update(format_version=2), "format version 2, this release reads 1"),
        (lambda values: values.pop("format_version"), "format version None"),
        (lambda values: values["state"]["$record"][1].update(step="7"), "RunState.step is of type str, not int"),
        (lambda values: values["state"]["$record"][1].update(step=True), "RunState.step is True, not int"),
        (lambda values: values["state"]["$record"][1].update(prompt_stream=[]), "RunState.prompt_stream is of type"),
        (lambda values: values["state"]["$record"][1].update(momentum=1), "RunState has no field 'momentum'"),
        *((remove(field.name), f"RunState lacks '{field.name}'") for field in dataclasses.fields(RunState)),
        (lambda values: values.update(state={"step": 7}), "holds no state"),
        (lambda values: values.pop("state"), "holds no state"),
    ],
)
def test_other_contents_are_errors_that_name_the_file(tmp_path, change, message):
    write_state(tmp_path, pack_state(make_state()))
    path = tmp_path / STATE_NAME
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(DamagedDirectory, match=message) as error:
        read_state(tmp_path)
    assert str(path) in str(error.value)


def test_missing_files_and_arrays_are_errors_that_name_the_file(tmp_path):
    with pytest.raises(DamagedDirectory, match=r"state\.json cannot be read"):
        read_state(tmp_path)
    write_state(tmp_path, pack_state(make_state(), {"ids": np.arange(3)}))
    (tmp_path / ARRAYS_NAME).unlink()
    with pytest.raises(DamagedDirectory, match=r"state\.json is damaged: .*0:progress\.ids"):
        read_progress(tmp_path)
