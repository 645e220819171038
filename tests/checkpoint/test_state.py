"""state.json: round trip, and every other form refused."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.checkpoint.manifest import DamagedDirectory
from mindrlhf.checkpoint.state import STATE_NAME, RunState, read_state, write_state
from mindrlhf.data.stream import PromptStream

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=3)
counts = st.integers(0, 2**40)
states = st.builds(
    RunState,
    *(counts, counts, counts, json_objects, json_objects, st.lists(json_values, max_size=3), json_objects),
    st.lists(json_values, max_size=3),
)


def make_state(**changes):
    state = RunState(step=7, weights_version=8, seed=3, prompt_stream={}, config={"run": {"seed": 3}}, evaluations=[])
    return dataclasses.replace(state, **changes)


@settings(max_examples=60, deadline=None)
@given(state=states)
def test_states_come_back_as_they_were(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("state")
    write_state(directory, state)
    assert read_state(directory) == state


def test_a_prompt_stream_continues_from_the_state(tmp_path):
    stream, other = PromptStream(10, seed=5), PromptStream(10, seed=5)
    stream.next(13)
    write_state(tmp_path, make_state(prompt_stream=stream.state()))
    other.restore(read_state(tmp_path).prompt_stream)
    assert other.next(20) == stream.next(20)


def test_tuples_become_lists_and_the_values_of_a_run_in_trouble_survive(tmp_path):
    troubled = {"loss": math.nan, "best": -math.inf}
    write_state(tmp_path, make_state(config={"lengths": (8, 16)}, algorithm_state=troubled))
    state = read_state(tmp_path)
    assert state.config == {"lengths": [8, 16]}
    assert math.isnan(state.algorithm_state["loss"]) and state.algorithm_state["best"] == -math.inf


@pytest.mark.parametrize(
    "extra, message",
    [
        ({"a": {"b": [1, {2}]}}, r"algorithm_state\.a\.b\[1\] is \{2\}: a set is no JSON value"),
        ({"a": {1: 2}}, r"algorithm_state\.a has the key 1"),
        ({"a": b"raw"}, "a bytes is no JSON value"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place(tmp_path, extra, message):
    with pytest.raises(TypeError, match=message):
        write_state(tmp_path, make_state(algorithm_state=extra))
    assert not (tmp_path / STATE_NAME).exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format_version": 1}, "format version 1, this release reads 2"),
        ({"format_version": None}, "format version None"),
        ({"step": -1}, "step is -1"),
        ({"step": True}, "step is True"),
        ({"step": "7"}, "step is '7'"),
        ({"prompt_stream": []}, r"prompt_stream is \[\]"),
        ({"evaluations": {}}, r"evaluations is \{\}"),
        ({"momentum": 1}, "'momentum' is missing or unknown"),
    ],
)
def test_other_contents_are_errors_that_name_the_file(tmp_path, change, message):
    write_state(tmp_path, make_state())
    path = tmp_path / STATE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DamagedDirectory, match=message) as error:
        read_state(tmp_path)
    assert str(path) in str(error.value)


def test_the_fingerprint_of_the_data_is_missing_in_checkpoints_of_older_releases(tmp_path):
    write_state(tmp_path, make_state(data={"train_file": {"checksum": "ab"}}))
    assert read_state(tmp_path).data == {"train_file": {"checksum": "ab"}}
    path = tmp_path / STATE_NAME
    values = json.loads(path.read_text())
    del values["data"]
    path.write_text(json.dumps(values))
    assert read_state(tmp_path).data == {}


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(RunState) if field.name not in ("data", "teachers")]
)
def test_a_missing_field_is_an_error(tmp_path, field):
    write_state(tmp_path, make_state())
    path = tmp_path / STATE_NAME
    values = json.loads(path.read_text())
    del values[field]
    path.write_text(json.dumps(values))
    with pytest.raises(DamagedDirectory, match=f"'{field}' is missing"):
        read_state(tmp_path)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DamagedDirectory, match=r"state\.json cannot be read"):
        read_state(tmp_path)
