"""A policy that is cut over the ranks: one rank's slices of it, its graphs, and what it puts into them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import POLICY_INPUTS
from mindrlhf.checkpoint.manifest import below
from mindrlhf.checkpoint.optimizer import optimizer_state
from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.config.sections import ParallelSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.errors import UserError
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.layout.rows import num_logprob_pieces, num_update_pieces, own_rows, place_rows
from mindrlhf.shards.save import (
    finish_saving,
    held_slices,
    plan_saving,
    state_layouts,
    step_layout,
    write_rank,
)
from mindrlhf.shards.sources import ArraySource
from mindrlhf.training.sharded.cells import ParallelUpdate
from mindrlhf.training.sharded.factory import build_logprobs, layout_of, network_layouts
from mindrlhf.weights.sharded import ShardedManifest
from mindrlhf.weights.tensors import STORAGE_DTYPES, convert_dtype


class SlicedModel:
    """This rank's slices of a model, and the graph of its log-probabilities.

    Args:
        policy: of :func:`mindrlhf.training.sharded.factory.build_policy`.
        parallel: the layout, with `data_parallel` filled in.
        rank: number of this rank.
    """

    def __init__(self, policy: PolicyLogProbs, parallel: ParallelSection, rank: int):
        self.network = policy.model
        self.layout = layout_of(parallel)
        self.rank = rank
        self.layouts: list[ParameterLayout] = network_layouts(self.network, self.layout)
        self.held = held_slices(self.layouts, rank)
        self._parameters = {parameter.name: parameter for parameter in self.network.get_parameters()}
        self.logprobs_cell = build_logprobs(policy, parallel)
        self.num_update_pieces = num_update_pieces(parallel)
        self._num_logprob_pieces = num_logprob_pieces(parallel)

    @property
    def dtype(self) -> str:
        """Dtype name of the parameters."""
        return _dtype_name(self.network.head_weight)

    def compile(self, rows: PackedRows) -> None:
        """Compile the graph of the log-probabilities for the shape of ``rows``."""
        self.logprobs_cell.compile(*self.row_inputs(rows, self._num_logprob_pieces))

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """Return the log-probabilities of this rank's rows, float32 [rows, length]; zeros before the last stage."""
        inputs = self.row_inputs(rows, self._num_logprob_pieces)
        pieces = [piece.asnumpy() for piece in self.logprobs_cell(*inputs)]
        if self.layout.stage_of(self.rank) != self.layout.pipeline_stage - 1:
            return np.zeros_like(rows.mask)
        return own_rows(pieces, self.layout, self.rank)

    def row_inputs(self, rows: PackedRows, num_pieces: int) -> list[ms.Tensor]:
        """Return the four arrays that every cell takes first."""
        return self.inputs((rows.input_ids, rows.segment_ids, rows.labels, rows.mask), num_pieces)

    def inputs(self, arrays: Iterable[np.ndarray], num_pieces: int) -> list[ms.Tensor]:
        """Return the inputs of a graph from this rank's rows [rows, ..] of each; see :mod:`mindrlhf.layout.rows`."""
        return [ms.Tensor(place_rows(array, self.layout, self.rank, num_pieces)) for array in arrays]

    def load(self, source: ArraySource) -> None:
        """Take this rank's slices of every parameter, one after the other, converted to the parameters' dtypes.

        The graphs must have been compiled: it is then that a parameter gets the shape of its slice.

        Raises:
            UserError: the source is damaged.
        """
        for one in self.held:
            parameter = self._parameters[one.name]
            array = convert_dtype(source.read_slice(one, self.rank), source.dtypes[one.name], _dtype_name(parameter))
            set_slice(parameter, array, one)
            source.release(one.name)

    def slices(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and array of what this rank holds; bfloat16 as uint16 bit patterns."""
        for one in self.held:
            parameter = self._parameters[one.name]
            yield one.name, parameter.asnumpy().view(STORAGE_DTYPES[_dtype_name(parameter)])

    def copy_from(self, other: "SlicedModel") -> None:
        """Take the slices of a model of the same shape."""
        for one in self.held:
            self._parameters[one.name].set_data(ms.Tensor(other._parameters[one.name].asnumpy().copy()))

    def state_writer(self, name: str, hold: Callable, optimizer: Any = None) -> StateWriter:
        """Return the function that writes this rank's part of a sharded directory; rank 0's also makes it whole.

        Args:
            name: of the directory in that which the function is given, the same on all ranks.
            hold: takes ``name`` and the arrays first.
            optimizer: AdamW, whose state is saved with the parameters.
        """
        manifest = self._plan_saving(with_state=optimizer is not None)
        arrays = hold(name, self._held_arrays(manifest, optimizer))

        def write(parent: Path) -> dict[str, str]:
            checksums = write_rank(parent / name, manifest, self.rank, arrays)
            if self.rank == 0:
                finish_saving(parent / name, manifest, self.network.hf_config, self.layouts, self.layout)
            return below(name, checksums)

        return write

    def size_bytes(self, *, with_state: bool) -> int:
        """Return the bytes that all ranks save, of parameters and, with ``with_state``, of AdamW's state."""
        arrays = self._plan_saving(with_state=with_state).arrays.values()
        return sum(array.shard_info.size_bytes * len(array.layout.ranks) for array in arrays)

    def _held_arrays(self, manifest: ShardedManifest, optimizer: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Yield what this rank writes in the order of its file."""
        # An optimiser also knows the parameters of other stages, of which there is no data here.
        state = optimizer_state(optimizer) if optimizer is not None else {}
        yield from self.slices()
        for name in manifest.infos_of_rank(self.rank):
            if name in state:
                yield name, state[name].asnumpy()

    def _plan_saving(self, *, with_state: bool) -> ShardedManifest:
        return plan_saving(self.network.hf_config, self.layouts, self.layout, self.dtype, with_state=with_state)


@dataclass(frozen=True)
class UpdateResult:
    """What the calls of one update gave: statistics, float64 [7], of all rows, and the gradient norm."""

    statistics: np.ndarray
    grad_norm: float


class ParallelLearner:
    """Updates a cut policy from micro-batches of this rank's rows.

    Args:
        model: its slices.
        update: of :func:`mindrlhf.training.sharded.factory.build_update`.
    """

    def __init__(self, model: SlicedModel, update: ParallelUpdate):
        self.model = model
        self.cell = update
        self.optimizer = update.optimizer

    def compile(self, rows: PackedRows) -> None:
        """Compile the update for the shape of ``rows``."""
        self.cell.compile(*self._inputs(rows, 0.0, 1))

    def warm_up(self, rows: PackedRows) -> None:
        """Run the graph on rows of weight 0 without an update."""
        self._call(rows, 0.0, 1, is_last=False)

    def update(
        self, micro_batches: Sequence[PackedRows], num_tokens: int, lr: float, kl_coefficient: float
    ) -> UpdateResult:
        """Make one optimiser update.

        Args:
            micro_batches: this rank's; as many on every rank.
            num_tokens: response tokens of the whole update, over all ranks.
            lr: learning rate.
            kl_coefficient: weight of the KL term.

        Returns:
            Statistics of all ranks' rows, the same on every rank of the last stage; zeros before it. A norm that is not
            finite says that there was no update.
        """
        self.optimizer.learning_rate.set_data(ms.Tensor(lr, ms.float32))
        total, norm = np.zeros(1), 0.0
        for index, rows in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            statistics, norm = self._call(rows, kl_coefficient, num_tokens, is_last=is_last)
            total = total + statistics
        return UpdateResult(total, norm)

    def restore_optimizer(self, source: ArraySource) -> None:
        """Take this rank's slices of AdamW's state; see :meth:`SlicedModel.load`.

        Raises:
            UserError: the source has no such state.
        """
        state = optimizer_state(self.optimizer)
        for one in self.state_layouts():
            if one.name not in source.dtypes:
                raise UserError(f"{source.directory} lacks {one.name} of the optimiser: it is no checkpoint of a run")
            set_slice(state[one.name], source.read_slice(one, self.model.rank), one)
            source.release(one.name)

    def state_layouts(self) -> list[ParameterLayout]:
        """Return how AdamW's state that this rank holds lies on the ranks."""
        trained = {one.name: False for one in self.model.held}
        trained |= {parameter.name: True for parameter in self.optimizer.parameters}
        return [*state_layouts(self.model.held, trained), step_layout(self.model.layout)]

    def _call(
        self, rows: PackedRows, kl_coefficient: float, num_tokens: int, *, is_last: bool
    ) -> tuple[np.ndarray, float]:
        self.cell.is_last.set_data(ms.Tensor([float(is_last)], ms.float32))
        statistics, norm = self.cell(*self._inputs(rows, kl_coefficient, num_tokens))
        values = statistics.asnumpy().astype(np.float64)
        is_in_last = self.model.layout.stage_of(self.model.rank) == self.model.layout.pipeline_stage - 1
        return (values if is_in_last else np.zeros_like(values)), float(norm.asnumpy()[0])

    def _inputs(self, rows: PackedRows, kl_coefficient: float, num_tokens: int) -> list[ms.Tensor]:
        unread = np.zeros_like(rows.mask)
        values = [rows.tokens.get(name, unread) for name in POLICY_INPUTS]
        num_rows = len(rows.mask) * self.model.layout.data_parallel
        scalars = np.tile(np.array([[kl_coefficient, num_tokens]], np.float32), (num_rows, 1))
        num_pieces = self.model.num_update_pieces
        return [*self.model.row_inputs(rows, num_pieces), *self.model.inputs(values, num_pieces), ms.Tensor(scalars)]


def set_slice(parameter: ms.Parameter, array: np.ndarray, layout: ParameterLayout) -> None:
    """Give a parameter its slice, in its dtype (bfloat16 as uint16 bit patterns)."""
    assert tuple(parameter.shape) == layout.slice_shape == array.shape, (
        f"{layout.name} is {tuple(parameter.shape)} in the graph, its layout gives {layout.slice_shape}, and the slice "
        f"is {array.shape}"
    )
    # The copy keeps the parameter from sharing a read-only file mapping.
    data = np.array(array, order="C")
    if parameter.dtype == ms.bfloat16:
        data = data.view(ms.Tensor([0], ms.bfloat16).asnumpy().dtype)
    parameter.set_data(ms.Tensor(data))


def _dtype_name(parameter: ms.Parameter) -> str:
    return str(parameter.dtype).lower()
