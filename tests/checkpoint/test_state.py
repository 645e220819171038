"""state.json: round trip, and every other form refused."""

import contextlib
import dataclasses
import json
import math
import shutil
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.checkpoint.manifest import EVALUATIONS_NAME, DamagedDirectory, verify
from mindrlhf.checkpoint.state import STATE_NAME, EvaluationFile, RunState, read_state, write_state
from mindrlhf.checkpoint.store import CheckpointStore
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


def test_evaluations_stand_in_the_state_of_checkpoints_of_older_releases(tmp_path):
    write_state(tmp_path, make_state())
    path, evaluations = tmp_path / STATE_NAME, [{"step": 0, "rewards": {"v": [[0.5, math.inf]]}}]
    path.write_text(json.dumps({**json.loads(path.read_text()), "evaluations": evaluations}))
    assert read_state(tmp_path).evaluations == evaluations


def write_checkpoint(store, file, step, number, *, fails=False):
    """Write one with so many evaluations; what fails does so after they were written."""
    evaluations = [{"step": index, "scores": [index / 7] * 500} for index in range(number)]
    checksums = {}
    with contextlib.suppress(RuntimeError), store.writing(step, 0, checksums=checksums) as directory:
        checksums.update(write_state(directory, make_state(step=step, evaluations=evaluations), file))
        if fails:
            raise RuntimeError
    return evaluations


def test_what_is_known_of_evaluations_is_written_once(tmp_path):
    store, file = CheckpointStore(tmp_path, keep_last=5), EvaluationFile()
    written = {step: write_checkpoint(store, file, step, number) for step, number in ((1, 0), (2, 2), (3, 2), (4, 9))}
    write_checkpoint(store, file, 5, 11, fails=True)
    written[6] = write_checkpoint(store, file, 6, 12)
    assert store.steps() == [1, 2, 3, 4, 6]
    for step, evaluations in written.items():
        verify(store.path(step))
        assert read_state(store.path(step)).evaluations == evaluations
        assert (store.path(step) / STATE_NAME).stat().st_size < 1000
    files = {store.path(step) / EVALUATIONS_NAME for step in (2, 3, 4, 6)}
    assert len({path.stat().st_ino for path in files}) == 1
    assert not (store.path(1) / EVALUATIONS_NAME).exists()


def test_evaluations_are_written_again_where_no_file_can_be_shared(tmp_path, monkeypatch):
    store, file = CheckpointStore(tmp_path, keep_last=1), EvaluationFile()
    write_checkpoint(store, file, 1, 3)
    shutil.rmtree(store.path(1))  # the file has no name any more
    second = write_checkpoint(store, file, 2, 4)
    monkeypatch.setattr("os.link", mock.Mock(side_effect=OSError))
    fourth = write_checkpoint(CheckpointStore(tmp_path, keep_last=2), file, 4, 5)
    other = write_checkpoint(CheckpointStore(tmp_path, keep_last=3), EvaluationFile(), 5, 2)  # a run that went back
    for step, evaluations in ((2, second), (4, fourth), (5, other)):
        verify(store.path(step))
        assert read_state(store.path(step)).evaluations == evaluations


@pytest.mark.parametrize("place", [10, -3])
def test_damage_in_the_evaluations_of_a_checkpoint_is_found_and_what_comes_later_is_not_its_own(tmp_path, place):
    store, file = CheckpointStore(tmp_path, keep_last=5), EvaluationFile()
    write_checkpoint(store, file, 1, 3)
    size = (store.path(1) / EVALUATIONS_NAME).stat().st_size
    write_checkpoint(store, file, 2, 6)
    path = store.path(2) / EVALUATIONS_NAME
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedDirectory, match=r"evaluations\.jsonl is damaged"):
        verify(store.path(2))
    if place < 0:
        verify(store.path(1))
        assert len(read_state(store.path(1)).evaluations) == 3
    path.write_bytes(content[: size - 9])
    with pytest.raises(DamagedDirectory, match=f"evaluations.jsonl has {size - 9} bytes, not {size}"):
        verify(store.path(1))
    with pytest.raises(DamagedDirectory, match="evaluations, not 3"):
        read_state(store.path(1))


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
