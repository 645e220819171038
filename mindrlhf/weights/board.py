"""The weight board: the logical Hugging Face tensors of one model version in memory shared by a node.

Training ranks write their own shards in place; the rollout server maps the same pages and reads them. So any
training layout reaches any rollout layout through the full tensor, and no rank ever gathers one.

The memory is a ``memfd``: it has no name in any file system, other processes of the same user open it through
``/proc/PID/fd/N`` of the process that created it, and the kernel frees it when the last process that maps it is
gone. Nothing is left behind by ``kill -9``, and the size limit of ``/dev/shm`` (64 MiB in many containers)
does not apply. The creating process must outlive every attach, not every use.

One version at a time::

    rank 0          board = WeightBoard.create(infos); send board.path to the others
    every rank      board.begin(version); board.write(name, array, region); send board.contribution() to rank 0
    rank 0          board.seal(contributions); tell the server
    server          board = WeightBoard.attach(path); for name, dtype, array in board.tensors(version): ...

The ranks and the server take turns by messages of their own (the board has no locks): nobody writes between ``seal``
and the reader's answer.

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

import contextlib
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.weights.exchange.boxes import Box, to_box
from mindrlhf.weights.exchange.parts import find_fault, find_gap, read_parts, write_parts
from mindrlhf.weights.tensors import TensorInfo

_MAGIC = b"MRLBOARD"
_HEADER = struct.Struct("<8sqQQ")  # magic, visible version, manifest size, offset of the checksums
_ALIGNMENT_BYTES = 64
_NO_VERSION = -1
# The source is copied and summed piece by piece, so that the sum finds the piece in the cache.
_PIECE_BYTES = 1 << 20
_STORED_DTYPES = ("float32", "float16", "bfloat16", "float64")

Region = tuple[slice, ...]


class WeightBoardError(RunFailure):
    """The tensors on the board are not the ones they should be."""


class WeightBoard:
    """A mapping of the shared memory, made by ``create`` or ``attach``. Not thread-safe."""

    def __init__(self, memory: mmap.mmap, fd: int, path: str, infos: tuple[TensorInfo, ...], writable: bool):
        self.path = path
        self.infos = infos
        self._memory = memory
        self._fd = fd
        self._writable = writable
        self._index = {info.name: i for i, info in enumerate(infos)}
        checksums_offset = _HEADER.unpack_from(memory)[3]
        self._checksums = np.frombuffer(memory, np.uint64, len(infos), checksums_offset)
        offset, self._views = _align(checksums_offset + 8 * len(infos)), []
        for info in infos:
            view = np.frombuffer(memory, info.numpy_dtype, info.num_elements, offset).reshape(info.shape)
            self._views.append(view)
            offset = _align(offset + info.size_bytes)
        self._parts_offset = offset  # behind the tensors: where a board that lacks regions says which it has
        self._version_in_progress: int | None = None
        self._contribution: dict[str, dict[str, Any]] = {}
        self._earlier: dict[str, dict[str, Any]] = {}

    @classmethod
    def create(cls, infos: Iterable[TensorInfo]) -> "WeightBoard":
        """Allocate a board for ``infos``; all of its memory is taken at once.

        Raises:
            WeightBoardError: a repeated name or unknown dtype, or the memory cannot be had.
        """
        infos = tuple(infos)
        names = {info.name for info in infos}
        if len(names) != len(infos):
            raise WeightBoardError("the weight board was given two tensors of one name")
        for info in infos:
            if info.dtype not in _STORED_DTYPES:
                raise WeightBoardError(
                    f"tensor '{info.name}' has dtype {info.dtype}; the weight board holds {', '.join(_STORED_DTYPES)}"
                )
        manifest = json.dumps([[info.name, info.dtype, list(info.shape)] for info in infos]).encode()
        checksums_offset = _align(_HEADER.size + len(manifest))
        data_offset = _align(checksums_offset + 8 * len(infos))
        size_bytes = data_offset + sum(_align(info.size_bytes) for info in infos)
        fd = os.memfd_create("mindrlhf-weight-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, size_bytes)
            # A board that shrank under a reader would kill it with SIGBUS; it grows by the list of its parts.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            memory = mmap.mmap(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise WeightBoardError(
                f"no {size_bytes / 2**30:.2f} GiB of shared memory for the weight board: {error}"
            ) from error
        memory[_HEADER.size : _HEADER.size + len(manifest)] = manifest
        _HEADER.pack_into(memory, 0, _MAGIC, _NO_VERSION, len(manifest), checksums_offset)
        return cls(memory, fd, f"/proc/{os.getpid()}/fd/{fd}", infos, writable=True)

    @classmethod
    def attach(cls, path: str, writable: bool = False) -> "WeightBoard":
        """Map the board that another process created; ``path`` is that process' ``board.path``.

        Raises:
            WeightBoardError: there is no board at ``path``, for example because its creator has ended.
        """
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise WeightBoardError(f"cannot open the weight board {path}: {error.strerror}") from error
        try:
            memory = mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
            magic, _, manifest_size, _ = _HEADER.unpack_from(memory)
            if magic != _MAGIC:
                raise ValueError("it is not a weight board")
            manifest = json.loads(memory[_HEADER.size : _HEADER.size + manifest_size])
            return cls(memory, fd, path, tuple(_info(entry) for entry in manifest), writable)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
            os.close(fd)
            raise WeightBoardError(f"cannot read the weight board {path}: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, without padding and manifest."""
        return sum(info.size_bytes for info in self.infos)

    @property
    def version(self) -> int | None:
        """The version that readers see, or None while none is sealed."""
        version = _HEADER.unpack_from(self._memory)[1]
        return None if version == _NO_VERSION else version

    def begin(self, version: int) -> None:
        """Start writing ``version`` (at least 0): what this process wrote before no longer counts.

        From the creator's ``begin`` to its ``seal``, readers see no version.
        """
        assert self._writable, "the weight board was attached for reading only"
        assert version >= 0, f"version {version} is negative"
        self._version_in_progress = version
        self._earlier |= self._contribution
        self._contribution = {}
        self._set_version(_NO_VERSION)

    def write(self, name: str, array: np.ndarray, region: Region | None = None) -> None:
        """Copy ``array`` into the tensor ``name``, or into its ``region``: one slice with step 1 per leading axis.

        Raises:
            WeightBoardError: unknown name, or ``array`` has another dtype or shape than its place.
        """
        assert self._version_in_progress is not None, "write() before begin()"
        info, view = self._find(name)
        if array.dtype != info.numpy_dtype:
            raise WeightBoardError(
                f"tensor '{name}' is {info.dtype} (as {info.numpy_dtype}) on the weight board but was given as "
                f"{array.dtype}"
            )
        bounds = _bounds(info, region)
        target = view[(*(slice(start, stop) for start, stop in bounds), ...)]  # the ellipsis keeps scalars views
        if target.shape != array.shape:
            raise WeightBoardError(f"tensor '{name}': shape {array.shape} was written to a place of {target.shape}")
        entry = self._contribution.setdefault(name, {"regions": [], "sums": [], "checksum": 0})
        entry["regions"].append(bounds)
        entry["sums"].append(_copy_and_sum(target, array))
        entry["checksum"] = (entry["checksum"] + entry["sums"][-1]) % 2**64

    def view(self, name: str, box: Sequence[Sequence[int]]) -> np.ndarray:
        """Return a region, (start, stop) per axis, in the shared memory, for those who bring it from another board."""
        return self._find(name)[1][(*(slice(start, stop) for start, stop in box), ...)]

    def keep(self, name: str) -> bool:
        """Count the tensor ``name`` as written, as this process wrote it for an earlier version.

        Returns:
            False when it never did.
        """
        assert self._version_in_progress is not None, "keep() before begin()"
        if name in self._earlier:
            self._contribution[name] = self._earlier[name]
        return name in self._earlier

    def contribution(self) -> dict[str, dict[str, Any]]:
        """What this process has written since ``begin``, as JSON-able values.

        By tensor name: "regions", lists of [start, stop] per axis, "sums", the sum of the bits of each, and "checksum",
        their sum modulo 2^64.
        """
        return self._contribution

    def seal(
        self,
        contributions: Sequence[Mapping[str, Mapping[str, Any]]] | None = None,
        needed: Mapping[str, Sequence[Box] | None] | None = None,
    ) -> None:
        """Make the version visible, after checking that the ranks together wrote each element exactly once.

        Args:
            contributions: those of all ranks, the caller's included; None when the caller alone has written.
            needed: what readers will read, where that is not everything: boxes by tensor, None for all of it, nothing
                of a tensor that is not there. Then each of these elements must have been written, and none twice.

        Raises:
            WeightBoardError: a gap or an overlap, naming the tensor. No version is visible then.
        """
        assert self._version_in_progress is not None, "seal() before begin()"
        contributions = [self._contribution] if contributions is None else contributions
        written = {}
        for i, info in enumerate(self.infos):
            parts = [contribution[info.name] for contribution in contributions if info.name in contribution]
            boxes = written[info.name] = [to_box(bounds) for part in parts for bounds in part["regions"]]
            if fault := find_fault(info, boxes, needed):
                raise WeightBoardError(fault)
            self._checksums[i] = sum(part["checksum"] for part in parts) % 2**64
        try:
            write_parts(self._fd, self._parts_offset, None if needed is None else written)
        except OSError as error:
            raise WeightBoardError(f"no shared memory for the list of the weight board's parts: {error}") from error
        self._set_version(self._version_in_progress)
        self._version_in_progress = None

    def tensors(self, version: int) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield (name, dtype name, array) of every tensor; the arrays are views of the shared memory.

        Raises:
            WeightBoardError: the board does not hold ``version``.
        """
        self._require(version)
        for info, view in zip(self.infos, self._views):
            yield info.name, info.dtype, view

    def verify(self, version: int) -> None:
        """Compare every tensor with the checksum its writers left.

        The checksum is the sum of the elements' bits as unsigned integers of the element's width, modulo that width
        (32 bits for float32, 16 for bfloat16). Sums do not depend on order, so those of shards written by different
        ranks add up, and they run as fast as memory. They notice torn, late and lost writes, not an exchange of
        elements. Of a board that was sealed with parts of its tensors, these are compared.

        Raises:
            WeightBoardError: the board does not hold ``version``, or a tensor differs.
        """
        parts = self.parts(version)
        for info, view, expected in zip(self.infos, self._views, self._checksums):
            regions = [view] if parts is None else [self.view(info.name, box) for box in parts[info.name]]
            pieces = (piece for region in regions for piece in _pieces(region, flat=region.flags.c_contiguous))
            checksum = sum(map(sum_bits, pieces)) % _modulus(info)
            if checksum != int(expected) % _modulus(info):
                raise WeightBoardError(
                    f"tensor '{info.name}' of weights version {version} changed after it was written "
                    f"(checksum {checksum:#x}, expected {int(expected) % _modulus(info):#x})"
                )

    def parts(self, version: int) -> dict[str, list[Box]] | None:
        """Return by tensor the disjoint boxes that the board has of it; None where it has all of every tensor.

        Raises:
            WeightBoardError: the board does not hold ``version``.
        """
        self._require(version)
        return read_parts(self._fd, self._parts_offset)

    def require(self, version: int, needed: Mapping[str, Sequence[Box] | None]) -> None:
        """Check that the board has what a reader reads of each tensor.

        Args:
            needed: as for :meth:`seal`.

        Raises:
            WeightBoardError: it lacks some of it.
        """
        parts = self.parts(version)
        for info in self.infos if parts is not None else ():
            if gap := find_gap(info, parts[info.name], needed):
                raise WeightBoardError(gap)

    def checksums(self, version: int) -> np.ndarray:
        """Return what ``verify`` compares with, uint64 [tensors].

        Raises:
            WeightBoardError: the board does not hold ``version``.
        """
        self._require(version)
        return np.array(self._checksums)

    def close(self) -> None:
        """Unmap the board. Arrays taken from it keep the memory alive until they are gone."""
        self._views, self._checksums = [], np.empty(0, np.uint64)
        with contextlib.suppress(BufferError):
            self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "WeightBoard":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[TensorInfo, np.ndarray]:
        if name not in self._index:
            raise WeightBoardError(f"the weight board has no tensor '{name}'")
        return self.infos[self._index[name]], self._views[self._index[name]]

    def _set_version(self, version: int) -> None:
        struct.pack_into("<q", self._memory, len(_MAGIC), version)

    def _require(self, version: int) -> None:
        if self.version != version:
            held = "no complete version" if self.version is None else f"version {self.version}"
            raise WeightBoardError(f"weights version {version} was asked for; the board {self.path} holds {held}")


def _info(entry: Any) -> TensorInfo:
    """Check one entry of the manifest: a size of -1, for one, would mean all there is to NumPy."""
    name, dtype, shape = entry
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not (isinstance(name, str) and dtype in _STORED_DTYPES and is_shape):
        raise ValueError(f"its manifest is damaged at {name!r}")
    return TensorInfo(name, dtype, tuple(shape))


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _modulus(info: TensorInfo) -> int:
    """Sums of other words than whole elements would not add up for shards of any width."""
    return 1 << (8 * info.numpy_dtype.itemsize)


def _bounds(info: TensorInfo, region: Region | None) -> list[list[int]]:
    """The [start, stop] per axis that ``region`` means."""
    region = region or ()
    if len(region) > len(info.shape):
        raise WeightBoardError(f"tensor '{info.name}' has {len(info.shape)} axes, its region {len(region)}")
    bounds = []
    for axis, size in enumerate(info.shape):
        start, stop, step = (region[axis] if axis < len(region) else slice(None)).indices(size)
        if step != 1:
            raise WeightBoardError(f"tensor '{info.name}': regions have step 1, not {step}")
        bounds.append([start, max(start, stop)])
    return bounds


def _pieces(array: np.ndarray, flat: bool) -> Iterator[np.ndarray]:
    """Cut ``array`` along its first axis (``flat``: as one axis) into pieces that fit the cache."""
    if flat:
        array = array.reshape(-1)
    if array.size:
        num_rows = max(1, _PIECE_BYTES // (array.nbytes // len(array)))
        for start in range(0, len(array), num_rows):
            yield array[start : start + num_rows]


def _copy_and_sum(target: np.ndarray, source: np.ndarray) -> int:
    flat = target.flags.c_contiguous and source.flags.c_contiguous
    checksum = 0
    for target_piece, source_piece in zip(_pieces(target, flat), _pieces(source, flat)):
        np.copyto(target_piece, source_piece)
        checksum += sum_bits(target_piece)
    return checksum


def sum_bits(array: np.ndarray) -> int:
    """Return the sum of the elements' bits, modulo the width of an element."""
    words = array.view(f"<u{array.dtype.itemsize}")
    return int(np.add.reduce(words, axis=None, dtype=words.dtype))
