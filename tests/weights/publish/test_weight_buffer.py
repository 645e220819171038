import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer, WeightBufferError

INFOS = [
    TensorInfo("embed", "float32", (10, 6)),
    TensorInfo("norm", "bfloat16", (7,)),
    TensorInfo("scale", "float32", ()),
]
RANDOM = np.random.default_rng(0)
ARRAYS = {
    "embed": RANDOM.normal(size=(10, 6)).astype(np.float32),
    "norm": RANDOM.integers(0, 2**16, 7, dtype=np.uint16),
    "scale": np.array(1.5, np.float32),
}


@pytest.fixture
def buffer():
    with WeightBuffer.create(INFOS) as buffer:
        yield buffer


def fill(buffer, version):
    buffer.begin(version)
    for name, array in ARRAYS.items():
        buffer.write(name, array)


def test_a_reader_sees_what_was_written(buffer):
    fill(buffer, 3)
    buffer.commit()
    with WeightBuffer.attach(buffer.path) as reader:
        assert reader.infos == tuple(INFOS)
        assert reader.version == 3
        reader.verify(3)
        for name, dtype, array in reader.tensors(3):
            assert dtype == ("bfloat16" if name == "norm" else "float32")
            assert array.shape == ARRAYS[name].shape
            np.testing.assert_array_equal(array, ARRAYS[name])
            assert array.ctypes.data % 64 == 0
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_nothing_is_visible_between_begin_and_commit(buffer):
    fill(buffer, 1)
    assert buffer.version is None
    buffer.commit()
    buffer.begin(2)
    with pytest.raises(WeightBufferError, match="version 1 was asked for; the buffer .* holds no complete version"):
        next(buffer.tensors(1))


def test_another_version_is_refused(buffer):
    fill(buffer, 1)
    buffer.commit()
    with pytest.raises(WeightBufferError, match="version 2 was asked for; the buffer .* holds version 1"):
        buffer.verify(2)


WRITER = """
import json, sys
import numpy as np
from mindrlhf.weights.publish.buffer import WeightBuffer
path, rank = sys.argv[1], int(sys.argv[2])
with WeightBuffer.attach(path, writable=True) as buffer:
    buffer.begin(5)
    whole = np.arange(60, dtype=np.float32).reshape(10, 6)
    columns = slice(3 * rank, 3 * rank + 3)
    buffer.write("embed", whole[:, columns], (slice(None), columns))
    if rank == 0:
        buffer.write("norm", np.arange(7, dtype=np.uint16))
    else:
        buffer.write("scale", np.array(2.0, np.float32))
    print(json.dumps(buffer.written()))
"""


def test_processes_write_their_own_shards(buffer):
    buffer.begin(5)
    writers = [
        subprocess.run([sys.executable, "-c", WRITER, buffer.path, rank], capture_output=True, timeout=60, check=True)
        for rank in "01"
    ]
    buffer.commit([one for writer in writers for one in json.loads(writer.stdout)])
    buffer.verify(5)
    tensors = {name: array for name, _, array in buffer.tensors(5)}
    np.testing.assert_array_equal(tensors["embed"], np.arange(60).reshape(10, 6))
    np.testing.assert_array_equal(tensors["norm"], np.arange(7))
    assert tensors["scale"] == 2.0


@settings(max_examples=40)
@given(st.data())
def test_any_partition_into_shards_is_accepted_and_any_missing_or_doubled_part_is_not(data):
    rows = sorted(data.draw(st.sets(st.integers(1, 11), max_size=3)) | {0, 12})
    columns = sorted(data.draw(st.sets(st.integers(1, 8), max_size=3)) | {0, 9})
    regions = [
        (slice(top, bottom), slice(left, right))
        for top, bottom in zip(rows, rows[1:])
        for left, right in zip(columns, columns[1:])
    ]
    name = data.draw(st.sampled_from(["float32", "bfloat16", "float64"]))
    dtype = TensorInfo("w", name, ()).numpy_dtype
    array = np.random.default_rng(1).integers(0, 2**16, (12, 9)).astype(dtype)
    with WeightBuffer.create([TensorInfo("w", name, (12, 9))]) as buffer:
        buffer.begin(0)
        for region in data.draw(st.permutations(regions)):
            buffer.write("w", array[region], region)
        buffer.commit()
        buffer.verify(0)
        np.testing.assert_array_equal(next(buffer.tensors(0))[2], array)

        odd_one = data.draw(st.sampled_from(regions))
        buffer.begin(1)
        for region in regions:
            if region != odd_one:
                buffer.write("w", array[region], region)
        with pytest.raises(WeightBufferError, match="'w' has 108 elements but"):
            buffer.commit()

        buffer.begin(2)
        for region in [*regions, odd_one]:
            buffer.write("w", array[region], region)
        with pytest.raises(WeightBufferError, match="'w' was written twice"):
            buffer.commit()
        assert buffer.version is None


