"""Arrays through a safetensors file, and the file against the safetensors library."""

import os

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from safetensors.numpy import load_file

from mindrlhf.errors import UserError
from mindrlhf.weights.array_file import ArrayFile, save_arrays
from mindrlhf.weights.tensors import TensorInfo, array_infos

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"]


def same_bits(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


names = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
any_array = st.sampled_from(DTYPES).flatmap(
    lambda dtype: st_numpy.arrays(dtype, st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@settings(max_examples=80)
@given(arrays=st.dictionaries(names, any_array, max_size=6), order=st.randoms(use_true_random=False))
def test_arrays_come_back_bit_for_bit_in_any_order_of_writing(tmp_path_factory, arrays, order):
    path = tmp_path_factory.mktemp("arrays") / "arrays.safetensors"
    shuffled = list(arrays.items())
    order.shuffle(shuffled)
    checksum = save_arrays(path, iter(shuffled), array_infos(arrays))
    in_order = sorted(arrays, key=lambda name: -arrays[name].itemsize)
    positions = [in_order.index(name) for name, array in shuffled if array.size]
    assert (checksum is not None) == (positions == sorted(positions))
    assert checksum in (None, xxhash.xxh3_64_hexdigest(path.read_bytes()))
    assert os.listdir(path.parent) == [path.name]
    loaded = ArrayFile(path)
    assert set(loaded) == set(arrays)
    assert all(same_bits(loaded[name], array) and loaded.shape(name) == array.shape for name, array in arrays.items())
    library = load_file(path)
    assert set(library) == set(arrays)
    assert all(same_bits(library[name], array) for name, array in arrays.items())


def test_views_that_are_not_contiguous_are_written_as_they_look(tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {"transposed": base.T, "strided": base[:, ::2], "reversed": base[::-1]}
    save_arrays(tmp_path / "a", arrays.items(), array_infos(arrays))
    loaded = ArrayFile(tmp_path / "a")
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_arrays_are_drawn_one_at_a_time_and_read_as_copies(tmp_path):
    def draw():
        buffer = np.zeros(3, np.int32)
        for number in (1, 2):
            buffer[:] = number
            yield f"array {number}", buffer

    infos = [TensorInfo(f"array {number}", "int32", (3,)) for number in (1, 2)]
    save_arrays(tmp_path / "a", draw(), infos)
    loaded = ArrayFile(tmp_path / "a")
    loaded["array 1"][:] = 7
    assert {name: loaded[name].tolist() for name in loaded} == {"array 1": [1, 1, 1], "array 2": [2, 2, 2]}
    with pytest.raises(KeyError):
        loaded["array 3"]


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({}, "1 arrays did not come, 'a' first"),
        ({"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}, "'b' is not in the infos"),
        ({"a": np.zeros(2, np.float64)}, "comes as float64, not float32"),
        ({"a": np.zeros((2, 1), np.float32)}, r"shape \(2, 1\), not \(2,\)"),
    ],
)
def test_anything_but_the_infos_fails_and_leaves_the_old_file(tmp_path, arrays, message):
    infos = [TensorInfo("a", "float32", (2,))]
    save_arrays(tmp_path / "file", [("a", np.ones(2, np.float32))], infos)
    with pytest.raises(AssertionError, match=message):
        save_arrays(tmp_path / "file", arrays.items(), infos)
    assert os.listdir(tmp_path) == ["file"]
    assert ArrayFile(tmp_path / "file")["a"].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [">f4", "c8", "U3", "O"])
def test_dtypes_the_format_does_not_have_are_refused(tmp_path, dtype):
    with pytest.raises(AssertionError, match="only little-endian numbers"):
        save_arrays(tmp_path / "a", [], array_infos({"a": np.zeros(2, dtype)}))


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"optimizer\.safetensors cannot be read"):
        ArrayFile(tmp_path / "optimizer.safetensors")


@given(cut=st.integers(0, 200), position=st.integers(0, 199), byte=st.integers(0, 255))
def test_a_damaged_file_loads_or_is_one_line(tmp_path_factory, cut, position, byte):
    path = tmp_path_factory.mktemp("damaged") / "file"
    arrays = {"exp_avg.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "step": np.array([3], np.int32)}
    save_arrays(path, arrays.items(), array_infos(arrays))
    data = bytearray(path.read_bytes())
    data[position % len(data)] = byte
    path.write_bytes(data[: len(data) - cut] if cut < 100 else data)
    try:
        loaded = ArrayFile(path)
        assert [loaded[name].size for name in loaded]
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert cut in (0, *range(100, 201)), "a file that is cut short can not be whole"
