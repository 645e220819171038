"""A sharded directory written by the ranks that hold its shards: nothing is gathered.

Every rank writes its own file, and one of them the rest; who calls them knows when all are done. It has checksums of
shards only, since no array was ever whole; `mindrlhf weights reshard` and `merge` read it like any other.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mindrlhf.algorithms.optimizers import GLOBAL_STEP_NAME, optimizer_of
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.shards.sources import states_of
from mindrlhf.shards.strategy_files import write_strategy_directory
from mindrlhf.specs import find_spec
from mindrlhf.specs.lora import AdaptedRules
from mindrlhf.system.files import write_json
from mindrlhf.weights.adapters.config import CONFIG_NAME, saved_rules
from mindrlhf.weights.convert import without_drafts
from mindrlhf.weights.file_writer import TensorFileWriter
from mindrlhf.weights.hf import SHARDED_NAME
from mindrlhf.weights.infos import file_dtype
from mindrlhf.weights.shard_files import shard_layout
from mindrlhf.weights.sharded import (
    RANK_MANIFEST_NAME,
    STRATEGY_NAME,
    ShardedArray,
    ShardedManifest,
    rank_file,
)

_FILE_FORMAT = "safetensors"


def plan_saving(
    hf_config: dict,
    layouts: Sequence[ParameterLayout],
    layout: Layout,
    dtype: str,
    *,
    state: Collection[str] = (),
    adapted: AdaptedRules | None = None,
) -> ShardedManifest:
    """Describe a directory that the ranks of a run are about to write.

    Args:
        hf_config: the model's config.json.
        layouts: of its parameters.
        layout: that they come from.
        dtype: name of the parameters' dtype.
        state: names of an optimiser's state, on one rank at least, which is among the arrays; empty: there is none.
        adapted: of an adapter, whose parameters these are.
    """
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    saved = spec.rules(dims) if adapted is None else saved_rules(adapted)
    rules = {rule.mf_name: rule for rule in saved}
    arrays, tensors = {}, {}
    for parameter in layouts:
        rule = rules[parameter.name]
        arrays[parameter.name] = ShardedArray(file_dtype(rule, dtype) or dtype, parameter)
        tensors |= dict.fromkeys(rule.hf_names, (arrays[parameter.name].dtype, ""))
    if state:
        kinds = states_of(rules.values(), dims, optimizer_of(state))
        arrays |= {state.name: ShardedArray("float32", state) for state in state_layouts(layouts, kinds)}
        arrays[GLOBAL_STEP_NAME] = ShardedArray("int32", step_layout(layout))
    manifest = ShardedManifest("", str(layout), _FILE_FORMAT, layout.world_size, arrays, tensors)
    identity = json.dumps([manifest.to_json(), hf_config], sort_keys=True)
    return replace(manifest, plan=hashlib.sha256(identity.encode()).hexdigest())


def step_layout(layout: Layout) -> ParameterLayout:
    """Layout of an optimiser's step count: whole on each rank."""
    return ParameterLayout(GLOBAL_STEP_NAME, (1,), tuple(range(layout.pipeline_stage)), layout.device_matrix, (-1,))


def write_rank(
    directory: Path, manifest: ShardedManifest, rank: int, shards: Iterable[tuple[str, np.ndarray]]
) -> dict[str, str]:
    """Write what a rank holds, one array at a time; its file appears whole or not at all.

    Args:
        directory: made when it is missing; other ranks may write to it at the same time.
        manifest: of :func:`plan_saving`, the same on all ranks.
        rank: the writer.
        shards: (name, array) of every array of the manifest that the rank holds, in any order; bfloat16 as uint16.

    Returns:
        The checksum of its file, XXH3-64 in hex, by path below ``directory``; empty unless the shards came in the
        order of ``manifest.infos_of_rank``.

    Raises:
        OSError: the disk refuses.
    """
    infos = manifest.infos_of_rank(rank)
    path = rank_file(directory, rank, manifest.file_format)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = TensorFileWriter(path, shard_layout(infos, manifest.file_format))
    try:
        entries = {}
        for name, array in shards:
            box = manifest.arrays[name].layout.shard_of(rank)
            entries[name] = {
                "offset": [part.start for part in box],
                "shape": list(array.shape),
                "checksum": writer.write_summed(name, array),
                "whole": "",
            }
        assert entries.keys() == infos.keys(), f"rank {rank} did not give {sorted(infos.keys() ^ entries.keys())[:3]}"
        content = {"plan": manifest.plan, "rank": rank, "size_bytes": writer.size_bytes, "tensors": {}}
        write_json(path.parent / RANK_MANIFEST_NAME, {**content, "arrays": entries})
        checksum = writer.finish()
    finally:
        writer.discard()
    return {path.relative_to(directory).as_posix(): checksum} if checksum else {}


def finish_saving(
    directory: Path,
    manifest: ShardedManifest,
    hf_config: dict,
    layouts: Sequence[ParameterLayout],
    layout: Layout,
    adapter_config: dict | None = None,
) -> None:
    """Make a directory whole that all ranks have written to: config.json, strategy files, and last its manifest.

    Raises:
        UserError, OSError: the disk refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", without_drafts(hf_config))
    if adapter_config is not None:
        write_json(directory / CONFIG_NAME, adapter_config)
    dims = find_spec(hf_config).dims(hf_config)
    write_strategy_directory(directory / STRATEGY_NAME, dims, layout, layouts)
    write_json(directory / SHARDED_NAME, manifest.to_json())


def state_layouts(
    layouts: Iterable[ParameterLayout], kinds: Mapping[str, Sequence[str]]
) -> list[ParameterLayout]:
    """Layouts of an optimiser's state: those of the trained parameters; ``kinds`` are the names of its parts."""
    return [
        replace(layout, name=f"{kind}.{layout.name}") for layout in layouts for kind in kinds.get(layout.name, ())
    ]
