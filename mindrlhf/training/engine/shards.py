"""One rank's shards of a model: what goes into its graphs, and what is published, saved and loaded of it."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np

from mindrlhf.checkpoint.manifest import below
from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.config.training import ParallelSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.layout.rows import num_logprob_micro_batches, own_rows, place_rows
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.models.lora.model import initial_down, scale_name, without_adapters
from mindrlhf.shards.adapter_sources import open_adapter_source
from mindrlhf.shards.save import finish_saving, held_shards, plan_saving, write_rank
from mindrlhf.shards.sources import ArraySource, open_source
from mindrlhf.specs.lora import AdaptedRules
from mindrlhf.training.engine.factory import layout_of, network_layouts
from mindrlhf.training.engine.model import Placement
from mindrlhf.weights.adapters.merge import merge
from mindrlhf.weights.adapters.peft import adapter_config
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.shards import PublishedShard, plan_publication, wanted_shards, write_shards
from mindrlhf.weights.sharded import ShardedManifest
from mindrlhf.weights.tensors import STORAGE_DTYPES, convert_dtype


class Shards(Placement):
    """This rank's shards.

    What computes is given its rows here, so that graphs which were compiled elsewhere can take the place of the
    product's own, and the shards may lie in other parameters than those of ``network``. Of adapters, a rank that holds
    rows of W has those of B, and one that holds columns of W those of A: so each merges what it publishes without the
    others.

    Args:
        network: the model, of which names, dtypes and shapes are read; ``network.lora`` says what its adapters are.
        parallel: the layout, with `data_parallel` filled in.
        rank: number of this rank.
        parameters: those that hold the shards, by name, at least all that this rank holds; None: the network's.
        after_token: of a scoring model, whose graph gives the score before each token: give that after it, which is the
            one before the next. So the rows are moved by one position on their way in, and the scores back, and no rank
            needs the next position of another.
    """

    def __init__(
        self,
        network: CausalLM,
        parallel: ParallelSection,
        rank: int,
        parameters: Mapping[str, ms.Parameter] | None = None,
        *,
        after_token: bool = False,
    ):
        super().__init__(network, parameters)
        self._after_token = after_token
        self.parallel = parallel
        self.layout = layout_of(parallel)
        self.rank = rank
        self.stage = self.layout.stage_of(rank)
        self.layouts: list[ParameterLayout] = network_layouts(network, self.layout)
        self.names = self.held = {one.name: one for one in held_shards(self.layouts, rank)}
        self.num_update_micro_batches = parallel.micro_batch_num
        self._num_logprob_micro_batches = num_logprob_micro_batches(parallel)
        self._publications: dict[tuple[int, ...] | None, dict[str, list[PublishedShard]]] = {}
        self._adapted = network.lora and AdaptedRules(network.spec, network.dims, network.lora.options)
        self._saved, self._adapter_of = self.layouts, {}
        if self._adapted:
            trained = {rule.mf_name for rule in self._adapted.trained()}
            self._saved = [one for one in self.layouts if one.name in trained]
            self._adapter_of = {one.base.mf_name: one for one in self._adapted.adapters}

    @property
    def is_in_last_stage(self) -> bool:
        """True when this rank has the outputs of the model."""
        return self.stage == self.layout.pipeline_stage - 1

    def see(self, images: Sequence[np.ndarray]) -> None:
        """See :meth:`Placement.see`; the first stage alone has the vision tower."""
        if self.stage == 0:
            self.network.images.see(images)

    def compile(self, graph: ms.nn.Cell, rows: PackedRows) -> None:
        """Compile a graph of outputs for the shape of ``rows``."""
        graph.compile(*self.row_inputs(rows, self._num_logprob_micro_batches))

    def outputs(self, graph: Callable[..., tuple[ms.Tensor, ...]], rows: PackedRows) -> np.ndarray:
        """See :meth:`Whole.outputs`; zeros before the last stage.

        The graph takes the four arrays of ``row_inputs`` and returns a tensor for each pipeline micro-batch, as
        :class:`mindrlhf.training.engine.sharded_cells.ParallelLogProbs` does.
        """
        outputs = graph(*self.row_inputs(rows, self._num_logprob_micro_batches))
        if not self.is_in_last_stage:
            return np.zeros_like(rows.mask)
        return self._after(own_rows([output.asnumpy() for output in outputs], self.layout, self.rank))

    def own_outputs(self, outputs: Sequence[ms.Tensor], rows: PackedRows) -> np.ndarray:
        """Return the same of what an update says of its pipeline micro-batches, this rank's rows [1, rows, length] of
        each.
        """
        if not self.is_in_last_stage:
            return np.zeros_like(rows.mask)
        return self._after(np.concatenate([output.asnumpy()[0] for output in outputs]))

    def _after(self, own: np.ndarray) -> np.ndarray:
        return _moved(own, -1) if self._after_token else own

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        return without_adapters(self.parameters[scale_name(self.stage)])

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Return what belongs to the tokens of rows [rows, length] where the cells expect it."""
        return _moved(values, 1) if self._after_token else values

    def row_inputs(self, rows: PackedRows, num_micro_batches: int) -> list[ms.Tensor]:
        """Return the four arrays that every cell takes first; with vision, set the image rows that they refer to."""
        if self.network.images is not None and self.stage == 0 and rows.images:
            self.network.images.place(rows.images)
        arrays = (rows.model_inputs, rows.segment_ids, rows.labels, self.per_token(rows.mask))
        return self.inputs(arrays, num_micro_batches)

    def inputs(self, arrays: Iterable[np.ndarray], num_micro_batches: int) -> list[ms.Tensor]:
        """Return the inputs of a graph from this rank's rows [rows, ..] of each; see :mod:`mindrlhf.layout.rows`."""
        return [ms.Tensor(place_rows(array, self.layout, self.rank, num_micro_batches)) for array in arrays]

    def load(self, source: ArraySource) -> None:
        """Take this rank's shard of every parameter, one after the other, converted to the parameters' dtypes.

        The graphs must have been compiled: it is then that a parameter gets the shape of its shard.

        Raises:
            UserError: the source is damaged.
        """
        if self.network.images is not None and self.stage == 0:
            self.network.images.place(())
        for one in self.held.values():
            if self._adapted and one.name not in source.dtypes:  # a source has the base, or the adapters
                continue
            parameter = self.parameters[one.name]
            array = convert_dtype(source.read_shard(one, self.rank), source.dtypes[one.name], _dtype_name(parameter))
            set_shard(parameter, array, one)
            source.release(one.name)

    def begin(self, seed: int, adapter_dir: str) -> None:
        """Give the adapters what they begin with: those of a directory, or when it is "", new ones of a seed.

        Raises:
            UserError: the adapter is of another model.
        """
        if adapter_dir:
            self.restore(adapter_dir)
            return
        for adapter in self._adapted.adapters:
            if adapter.down.mf_name in self.held:
                down, up = self.held[adapter.down.mf_name], self.held[adapter.up.mf_name]
                whole = initial_down(adapter, self.network.dims, seed)
                set_shard(self.parameters[down.name], whole[down.shard_of(self.rank)], down)
                set_shard(self.parameters[up.name], np.zeros(up.shard_shape, np.float32), up)

    def restore(self, directory: str | os.PathLike) -> None:
        self.load(self.open_saved(directory))

    def open_saved(self, directory: str | os.PathLike, optimizer_file: str | os.PathLike = "") -> ArraySource:
        """Open what ranks of any layout have saved of this model, or of its adapters, and of the optimiser."""
        if self._adapted:
            return open_adapter_source(directory, self._adapted, self.network.dims, optimizer_file)
        return open_source(directory, optimizer_file, is_partial=True)

    def shards(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and array of what this rank holds; bfloat16 as uint16 bit patterns."""
        yield from ((name, self.shard(name)) for name in self.held)

    def shard(self, name: str) -> np.ndarray:
        """Return what this rank holds of a parameter; bfloat16 as uint16 bit patterns."""
        parameter = self.parameters[name]
        return parameter.asnumpy().view(STORAGE_DTYPES[_dtype_name(parameter)])

    def write_to(self, buffer: WeightBuffer, ranks: Sequence[int] | None = None) -> None:
        """See :meth:`Whole.write_to`: what no other rank of the node writes."""
        publication = self._publication(None if ranks is None else tuple(ranks))
        for name, parts in wanted_shards(publication, buffer).items():
            if name in self._adapter_of:
                self._write_merged(buffer, name, parts)
            else:
                self._write_rounded(buffer, name, parts)

    def _write_rounded(self, buffer: WeightBuffer, name: str, parts: Sequence[PublishedShard]) -> None:
        """Write parts of a parameter, in the buffer's dtype and cut out before they leave the device."""
        parameter, dtype = self.parameters[name], buffer.info(parts[0].hf_name).dtype
        if sum(part.num_elements for part in parts) == parameter.size:
            write_shards(buffer, {name: parts}, {name: _to_host(parameter, dtype)})
            return
        for part in parts:  # the others are of another bucket
            if isinstance(part.rows, slice) or dtype != _dtype_name(parameter):
                array = _to_host(part.cut(parameter), dtype)
            else:  # a CPU gathers no bfloat16
                array = part.cut(_to_host(parameter, dtype))
            buffer.write(part.hf_name, array if part.columns is None else array.T, part.index)

    def _write_merged(self, buffer: WeightBuffer, name: str, parts: Sequence[PublishedShard]) -> None:
        adapter, options = self._adapter_of[name], self.network.lora.options
        base, down, up = (self.shard(one) for one in (name, adapter.down.mf_name, adapter.up.mf_name))
        # A sharded optimiser cuts the rows of W among replicas, but not those of B.
        start = self.held[name].shard_of(self.rank)[0].start
        start -= self.held[adapter.up.mf_name].shard_of(self.rank)[0].start
        up = up[start : start + len(base)]
        for part in parts:
            first = adapter.base.hf_names.index(part.hf_name) * options.rank
            factors = (down[first : first + options.rank], up[part.rows])
            buffer.write(part.hf_name, merge(base[part.rows], *factors, options.scale), part.index)

    def _publication(self, ranks: tuple[int, ...] | None) -> dict[str, list[PublishedShard]]:
        if ranks not in self._publications:
            rules = {rule.mf_name: rule for rule in self.network.spec.rules(self.network.dims)}
            layouts = [one for one in self.layouts if one.name in rules]
            plan = plan_publication(layouts, rules, self.network.dims, self.rank, ranks)
            self._publications[ranks] = plan
        return self._publications[ranks]

    def size_bytes(self, state: Mapping[str, ms.Parameter] | None = None) -> int:
        """Return the bytes that all ranks save, of parameters and, with ``state``, of the optimiser's."""
        arrays = self._plan_saving(state).arrays.values()
        return sum(array.shard_info.size_bytes * len(array.layout.ranks) for array in arrays)

    def state_writer(self, name: str, hold: Callable, state: Mapping[str, ms.Parameter] | None = None) -> StateWriter:
        """Return the function that writes this rank's part of a sharded directory; rank 0's also makes it whole.

        Args:
            name, hold: see :meth:`Whole.state_writer`.
            state: the optimiser's, saved with the parameters.
        """
        manifest = self._plan_saving(state)
        arrays = hold(name, self._held_arrays(manifest, state or {}))

        def write(parent: Path) -> dict[str, str]:
            checksums = write_rank(parent / name, manifest, self.rank, arrays)
            if self.rank == 0:
                self._finish_saving(parent / name, manifest)
            return below(name, checksums)

        return write

    def _finish_saving(self, directory: Path, manifest: ShardedManifest) -> None:
        network, config = self.network, None
        if self._adapted:
            config = adapter_config(network.spec, network.dims, network.lora.options, network.lora.base_path)
        finish_saving(directory, manifest, network.hf_config, self._saved, self.layout, config)

    def _held_arrays(
        self, manifest: ShardedManifest, state: Mapping[str, ms.Parameter]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield what this rank writes in the order of its file."""
        yield from ((name, array) for name, array in self.shards() if name in manifest.arrays)
        # An optimiser also knows the parameters of other stages, of which there is no data here.
        for name in manifest.infos_of_rank(self.rank):
            if name in state:
                yield name, state[name].asnumpy()

    def _plan_saving(self, state: Mapping[str, ms.Parameter] | None) -> ShardedManifest:
        options = {"state": state or (), "adapted": self._adapted or None}
        return plan_saving(self.network.hf_config, self._saved, self.layout, self.dtype, **options)


def _moved(values: np.ndarray, places: int) -> np.ndarray:
    """Move values [rows, length] by one position, 1 or -1; what is moved out, of which no row has any, is dropped."""
    moved = np.zeros_like(values)
    if places > 0:
        moved[:, 1:] = values[:, :-1]
    else:
        moved[:, :-1] = values[:, 1:]
    return moved


def set_shard(parameter: ms.Parameter, array: np.ndarray, layout: ParameterLayout) -> None:
    """Give a parameter its shard, in its dtype (bfloat16 as uint16 bit patterns)."""
    assert tuple(parameter.shape) == layout.shard_shape == array.shape, (
        f"{layout.name} is {tuple(parameter.shape)} in the graph, its layout gives {layout.shard_shape}, and the shard "
        f"is {array.shape}"
    )
    # The copy keeps the parameter from sharing a read-only file mapping.
    data = np.array(array, order="C")
    if parameter.dtype == ms.bfloat16:
        data = data.view(ms.Tensor([0], ms.bfloat16).asnumpy().dtype)
    parameter.set_data(ms.Tensor(data))


def _to_host(tensor: ms.Tensor, dtype: str) -> np.ndarray:
    """Return a tensor in a dtype, rounded (to nearest even) on the device, where it lies."""
    rounded = tensor if dtype == _dtype_name(tensor) else ms.ops.cast(tensor, getattr(ms, dtype))
    return rounded.asnumpy().view(STORAGE_DTYPES[dtype])


def _dtype_name(tensor: ms.Tensor) -> str:
    return str(tensor.dtype).lower()
