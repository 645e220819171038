"""AdamW in place on the parameters' own memory: the CPU stand-in of the fused optimiser kernel.

Built of separate operators, AdamW makes a dozen temporaries as large as each weight. Here all of it happens in
blocks that stay in the cache. MindSpore's CPU arrays are live views of the parameters, so nothing is copied;
the state is that of MindFormers' AdamW, and the results are its results.
"""

import math

import mindspore as ms
import numpy as np
from mindspore import nn

from mindrlhf.training.worker.cells import SumOverRanks

BLOCK_ELEMENTS = 1 << 16


class HostOptimizerStep:
    """What :class:`mindrlhf.training.worker.cells.OptimizerStep` does, on the CPU.

    Args:
        optimizer: MindFormers AdamW; its moments, step count, learning rate and decay are used.
        accumulators: summed gradients of this rank, cleared by each call.
        max_grad_norm: 0 leaves the gradients as they are.
        num_ranks: data-parallel ranks whose gradients are added.
    """

    def __init__(self, optimizer: nn.Cell, accumulators: ms.ParameterTuple, max_grad_norm: float, num_ranks: int):
        self.optimizer = optimizer
        self.accumulators = accumulators
        self.max_grad_norm = max_grad_norm
        self.reduce = SumOverRanks(accumulators) if num_ranks > 1 else None

    def __call__(self) -> float:
        """Update the weights, unless the norm is not finite, and return the global gradient norm before clipping."""
        if self.reduce is not None:
            self.reduce().asnumpy()  # waits for the collective
        gradients = [_flat(accumulator) for accumulator in self.accumulators]
        norm = math.sqrt(sum(float(np.dot(gradient, gradient)) for gradient in gradients))
        if math.isfinite(norm):
            scale = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
            self._update(gradients, scale)
        else:
            for gradient in gradients:
                gradient[...] = 0.0
        return norm

    def _update(self, gradients: list[np.ndarray], scale: float) -> None:
        optimizer = self.optimizer
        step = optimizer.global_step.asnumpy()
        step += 1
        beta1, beta2, epsilon = (
            float(value.asnumpy()[0]) for value in (optimizer.beta1, optimizer.beta2, optimizer.eps)
        )
        lr = float(optimizer.learning_rate.asnumpy())
        rate = lr / (1.0 - beta1 ** int(step[0]))
        correction = 1.0 - beta2 ** int(step[0])
        scratch = np.empty(BLOCK_ELEMENTS, np.float32)
        states = zip(optimizer.parameters, gradients, optimizer.exp_avg, optimizer.exp_avg_sq, _decays(optimizer))
        for parameter, gradient, mean, square, decay in states:
            arrays = (_flat(parameter), gradient, _flat(mean), _flat(square))
            for start in range(0, len(gradient), BLOCK_ELEMENTS):
                weights, grad, first, second = (array[start : start + BLOCK_ELEMENTS] for array in arrays)
                update = scratch[: len(grad)]
                grad *= np.float32(scale)
                first *= np.float32(beta1)
                first += np.multiply(grad, np.float32(1.0 - beta1), out=update)
                second *= np.float32(beta2)
                grad *= grad
                second += np.multiply(grad, np.float32(1.0 - beta2), out=update)
                np.sqrt(np.divide(second, np.float32(correction), out=update), out=update)
                update += np.float32(epsilon)
                np.divide(first, update, out=update)
                update *= np.float32(rate)
                weights *= np.float32(1.0 - lr * decay)
                weights -= update
                grad[...] = 0.0


def _flat(parameter: ms.Parameter) -> np.ndarray:
    """Return a live one-dimensional view."""
    view = parameter.asnumpy().reshape(-1)
    assert np.shares_memory(view, parameter.asnumpy()), f"{parameter.name} is not contiguous"
    return view


def _decays(optimizer: nn.Cell) -> list[float]:
    """Return the weight decay of each parameter, in order."""
    decay = optimizer.weight_decay
    values = decay if isinstance(decay, (list, tuple)) else [decay] * len(optimizer.parameters)
    return [float(value.asnumpy() if isinstance(value, ms.Tensor) else value) for value in values]
