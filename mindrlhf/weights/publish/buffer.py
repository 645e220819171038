"""The weight buffer: the logical Hugging Face tensors of one model version in memory shared by a node.

Training ranks write their own shards in place; the rollout server maps the same pages and reads them. So any
training layout reaches any rollout layout through the full tensor, and no rank ever gathers one.

The memory is a ``memfd``: it has no name in any file system, other processes of the same user open it through
``/proc/PID/fd/N`` of the process that created it, and the kernel frees it when the last process that maps it is
gone. Nothing is left behind by ``kill -9``, and the size limit of ``/dev/shm`` (64 MiB in many containers)
does not apply. The creating process must outlive every attach, not every use.

Where the memory of a node is not to hold all tensors at once, they share it: it then holds one bucket of them after
the other (:func:`cut_into_buckets`), and all of the following is done for each.

One version at a time::

    rank 0          buffer = WeightBuffer.create(infos); send buffer.path to the others
    every rank      buffer.begin(version); buffer.write(name, array, index); send buffer.written() to rank 0
    rank 0          buffer.commit(written); tell the server
    server          buffer = WeightBuffer.attach(path); for name, dtype, array in buffer.tensors(version): ...

The ranks and the server take turns by messages of their own (there are no locks): nobody writes between ``commit``
and the reader's answer.

Needs the standard library and NumPy only: both interpreters (training and rollout) import it.
"""

import contextlib
import fcntl
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.weights.publish.slices import (
    TensorSlice,
    copy_and_sum,
    intersect,
    num_elements,
    sum_bits,
    to_index,
    to_slice,
)
from mindrlhf.weights.tensors import TensorInfo, align

_MAGIC = b"MRLBUFFR"
# Magic, the visible version and its bucket, manifest size, checksums' offset, memory of the buckets.
_HEADER = struct.Struct("<8sqqQQQ")
_VISIBLE = struct.Struct("<qq")
_NO_VERSION = -1
_STORED_DTYPES = ("float32", "float16", "bfloat16", "float64")

Index = tuple[slice, ...]
# A tensor's name, (start, stop) per axis of what was written of it, and the sum of the bits there.
WrittenSlice = list[Any]


class WeightBufferError(RunFailure):
    """The tensors in the weight buffer are not the ones they should be."""


