"""Buckets cover every parameter once, in order, and none is much larger than its share."""

from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.layout.parameter_buckets import NUM_BUCKETS, buckets_of_equal_size


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=60))
def test_spans_are_a_partition_of_about_equal_parts(sizes):
    buckets = buckets_of_equal_size(sizes)
    assert [i for start, stop in buckets for i in range(start, stop)] == list(range(len(sizes)))
    assert all(start < stop for start, stop in buckets)
    assert len(buckets) <= NUM_BUCKETS
    # What the plan counts: the largest and an eighth of the whole bound every bucket.
    assert max(sum(sizes[start:stop]) for start, stop in buckets) <= max(sizes) + sum(sizes) / NUM_BUCKETS


def test_equal_parameters():
    assert buckets_of_equal_size([5] * 16) == tuple((i, i + 2) for i in range(0, 16, 2))
    assert buckets_of_equal_size([7]) == ((0, 1),)
