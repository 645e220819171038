"""Samples left over for the next step: round trip through a checkpoint, and damage."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mindrlhf.checkpoint.leftover import LEFTOVER_NAME, LeftoverSample, leftover_records, load_leftover, save_leftover
from mindrlhf.errors import UserError

arrays = st.one_of(
    hnp.arrays(np.int32, hnp.array_shapes(max_dims=2, max_side=4)),
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=4), elements=st.floats(-1, 1, width=32)),
)
samples = st.lists(
    st.builds(
        LeftoverSample,
        st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
        st.dictionaries(st.sampled_from(["prompt_ids", "response_ids", "a.b"]), arrays, max_size=3),
    ),
    max_size=4,
)


def through_json(values):
    return json.loads(json.dumps(values))


@settings(max_examples=40, deadline=None)
@given(leftover=samples)
def test_samples_come_back_as_they_were(tmp_path_factory, leftover):
    directory = tmp_path_factory.mktemp("leftover")
    save_leftover(directory, leftover)
    assert (directory / LEFTOVER_NAME).exists() == any(sample.arrays for sample in leftover)
    loaded = load_leftover(directory, through_json(leftover_records(leftover)))
    assert [sample.record for sample in loaded] == [sample.record for sample in leftover]
    for one, other in zip(loaded, leftover, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            assert array.dtype == other.arrays[name].dtype
            np.testing.assert_array_equal(array, other.arrays[name])


def test_a_missing_array_and_strange_records_are_damage(tmp_path):
    save_leftover(tmp_path, [LeftoverSample({}, {"ids": np.arange(3)})])
    with pytest.raises(UserError, match="lacks the array 'logprobs' of carried-over sample 0"):
        load_leftover(tmp_path, [{"record": {}, "arrays": ["ids", "logprobs"]}])
    for strange in ([{"arrays": []}], [{"record": {}, "arrays": 3}], ["text"]):
        with pytest.raises(UserError, match="carried-over samples are no records"):
            load_leftover(tmp_path, strange)
    (tmp_path / LEFTOVER_NAME).unlink()
    with pytest.raises(UserError, match=LEFTOVER_NAME):
        load_leftover(tmp_path, [{"record": {}, "arrays": ["ids"]}])