class WeightBuffer:
    """A mapping of the shared memory, made by ``create`` or ``attach``. Not thread-safe.

    What is asked for a version raises ``WeightBufferError`` where the buffer does not hold that version.
    """

    def __init__(self, memory: mmap.mmap, fd: int, path: str, infos: tuple[TensorInfo, ...], writable: bool):
        self.path = path
        self.infos = infos
        self._memory = memory
        self._fd = fd
        self._writable = writable
        self._index = {info.name: i for i, info in enumerate(infos)}
        *_, checksums_offset, bucket_bytes = _HEADER.unpack_from(memory)
        self._checksums = np.frombuffer(memory, np.uint64, len(infos), checksums_offset)
        self._buckets = cut_into_buckets(infos, bucket_bytes)
        self._views = []
        for bucket in self._buckets:
            offset = align(checksums_offset + 8 * len(infos))
            for info in infos[bucket.start : bucket.stop]:
                view = np.frombuffer(memory, info.numpy_dtype, info.num_elements, offset).reshape(info.shape)
                self._views.append(view)
                offset = align(offset + info.size_bytes)
        self._version_in_progress: int | None = None
        self._bucket_in_progress = 0
        self._written: list[WrittenSlice] = []

    @classmethod
    def create(cls, infos: Iterable[TensorInfo], bucket_bytes: int = 0) -> "WeightBuffer":
        """Allocate a buffer for ``infos``; all of its memory is taken at once.

        Args:
            bucket_bytes: see :func:`cut_into_buckets`.

        Raises:
            WeightBufferError: a repeated name or unknown dtype, or the memory cannot be had.
        """
        infos = tuple(infos)
        names = {info.name for info in infos}
        if len(names) != len(infos):
            raise WeightBufferError("the weight buffer was given two tensors of one name")
        for info in infos:
            if info.dtype not in _STORED_DTYPES:
                raise WeightBufferError(
                    f"tensor '{info.name}' has dtype {info.dtype}; the weight buffer holds {', '.join(_STORED_DTYPES)}"
                )
        manifest = json.dumps([[info.name, info.dtype, list(info.shape)] for info in infos]).encode()
        checksums_offset = align(_HEADER.size + len(manifest))
        data_offset = align(checksums_offset + 8 * len(infos))
        size_bytes = data_offset + buffer_bytes(infos, bucket_bytes)
        fd = os.memfd_create("mindrlhf-weight-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, size_bytes)
            # A buffer that shrank under a reader would kill it with SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            memory = mmap.mmap(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise WeightBufferError(
                f"no {size_bytes / 2**30:.2f} GiB of shared memory for the weight buffer: {error}"
            ) from error
        memory[_HEADER.size : _HEADER.size + len(manifest)] = manifest
        _HEADER.pack_into(memory, 0, _MAGIC, _NO_VERSION, 0, len(manifest), checksums_offset, bucket_bytes)
        return cls(memory, fd, f"/proc/{os.getpid()}/fd/{fd}", infos, writable=True)

    @classmethod
    def attach(cls, path: str, writable: bool = False) -> "WeightBuffer":
        """Map the buffer that another process created; ``path`` is that process' ``buffer.path``.

        Raises:
            WeightBufferError: there is no buffer at ``path``, for example because its creator has ended.
        """
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise WeightBufferError(f"cannot open the weight buffer {path}: {error.strerror}") from error
        try:
            memory = mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
            magic, *_, manifest_size, _, _ = _HEADER.unpack_from(memory)
            if magic != _MAGIC:
                raise ValueError("it is not a weight buffer")
            manifest = json.loads(memory[_HEADER.size : _HEADER.size + manifest_size])
            infos = tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in manifest)
            return cls(memory, fd, path, infos, writable)
        except (OSError, ValueError, struct.error) as error:
            os.close(fd)
            raise WeightBufferError(f"cannot read the weight buffer {path}: {error}") from error

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, without padding and manifest."""
        return sum(info.size_bytes for info in self.infos)

    @property
    def num_buckets(self) -> int:
        """Number of buckets that share the memory, one after the other."""
        return len(self._buckets)

    @property
    def version(self) -> int | None:
        """The version that readers see, or None while none is committed."""
        version, _ = self._visible()
        return None if version == _NO_VERSION else version

    @property
    def bucket(self) -> int:
        """Index of the bucket that was written last, from 0."""
        return self._visible()[1]

    def begin(self, version: int, bucket: int = 0) -> None:
        """Start writing a bucket of ``version`` (at least 0): what this process wrote before no longer counts.

        From the creator's ``begin`` to its ``commit``, readers see no version.
        """
        assert self._writable, "the weight buffer was attached for reading only"
        assert version >= 0, f"version {version} is negative"
        self._version_in_progress, self._bucket_in_progress = version, bucket
        self._written = []
        self._show(_NO_VERSION, bucket)

    def info(self, name: str) -> TensorInfo:
        return self.infos[self._index[name]]

    def wants(self, name: str) -> bool:
        """Return whether the tensor ``name`` belongs to the bucket that is being written."""
        return self._index.get(name) in self._buckets[self._bucket_in_progress]

    def write(self, name: str, array: np.ndarray, index: Index | None = None) -> None:
        """Copy ``array`` into the tensor ``name``, or where ``index`` says: one slice with step 1 per leading axis.

        float32 is rounded to the nearest value of a tensor that has 2 bytes an element.

        Raises:
            WeightBufferError: unknown name, or ``array`` has another dtype or shape than its place.
        """
        assert self._version_in_progress is not None, "write() before begin()"
        info, view = self._find(name)
        assert self.wants(name), f"tensor '{name}' is not of bucket {self._bucket_in_progress}"
        if array.dtype not in (info.numpy_dtype, np.float32) or array.dtype.itemsize < info.numpy_dtype.itemsize:
            raise WeightBufferError(
                f"tensor '{name}' is {info.dtype} (as {info.numpy_dtype}) in the weight buffer but was given as "
                f"{array.dtype}"
            )
        bounds = _bounds(info, index or ())
        target = view[to_index(bounds)]
        if target.shape != array.shape:
            raise WeightBufferError(f"tensor '{name}': shape {array.shape} was written to a place of {target.shape}")
        self._written.append([name, bounds, copy_and_sum(target, array, info.dtype)])

    def view(self, name: str, bounds: Sequence[Sequence[int]]) -> np.ndarray:
        """Return a slice, (start, stop) per axis, in the shared memory, for those who bring it from another buffer."""
        return self._find(name)[1][to_index(bounds)]

    def written(self) -> list[WrittenSlice]:
        """Slices that this process has written since ``begin``, as JSON-able values."""
        return list(self._written)

    def commit(self, written: Iterable[WrittenSlice] | None = None) -> None:
        """Make the bucket visible, after checking that the ranks together wrote each element of it exactly once.

        Args:
            written: by all ranks, the caller included; None when the caller alone has written.

        Raises:
            WeightBufferError: a gap or an overlap, naming the tensor. No version is visible then.
        """
        assert self._version_in_progress is not None, "commit() before begin()"
        infos = [self.infos[i] for i in self._buckets[self._bucket_in_progress]]
        slices: dict[str, list[TensorSlice]] = {info.name: [] for info in infos}
        checksums = dict.fromkeys(slices, 0)
        for name, bounds, checksum in self._written if written is None else written:
            slices[name].append(to_slice(bounds))
            checksums[name] = (checksums[name] + checksum) % 2**64
        for info in infos:
            _check_written(info, slices[info.name])
            self._checksums[self._index[info.name]] = checksums[info.name]
        self._show(self._version_in_progress, self._bucket_in_progress)
        self._version_in_progress = None

    def tensors(self, version: int) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield (name, dtype name, array) of every tensor of the bucket; the arrays are views of the shared memory."""
        self._require(version)
        for i in self._buckets[self.bucket]:
            yield self.infos[i].name, self.infos[i].dtype, self._views[i]

    def verify(self, version: int, share: int = 0, num_shares: int = 1) -> None:
        """Compare the tensors of the bucket with the checksums their writers left; of several readers each its share.

        The checksum is the sum of the elements' bits as unsigned integers of the element's width, modulo that width
        (32 bits for float32, 16 for bfloat16). Sums do not depend on order, so those of shards written by different
        ranks add up, and they run as fast as memory. They notice torn, late and lost writes, not an exchange of
        elements.

        Raises:
            WeightBufferError: a tensor differs.
        """
        self._require(version)
        by_size = sorted(self._buckets[self.bucket], key=lambda i: -self.infos[i].size_bytes)
        for i in by_size[share::num_shares]:
            info = self.infos[i]
            checksum = sum_bits(self._views[i]) % _modulus(info)
            expected = int(self._checksums[i]) % _modulus(info)
            if checksum != expected:
                raise WeightBufferError(
                    f"tensor '{info.name}' of weights version {version} changed after it was written "
                    f"(checksum {checksum:#x}, expected {expected:#x})"
                )

    def checksums(self, version: int) -> np.ndarray:
        """Return what ``verify`` compares with, uint64 [tensors]."""
        self._require(version)
        return np.array(self._checksums)

    def close(self) -> None:
        """Unmap the buffer. Arrays taken from it keep the memory alive until they are gone."""
        self._views, self._checksums = [], np.empty(0, np.uint64)
        with contextlib.suppress(BufferError):
            self._memory.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "WeightBuffer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _find(self, name: str) -> tuple[TensorInfo, np.ndarray]:
        if name not in self._index:
            raise WeightBufferError(f"the weight buffer has no tensor '{name}'")
        return self.infos[self._index[name]], self._views[self._index[name]]

    def _visible(self) -> tuple[int, int]:
        return _VISIBLE.unpack_from(self._memory, len(_MAGIC))

    def _show(self, version: int, bucket: int) -> None:
        _VISIBLE.pack_into(self._memory, len(_MAGIC), version, bucket)

    def _require(self, version: int) -> None:
        if self.version != version:
            held = "no complete version" if self.version is None else f"version {self.version}"
            raise WeightBufferError(f"weights version {version} was asked for; the buffer {self.path} holds {held}")


