"""What changed between two versions of a tensor, bit for bit, whatever changed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.weights.publish.tcp import apply_changes, find_changes, may_repeat


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(1,), (3,), (7, 5), (4, 3, 2), (65536,), (65537,), (3, 50000)]),
    dtype=st.sampled_from([np.uint16, np.float16]),
    share=st.sampled_from([0.0, 0.001, 0.1, 0.49]),
    is_cut=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_changes_make_the_new_of_the_old_bit_for_bit(shape, dtype, share, is_cut, seed):
    random = np.random.default_rng(seed)
    old = random.integers(0, 1 << 16, shape, np.uint16)  # also numbers that are none
    new = np.where(random.random(shape) < share, random.integers(0, 1 << 16, shape, np.uint16), old)
    changes = find_changes(old.reshape(-1).view(dtype), new.reshape(-1).view(dtype))
    num_changed = int((old != new).sum())
    size_bytes = 4 * -(-old.size // 65536) + 4 * num_changed
    assert (changes is None) == (size_bytes >= new.nbytes)
    if changes is None:
        return
    assert sum(array.nbytes for array in changes.values()) == size_bytes
    target = np.zeros((*shape[:-1], shape[-1] + 1), np.uint16)[..., 1:] if is_cut else np.empty(shape, np.uint16)
    target[...] = old
    apply_changes(target.view(dtype), changes)
    np.testing.assert_array_equal(target, new)


def test_a_zero_that_changes_its_sign_has_changed():
    old, new = np.zeros(100, np.float16), np.zeros(100, np.float16)
    new[3] = -0.0
    target = old.copy()
    apply_changes(target, find_changes(old, new))
    assert target.tobytes() == new.tobytes() != old.tobytes()


def test_changes_of_another_array_are_refused():
    changes = find_changes(np.zeros(100, np.uint16), np.eye(10, dtype=np.uint16).reshape(-1))
    for target in (np.zeros(99, np.uint16), np.zeros(70000, np.uint16), np.zeros(100, np.float16)):
        with pytest.raises(ValueError, match="another array|outside"):
            apply_changes(target, changes)


def test_elements_of_four_bytes_are_not_compared():
    assert may_repeat(np.dtype(np.uint16)) and not may_repeat(np.dtype(np.float32))
