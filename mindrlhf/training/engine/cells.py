"""The two graphs of an update: gradients of a micro-batch, and the optimiser step."""

import math
from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from mindrlhf.errors import RunFailure

# Elements per all-reduce: small tensors share one collective, whose fixed cost is about a millisecond.
BUCKET_ELEMENTS = 1 << 23


class AccumulateGradients(nn.Cell):
    """Adds the gradients of one micro-batch to accumulators.

    Args:
        loss: cell returning (loss, statistics, logprobs).
        parameters: the trained parameters.
        accumulators: one float32 parameter of the same shape for each; see :func:`make_accumulators`.
    """

    def __init__(self, loss: nn.Cell, parameters: ms.ParameterTuple, accumulators: ms.ParameterTuple):
        super().__init__(auto_prefix=False)
        self.loss = loss
        self.accumulators = accumulators
        self.value_and_grad = ops.value_and_grad(loss, None, parameters, has_aux=True)
        self.hyper_map = ops.HyperMap()
        self.assign_add = ops.AssignAdd()

    def construct(self, *inputs):
        """Return (statistics, logprobs) of the loss cell."""
        (_, statistics, logprobs), gradients = self.value_and_grad(*inputs)
        added = self.hyper_map(self.assign_add, self.accumulators, gradients)
        return ops.depend(statistics, added), logprobs


class SumOverRanks(nn.Cell):
    """Replaces each accumulator by its sum over the ranks, several small ones in one collective."""

    def __init__(self, accumulators: ms.ParameterTuple):
        super().__init__(auto_prefix=False)
        self.accumulators = accumulators
        self.ranges = bucket_ranges([accumulator.size for accumulator in accumulators])
        self.all_reduce = ops.AllReduce()
        self.assign = ops.Assign()

    def construct(self):
        """Return a scalar that is there once everything is reduced."""
        done = ms.Tensor(0.0, ms.float32)
        for first, last in self.ranges:
            flat = ops.concat([ops.reshape(gradient, (-1,)) for gradient in self.accumulators[first:last]])
            # One after the other: the ranks must issue their collectives in one order.
            flat = self.all_reduce(ops.depend(flat, done))
            offset = 0
            for index in range(first, last):
                accumulator = self.accumulators[index]
                part = ops.reshape(flat[offset : offset + accumulator.size], accumulator.shape)
                done = ops.depend(done, self.assign(accumulator, part))
                offset += accumulator.size
        return done


class GradientNorm(nn.Cell):
    """Sums the accumulators over the ranks and measures them; see :class:`OptimizerStep`."""

    def __init__(self, accumulators: ms.ParameterTuple, num_ranks: int):
        super().__init__(auto_prefix=False)
        self.accumulators = accumulators
        self.reduce = SumOverRanks(accumulators) if num_ranks > 1 else None
        self.hyper_map = ops.HyperMap()

    def construct(self):
        """Return the global gradient norm, a float32 scalar."""
        gradients = self.accumulators
        if self.reduce is not None:
            gradients = ops.depend(gradients, self.reduce())
        return ops.sqrt(ops.addn(self.hyper_map(_square_sum, gradients)))


class ClippedUpdate(nn.Cell):
    """Clips the accumulators by their global norm and updates the weights; see :class:`OptimizerStep`."""

    def __init__(self, optimizer: nn.Cell, accumulators: ms.ParameterTuple, max_grad_norm: float):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.accumulators = accumulators
        self.max_grad_norm = max_grad_norm

    def construct(self, norm):
        """Return what is there once the weights are updated."""
        one = ops.ones_like(norm)
        scale = ops.minimum(self.max_grad_norm / (norm + 1e-6), one) if self.max_grad_norm > 0 else one
        return self.optimizer(self.accumulators, ops.reshape(scale, (1,)), ops.reshape(one, (1,)))


class ClearAccumulators(nn.Cell):
    """Sets the accumulators to zero."""

    def __init__(self, accumulators: ms.ParameterTuple):
        super().__init__(auto_prefix=False)
        self.accumulators = accumulators
        self.hyper_map = ops.HyperMap()
        self.assign = ops.Assign()

    def construct(self):
        """Return what is there once they are zero."""
        return self.hyper_map(self.assign, self.accumulators, self.hyper_map(ops.zeros_like, self.accumulators))


class OptimizerStep:
    """Sums the accumulators over the ranks, clips them by global norm, updates the weights, clears the accumulators.

    A norm that is not finite skips the update: weights, moments and step count stay as they are. The norm is that of
    the sum over the ranks, so all ranks skip or none.

    Args:
        optimizer: of :mod:`mindrlhf.training.optimizers`, over the trained parameters.
        accumulators: summed gradients of this rank; each has been divided by the global token count.
        max_grad_norm: 0 leaves the gradients as they are.
        num_ranks: data-parallel ranks whose gradients are added.
    """

    def __init__(self, optimizer: nn.Cell, accumulators: ms.ParameterTuple, max_grad_norm: float, num_ranks: int):
        self.optimizer = optimizer
        self._measure = GradientNorm(accumulators, num_ranks)
        self._update = ClippedUpdate(optimizer, accumulators, max_grad_norm)
        self._clear = ClearAccumulators(accumulators)

    def __call__(self) -> float:
        """Return the global gradient norm before clipping."""
        norm = self._measure()
        value = float(norm.asnumpy())
        if math.isfinite(value):
            self._update(norm)
        self._clear()
        return value


def _square_sum(gradient):
    return (gradient * gradient).sum()


def check_finite(norm: float) -> float:
    """Return a gradient norm that is finite.

    Raises:
        RunFailure: it is not.
    """
    if not math.isfinite(norm):
        raise RunFailure(
            f"the gradient norm is {norm}, not finite: the weights were not updated; lower optimizer.start_lr, or look "
            "at the loss in metrics.jsonl for the step where it began"
        )
    return norm


def bucket_ranges(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (first, last) index ranges whose sizes add up to about ``BUCKET_ELEMENTS``."""
    buckets, first, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if filled and filled + size > BUCKET_ELEMENTS:
            buckets.append((first, index))
            first, filled = index, 0
        filled += size
    return (*buckets, (first, len(sizes)))


def make_accumulators(parameters: Sequence[ms.Parameter]) -> ms.ParameterTuple:
    """Return a zero float32 parameter for each trained parameter."""
    return ms.ParameterTuple(
        [
            ms.Parameter(ops.zeros(parameter.shape, ms.float32), name=f"grad.{parameter.name}", requires_grad=False)
            for parameter in parameters
        ]
    )
