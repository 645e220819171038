"""AdamW in place on the parameters' own memory: the CPU stand-in of the fused optimiser kernel.

Built of separate operators, AdamW makes a dozen temporaries as large as each weight. Here all of it happens in
blocks that stay in the cache. MindSpore's CPU arrays are live views of the parameters, so nothing is copied;
the state is that of MindFormers' AdamW, and the results are its results.
"""

import math
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import nn

BLOCK_ELEMENTS = 1 << 16
_NORM_ELEMENTS = 1 << 14


class HostOptimizerStep:
    """The step of :class:`mindrlhf.training.engine.cells.OptimizerStep`, on the CPU.

    Args:
        optimizer: AdamW; its moments, step count, learning rate and decay are used.
        accumulators: summed gradients of this rank, cleared by each call.
        max_grad_norm: 0 leaves the gradients as they are.
        reduce: replaces the accumulators by their sums over the ranks; None where there is one rank.
    """

    def __init__(
        self,
        optimizer: nn.Cell,
        accumulators: Sequence[ms.Parameter],
        max_grad_norm: float,
        reduce: nn.Cell | None = None,
    ):
        self.optimizer = optimizer
        self.accumulators = accumulators
        self.max_grad_norm = max_grad_norm
        self.reduce = reduce

    def __call__(self) -> float:
        """Update the weights, unless the norm is not finite, and return the global gradient norm before clipping."""
        if self.reduce is not None:
            self.reduce().asnumpy()  # waits for the collective
        gradients = [_flat(accumulator) for accumulator in self.accumulators]
        norm = math.sqrt(_square_sum(gradients))
        if math.isfinite(norm):
            self._update(gradients, min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0)
        for gradient in gradients:
            gradient[...] = 0.0
        return norm

    def _update(self, gradients: list[np.ndarray], scale: float) -> None:
        """Update weights and moments; the gradients are changed."""
        optimizer = self.optimizer
        step = optimizer.global_step.asnumpy()
        step += 1
        beta1, beta2, epsilon = (
            float(value.asnumpy()[0]) for value in (optimizer.beta1, optimizer.beta2, optimizer.eps)
        )
        lr = float(optimizer.learning_rate.asnumpy())
        # Both corrections of the moments' bias in the two numbers, so that no pass over the elements is for them.
        correction = math.sqrt(1.0 - beta2 ** int(step[0]))
        rate, epsilon = lr * correction / (1.0 - beta1 ** int(step[0])), epsilon * correction
        scratch = np.empty(BLOCK_ELEMENTS, np.float32)
        states = zip(
            optimizer.parameters, gradients, optimizer.exp_avg, optimizer.exp_avg_sq, _decays(optimizer), strict=True
        )
        for parameter, gradient, mean, square, decay in states:
            arrays = [_flat(parameter), gradient, _flat(mean), _flat(square)]
            for start in range(0, len(gradient), BLOCK_ELEMENTS):
                weights, grad, first, second = (array[start : start + BLOCK_ELEMENTS] for array in arrays)
                update = scratch[: len(grad)]
                if scale != 1.0:
                    grad *= np.float32(scale)
                first *= np.float32(beta1)
                first += np.multiply(grad, np.float32(1.0 - beta1), out=update)
                second *= np.float32(beta2)
                grad *= grad
                second += np.multiply(grad, np.float32(1.0 - beta2), out=update)
                np.sqrt(second, out=update)
                update += np.float32(epsilon)
                np.divide(first, update, out=update)
                update *= np.float32(rate)
                if decay:
                    weights *= np.float32(1.0 - lr * decay)
                weights -= update


def _square_sum(gradients: Sequence[np.ndarray]) -> float:
    """Return the sum of squares of all elements, by blocks that stay in the cache."""
    total, begin = 0.0, 0
    for gradient in gradients:
        first = 0
        while first < len(gradient):
            # The blocks are those of the tensors as one long array.
            last = first + _NORM_ELEMENTS - (begin + first) % _NORM_ELEMENTS
            block = gradient[first:last]
            total += float(np.dot(block, block))
            first = last
        begin += len(gradient)
    return total


def _flat(parameter: ms.Parameter) -> np.ndarray:
    """Return a live one-dimensional view."""
    array = parameter.asnumpy()
    view = array.reshape(-1)
    assert np.shares_memory(view, array), f"an array of shape {array.shape} is not contiguous"
    return view


def _decays(optimizer: nn.Cell) -> list[float]:
    """Return the weight decay of each parameter, in order."""
    decay = optimizer.weight_decay
    values = decay if isinstance(decay, (list, tuple)) else [decay] * len(optimizer.parameters)
    return [float(value.asnumpy() if isinstance(value, ms.Tensor) else value) for value in values]
