"""One rank's shards of a model: what goes into its graphs, and what comes out of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import mindspore as ms
import numpy as np

from mindrlhf.config.training import ParallelSection
from mindrlhf.data.packing import PackedRows
from mindrlhf.layout.rows import num_logprob_micro_batches, own_rows, place_rows
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.training.engine.factory import layout_of
from mindrlhf.training.placement import Placement
from mindrlhf.training.routing.rows import tokens_and_experts


class Shards(Placement):
    """This rank's shards.

    What computes is given its rows here, so that graphs which were compiled elsewhere can take the place of the
    product's own, and the shards may lie in other parameters than those of ``network``.

    Args:
        network, rank, parameters: of :class:`mindrlhf.training.placement.Placement`.
        parallel: the layout, with `data_parallel` filled in.
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
        super().__init__(network, layout_of(parallel), rank, parameters)
        self._after_token = after_token
        self.parallel = parallel
        self.num_update_micro_batches = parallel.micro_batch_num
        self._num_logprob_micro_batches = num_logprob_micro_batches(parallel)

    @property
    def is_in_last_stage(self) -> bool:
        """True when this rank has the outputs of the model."""
        return self.stage == self.layout.pipeline_stage - 1

    def compile(self, graph: ms.nn.Cell, rows: PackedRows) -> None:
        """Compile a graph of outputs for the shape of ``rows``."""
        graph.compile(*self.row_inputs(rows, self._num_logprob_micro_batches))

    def outputs(self, graph: Callable[..., tuple[ms.Tensor, ...]], rows: PackedRows) -> np.ndarray:
        """See :meth:`mindrlhf.training.engine.model.Whole.outputs`; zeros before the last stage.

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

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Return what belongs to the tokens of rows [rows, length] where the cells expect it."""
        return _moved(values, 1) if self._after_token else values

    def row_inputs(self, rows: PackedRows, num_micro_batches: int) -> list[ms.Tensor]:
        """Return the four arrays that every cell takes first; with vision, set the image rows that they refer to."""
        if self.network.images is not None and self.stage == 0 and rows.images:
            self.network.images.place(rows.images)
        inputs = rows.model_inputs
        if self.network.tokens_and_experts is not None:
            inputs = tokens_and_experts(rows, self.network.dims)
        arrays = (inputs, rows.segment_ids, rows.labels, self.per_token(rows.mask))
        return self.inputs(arrays, num_micro_batches)

    def inputs(self, arrays: Iterable[np.ndarray], num_micro_batches: int) -> list[ms.Tensor]:
        """Return the inputs of a graph from this rank's rows [rows, ..] of each; see :mod:`mindrlhf.layout.rows`."""
        return [ms.Tensor(place_rows(array, self.layout, self.rank, num_micro_batches)) for array in arrays]


def _moved(values: np.ndarray, places: int) -> np.ndarray:
    """Move values [rows, length] by one position, 1 or -1; what is moved out, of which no row has any, is dropped."""
    moved = np.zeros_like(values)
    if places > 0:
        moved[:, 1:] = values[:, :-1]
    else:
        moved[:, :-1] = values[:, 1:]
    return moved
