"""AdamW that can be told, on the device, to leave everything as it is: for an update that is one graph."""

import mindspore as ms
from mindformers.core.optim.adamw import AdamW
from mindspore import ops


class WithholdableAdamW(AdamW):
    """MindFormers' AdamW, the same numbers to the last bit, with an update that is made or withheld.

    A semi-auto-parallel graph holds gradients and optimiser, so the host cannot look at the gradient norm between
    them; and a graph with two branches would be compiled as two. So every call computes, and where it does not apply,
    the factors of AdamW are those that leave weights, moments and step count exactly as they are.
    """

    def construct(self, gradients, applies):
        """Update the parameters where ``applies``, float32 [1], is 1; change nothing where it is 0.

        Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2. Gradients must be finite in both cases.
        """
        decays, lr = self.get_weight_decay(), self.get_lr() * applies
        counted = self.assignadd(self.global_step, ops.cast(applies, ms.int32) * self.global_step_increase_tensor)
        # Where the first update is withheld the count is 0, and the corrections would be 0 too.
        step = ops.maximum(ops.cast(counted, ms.float32), ops.ones_like(applies))
        held = 1.0 - applies
        betas = (self.beta1 * applies + held, self.beta2 * applies + held)
        corrections = (1.0 - ops.pow(self.beta1, step), 1.0 - ops.pow(self.beta2, step))
        update = ops.partial(_update, betas, corrections, self.eps, lr)
        if self.is_group:
            return self.hyper_map(update, decays, self._parameters, gradients, self.exp_avg, self.exp_avg_sq)
        update = ops.partial(update, decays)
        return self.hyper_map(update, self._parameters, gradients, self.exp_avg, self.exp_avg_sq)


def _update(betas, corrections, epsilon, lr, decay, parameter, gradient, mean, square):
    gradient = ops.cast(gradient, ms.float32)
    new_mean = mean * betas[0] + gradient * (1.0 - betas[0])
    new_square = square * betas[1] + gradient * gradient * (1.0 - betas[1])
    denominator = ops.sqrt(new_square / corrections[1]) + epsilon
    weight = ops.cast(parameter, ms.float32)
    new_weight = weight * (1.0 - lr * decay) - new_mean / denominator * (lr / corrections[0])
    done = ops.assign(parameter, ops.cast(new_weight, parameter.dtype))
    done = ops.depend(ops.assign(mean, ops.depend(new_mean, done)), done)
    return ops.assign(square, ops.depend(new_square, done))
