"""The two graphs of an update: gradients of a micro-batch, and the optimiser step."""

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from mindrlhf.config.sections import OptimizerSection

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


class OptimizerStep(nn.Cell):
    """Sums the accumulators over the ranks, clips them by global norm, updates the weights, clears the accumulators.

    Args:
        optimizer: MindFormers AdamW over the trained parameters.
        accumulators: summed gradients of this rank.
        max_grad_norm: 0 leaves the gradients as they are.
        num_ranks: data-parallel ranks whose gradients are added; each has divided by the global token count.
    """

    def __init__(self, optimizer: nn.Cell, accumulators: ms.ParameterTuple, max_grad_norm: float, num_ranks: int):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.accumulators = accumulators
        self.max_grad_norm = max_grad_norm
        self.buckets = _buckets([parameter.size for parameter in accumulators]) if num_ranks > 1 else ()
        self.all_reduce = ops.AllReduce() if num_ranks > 1 else None
        self.hyper_map = ops.HyperMap()
        self.assign = ops.Assign()

    def construct(self):
        """Return the global gradient norm before clipping, a float32 scalar."""
        gradients = self._reduced()
        square_sum = ops.addn(self.hyper_map(_square_sum, gradients))
        norm = ops.sqrt(square_sum)
        if self.max_grad_norm > 0:
            scale = ops.minimum(self.max_grad_norm / (norm + 1e-6), ops.ones_like(norm))
            gradients = self.hyper_map(ops.partial(_scale, scale), gradients)
        updated = self.optimizer(gradients)
        zeros = self.hyper_map(ops.zeros_like, self.accumulators)
        cleared = self.hyper_map(self.assign, self.accumulators, ops.depend(zeros, updated))
        return ops.depend(norm, cleared)

    def _reduced(self):
        if self.all_reduce is None:
            return self.accumulators
        reduced = ()
        for first, last in self.buckets:
            flat = ops.concat([ops.reshape(gradient, (-1,)) for gradient in self.accumulators[first:last]])
            flat = self.all_reduce(flat)
            offset = 0
            for index in range(first, last):
                size = self.accumulators[index].size
                reduced += (ops.reshape(flat[offset : offset + size], self.accumulators[index].shape),)
                offset += size
        return reduced


def _square_sum(gradient):
    return (gradient * gradient).sum()


def _scale(scale, gradient):
    return gradient * scale


def _buckets(sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
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


def make_optimizer(parameters: Sequence[ms.Parameter], options: OptimizerSection) -> nn.Cell:
    """Return MindFormers AdamW; vectors (norms and biases) are not decayed."""
    from mindformers.core.optim.adamw import AdamW

    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
        {"order_params": list(parameters)},
    ]
    return AdamW(
        groups,
        learning_rate=options.start_lr,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
    )
