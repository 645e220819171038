"""Prove that a sharded directory is the model it was made from: `mindrlhf weights verify`."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.shards.shard import DEFAULT_WORKERS, worker_pool
from mindrlhf.shards.strategy_files import identifying_dims
from mindrlhf.system.progress import counted
from mindrlhf.weights.convert import hf_shapes, ignored_names
from mindrlhf.weights.hf import SafetensorsDirectory, read_hf_config
from mindrlhf.weights.sharded import ShardedArray, ShardedDirectory
from mindrlhf.weights.tensors import convert_dtype

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Verification:
    """Result of a verification.

    Attributes:
        num_ranks: rank directories.
        num_arrays: parameters and arrays of optimiser state.
        num_tensors: Hugging Face tensors.
        num_shards: shards read and compared with their checksums.
        whole_bytes: bytes of all arrays, each once.
        shard_bytes: bytes of all shards; more than `whole_bytes` by the replicas.
        replicas: fewest and most ranks that hold the same shard.
        compared_with: the Hugging Face directory whose bytes were compared, empty for none.
    """

    num_ranks: int
    num_arrays: int
    num_tensors: int
    num_shards: int
    whole_bytes: int
    shard_bytes: int
    replicas: tuple[int, int]
    compared_with: str

    def __str__(self) -> str:
        fewest, most = self.replicas
        times = "once" if fewest == most == 1 else f"{fewest} to {most} times" if fewest != most else f"{most} times"
        lines = [
            f"{self.num_arrays} arrays ({self.whole_bytes:,} bytes), {self.num_shards} shards, {self.num_ranks} ranks",
            f"coverage: each element of each array lies in exactly one shard; each shard is stored {times} "
            f"({self.shard_bytes:,} bytes)",
            f"checksums: all shards, all arrays put together, and the {self.num_tensors} Hugging Face tensors agree",
        ]
        if self.compared_with:
            lines.append(f"every tensor equals that of {self.compared_with} to the bit")
        return "\n".join(lines)


def verify_directory(
    sharded_dir: str | os.PathLike, *, against: str | os.PathLike = "", num_workers: int = DEFAULT_WORKERS
) -> Verification:
    """Prove that every byte of the original is in exactly one place per replica, and unharmed.

    By counting: the shards' places, as the ranks' manifests state them, cover each element of each array exactly once,
    and every shard is held by equally many ranks. By checksum: each shard on each rank, each array put together from
    them, and each Hugging Face tensor split off it.

    Args:
        against: a Hugging Face directory to compare with byte by byte, beyond the checksums.
        num_workers: threads; each holds about one tensor.

    Raises:
        UserError: anything is missing, left over, damaged or different; the message names it and the fix.
    """
    shards = ShardedDirectory(sharded_dir)
    _check_no_stranger(shards)
    original = _open_original(shards, against) if against else None
    rules = {rule.mf_name: rule for rule in shards.rules()}
    arrays = shards.manifest.arrays
    replicas = [_check_places(shards, name, array) for name, array in arrays.items()]

    def verify_array(name: str) -> None:
        whole = _check_shards(shards, name, arrays[name])
        if name not in rules:
            shards.check_array(name, whole)
            return
        for hf_name, tensor in shards.split(rules[name], whole).items():
            if original is not None:
                _check_original(shards, original, hf_name, tensor)

    with worker_pool(num_workers) as pool:
        list(counted(pool.map(verify_array, arrays), len(arrays), "parameters"))
    return Verification(
        num_ranks=shards.manifest.num_ranks,
        num_arrays=len(arrays),
        num_tensors=len(shards.names()),
        num_shards=sum(len(array.layout.ranks) for array in arrays.values()),
        whole_bytes=sum(array.info.size_bytes for array in arrays.values()),
        shard_bytes=sum(array.shard_info.size_bytes * len(array.layout.ranks) for array in arrays.values()),
        replicas=(min(replicas), max(replicas)),
        compared_with=str(against),
    )


def check_coverage(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> int:
    """Count how often each element lies in the boxes of all ranks.

    Args:
        shape: of the whole array.
        boxes: one per rank that holds a shard: (start, stop) per axis.

    Returns:
        How many ranks hold each element, the same for all.

    Raises:
        UserError: some elements are held by fewer or more ranks than others, or by none; or boxes overlap in part.
    """
    counts = Counter(boxes)
    edges = [sorted({0, size, *(edge for box in counts for edge in box[axis])}) for axis, size in enumerate(shape)]
    cells = np.zeros([len(axis_edges) - 1 for axis_edges in edges], np.int64)
    for box in counts:
        cells[tuple(slice(*(axis.index(edge) for edge in bounds)) for axis, bounds in zip(edges, box))] += 1
    if any(axis_edges[0] < 0 or axis_edges[-1] > size for axis_edges, size in zip(edges, shape)):
        raise UserError(f"shards of {name} reach beyond its shape {list(shape)}: shard again")
    if (cells != 1).any():
        element = [edges[axis][index] for axis, index in enumerate(np.argwhere(cells != 1)[0])]
        times = "no shard" if cells[tuple(np.argwhere(cells != 1)[0])] == 0 else "several shards"
        raise UserError(f"element {element} of {name} lies in {times}: shard again")
    if len(set(counts.values())) > 1:
        raise UserError(f"shards of {name} are stored {sorted(set(counts.values()))} times: shard again")
    return next(iter(counts.values()))


_cached_coverage = lru_cache(maxsize=256)(lambda shape, boxes: check_coverage("an array", shape, boxes))


def _check_places(shards: ShardedDirectory, name: str, array: ShardedArray) -> int:
    """Check where the ranks' manifests say that an array's shards belong; return the number of replicas."""
    boxes = []
    for rank in array.layout.ranks:
        entry = shards.shard_entry(rank, name)
        box = tuple((start, start + length) for start, length in zip(entry["offset"], entry["shape"]))
        if box != tuple((part.start, part.stop) for part in array.layout.shard_of(rank)):
            raise UserError(
                f"{shards.directory / f'rank_{rank}'} holds {name} at {[list(bounds) for bounds in box]}, which is not "
                f"its place in the layout: remove that directory and run the same `mindrlhf weights shard` again"
            )
        boxes.append(box)
    try:
        return _cached_coverage(array.layout.shape, tuple(boxes))
    except UserError:
        return check_coverage(name, array.layout.shape, boxes)


def _check_shards(shards: ShardedDirectory, name: str, array: ShardedArray) -> np.ndarray:
    """Compare every rank's shard with its checksum, and replicas with each other; return the whole array."""
    whole = np.empty(array.layout.shape, array.info.numpy_dtype)
    writers = set(array.layout.writers())
    for rank in array.layout.ranks:
        data = shards.read_shard(rank, name)
        if rank in writers:
            whole[array.layout.shard_of(rank)] = data
        shards.release(rank, name)
    for ranks in array.layout.replicas().values():
        if len({shards.shard_entry(rank, name)["checksum"] for rank in ranks}) > 1:
            raise UserError(f"{shards.directory}: ranks {list(ranks)} hold different copies of {name}: shard again")
    return whole


