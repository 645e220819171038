"""AdamW that can be told, on the device, to leave everything as it is: for an update that is one graph."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import mindspore as ms
from mindformers.core.optim import adamw as mindformers
from mindspore import nn, ops

from mindrlhf.algorithms.optimizers import GRAPH_NAMES, OPTIMIZERS
from mindrlhf.config.training import OptimizerSection
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.layout.parameter_buckets import buckets_of_equal_size
from mindrlhf.specs import Matrices


class Optimizer(nn.Optimizer):
    """MindFormers' AdamW, the same numbers to the last bit, with an update that is made or withheld.

    A semi-auto-parallel graph holds gradients and optimiser, so the host cannot look at the gradient norm between
    them; and a graph with two branches would be compiled as two. So every call computes, and where it does not apply,
    the factors are those that leave weights, moments and step count exactly as they are.

    Args:
        parameters: those that are trained; vectors (norms and biases) are not decayed.
        options: of the section `optimizer`.
        matrices: by name of a parameter, how it is put together of hidden matrices; None where it is not.
        layouts: by name, how it lies on the ranks; empty: every rank has all.

    Attributes:
        state: by its name in files (see :mod:`mindrlhf.algorithms.optimizers`), without the step count.
        buckets: (start, stop) of the parameters that are updated at a time.
    """

    def __init__(
        self,
        parameters: Sequence[ms.Parameter],
        options: OptimizerSection,
        matrices: Mapping[str, Matrices | None],
        layouts: Mapping[str, ParameterLayout],
    ):
        decayed = [parameter for parameter in parameters if parameter.ndim > 1]
        vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
        groups = [
            {"params": members, "weight_decay": decay}
            for members, decay in ((decayed, options.weight_decay), (vectors, 0.0))
            if members
        ]
        super().__init__(options.start_lr, [*groups, {"order_params": list(parameters)}], weight_decay=0.0)
        self.beta1, self.beta2, self.eps = (
            ms.Tensor([value], ms.float32) for value in (options.beta1, options.beta2, options.epsilon)
        )
        kinds = {one.name: OPTIMIZERS[options.type].state_of(bool(matrices.get(one.name))) for one in parameters}
        made = {}
        for kind in dict.fromkeys(kind for each in kinds.values() for kind in each):
            members = [one for one in parameters if kind in kinds[one.name]]
            setattr(self, kind, self.clone_state(GRAPH_NAMES[kind], members))
            made[kind] = iter(getattr(self, kind))
        self.state = {f"{kind}.{one.name}": next(made[kind]) for one in parameters for kind in kinds[one.name]}
        self.has_adamw = any(name.startswith("exp_avg.") for name in self.state)
        assert len(kinds) == len(parameters), "two trained parameters have the same name"
        self.buckets = buckets_of_equal_size([parameter.size for parameter in parameters])

    def clone_state(self, prefix: str, parameters: Sequence[ms.Parameter]) -> ms.ParameterTuple:
        """Return float32 zeros like the parameters, which the compiler shards like them."""
        owner = SimpleNamespace(parameters=parameters, swap=False)
        return mindformers.AdamW.clone_state(owner, prefix=prefix, init="zeros")

    def construct(self, gradients, scale, applies):
        """Update the parameters with ``scale`` times the gradients where ``applies`` is 1; else change nothing.

        Both are float32 [1]. Gradients that are not finite count as 0. Loshchilov and Hutter 2019 (arXiv:1711.05101),
        algorithm 2.
        """
        decays, lr = self.get_weight_decay(), self.get_lr()
        counted = self.assignadd(self.global_step, ops.cast(applies, ms.int32) * self.global_step_increase_tensor)
        # Where the first update is withheld the count is 0, and the corrections would be 0 too.
        step = ops.maximum(ops.cast(counted, ms.float32), ops.ones_like(applies))
        corrections = (1.0 - ops.pow(self.beta1, step), 1.0 - ops.pow(self.beta2, step))
        done = applies
        for index in range(len(self.buckets)):
            # All that an update computes takes a gradient or one of these, and so waits for the bucket before.
            applied = ops.depend(applies, done)
            held = 1.0 - applied
            betas = (self.beta1 * applied + held, self.beta2 * applied + held)
            adamw = ()
            if self.has_adamw:  # a function that nothing calls would not compile (MindSpore 2.9.0)
                adamw = ops.partial(_update, betas, corrections, self.eps, lr * applied, scale)
            start, stop = self.buckets[index]
            waiting = ops.depend(gradients[start:stop], done)
            done = self.update_bucket(index, adamw, waiting, decays, lr * applied, scale, applied)
        return done

    def update_bucket(self, index, adamw, gradients, decays, lr, scale, applied):
        """Update the parameters of a bucket; return what is there once that is done."""
        start, stop = self.buckets[index]
        state = (self._parameters[start:stop], gradients, self.exp_avg[start:stop], self.exp_avg_sq[start:stop])
        if self.is_group:
            return self.hyper_map(adamw, decays[start:stop], *state)
        return self.hyper_map(ops.partial(adamw, decays), *state)


def _update(betas, corrections, epsilon, lr, scale, decay, parameter, gradient, mean, square):
    gradient = ops.nan_to_num(ops.cast(gradient, ms.float32), 0.0, 0.0, 0.0) * scale
    new_mean = mean * betas[0] + gradient * (1.0 - betas[0])
    new_square = square * betas[1] + gradient * gradient * (1.0 - betas[1])
    denominator = ops.sqrt(new_square / corrections[1]) + epsilon
    weight = ops.cast(parameter, ms.float32)
    new_weight = weight * (1.0 - lr * decay) - new_mean / denominator * (lr / corrections[0])
    done = ops.assign(parameter, ops.cast(new_weight, parameter.dtype))
    done = ops.depend(ops.assign(mean, ops.depend(new_mean, done)), done)
    return ops.assign(square, ops.depend(new_square, done))
