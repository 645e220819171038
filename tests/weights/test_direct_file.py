"""Files filled past the page cache: the bytes are those of a plain write, whatever the positions, order and threads."""

import errno
import fcntl
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.weights import direct_file
from mindrlhf.weights.direct_file import BLOCK_BYTES, DirectFile, OrderedChecksum

SIZES = st.one_of(
    st.integers(1, 3 * BLOCK_BYTES),
    st.sampled_from([BLOCK_BYTES, 2 * BLOCK_BYTES, direct_file.PIECE_BYTES, direct_file.PIECE_BYTES + BLOCK_BYTES + 1]),
)


def no_direct_writing(monkeypatch, when):
    """Let the system refuse as file systems without direct writing do: on opening, or only on writing."""
    original = getattr(os, when)

    def open_refusing(path, flags, *arguments):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *arguments)

    def pwrite_refusing(descriptor, data, offset):
        if is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, data, offset)

    monkeypatch.setattr(os, when, open_refusing if when == "open" else pwrite_refusing)


def is_direct(descriptor):
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def fill(path, sizes, seed, num_threads):
    """Write random parts in a random order; return what the file should hold, and what each part was said to be."""
    generator = np.random.default_rng(seed)
    expected = generator.integers(0, 256, sum(sizes), np.uint8).tobytes()
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    told = {}
    with DirectFile(path, len(expected)) as file, ThreadPoolExecutor(num_threads) as pool:

        def write(index):
            start, pieces = starts[index], []
            part = memoryview(expected)[start : start + sizes[index]]
            file.write(part, start, lambda piece: pieces.append(bytes(piece)))
            told[index] = b"".join(pieces) == bytes(part)

        list(pool.map(write, generator.permutation(len(sizes)).tolist()))
        file.sync()
    return expected, all(told[index] for index in range(len(sizes)))


@settings(max_examples=30, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(0, 2**31), st.sampled_from([1, 4]))
def test_every_byte_is_in_its_place(tmp_path_factory, sizes, seed, num_threads):
    path = tmp_path_factory.mktemp("direct") / "file"
    expected, told = fill(path, sizes, seed, num_threads)
    assert path.read_bytes() == expected and told


@pytest.mark.parametrize("when", ["open", "pwrite"])
def test_file_systems_without_direct_writing(tmp_path, monkeypatch, when):
    no_direct_writing(monkeypatch, when)
    sizes = [5, 3 * BLOCK_BYTES, direct_file.PIECE_BYTES + 7, 1, BLOCK_BYTES]
    expected, told = fill(tmp_path / "file", sizes, 0, 2)
    assert (tmp_path / "file").read_bytes() == expected and told


def test_what_direct_writing_leaves_is_written(tmp_path, monkeypatch):
    """A disk that takes only a part of a piece, as one that is nearly full does."""
    original = os.pwrite

    def short(descriptor, data, offset):
        return original(descriptor, data[:BLOCK_BYTES] if is_direct(descriptor) else data, offset)

    monkeypatch.setattr(os, "pwrite", short)
    expected, _ = fill(tmp_path / "file", [3, 5 * BLOCK_BYTES, 2 * BLOCK_BYTES - 3], 1, 1)
    assert (tmp_path / "file").read_bytes() == expected


def test_an_error_of_the_disk_is_raised(tmp_path, monkeypatch):
    def full(descriptor, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with DirectFile(tmp_path / "file", BLOCK_BYTES) as file, pytest.raises(OSError, match="No space left"):
        file.write(memoryview(bytes(BLOCK_BYTES)), 0)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=5), order=st.randoms(use_true_random=False), seed=st.integers(0, 99))
def test_a_checksum_is_known_when_all_bytes_came_in_their_order(tmp_path_factory, sizes, order, seed):
    path = tmp_path_factory.mktemp("checksum") / "file"
    data = np.random.default_rng(seed).integers(0, 256, sum(sizes), np.uint8)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = list(zip(starts, sizes))
    order.shuffle(parts)
    checksum = OrderedChecksum()
    with DirectFile(path, data.size) as file:
        for start, size in parts:
            assert checksum.value(data.size) is None
            file.write(memoryview(data[start : start + size]), start, checksum.taker(start))
    is_in_order = parts == sorted(parts)
    assert checksum.value(data.size) == (xxhash.xxh3_64_hexdigest(path.read_bytes()) if is_in_order else None)
