"""Parameters of placed models on disk: what ranks load, save and export of them and of their optimisers' state."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.optimizers import STATE_NAMES, optimizer_of
from mindrlhf.checkpoint.manifest import below
from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.errors import UserError
from mindrlhf.models.lora.model import initial_down
from mindrlhf.shards.adapter_sources import open_adapter_source
from mindrlhf.shards.save import finish_saving, plan_saving, state_layouts, step_layout, write_rank
from mindrlhf.shards.sources import ArraySource, open_source
from mindrlhf.training.placement import Placement, dtype_of, set_shard
from mindrlhf.weights.adapters.peft import adapter_config
from mindrlhf.weights.sharded import ShardedManifest
from mindrlhf.weights.tensors import convert_dtype

State = Mapping[str, ms.Parameter]  # an optimiser's, by names in a checkpoint


def load(placement: Placement, source: ArraySource) -> None:
    """Take this rank's shard of every parameter, one after the other, converted to the parameters' dtypes.

    The graphs must have been compiled: it is then that a parameter gets the shape of its shard.

    Raises:
        UserError: the source is damaged.
    """
    if placement.network.images is not None and placement.stage == 0:
        placement.network.images.place(())
    for one in placement.held.values():
        if placement.adapted and one.name not in source.dtypes:  # a source has the base, or the adapters
            continue
        parameter = placement.parameters[one.name]
        array = convert_dtype(source.read_shard(one, placement.rank), source.dtypes[one.name], dtype_of(parameter))
        set_shard(parameter, array, one)
        source.release(one.name)


def begin_adapters(placement: Placement, seed: int, directory: str) -> None:
    """Give the adapters what they begin with: those of a directory, or when it is "", new ones of a seed.

    Raises:
        UserError: the adapter is of another model.
    """
    if directory:
        restore(placement, directory)
        return
    for adapter in placement.adapted.adapters:
        if adapter.down.mf_name in placement.held:
            down, up = placement.held[adapter.down.mf_name], placement.held[adapter.up.mf_name]
            whole = initial_down(adapter, placement.network.dims, seed)
            set_shard(placement.parameters[down.name], whole[down.shard_of(placement.rank)], down)
            set_shard(placement.parameters[up.name], np.zeros(up.shard_shape, np.float32), up)


def restore(placement: Placement, directory: str | os.PathLike, state: State | None = None) -> None:
    """Load this rank's shards of weights, or of adapters, and of an optimiser's state, whatever layout saved them."""
    source, held = _open_saved(placement, directory), placement.held
    layouts = []
    if state is not None:
        kinds = {name: [kind for kind in STATE_NAMES if f"{kind}.{name}" in state] for name in held}
        layouts = [*state_layouts(held.values(), kinds), step_layout(placement.layout)]
    if missing := [layout.name for layout in layouts if layout.name not in source.dtypes]:
        other = optimizer_of(source.dtypes)
        raise UserError(f"{directory} lacks {missing[0]} of the optimiser: set optimizer.type to {other.name}")
    load(placement, source)
    for layout in layouts:
        set_shard(state[layout.name], source.read_shard(layout, placement.rank), layout)
        source.release(layout.name)


def _open_saved(placement: Placement, directory: str | os.PathLike) -> ArraySource:
    if placement.adapted:
        return open_adapter_source(directory, placement.adapted, placement.network.dims)
    return open_source(directory, is_partial=True)


def state_size_bytes(placement: Placement, state: State | None = None) -> int:
    """Return the bytes that all ranks save, of parameters and, with ``state``, of the optimiser's."""
    arrays = _plan(placement, state).arrays.values()
    return sum(array.shard_info.size_bytes * len(array.layout.ranks) for array in arrays)


def state_writer(placement: Placement, name: str, hold: Callable, state: State | None = None) -> StateWriter:
    """Return the function that writes this rank's part of a sharded directory; rank 0's also makes it whole.

    Args:
        name: of the directory.
        hold: takes ``name`` and the arrays first.
        state: the optimiser's, saved with the parameters.
    """
    manifest, rank, network = _plan(placement, state), placement.rank, placement.network
    arrays = hold(name, _held_arrays(placement, manifest, state or {}))
    config = None
    if placement.adapted:
        config = adapter_config(network.spec, network.dims, network.lora.options, network.lora.base_path)

    def write(parent: Path) -> dict[str, str]:
        checksums = write_rank(parent / name, manifest, rank, arrays)
        if rank == 0:
            whole = (network.hf_config, placement.saved, placement.layout, config)
            finish_saving(parent / name, manifest, *whole)
        return below(name, checksums)

    return write


def _held_arrays(placement: Placement, manifest: ShardedManifest, state: State) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what this rank writes in the order of its file."""
    yield from ((name, array) for name, array in placement.shards() if name in manifest.arrays)
    # An optimiser also knows the parameters of other stages, of which there is no data here.
    for name in manifest.infos_of_rank(placement.rank):
        if name in state:
            yield name, state[name].asnumpy()


def _plan(placement: Placement, state: State | None) -> ShardedManifest:
    options = {"state": state or (), "adapted": placement.adapted or None}
    return plan_saving(placement.network.hf_config, placement.saved, placement.layout, placement.dtype, **options)
