"""AdamW in place on the parameters' own memory: the CPU stand-in of the fused optimiser kernel.

Built of separate operators, AdamW makes a dozen temporaries as large as each weight. Here all of it happens in
blocks that stay in the cache. MindSpore's CPU arrays are live views of the parameters, so nothing is copied;
the state is that of MindFormers' AdamW, and the results are its results. Ranks on one machine divide the update among
them; ranks on several sum gradients by collectives and make the same update each.
"""

import math
from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import nn

from mindrlhf.config.training import OptimizerSection
from mindrlhf.cpu.training.rank_memory import share_memory
from mindrlhf.cpu.training.shared_update import Piece, SharedUpdate, blocks_of, square_sums
from mindrlhf.training.engine.cells import SumOverRanks
from mindrlhf.training.optimizers import make_optimizer
from mindrlhf.training.runtime import Rank

BLOCK_ELEMENTS = 1 << 16


class SharedAdamW:
    """Settings and state of MindFormers' AdamW under the same names, the moments being NumPy arrays in shared memory.

    Args:
        parameters: the trained parameters; only matrices are decayed.
        options: of AdamW.
        moments: float32 [2, elements of all parameters], zero.
    """

    def __init__(self, parameters: Sequence[ms.Parameter], options: OptimizerSection, moments: np.ndarray):
        self.parameters = tuple(parameters)
        self.learning_rate = ms.Parameter(ms.Tensor(options.start_lr, ms.float32), name="learning_rate")
        self.global_step = ms.Parameter(ms.Tensor([0], ms.int32), name="global_step")
        self.beta1, self.beta2, self.eps = (
            ms.Tensor([value], ms.float32) for value in (options.beta1, options.beta2, options.epsilon)
        )
        self.weight_decay = tuple(
            ms.Tensor(options.weight_decay if parameter.ndim > 1 else 0.0, ms.float32) for parameter in parameters
        )
        ends = np.cumsum([parameter.size for parameter in parameters])[:-1]
        self.exp_avg, self.exp_avg_sq = (
            [flat.reshape(parameter.shape) for flat, parameter in zip(np.split(moment, ends), parameters, strict=True)]
            for moment in moments
        )
        pairs = zip(self.parameters, self.exp_avg, self.exp_avg_sq)
        self.state = {
            f"{kind}.{one.name}": array for one, *both in pairs for kind, array in zip(("exp_avg", "exp_avg_sq"), both)
        }

    def get_parameters(self) -> tuple[ms.Parameter, ...]:
        """Return what lies in the memory of MindSpore."""
        return (self.learning_rate, self.global_step)


def make_host_step(
    parameters: Sequence[ms.Parameter], accumulators: ms.ParameterTuple, options: OptimizerSection, rank: Rank
) -> "HostOptimizerStep | None":
    """Return the step over trained parameters; None where the optimiser has none here, and is left to its graph.

    All ranks of the run must call it, for the same.
    """
    if options.type != "adamw":
        return None
    if rank.world_size > 1:
        sizes = [parameter.size for parameter in parameters]
        memory = share_memory(rank, SharedUpdate.size_bytes(sizes, rank.world_size))
        if memory is not None:
            shared = SharedUpdate(memory, sizes)
            optimizer = SharedAdamW(parameters, options, shared.moments)
            return HostOptimizerStep(optimizer, accumulators, options.max_grad_norm, rank.world_size, shared)
    optimizer = make_optimizer(parameters, options, {})
    return HostOptimizerStep(optimizer, accumulators, options.max_grad_norm, rank.world_size)


class HostOptimizerStep:
    """The step of :class:`mindrlhf.training.engine.cells.OptimizerStep`, on the CPU.

    Args:
        optimizer: AdamW; its moments, step count, learning rate and decay are used.
        accumulators: summed gradients of this rank, cleared by each call.
        max_grad_norm: 0 leaves the gradients as they are.
        num_ranks: data-parallel ranks whose gradients are added.
        shared: by which they divide the update; None where they cannot, or there is one.
    """

    def __init__(
        self,
        optimizer: nn.Cell | SharedAdamW,
        accumulators: ms.ParameterTuple,
        max_grad_norm: float,
        num_ranks: int,
        shared: SharedUpdate | None = None,
    ):
        self.optimizer = optimizer
        self.accumulators = accumulators
        self.max_grad_norm = max_grad_norm
        self._shared = shared
        self._blocks = blocks_of([accumulator.size for accumulator in accumulators])
        self.reduce = SumOverRanks(accumulators) if num_ranks > 1 and shared is None else None

    def __call__(self) -> float:
        """Update the weights, unless the norm is not finite, and return the global gradient norm before clipping."""
        if self.reduce is not None:
            self.reduce().asnumpy()  # waits for the collective
        gradients = [_flat(accumulator) for accumulator in self.accumulators]
        if self._shared is not None:
            norm = math.sqrt(sum(self._shared.sum_gradients(gradients)))
        else:
            norm = math.sqrt(sum(square_sums(gradients, self._blocks)))
        if not math.isfinite(norm):
            for gradient in gradients:
                gradient[...] = 0.0
            return norm
        scale = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm > 0 else 1.0
        if self._shared is None:
            whole = [Piece(index, 0, len(gradient), 0) for index, gradient in enumerate(gradients)]
            self._update(gradients, scale, whole)
        else:
            self._update(gradients, scale, self._shared.owned)
            self._shared.spread_weights([_flat(parameter) for parameter in self.optimizer.parameters])
        return norm

    def _update(self, gradients: list[np.ndarray], scale: float, pieces: Sequence[Piece]) -> None:
        """Update the weights and moments of some elements, and clear their gradients."""
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
        states = [
            (_flat(parameter), gradient, _flat(mean), _flat(square), decay)
            for parameter, gradient, mean, square, decay in zip(
                optimizer.parameters, gradients, optimizer.exp_avg, optimizer.exp_avg_sq, _decays(optimizer)
            )
        ]
        for piece in pieces:
            *arrays, decay = states[piece.tensor]
            for start in range(piece.first, piece.last, BLOCK_ELEMENTS):
                block = slice(start, min(start + BLOCK_ELEMENTS, piece.last))
                weights, grad, first, second = (array[block] for array in arrays)
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
                grad[...] = 0.0


def _flat(parameter: ms.Parameter | np.ndarray) -> np.ndarray:
    """Return a live one-dimensional view."""
    array = parameter if isinstance(parameter, np.ndarray) else parameter.asnumpy()
    view = array.reshape(-1)
    assert np.shares_memory(view, array), f"an array of shape {array.shape} is not contiguous"
    return view


def _decays(optimizer: nn.Cell | SharedAdamW) -> list[float]:
    """Return the weight decay of each parameter, in order."""
    decay = optimizer.weight_decay
    values = decay if isinstance(decay, (list, tuple)) else [decay] * len(optimizer.parameters)
    return [float(value.asnumpy() if isinstance(value, ms.Tensor) else value) for value in values]
