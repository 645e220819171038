"""Buffers that hold the tensors of a model one bucket after the other, and buffers of a narrower dtype."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.weights.publish import buffer as buffer_module
from mindrlhf.weights.publish.buffer import (
    WeightBuffer,
    WeightBufferError,
    buffer_bytes,
    cut_into_buckets,
    size_of,
)
from mindrlhf.weights.tensors import TensorInfo

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=12)


def infos_of(shapes, dtype="float32"):
    return [TensorInfo(f"tensor_{place}", dtype, shape) for place, shape in enumerate(shapes)]


@given(SHAPES, st.integers(0, 2000))
def test_every_tensor_is_in_one_bucket_and_only_a_large_one_exceeds_its_size(shapes, bucket_bytes):
    infos = infos_of(shapes)
    buckets = cut_into_buckets(infos, bucket_bytes)
    assert [place for bucket in buckets for place in bucket] == list(range(len(infos)))
    assert all(len(bucket) for bucket in buckets)
    if bucket_bytes:
        assert all(size_of(bucket, infos) <= bucket_bytes or len(bucket) == 1 for bucket in buckets)
        # Greedy: the first of a bucket did not fit into the one before.
        for before, after in zip(buckets, buckets[1:]):
            assert size_of(range(before.start, after.start + 1), infos) > bucket_bytes
    else:
        assert len(buckets) == 1


@settings(max_examples=30)
@given(SHAPES, st.integers(0, 1000))
def test_a_reader_sees_every_tensor_of_every_version(shapes, bucket_bytes):
    infos = infos_of(shapes)
    with WeightBuffer.create(infos, bucket_bytes) as buffer, WeightBuffer.attach(buffer.path) as reader:
        assert reader.num_buckets == buffer.num_buckets == len(cut_into_buckets(infos, bucket_bytes))
        for version in (1, 2):
            values = {info.name: np.full(info.shape, place + version, np.float32) for place, info in enumerate(infos)}
            found = {}
            for bucket in range(buffer.num_buckets):
                buffer.begin(version, bucket)
                assert reader.version is None
                for name in filter(buffer.wants, values):
                    buffer.write(name, values[name])
                buffer.commit()
                reader.verify(version)
                assert (reader.version, reader.bucket) == (version, bucket)
                found |= {name: np.array(array) for name, _, array in reader.tensors(version)}
            assert found.keys() == values.keys()
            for name, array in found.items():
                np.testing.assert_array_equal(array, values[name])


@settings(max_examples=40)
@given(SHAPES, st.integers(1, 5), st.data())
def test_readers_that_share_the_memory_each_sum_other_tensors_and_together_all(shapes, num_shares, data):
    infos = infos_of(shapes)
    with WeightBuffer.create(infos) as buffer:
        buffer.begin(1)
        for info in infos:
            buffer.write(info.name, np.ones(info.shape, np.float32))
        buffer.commit()
        summed = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buffer_module, "sum_bits", lambda array: summed.append(array.ctypes.data) or 0)
            patch.setattr(buffer, "_checksums", np.zeros(len(infos), np.uint64))
            sizes = []
            for share in range(num_shares):
                before = len(summed)
                buffer.verify(1, share, num_shares)
                sizes.append(len(summed) - before)
        assert sum(sizes) == len(infos) and max(sizes) - min(sizes) <= 1
        full = [info.name for info in infos if info.num_elements]
        if not full:
            return
        broken = data.draw(st.sampled_from(full))
        buffer.view(broken, [[0, size] for size in buffer.info(broken).shape]).flat[0] = 2
        found = 0
        for share in range(num_shares):
            try:
                buffer.verify(1, share, num_shares)
            except WeightBufferError as error:
                assert f"'{broken}'" in str(error)
                found += 1
        assert found == 1


def test_the_memory_is_that_of_the_largest_bucket():
    infos = infos_of([(256,)] * 8)  # 1 KiB each
    for bucket_bytes, num_buckets, expected in ((0, 1, 8192), (4096, 2, 4096), (3 * 1024, 3, 3072), (100, 8, 1024)):
        assert buffer_bytes(infos, bucket_bytes) == expected
        with WeightBuffer.create(infos, bucket_bytes) as buffer:
            assert buffer.num_buckets == num_buckets
            views = [buffer.view(info.name, [[0, 256]]).ctypes.data for info in infos]
            assert max(views) - min(views) + 1024 == expected


def test_a_gap_in_a_bucket_is_named_and_nothing_is_kept_from_an_earlier_version():
    infos = infos_of([(4,), (4,), (48,)])
    with WeightBuffer.create(infos, 256) as buffer:
        assert buffer.num_buckets == 2
        for version in (1, 2):
            buffer.begin(version, 0)
            buffer.write("tensor_0", np.ones(4, np.float32))
            assert not buffer.wants("tensor_2")
            with pytest.raises(WeightBufferError, match="'tensor_1' has 4 elements but 0 were written"):
                buffer.commit()
            buffer.write("tensor_1", np.ones(4, np.float32))
            buffer.commit()


def nearest_bfloat16(values):
    """The bits of the nearest bfloat16 to each value, by distance in float64; of two as near the even one."""
    lower = values.view(np.uint32) & np.uint32(0xFFFF0000)
    upper = lower + np.uint32(0x10000)
    below, above = (np.abs(values.astype(np.float64) - bits.view(np.float32)) for bits in (lower, upper))
    takes_upper = (above < below) | ((above == below) & ((lower >> 16) % 2 == 1))
    return (np.where(takes_upper, upper, lower) >> 16).astype(np.uint16)


@pytest.mark.parametrize("shape", [(9,), (300, 1500)])
def test_float32_is_rounded_to_the_nearest(shape):
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    values.flat[:5] = [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40]  # the third and fourth lie between neighbours
    infos = [TensorInfo("brain", "bfloat16", shape), TensorInfo("half", "float16", shape)]
    with WeightBuffer.create(infos) as buffer:
        buffer.begin(1)
        for info in infos:
            buffer.write(info.name, values[:3], (slice(0, 3),))
            buffer.write(info.name, values[3:], (slice(3, None),))
        buffer.commit()
        buffer.verify(1)
        brain, half = (array for _, _, array in buffer.tensors(1))
        np.testing.assert_array_equal(brain, nearest_bfloat16(values))
        assert brain.flat[2] == 0x3F80 and brain.flat[3] == 0x3F82, "of two as near the even one"
        error = np.abs(half.astype(np.float64) - values)
        assert (error <= np.spacing(np.abs(half)).astype(np.float64) / 2).all()


def test_what_is_not_finite_stays_so():
    values = np.array([np.inf, -np.inf, np.nan, np.finfo(np.float32).max], np.float32)
    values.view(np.uint32)[2] = 0x7F800001  # whose upper half is that of infinity
    with WeightBuffer.create([TensorInfo("weight", "bfloat16", (4,))]) as buffer:
        buffer.begin(1)
        buffer.write("weight", values)
        buffer.commit()
        ((_, _, found),) = buffer.tensors(1)
        wide = (found.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(wide, [np.inf, -np.inf, np.nan, np.inf])


def test_no_other_dtype_is_taken_for_another():
    with WeightBuffer.create([TensorInfo("wide", "float32", (2,)), TensorInfo("narrow", "float16", (2,))]) as buffer:
        buffer.begin(1)
        for name, dtype in (("wide", np.float16), ("wide", np.uint16), ("narrow", np.uint16), ("narrow", np.float64)):
            with pytest.raises(WeightBufferError, match=f"tensor '{name}' is"):
                buffer.write(name, np.zeros(2, dtype))
