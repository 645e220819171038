"""Token log-probabilities and entropy from hidden states: graph cells."""

import mindspore as ms
from mindspore import nn, ops

from mindrlhf.algorithms import vocabulary


class GraphTokenLogProbs(nn.Cell):
    """Plain MindSpore operators: the form that Ascend compiles, one micro-batch of logits at a time."""

    def construct(self, hidden, weight, labels, mask):
        """Return log-probabilities and entropies, float32 [tokens] each, 0 where ``mask`` is 0.

        ``hidden`` is [tokens, width], ``weight`` [vocabulary, width], ``labels`` int32 and ``mask`` float32 [tokens].
        """
        logits = ops.cast(ops.matmul(hidden, ops.cast(weight, hidden.dtype).transpose(1, 0)), ms.float32)
        logprobs = ops.log_softmax(logits, -1)
        chosen = ops.gather_elements(logprobs, 1, ops.reshape(labels, (-1, 1)))
        entropy = -ops.reduce_sum(ops.exp(logprobs) * logprobs, -1)
        return ops.reshape(chosen, (-1,)) * mask, entropy * mask


class TiledTokenLogProbs(nn.Cell):
    """The same values through the tiled NumPy kernels of :mod:`mindrlhf.algorithms.vocabulary` (CPU, float32)."""

    def __init__(self):
        super().__init__()
        self.forward_kernel = ops.Custom(
            vocabulary.forward,
            out_shape=lambda hidden, weight, labels, mask: (labels, labels, labels),
            out_dtype=lambda hidden, weight, labels, mask: (hidden, hidden, hidden),
            func_type="pyfunc",
        )
        self.backward_kernel = ops.Custom(
            vocabulary.backward,
            out_shape=lambda hidden, weight, *others: (hidden, weight),
            out_dtype=lambda hidden, weight, *others: (hidden, weight),
            func_type="pyfunc",
        )

    def construct(self, hidden, weight, labels, mask):
        """Return what :class:`GraphTokenLogProbs` returns, and the log-normaliser that ``bprop`` needs."""
        return self.forward_kernel(hidden, weight, labels, mask)

    def bprop(self, hidden, weight, labels, mask, out, dout):
        """Return the gradients of hidden states and weight; MindSpore calls this by name."""
        grad_hidden, grad_weight = self.backward_kernel(hidden, weight, labels, mask, out[1], out[2], dout[0], dout[1])
        return grad_hidden, grad_weight, ops.zeros_like(labels), ops.zeros_like(mask)


class PolicyLogProbs(nn.Cell):
    """Log-probabilities of the labels under a model, at a sampling temperature."""

    def __init__(self, model, temperature: float, device: str):
        super().__init__(auto_prefix=False)
        self.model = model
        self.weight = model.head_weight
        self.token_logprobs = TiledTokenLogProbs() if device == "cpu" else GraphTokenLogProbs()
        self.inverse_temperature = 1.0 / temperature

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return log-probabilities and entropies, float32 [rows, length] each, 0 where ``mask`` is 0.

        All inputs are [rows, length] as in :class:`mindrlhf.data.packing.PackedRows`.
        """
        hidden = self.model(input_ids, segment_ids)
        # Scaling the hidden states scales the logits, at the width of the model instead of the vocabulary.
        hidden = ops.reshape(hidden, (-1, hidden.shape[-1])) * self.inverse_temperature
        outputs = self.token_logprobs(hidden, self.weight, ops.reshape(labels, (-1,)), ops.reshape(mask, (-1,)))
        return ops.reshape(outputs[0], labels.shape), ops.reshape(outputs[1], labels.shape)
