"""One writer for files of tensors, whatever their format: filled as a stream or in any order, by several threads.

Both formats, safetensors and MindSpore's ckpt, put the description of a tensor before its data, so that all positions
are known before any data is. The formats' Python APIs want all tensors of a file in memory at once; this does not.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from mindrlhf.system.files import partial_path, put_in_place
from mindrlhf.weights.tensors import TensorInfo

_PIECE_BYTES = 2 << 20  # written and summed while it is in the processor's cache
# A tensor, or the blocks that make it when stacked along the first axis.
Content = np.ndarray | Iterable[np.ndarray]


@dataclass(frozen=True)
class FileLayout:
    """Positions of everything in a file.

    Attributes:
        frames: (position, bytes) of what stands around the data.
        infos: what the file holds, by name.
        places: by name, (position, bytes) of the data.
        size_bytes: of the file.
    """

    frames: list[tuple[int, bytes]]
    infos: dict[str, TensorInfo]
    places: dict[str, list[tuple[int, int]]]
    size_bytes: int


class TensorFileWriter:
    """A file that appears under its name, whole, by `finish`; open only while something is written to it.

    Raises:
        OSError: the disk refuses.
    """

    def __init__(self, path: Path, layout: FileLayout):
        self.path = path
        self.size_bytes = layout.size_bytes
        self._layout = layout
        self._left = set(layout.infos)
        self._partial = partial_path(path)
        # Of the file's bytes, as long as they come from first to last: reading them back costs as much as writing.
        self._digest, self._num_summed = xxhash.xxh3_64(), 0
        try:
            with open(self._partial, "wb") as file:
                file.truncate(self.size_bytes)
                for offset, frame in layout.frames:
                    self._put(file, memoryview(frame), offset, ())
        except OSError:
            self.discard()
            raise

    def _put(self, file: IO, data: memoryview, offset: int, takers: Iterable[Callable[[memoryview], None]]) -> None:
        is_next = offset == self._num_summed
        file.seek(offset)
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            file.write(piece)
            for take in (*takers, self._digest.update) if is_next else takers:
                take(piece)
        if is_next:
            self._num_summed += len(data)

    def write(self, name: str, content: Content, *takers: Callable[[memoryview], None]) -> None:
        """Write a tensor as its info says, once.

        Args:
            content: the array, or the blocks that make it when stacked along the first axis, so that it need never be
                whole in memory; in the dtype of storage.
            takers: each gets the bytes, a bounded number at a time.
        """
        assert name in self._left, f"array {name!r} is not in the infos, or came twice"
        self._left.remove(name)
        info, num_rows = self._layout.infos[name], 0
        places, offset, room = iter(self._layout.places[name]), 0, 0
        is_whole = isinstance(content, (np.ndarray, np.generic))
        with open(self._partial, "r+b") as file:
            for block in [content] if is_whole else content:
                assert block.dtype == info.numpy_dtype, f"array {name!r} comes as {block.dtype}, not {info.numpy_dtype}"
                found, expected = (block.shape, info.shape) if is_whole else (block.shape[1:], info.shape[1:])
                assert found == tuple(expected), f"array {name!r} comes with shape {block.shape}, not {info.shape}"
                num_rows += 0 if is_whole else len(block)
                data = memoryview(np.ascontiguousarray(block).reshape(-1).view(np.uint8))
                while len(data):
                    if not room:
                        offset, room = next(places)
                    some = data[:room]
                    self._put(file, some, offset, takers)
                    data, offset, room = data[len(some) :], offset + len(some), room - len(some)
            file.flush()
            # The disk starts now, and what it has written need not stay in memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert is_whole or num_rows == info.shape[0], f"array {name!r} comes with {num_rows} rows, not {info.shape[0]}"

    def write_summed(self, name: str, array: np.ndarray) -> str:
        """As `write`; return the checksum of the array, see :func:`checksum`."""
        digest = xxhash.xxh3_64()
        self.write(name, array, digest.update)
        return digest.hexdigest()

    def finish(self) -> str | None:
        """Force the data to the disk and give the file its name; every tensor must have been written.

        Returns:
            The file's checksum, XXH3-64 in hex; None if its bytes did not come in their order.
        """
        assert not self._left, f"{len(self._left)} arrays did not come, {min(self._left)!r} first: they were not given"
        put_in_place(self._partial, self.path)
        return self._digest.hexdigest() if self._num_summed == self.size_bytes else None

    def discard(self) -> None:
        """Remove what was written; nothing happens after `finish`."""
        self._partial.unlink(missing_ok=True)


def checksum(array: np.ndarray) -> str:
    """XXH3-64 (xxhash.com) of a contiguous array's bytes, in hex: it finds damage and mistakes, not an attacker."""
    return xxhash.xxh3_64_hexdigest(array.reshape(-1).view(np.uint8).data)
