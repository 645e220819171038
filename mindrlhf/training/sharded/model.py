"""One rank's shard of a model, and the graph of its log-probabilities."""

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
from mindrlhf.layout.rows import num_logprob_micro_batches, num_update_micro_batches, own_rows, place_rows
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.shards.save import finish_saving, held_shards, plan_saving, write_rank
from mindrlhf.shards.sources import ArraySource, open_source
from mindrlhf.training.sharded.factory import layout_of, network_layouts
from mindrlhf.training.worker.model import RankModel, frozen_tensors
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.shards import PublishedShard, plan_publication, wanted_shards, write_shards
from mindrlhf.weights.sharded import ShardedManifest
from mindrlhf.weights.tensors import STORAGE_DTYPES, convert_dtype


class ShardedModel(RankModel):
    """This rank's shard of a model.

    What computes is given to it, so that graphs which were compiled elsewhere can take the place of the product's own:
    ``cell`` may be any function, and the shard may lie in other parameters than those of ``network``.

    Args:
        network: the model, of which names, dtypes and shapes are read.
        cell: log-probabilities; takes the four arrays of ``row_inputs``, returns a tuple of tensors, one for each
            pipeline micro-batch, as :class:`mindrlhf.training.sharded.cells.ParallelLogProbs` does.
        parallel: the layout, with `data_parallel` filled in.
        rank: number of this rank.
        parameters: those that hold the shard, by name, at least all that this rank holds; None: the network's.
        after_token: of a scoring model, whose cell gives the score before each token: give that after it, which is the
            one before the next. So the rows are moved by one position on their way in, and the scores back, and no rank
            needs the next position of another.
    """

    def __init__(
        self,
        network: CausalLM,
        cell: Callable[..., tuple[ms.Tensor, ...]],
        parallel: ParallelSection,
        rank: int,
        parameters: Mapping[str, ms.Parameter] | None = None,
        *,
        after_token: bool = False,
    ):
        super().__init__(network)
        self._after_token = after_token
        self.cell = cell
        self.parallel = parallel
        self.layout = layout_of(parallel)
        self.rank = rank
        self.layouts: list[ParameterLayout] = network_layouts(network, self.layout)
        self.held = held_shards(self.layouts, rank)
        self._parameters = parameters or {parameter.name: parameter for parameter in network.get_parameters()}
        self.num_update_micro_batches = num_update_micro_batches(parallel)
        self._num_logprob_micro_batches = num_logprob_micro_batches(parallel)
        self._publications: dict[tuple[int, ...] | None, dict[str, list[PublishedShard]]] = {}

    @property
    def is_in_last_stage(self) -> bool:
        """Whether this rank has the outputs of the model."""
        return self.layout.stage_of(self.rank) == self.layout.pipeline_stage - 1

    def see(self, images: Sequence[np.ndarray]) -> None:
        """See :meth:`RankModel.see`; the first stage alone has the vision tower."""
        if self._is_in_first_stage:
            self.network.images.see(images)

    @property
    def _is_in_first_stage(self) -> bool:
        return self.layout.stage_of(self.rank) == 0

    def compile(self, rows: PackedRows) -> None:
        """Compile the graph of the log-probabilities for the shape of ``rows``; its cell must be MindSpore's."""
        self.cell.compile(*self.row_inputs(rows, self._num_logprob_micro_batches))

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """Return the log-probabilities of this rank's rows, float32 [rows, length]; zeros before the last stage."""
        outputs = self.cell(*self.row_inputs(rows, self._num_logprob_micro_batches))
        if not self.is_in_last_stage:
            return np.zeros_like(rows.mask)
        own = own_rows([output.asnumpy() for output in outputs], self.layout, self.rank)
        return _moved(own, -1) if self._after_token else own

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Return what belongs to the tokens of rows [rows, length] where the cells expect it."""
        return _moved(values, 1) if self._after_token else values

    def row_inputs(self, rows: PackedRows, num_micro_batches: int) -> list[ms.Tensor]:
        """Return the four arrays that every cell takes first; with vision, set the image rows that they refer to."""
        if self.network.images is not None and self._is_in_first_stage and rows.images:
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
        if self.network.images is not None and self._is_in_first_stage:
            self.network.images.place(())
        for one in self._held_in(source):
            parameter = self._parameters[one.name]
            array = convert_dtype(source.read_shard(one, self.rank), source.dtypes[one.name], _dtype_name(parameter))
            set_shard(parameter, array, one)
            source.release(one.name)

    def _held_in(self, source: ArraySource) -> Sequence[ParameterLayout]:
        """Return the layouts of what this rank takes of a source."""
        return self.held

    def restore(self, directory: str | os.PathLike) -> None:
        """See :meth:`RankModel.restore`."""
        self.load(self.open_saved(directory))

    def open_saved(self, directory: str | os.PathLike, optimizer_file: str | os.PathLike = "") -> ArraySource:
        """Open what ranks of any layout have saved of this model; see :func:`mindrlhf.shards.sources.open_source`."""
        return open_source(directory, optimizer_file, is_partial=True)

    def shards(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and array of what this rank holds; bfloat16 as uint16 bit patterns."""
        for one in self.held:
            yield one.name, self.shard(one.name)

    def shard(self, name: str) -> np.ndarray:
        """Return what this rank holds of a parameter; bfloat16 as uint16 bit patterns."""
        parameter = self._parameters[name]
        return parameter.asnumpy().view(STORAGE_DTYPES[_dtype_name(parameter)])

    def copy_from(self, other: "ShardedModel") -> None:
        """See :meth:`RankModel.copy_from`: shard by shard."""
        for one in self.held:
            self._parameters[one.name].set_data(ms.Tensor(other._parameters[one.name].asnumpy().copy()))

    def write_to(self, buffer: WeightBuffer, ranks: Sequence[int] | None = None) -> None:
        """Write what this rank holds, and no other rank of its node writes."""
        publication = self._publication(None if ranks is None else tuple(ranks))
        frozen = frozen_tensors(self.network)
        for name, parts in wanted_shards(publication, buffer).items():
            if not (name in frozen and buffer.keep(frozen[name])):
                write_shards(buffer, {name: parts}, {name: self.shard(name)})

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
            name, hold: see :meth:`RankModel.state_writer`.
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
        finish_saving(directory, manifest, self.network.hf_config, self.layouts, self.layout)

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
        return plan_saving(self.network.hf_config, self.layouts, self.layout, self.dtype, state=state or ())


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


def _dtype_name(parameter: ms.Parameter) -> str:
    return str(parameter.dtype).lower()
