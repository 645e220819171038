"""Shard a model into one directory per rank, as a stream: `mindrlhf weights shard` and `mindrlhf weights reshard`.

Arrays are read whole, one at a time per worker, and their shards written to the files of a batch of ranks at once; a
batch is a run of ranks of one stage that together hold as much as the stage's arrays. A rank's file appears when all of
it is on the disk, so an interrupted command, run again, goes on with the ranks that are not there.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.algorithms.optimizers import GLOBAL_STEP_NAME
from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.shards.sources import ArraySource, HuggingFaceSource, ShardedSource
from mindrlhf.shards.strategy_files import read_strategy, write_strategy_directory
from mindrlhf.system.files import partial_path, write_file, write_json
from mindrlhf.system.progress import counted
from mindrlhf.weights.file_writer import FileLayout, TensorFileWriter, checksum
from mindrlhf.weights.hf import SHARDED_NAME, read_json_object
from mindrlhf.weights.open import is_sharded
from mindrlhf.weights.shard_files import shard_layout
from mindrlhf.weights.sharded import (
    PROGRESS_NAME,
    RANK_MANIFEST_NAME,
    STRATEGY_NAME,
    ShardedArray,
    ShardedManifest,
    rank_file,
)
from mindrlhf.weights.tensors import SHARD_DTYPES
from mindrlhf.weights.writer import tokenizer_files

DEFAULT_WORKERS = min(8, os.cpu_count() or 1)
_SPARE_BYTES = 16 * 2**20

Report = Callable[[str], None]


def shard_directory(
    model_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    *,
    parallel: str | None = None,
    strategy: str | os.PathLike | None = None,
    file_format: str = "safetensors",
    dtype: str | None = None,
    optimizer_file: str | os.PathLike = "",
    num_workers: int = DEFAULT_WORKERS,
    report: Report = lambda line: None,
) -> ShardedManifest:
    """Shard a Hugging Face directory into one directory per rank, or a sharded one, with its optimiser state, for
    another layout; goes on where an earlier run was interrupted.

    Ranks that hold the same (data-parallel ones without a sharded optimiser) have one file, by hard links.

    Args:
        parallel: layout in the short form of `Layout.parse`; or
        strategy: directory or merged file of MindSpore strategy files.
        file_format: `safetensors` or `ckpt`.
        dtype: converts the parameters of a Hugging Face directory.
        optimizer_file: optimiser state to shard along with such.
        num_workers: threads; each holds about one tensor.
        report: gets a line for each batch of ranks.

    Raises:
        UserError: source, layout and model do not fit, `out_dir` holds something else, or the disk is too small.
    """
    source: ArraySource
    if not is_sharded(model_dir):
        source = HuggingFaceSource(model_dir, dtype, optimizer_file)
    elif dtype or optimizer_file:
        raise UserError(f"{model_dir} is sharded: --dtype and --optimizer are for a Hugging Face directory")
    else:
        source = ShardedSource(model_dir)
    rules = source.spec.rules(source.dims)
    if parallel:
        layout = Layout.parse(parallel)
        element_bytes = max(SHARD_DTYPES[source.dtypes[rule.mf_name]].itemsize for rule in rules)
        layouts = parameter_layouts(source.spec, source.dims, layout, element_bytes)
    else:
        layouts, layout = read_strategy(
            strategy, source.dims, {rule.mf_name: rule.mf_shape(source.dims) for rule in rules}
        )
    manifest = _plan(source, layouts, str(layout or strategy), file_format)
    out = Path(out_dir)
    try:
        with _locked(out):
            return _Sharding(source, manifest, out, num_workers, report).run(layouts, layout)
    except OSError as error:
        raise UserError(
            f"{error.filename or out} cannot be written ({error.strerror or error}): make room and run the same "
            "command again; it goes on from the ranks that are finished"
        ) from error


def _plan(source: ArraySource, layouts: Sequence[ParameterLayout], parallel: str, file_format: str) -> ShardedManifest:
    """The manifest before anything is written: no checksums yet."""
    by_name = {layout.name: layout for layout in layouts}
    num_stages = 1 + max(stage for layout in layouts for stage in layout.stages)
    matrix = layouts[0].device_matrix
    by_name[GLOBAL_STEP_NAME] = ParameterLayout(GLOBAL_STEP_NAME, (1,), tuple(range(num_stages)), matrix, (-1,))
    arrays = {}
    for name, dtype in source.dtypes.items():
        layout = by_name.get(name) or by_name[name.partition(".")[2]]
        arrays[name] = ShardedArray(dtype, dataclasses.replace(layout, name=name))
    tensors = {name: (dtype, "") for name, dtype in source.tensors.items()}
    manifest = ShardedManifest("", parallel, file_format, num_stages * layouts[0].stage_size, arrays, tensors)
    identity = json.dumps([manifest.to_json(), source.identity()], sort_keys=True)
    return dataclasses.replace(manifest, plan=hashlib.sha256(identity.encode()).hexdigest())


class _Sharding:
    """One command's work: what is there is kept, what is missing is written."""

    def __init__(self, source: ArraySource, manifest: ShardedManifest, out: Path, num_workers: int, report: Report):
        self._source = source
        self._manifest = manifest
        self._out = out
        self._num_workers = num_workers
        self._report = report
        self._infos = [manifest.infos_of_rank(rank) for rank in range(manifest.num_ranks)]

    def run(self, layouts: Sequence[ParameterLayout], layout: Layout | None) -> ShardedManifest:
        self._check_out()
        missing = [rank for rank in range(self._manifest.num_ranks) if not self._is_finished(rank)]
        if not missing and (self._out / SHARDED_NAME).is_file():
            self._report(f"{self._out} holds all {self._manifest.num_ranks} ranks already")
            return ShardedManifest.read(self._out / SHARDED_NAME)
        if len(missing) < self._manifest.num_ranks:
            self._report(f"{self._manifest.num_ranks - len(missing)} ranks are there already")
        written, linked = self._divide(missing)
        self._check_space(written)
        write_json(self._out / PROGRESS_NAME, {"plan": self._manifest.plan})
        (self._out / SHARDED_NAME).unlink(missing_ok=True)
        self._remove_leftovers()
        for batch in self._batches(written):
            self._write_batch(batch)
            self._report(f"ranks {batch[0]} to {batch[-1]} of {self._manifest.num_ranks} written")
        for rank, source in linked.items():
            self._link_rank(rank, source)
        if linked:
            self._report(f"{len(linked)} ranks hold what others do: links to their files")
        self._copy_companions()
        write_strategy_directory(self._out / STRATEGY_NAME, self._source.dims, layout, layouts)
        manifest = self._finished_manifest()
        write_json(self._out / SHARDED_NAME, manifest.to_json())
        (self._out / PROGRESS_NAME).unlink()
        return manifest

    def _divide(self, missing: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """Return the ranks to be written, and for the others the rank whose file holds the same."""
        held: dict[int, list[tuple]] = {}
        for array in self._manifest.arrays.values():
            for box, ranks in array.layout.replicas().items():
                for rank in ranks:
                    held.setdefault(rank, []).append((array.layout.name, box))
        finished = set(held) - set(missing)
        first: dict[tuple, int] = {}
        for rank in sorted(held, key=lambda rank: (rank not in finished, rank)):
            first.setdefault(tuple(held[rank]), rank)
        sources = {rank: first[tuple(held[rank])] for rank in missing}
        written = [rank for rank, source in sources.items() if source == rank]
        return written, {rank: source for rank, source in sources.items() if source != rank}

    def _link_rank(self, rank: int, source: int) -> None:
        """Give a rank the file of another by a hard link, or by a copy where the file system has none."""
        theirs, ours = (rank_file(self._out, owner, self._manifest.file_format) for owner in (source, rank))
        ours.parent.mkdir(exist_ok=True)
        manifest = read_json_object(theirs.parent / RANK_MANIFEST_NAME)
        write_json(ours.parent / RANK_MANIFEST_NAME, {**manifest, "rank": rank})
        partial = partial_path(ours)
        try:
            os.link(theirs, partial)
        except OSError:  # not supported, or more links than a file may have
            shutil.copyfile(theirs, partial)
        partial.replace(ours)

    def _check_out(self) -> None:
        for name in (SHARDED_NAME, PROGRESS_NAME):
            if (self._out / name).is_file():
                if read_json_object(self._out / name).get("plan") == self._manifest.plan:
                    return
                raise UserError(
                    f"{self._out} holds shards of another model, layout, dtype or format: choose another --output, or "
                    "remove it"
                )
        if any(self._out.iterdir()):
            raise UserError(f"{self._out} exists already and is no sharded directory: choose another --output")

    def _is_finished(self, rank: int) -> bool:
        path = rank_file(self._out, rank, self._manifest.file_format)
        manifest_path = path.parent / RANK_MANIFEST_NAME
        if not path.is_file() or not manifest_path.is_file():
            return False
        manifest = read_json_object(manifest_path)
        return manifest.get("plan") == self._manifest.plan and manifest.get("size_bytes") == path.stat().st_size

    def _check_space(self, ranks: Sequence[int]) -> None:
        needed = sum(self._file_layout(rank).size_bytes for rank in ranks) + _SPARE_BYTES
        free = shutil.disk_usage(self._out).free
        if needed > free:
            raise UserError(
                f"the shards need {needed / 2**30:.2f} GiB, but {self._out} has {free / 2**30:.2f} GiB free: make room "
                "or choose another --output"
            )

    def _file_layout(self, rank: int) -> FileLayout:
        return shard_layout(self._infos[rank], self._manifest.file_format)

    def _remove_leftovers(self) -> None:
        for rank in range(self._manifest.num_ranks):
            partial_path(rank_file(self._out, rank, self._manifest.file_format)).unlink(missing_ok=True)

    def _batches(self, ranks: Sequence[int]) -> Iterator[list[int]]:
        """Runs of ranks of one stage that hold as much as the stage: each reads the stage's arrays once."""
        batch: list[int] = []
        size_bytes = 0
        stage_size = next(iter(self._manifest.arrays.values())).layout.stage_size
        for rank in ranks:
            stage = rank // stage_size
            if batch and (stage != batch[0] // stage_size or size_bytes >= self._stage_bytes(stage)):
                yield batch
                batch, size_bytes = [], 0
            batch.append(rank)
            size_bytes += sum(info.size_bytes for info in self._infos[rank].values())
        if batch:
            yield batch

    def _stage_bytes(self, stage: int) -> int:
        return sum(array.info.size_bytes for array in self._manifest.arrays.values() if stage in array.layout.stages)

    def _write_batch(self, ranks: Sequence[int]) -> None:
        writers: dict[int, TensorFileWriter] = {}
        try:
            for rank in ranks:
                path = rank_file(self._out, rank, self._manifest.file_format)
                path.parent.mkdir(exist_ok=True)
                writers[rank] = TensorFileWriter(path, self._file_layout(rank))
            with worker_pool(self._num_workers) as pool:
                names = self._infos[ranks[0]]
                written = pool.map(lambda name: self._write_array(name, writers), names)
                what = f"tensors of ranks {ranks[0]} to {ranks[-1]} of {self._manifest.num_ranks}"
                entries = list(counted(written, len(names), what))
                list(pool.map(lambda rank: self._finish_rank(rank, writers[rank], entries), ranks))
        finally:
            for writer in writers.values():
                writer.discard()

    def _write_array(self, name: str, writers: Mapping[int, TensorFileWriter]) -> dict[str, Any]:
        """Write one array's shards; return the checksums of its tensors, else of the whole, and of each shard."""
        layout = self._manifest.arrays[name].layout
        whole, tensors = self._source.read(name)
        shards = {}
        for box, ranks in layout.replicas().items():
            here = [rank for rank in ranks if rank in writers]
            shard = np.ascontiguousarray(whole[tuple(slice(*bounds) for bounds in box)]) if here else None
            for rank in here:
                shards[rank] = {
                    "offset": [start for start, _ in box],
                    "shape": list(layout.shard_shape),
                    "checksum": writers[rank].write_summed(name, shard),
                }
        entry = {"name": name, "whole": "" if tensors else checksum(whole), "tensors": tensors, "shards": shards}
        self._source.release(name)
        return entry

    def _finish_rank(self, rank: int, writer: TensorFileWriter, entries: Sequence[Mapping[str, Any]]) -> None:
        manifest = {
            "plan": self._manifest.plan,
            "rank": rank,
            "size_bytes": writer.size_bytes,
            "arrays": {entry["name"]: {**entry["shards"][rank], "whole": entry["whole"]} for entry in entries},
            "tensors": {name: checksum for entry in entries for name, checksum in entry["tensors"].items()},
        }
        write_json(writer.path.parent / RANK_MANIFEST_NAME, manifest)
        writer.finish()

    def _copy_companions(self) -> None:
        write_json(self._out / "config.json", self._source.hf_config)
        for name in tokenizer_files(self._source.directory):
            (self._out / name).parent.mkdir(exist_ok=True)
            write_file(self._out / name, (self._source.directory / name).read_bytes())

    def _finished_manifest(self) -> ShardedManifest:
        """The manifest with the checksums that the ranks' manifests hold."""
        wholes: dict[str, str] = {}
        tensors: dict[str, str] = {}
        for rank in range(self._manifest.num_ranks):
            path = rank_file(self._out, rank, self._manifest.file_format).parent / RANK_MANIFEST_NAME
            manifest = read_json_object(path)
            for known, new in (
                (wholes, {name: entry["whole"] for name, entry in manifest["arrays"].items()}),
                (tensors, manifest["tensors"]),
            ):
                changed = next((name for name in new if known.setdefault(name, new[name]) != new[name]), None)
                if changed:
                    raise UserError(
                        f"{changed} changed in {self._source.directory} meanwhile: remove {self._out} and start again"
                    )
        return dataclasses.replace(
            self._manifest,
            arrays={
                name: dataclasses.replace(array, checksum=wholes[name]) for name, array in self._manifest.arrays.items()
            },
            tensors={name: (dtype, tensors[name]) for name, (dtype, _) in self._manifest.tensors.items()},
        )


@contextlib.contextmanager
def worker_pool(num_workers: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that start nothing new once something failed."""
    pool = ThreadPoolExecutor(num_workers)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Make a directory and keep other sharding commands out of it; the system drops the lock with the process."""
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another command is writing {out}: wait for it, or choose another --output") from None
        yield
    finally:
        os.close(descriptor)