def cut_into_buckets(infos: Sequence[TensorInfo], bucket_bytes: int = 0) -> list[range]:
    """Cut a list of tensors, in its order, into buckets.

    Args:
        infos: the tensors of a model.
        bucket_bytes: of a bucket at most; a tensor that is larger has one for itself. 0 puts all into one.

    Returns:
        The places in ``infos`` of each bucket's tensors.
    """
    buckets, first, size_bytes = [], 0, 0
    for place, info in enumerate(infos):
        tensor_bytes = align(info.size_bytes)
        if bucket_bytes and place > first and size_bytes + tensor_bytes > bucket_bytes:
            buckets.append(range(first, place))
            first, size_bytes = place, 0
        size_bytes += tensor_bytes
    return [*buckets, range(first, len(infos))]


def size_of(bucket: range, infos: Sequence[TensorInfo]) -> int:
    """Return the bytes of a bucket, with the gaps between its tensors."""
    return sum(align(infos[place].size_bytes) for place in bucket)


def buffer_bytes(infos: Sequence[TensorInfo], bucket_bytes: int = 0) -> int:
    """Return the memory that the tensors of a buffer take: that of its largest bucket."""
    return max(size_of(bucket, infos) for bucket in cut_into_buckets(infos, bucket_bytes))


def _modulus(info: TensorInfo) -> int:
    """Sums of other words than whole elements would not add up for shards of any width."""
    return 1 << (8 * info.numpy_dtype.itemsize)


def _bounds(info: TensorInfo, index: Index) -> list[list[int]]:
    """The [start, stop] per axis that ``index`` means."""
    if len(index) > len(info.shape):
        raise WeightBufferError(f"tensor '{info.name}' has {len(info.shape)} axes, its index {len(index)}")
    bounds = []
    for axis, size in enumerate(info.shape):
        start, stop, step = (index[axis] if axis < len(index) else slice(None)).indices(size)
        if step != 1:
            raise WeightBufferError(f"tensor '{info.name}': slices have step 1, not {step}")
        bounds.append([start, max(start, stop)])
    return bounds


def _check_written(info: TensorInfo, written: Sequence[TensorSlice]) -> None:
    """Check that each element of a tensor was written exactly once."""
    written = [bounds for bounds in written if num_elements(bounds)]
    for i, bounds in enumerate(written):
        for other in written[:i]:
            if intersect(bounds, other) is not None:
                raise WeightBufferError(f"tensor '{info.name}' was written twice: slices {other} and {bounds} overlap")
    # Slices that are pairwise disjoint and hold as many elements as the tensor cover it exactly.
    num_written = sum(map(num_elements, written))
    if num_written != info.num_elements:
        raise WeightBufferError(f"tensor '{info.name}' has {info.num_elements} elements but {num_written} were written")
