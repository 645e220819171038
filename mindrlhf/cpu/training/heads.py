"""The vocabulary projection as cells over the NumPy kernels of ``vocabulary.py`` (CPU, float32).

The weight, often most of a small model, never enters the graph: the kernels read it where it lies, and add its gradient
to ``weight_gradient``, a NumPy array that the optimiser step collects. As a graph input and output it would be copied
four times in every micro-batch. So :func:`bind` must come before each run, and :func:`collect_gradients` before what
was accumulated is read.
"""

import heapq
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.operations._pyfunc_registry import add_pyfunc

from mindrlhf.cpu.training.vocabulary import LogSoftmax

_free_numbers: list[int] = []  # a heap: of kernels that are no more
_next_number = itertools.count(1)
_heads_of_cells: weakref.WeakKeyDictionary[nn.Cell, list[weakref.ref]] = weakref.WeakKeyDictionary()


class TiledTokenLogProbs(nn.Cell):
    """Results of :class:`mindrlhf.algorithms.logprobs.GraphTokenLogProbs`, and the log-normaliser.

    Args:
        weight: output projection [vocabulary, width]; one that is not trained now has no gradient.
        in_graph: the graph has it too, as the embedding of a tied model; its gradient is then the sum of both parts.
    """

    def __init__(self, weight: ms.Parameter, in_graph: bool = False):
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.in_graph = in_graph
        self.weight_gradient = np.zeros(weight.shape, np.float32) if weight.requires_grad else None
        # A list, since MindSpore cells do not take plain arrays as attributes that change.
        self.bound: list[np.ndarray] = []
        self.of_labels = _OfLabels(self.bound, self.weight_gradient)

    def construct(self, hidden, labels, mask):
        """Return log-probabilities, entropies and log-normalisers, float32 [rows, length], of hidden states [rows,
        length, width]."""
        return self.of_labels(hidden, labels, mask)

    def bind(self) -> None:
        """Look up where the weight lies now. The kernels cannot: asking MindSpore from inside a run would deadlock."""
        # The first run may move a parameter; a copy outlives that.
        self.bound[:] = [self.weight.asnumpy() if self.bound else self.weight.asnumpy().copy()]


class _OfLabels(nn.Cell):
    # MindSpore keeps the functions of kernels: they must not keep the cell.
    def __init__(self, bound: list[np.ndarray], weight_gradient: np.ndarray | None):
        super().__init__(auto_prefix=False)
        softmax = LogSoftmax()

        def forward(hidden, labels, mask):
            outputs = softmax.forward(_rows(hidden), bound[0], labels.reshape(-1), mask.reshape(-1))
            return tuple(array.reshape(labels.shape) for array in outputs)

        def backward(hidden, labels, mask, entropy, normaliser, grad_logprobs, grad_entropy):
            arrays = (labels, mask, entropy, normaliser, grad_logprobs, grad_entropy)
            flat = (array.reshape(-1) for array in arrays)
            return softmax.backward(_rows(hidden), bound[0], *flat, weight_gradient).reshape(hidden.shape)

        self.forward_kernel = _kernel(
            self, forward, lambda hidden, labels, mask: (labels,) * 3, lambda hidden, *others: (hidden,) * 3
        )
        self.backward_kernel = _kernel(self, backward)

    def construct(self, hidden, labels, mask):
        return self.forward_kernel(hidden, labels, mask)

    def bprop(self, hidden, labels, mask, out, dout):
        grad_hidden = self.backward_kernel(hidden, labels, mask, out[1], out[2], dout[0], dout[1])
        return grad_hidden, ops.zeros_like(labels), ops.zeros_like(mask)


def bind(cell: nn.Cell) -> None:
    """Look up where the weights of the heads in ``cell`` lie; to be called before each run of it."""
    for head in _heads(cell):
        head.bind()


def differentiated(cell: nn.Cell, parameters: Sequence[ms.Parameter]) -> list[ms.Parameter]:
    """Return those of the trained ``parameters`` that the graph of ``cell`` differentiates."""
    outside = {id(head.weight) for head in _heads(cell) if not head.in_graph}
    return [parameter for parameter in parameters if id(parameter) not in outside]


def collect_gradients(cell: nn.Cell, accumulators: Mapping[str, ms.Parameter]) -> None:
    """Add to ``accumulators``, by the name of a trained parameter, what the graph of ``cell`` lacks of its gradient."""
    for head in _heads(cell):
        if head.weight_gradient is not None:
            gradient = accumulators[head.weight.name].asnumpy()  # a live view
            gradient += head.weight_gradient
            head.weight_gradient.fill(0.0)


def _heads(cell: nn.Cell) -> list[TiledTokenLogProbs]:
    if cell not in _heads_of_cells:
        heads = [part for _, part in cell.cells_and_names() if isinstance(part, TiledTokenLogProbs)]
        _heads_of_cells[cell] = [weakref.ref(head) for head in heads]
    return [head() for head in _heads_of_cells[cell]]


def _rows(array: np.ndarray) -> np.ndarray:
    """Return [rows, length, n] as [rows * length, n]."""
    return array.reshape(-1, array.shape[-1])


def _kernel(
    owner: nn.Cell,
    function: Callable[..., Any],
    shapes: Callable = lambda hidden, *others: hidden,
    dtypes: Callable = lambda hidden, *others: hidden,
) -> ops.Custom:
    """Return a Python function as a kernel of graphs, under a number that the next process gives it too.

    MindSpore's own is the function's address, under which the next process knows another function, or none. The number
    is free again when the owner is gone.
    """
    kernel = ops.Custom(function, out_shape=shapes, out_dtype=dtypes, func_type="pyfunc")
    number = heapq.heappop(_free_numbers) if _free_numbers else next(_next_number)
    add_pyfunc(number, function)
    weakref.finalize(owner, _free_kernel, number)
    kernel.add_prim_attr("fn_id", number)
    kernel.add_prim_attr("uniq_name", f"kernel_{number}")
    return kernel


def _free_kernel(number: int) -> None:
    add_pyfunc(number, None)  # and with it the arrays that it held
    heapq.heappush(_free_numbers, number)
