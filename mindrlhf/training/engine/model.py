"""A model on one rank: replicated parameters, and forward passes over packed rows."""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import mindspore as ms
import numpy as np

from mindrlhf.data.packing import PackedRows
from mindrlhf.layout.layout import Layout
from mindrlhf.models.causal_lm import CausalLM
from mindrlhf.models.context import run_graph
from mindrlhf.training.placement import Placement
from mindrlhf.training.routing.rows import experts_by_layer

if TYPE_CHECKING:
    from mindrlhf.training.runtime import Rank


class Whole(Placement):
    """Every rank has a replica: the layout of one shard. Ranks share the work of publishing."""

    def __init__(self, network: CausalLM, rank: "Rank"):
        super().__init__(network, Layout(), 0)
        self.published_layout, self.published_rank = Layout(data_parallel=rank.world_size), rank.index

    def outputs(self, graph: Callable, rows: PackedRows) -> np.ndarray:
        """Return what a graph over the model says of each token of this rank's rows, float32 [rows, length]."""
        return run_graph(graph, *model_tensors(self.network, rows))[0].asnumpy().copy()


class Model:
    """A forward pass over rows.

    Args:
        placement: of its parameters.
        graph: over them: log-probabilities, or scores.
        is_base: it is the reference model of a policy with adapters: without these, in the same memory.
    """

    def __init__(self, placement: Placement, graph: Callable, *, is_base: bool = False):
        self.placement = placement
        self.network = placement.network
        self.graph = graph
        self._turned_off = placement.without_adapters if is_base else contextlib.nullcontext

    def see(self, images: Sequence[np.ndarray]) -> None:
        self.placement.see(images)

    def logprobs(self, rows: PackedRows) -> np.ndarray:
        """See :meth:`Whole.outputs`."""
        with self._turned_off():
            return self.placement.outputs(self.graph, rows)


def model_tensors(network: CausalLM, rows: PackedRows) -> tuple:
    """Return `row_tensors` as a model takes them: with the images of the rows, or the experts to be replayed."""
    input_ids, *others = row_tensors(rows)
    experts = experts_by_layer(rows)
    if experts is not None:
        # Not mutable, the experts would be constants of the graph: it would be compiled for each micro-batch anew.
        return (ms.mutable((input_ids, ms.Tensor(experts))), *others)
    if network.images is not None:
        network.images.place(rows.images)
    return (input_ids, *others)


def row_tensors(rows: PackedRows) -> tuple[ms.Tensor, ...]:
    """Return the four arrays that every cell takes first."""
    return tuple(ms.Tensor(array) for array in (rows.model_inputs, rows.segment_ids, rows.labels, rows.mask))