def test_an_overlap_does_not_make_up_for_a_gap_of_its_size(buffer):
    fill(buffer, 0)
    buffer.begin(0)
    buffer.write("norm", ARRAYS["norm"])
    buffer.write("scale", ARRAYS["scale"])
    buffer.write("embed", ARRAYS["embed"][:5], (slice(0, 5),))
    buffer.write("embed", ARRAYS["embed"][:5], (slice(4, 9),))
    with pytest.raises(WeightBufferError, match="'embed' was written twice"):
        buffer.commit()


def test_a_tensor_nobody_wrote_is_named(buffer):
    buffer.begin(0)
    buffer.write("embed", ARRAYS["embed"])
    with pytest.raises(WeightBufferError, match="'norm' has 7 elements but 0 were written"):
        buffer.commit()


@pytest.mark.parametrize(
    "name, array, region, message",
    [
        ("embed", np.zeros((10, 6)), None, "'embed' is float32 .* given as float64"),
        ("norm", np.zeros(7), None, "'norm' is bfloat16 .as uint16"),
        ("embed", np.zeros((6, 10), np.float32), None, r"'embed': shape \(6, 10\)"),
        ("embed", np.zeros((10, 3), np.float32), (slice(None), slice(0, 4)), r"'embed': shape \(10, 3\)"),
        ("embed", np.zeros((5, 6), np.float32), (slice(0, 10, 2),), "step 1, not 2"),
        ("embed", np.zeros((10, 6), np.float32), (slice(None),) * 3, "2 axes, its index 3"),
        ("head", np.zeros(1, np.float32), None, "no tensor 'head'"),
    ],
)
def test_a_wrong_write_is_refused(buffer, name, array, region, message):
    buffer.begin(0)
    with pytest.raises(WeightBufferError, match=message):
        buffer.write(name, array, region)


@pytest.mark.parametrize("infos", [[INFOS[0], INFOS[0]], [TensorInfo("w", "int8", (2,))]])
def test_a_wrong_manifest_is_refused(infos):
    with pytest.raises(WeightBufferError, match="two tensors of one name|'w' has dtype int8"):
        WeightBuffer.create(infos)


def test_a_late_write_is_noticed(buffer):
    fill(buffer, 4)
    buffer.commit()
    intruder = WeightBuffer.attach(buffer.path, writable=True)
    next(array for name, _, array in intruder.tensors(4) if name == "embed")[3, 3] += 1
    with pytest.raises(WeightBufferError, match="'embed' of weights version 4 changed"):
        buffer.verify(4)


def test_tensors_larger_than_a_piece_and_not_contiguous():
    array = np.random.default_rng(2).normal(size=(3000, 301)).astype(np.float32)
    with WeightBuffer.create([TensorInfo("w", "float32", array.shape)]) as buffer:
        for version, source in enumerate([array, np.asfortranarray(array)]):
            buffer.begin(version)
            buffer.write("w", source)
            buffer.commit()
            buffer.verify(version)
            np.testing.assert_array_equal(next(buffer.tensors(version))[2], array)


CREATOR = """
import sys, time
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer
buffer = WeightBuffer.create([TensorInfo("w", "float32", (1000,))])
print(buffer.path, flush=True)
time.sleep(60)
"""


def test_a_killed_creator_leaves_nothing():
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", CREATOR], stdout=subprocess.PIPE, text=True) as creator:
        path = creator.stdout.readline().strip()
        reader = WeightBuffer.attach(path)
        creator.send_signal(signal.SIGKILL)
    assert reader.size_bytes == 4000  # those who hold it may go on
    reader.close()
    deadline = time.monotonic() + 20
    while not set(os.listdir("/dev/shm")) <= before:  # what tests beside this one use goes within seconds
        assert time.monotonic() < deadline, set(os.listdir("/dev/shm")) - before
        time.sleep(0.2)
    with pytest.raises(WeightBufferError, match="cannot open the weight buffer"):
        WeightBuffer.attach(path)


def test_a_file_that_is_no_buffer_is_refused(tmp_path):
    path = tmp_path / "noise"
    path.write_bytes(bytes(4096))
    with pytest.raises(WeightBufferError, match="not a weight buffer"):
        WeightBuffer.attach(str(path))