def _check_no_stranger(shards: ShardedDirectory) -> None:
    for path in sorted(shards.directory.glob("rank_*")):
        number = path.name.removeprefix("rank_")
        if number.isdigit() and int(number) >= shards.manifest.num_ranks:
            raise UserError(f"{path} does not belong to a layout of {shards.manifest.num_ranks} ranks: remove it")


def _open_original(shards: ShardedDirectory, hf_dir: str | os.PathLike) -> SafetensorsDirectory:
    hf_dims = shards.spec.dims(read_hf_config(hf_dir))
    if identifying_dims(hf_dims) != identifying_dims(shards.dims):
        raise UserError(f"{shards.directory} is not of the model in {hf_dir}: their config.json differ in their sizes")
    original = SafetensorsDirectory(Path(hf_dir))
    original.check_coverage(hf_shapes(shards.spec, hf_dims), ignored_names(hf_dims))
    return original


def _check_original(shards: ShardedDirectory, original: SafetensorsDirectory, name: str, tensor: np.ndarray) -> None:
    expected = convert_dtype(original.read(name), original.info(name).dtype, shards.info(name).dtype)
    if not np.array_equal(_bits(tensor), _bits(expected)):
        raise UserError(
            f"{name} in {shards.directory} differs from {original.directory}: it was made from another; shard again"
        )
    original.release(name)


def _bits(array: np.ndarray) -> np.ndarray:
    """The bytes, so that NaN equals NaN and 0 differs from -0."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
