"""Arrays of any plain dtype in one safetensors file, written and read one array at a time."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from mindrlhf.weights.file_writer import TensorFileWriter
from mindrlhf.weights.safetensors_file import ARRAY_DTYPES, SafetensorsFile, safetensors_layout, wide_first
from mindrlhf.weights.tensors import TensorInfo


def save_arrays(path: Path, arrays: Iterable[tuple[str, np.ndarray]], infos: Iterable[TensorInfo]) -> str | None:
    """Write a safetensors file as a stream; it appears under its name whole or not at all.

    Args:
        path: the file; replaced when it is there.
        arrays: (name, array), exactly those of ``infos``, in any order; each is written before the next is taken.
        infos: what will come: the header is written first. Little-endian numbers and booleans.

    Returns:
        The file's checksum, XXH3-64 in hex; None if the arrays did not come in the order of the file, which is that
        of ``infos`` with wider elements first.

    Raises:
        OSError: the disk refuses.
    """
    writer = TensorFileWriter(path, safetensors_layout(wide_first(infos)))
    try:
        for name, array in arrays:
            writer.write(name, array)
        return writer.finish()
    finally:
        writer.discard()


class ArrayFile(Mapping[str, np.ndarray]):
    """The arrays of a safetensors file by name; each is read, as a copy of its own, when it is asked for.

    Raises:
        UserError: the file is missing, or no whole safetensors file.
    """

    def __init__(self, path: Path):
        self._file = SafetensorsFile(path, ARRAY_DTYPES)
        self._names = frozenset(self._file.names())

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        array = self._file.read(name).copy()
        self._file.release(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.names())

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array without reading it."""
        return self._file.info(name).shape
