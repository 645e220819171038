"""Put the shards of all ranks together again: `mindrlhf weights merge`."""

import os
import shutil
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.shards.shard import DEFAULT_WORKERS, worker_pool
from mindrlhf.specs import ParameterRule
from mindrlhf.system.progress import counted
from mindrlhf.weights.adapters.config import CONFIG_NAME
from mindrlhf.weights.adapters.peft import write_adapter
from mindrlhf.weights.array_file import save_arrays
from mindrlhf.weights.convert import MAX_SHARD_BYTES
from mindrlhf.weights.hf import read_json_object
from mindrlhf.weights.sharded import ShardedDirectory
from mindrlhf.weights.writer import model_directory


def merge_directory(
    sharded_dir: str | os.PathLike,
    out_dir: str | os.PathLike,
    *,
    optimizer_file: str | os.PathLike = "",
    num_workers: int = DEFAULT_WORKERS,
) -> None:
    """Write the Hugging Face directory that a sharded directory was made from: every tensor equal to the bit.

    It appears whole or not at all. Each shard and each tensor is compared with its checksum on the way. Of an adapter's
    shards it is the directory in PEFT's format.

    Args:
        optimizer_file: where to write the optimiser state, as a run's checkpoint has it; replaced when it is there.
        num_workers: threads; each holds about one tensor.

    Raises:
        UserError: the source is damaged, has no optimiser state that was asked for, `out_dir` is in use, or the disk is
            too small.
    """
    shards = ShardedDirectory(sharded_dir)
    if optimizer_file and not shards.state_names():
        raise UserError(f"{sharded_dir} holds no optimiser state: leave out --optimizer-out")
    infos = [shards.info(name) for name in shards.names()]
    if shards.lora is not None:
        _write_adapter(shards, Path(out_dir))
        if optimizer_file:
            _write_optimizer(shards, Path(optimizer_file))
        return
    _check_space(Path(out_dir), sum(info.size_bytes for info in infos))
    with (
        model_directory(
            infos,
            shards.hf_config,
            out_dir,
            file_format="pt",
            max_shard_bytes=MAX_SHARD_BYTES,
            tokenizer_dir=sharded_dir,
        ) as files,
        worker_pool(num_workers) as pool,
    ):

        def merge(rule: ParameterRule) -> None:
            for name, tensor in shards.read_tensors(rule).items():
                files.write(name, tensor)

        rules = list(shards.rules())
        list(counted(pool.map(merge, rules), len(rules), "parameters"))
    if optimizer_file:
        _write_optimizer(shards, Path(optimizer_file))


def _write_adapter(shards: ShardedDirectory, out_dir: Path) -> None:
    if out_dir.exists():
        raise UserError(f"{out_dir} exists: give a directory that does not")
    tensors = ((name, shards.read_float32(name)) for name in shards.names())
    shapes = {name: shards.info(name).shape for name in shards.names()}
    write_adapter(tensors, shapes, read_json_object(shards.directory / CONFIG_NAME), out_dir)


def _write_optimizer(shards: ShardedDirectory, path: Path) -> None:
    infos = [shards.manifest.arrays[name].info for name in shards.state_names()]
    try:
        _check_space(path, sum(info.size_bytes for info in infos))
        save_arrays(path, ((info.name, shards.read_array(info.name)) for info in infos), infos)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}): give another --optimizer-out"
        ) from error


def _check_space(path: Path, size_bytes: int) -> None:
    parent = next(parent for parent in path.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(parent).free
    if size_bytes > free:
        raise UserError(
            f"{path} needs {size_bytes / 2**30:.2f} GiB, but {parent} has {free / 2**30:.2f} GiB free: make room or "
            "choose another disk"
        )
