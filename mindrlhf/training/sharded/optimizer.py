"""AdamW that can be told, on the device, to leave everything as it is: for an update that is one graph."""

import mindspore as ms
from mindformers.core.optim.adamw import AdamW
from mindspore import ops

from mindrlhf.layout.parameter_buckets import buckets_of_equal_size


class WithholdableAdamW(AdamW):
    """MindFormers' AdamW, the same numbers to the last bit, with an update that is made or withheld.

    A semi-auto-parallel graph holds gradients and optimiser, so the host cannot look at the gradient norm between
    them; and a graph with two branches would be compiled as two. So every call computes, and where it does not apply,
    the factors of AdamW are those that leave weights, moments and step count exactly as they are.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.buckets = buckets_of_equal_size([parameter.size for parameter in self._parameters])

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
        for start, stop in self.buckets:
            # All that an update computes takes a gradient or one of these, and so waits for the bucket before.
            applied = ops.depend(applies, done)
            held = 1.0 - applied
            betas = (self.beta1 * applied + held, self.beta2 * applied + held)
            update = ops.partial(_update, betas, corrections, self.eps, lr * applied, scale)
            parameters, waiting = self._parameters[start:stop], ops.depend(gradients[start:stop], done)
            means, squares = self.exp_avg[start:stop], self.exp_avg_sq[start:stop]
            if self.is_group:
                done = self.hyper_map(update, decays[start:stop], parameters, waiting, means, squares)
            else:
                done = self.hyper_map(ops.partial(update, decays), parameters, waiting, means, squares)
        return done


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
