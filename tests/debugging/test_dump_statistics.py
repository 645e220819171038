"""Descriptions of values against NumPy in float64."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mindrlhf.debugging.statistics import describe


@settings(max_examples=50, deadline=None)
@given(
    arrays.arrays(
        st.sampled_from([np.float32, np.float64, np.int32]),
        arrays.array_shapes(max_dims=3, max_side=5),
        elements=st.integers(-1000, 1000),
    )
)
def test_statistics_of_arrays(array):
    found = describe(array, "a")
    assert (found["type"], found["dtype"], found["shape"]) == ("numpy.ndarray", str(array.dtype), list(array.shape))
    values = [float(value) for value in array.ravel()]
    assert (found["Max"], found["Min"]) == (max(values), min(values))
    assert found["Mean"] == pytest.approx(sum(values) / len(values))
    assert found["Norm"] == pytest.approx(sum(value**2 for value in values) ** 0.5)
    assert int(found["crc32"], 16) == zlib.crc32(array.tobytes())


def test_a_large_value_does_not_overflow_the_norm():
    assert describe(np.full(4, 1e30, np.float32), "a")["Norm"] == pytest.approx(2e30, rel=1e-6)


def test_nested_values_are_saved_under_their_place():
    saved = {}

    def save(name, array):
        saved[name] = array
        return f"{name}.npy"

    value = {"x": [np.ones(2), (np.zeros(1), "text")], "y": None, "z": np.float32(0.5), "n": 3}
    found = describe(value, "v", save)
    assert sorted(saved) == ["v.x.0", "v.x.1.0"] and saved["v.x.0"] is value["x"][0]
    assert found["x"][0]["data_name"] == "v.x.0.npy"
    assert found["x"][1][1] == {"type": "str", "value": "text"}
    assert found["y"] == {"type": "NoneType", "value": None}
    assert found["z"] == {"type": "float", "value": 0.5} and found["n"] == {"type": "int", "value": 3}


def test_empty_and_boolean_arrays():
    empty = describe(np.zeros((0, 3)), "a")
    assert [empty[name] for name in ("Max", "Min", "Mean", "Norm")] == [None] * 4
    boolean = describe(np.array([True, False]), "a")
    assert (boolean["Max"], boolean["Min"], boolean["Mean"]) == (True, False, None)
