"""A large file that is filled in any order by several threads, past the page cache where the file system allows it.

Through the page cache every byte is copied into new pages, written back from them, and the pages given up again; for
files as large as weights, which are not read again soon, that is most of the time. `O_DIRECT` (open(2)) takes whole
blocks at whole block positions; what is left at the edges of an array goes through the page cache. A page belongs to
one of the two ways, since blocks are whole pages.
"""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import xxhash

BLOCK_BYTES = max(4096, mmap.PAGESIZE)
PIECE_BYTES = max(2**21, BLOCK_BYTES)
_local = threading.local()


class OrderedChecksum:
    """XXH3-64 (Y. Collet, the xxHash specification) of a file, taken while its bytes are written from first to last.

    What is read back for a checksum costs as much as the writing, and tells what the disk made of the bytes; this
    tells what they were.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_64()
        self._size_bytes = 0

    def taker(self, offset: int) -> Callable[[memoryview], None] | None:
        """Return what takes the bytes written at ``offset``, piece by piece; None if others should come first."""
        return self._take if offset == self._size_bytes else None

    def _take(self, piece: memoryview) -> None:
        self._digest.update(piece)
        self._size_bytes += len(piece)

    def value(self, size_bytes: int) -> str | None:
        """Return the checksum in hex of a file of this size; None if its bytes did not all come in their order."""
        return self._digest.hexdigest() if self._size_bytes == size_bytes else None


class DirectFile:
    """A file of a known size, made if it is not there, open for writing; a context that closes it.

    Raises:
        OSError: the disk refuses; the file is removed if it could not be opened.
    """

    def __init__(self, path: Path, size_bytes: int):
        self.path = path
        self._buffered = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._direct = -1
        self._is_direct = False
        try:
            os.ftruncate(self._buffered, size_bytes)
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            self._is_direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:  # which is how a file system says that it has no direct writing
                self.close()
                path.unlink()
                raise

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, data: memoryview, offset: int, *takers: Callable[[memoryview], None] | None) -> None:
        """Write bytes at a position.

        Args:
            takers: each but None gets ``data`` piece by piece, while it is in the processor's cache.
        """
        start = 0
        for stop in _cuts(len(data), offset):
            piece, place = data[start:stop], offset + start
            if self._is_direct and place % BLOCK_BYTES == 0 and len(piece) % BLOCK_BYTES == 0:
                piece = self._write_direct(piece, place)
            else:
                write_at(self._buffered, piece, place)
            for take in takers:
                if take is not None:
                    take(piece)
            start = stop
        if not self._is_direct:
            # The disk starts now, and what it has written need not stay in memory.
            os.posix_fadvise(self._buffered, offset, len(data), os.POSIX_FADV_DONTNEED)

    def _write_direct(self, piece: memoryview, place: int) -> memoryview:
        """Write whole blocks from memory that is aligned as the disk wants it; return the copy that lies there."""
        if not hasattr(_local, "buffer"):
            _local.buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
        copied = _local.buffer[: len(piece)]
        np.copyto(np.frombuffer(copied, np.uint8), np.frombuffer(piece, np.uint8))
        written = 0
        try:
            written = os.pwrite(self._direct, copied, place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._is_direct = False
        # All of it, unless the disk wants larger blocks, or is full: then this call tells.
        write_at(self._buffered, copied[written:], place + written)
        return copied

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._buffered)

    def close(self) -> None:
        """Close the file; nothing happens the second time."""
        for descriptor in (self._buffered, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._buffered = self._direct = -1


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at a position of a file."""
    while len(data):
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _cuts(size_bytes: int, offset: int) -> Iterator[int]:
    """Where to cut data for a position of a file so that its pieces, but for both edges, are whole blocks there."""
    first = min(-offset % BLOCK_BYTES, size_bytes)
    last = first + (size_bytes - first) // BLOCK_BYTES * BLOCK_BYTES
    if first:
        yield first
    yield from range(min(first + PIECE_BYTES, last), last, PIECE_BYTES)
    if last > first:
        yield last
    if size_bytes > last:
        yield size_bytes
