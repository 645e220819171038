"""Samples handed on from step to step: round trip through a checkpoint, and damage."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mindrlhf.checkpoint.carried import CARRIED_NAME, CarriedSample, carried_records, load_carried, save_carried
from mindrlhf.errors import UserError

arrays = st.one_of(
    hnp.arrays(np.int32, hnp.array_shapes(max_dims=2, max_side=4)),
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=2, max_side=4), elements=st.floats(-1, 1, width=32)),
)
samples = st.lists(
    st.builds(
        CarriedSample,
        st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3),
        st.dictionaries(st.sampled_from(["prompt_ids", "response_ids", "a.b"]), arrays, max_size=3),
    ),
    max_size=4,
)


def through_json(values):
    return json.loads(json.dumps(values))


@settings(max_examples=40, deadline=None)
@given(carried=samples)
def test_samples_come_back_as_they_were(tmp_path_factory, carried):
    directory = tmp_path_factory.mktemp("carried")
    save_carried(directory, carried)
    assert (directory / CARRIED_NAME).exists() == any(sample.arrays for sample in carried)
    loaded = load_carried(directory, through_json(carried_records(carried)))
    assert [sample.record for sample in loaded] == [sample.record for sample in carried]
    for one, other in zip(loaded, carried, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            assert array.dtype == other.arrays[name].dtype
            np.testing.assert_array_equal(array, other.arrays[name])


def test_a_missing_array_and_strange_records_are_damage(tmp_path):
    save_carried(tmp_path, [CarriedSample({}, {"ids": np.arange(3)})])
    with pytest.raises(UserError, match="lacks the array 'logprobs' of carried sample 0"):
        load_carried(tmp_path, [{"record": {}, "arrays": ["ids", "logprobs"]}])
    for strange in ([{"arrays": []}], [{"record": {}, "arrays": 3}], ["text"]):
        with pytest.raises(UserError, match="carried samples are no records"):
            load_carried(tmp_path, strange)
    (tmp_path / CARRIED_NAME).unlink()
    with pytest.raises(UserError, match=CARRIED_NAME):
        load_carried(tmp_path, [{"record": {}, "arrays": ["ids"]}])
