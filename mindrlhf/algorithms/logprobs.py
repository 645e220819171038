"""Token log-probabilities and entropy from hidden states: graph cells."""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from mindrlhf.algorithms import vocabulary


class GraphTokenLogProbs(nn.Cell):
    """Plain MindSpore operators: the form that Ascend compiles, one micro-batch of logits at a time."""

    def __init__(self, weight: ms.Parameter):
        super().__init__(auto_prefix=False)
        self.weight = weight

    def construct(self, hidden, labels, mask):
        """Return log-probabilities and entropies, float32 [tokens] each, 0 where ``mask`` is 0.

        ``hidden`` is [tokens, width]; ``labels`` int32 and ``mask`` float32 [tokens].
        """
        weight = ops.cast(self.weight, hidden.dtype).transpose(1, 0)
        logprobs = ops.log_softmax(ops.cast(ops.matmul(hidden, weight), ms.float32), -1)
        chosen = ops.gather_elements(logprobs, 1, ops.reshape(labels, (-1, 1)))
        entropy = -ops.reduce_sum(ops.exp(logprobs) * logprobs, -1)
        return ops.reshape(chosen, (-1,)) * mask, entropy * mask


class TiledTokenLogProbs(nn.Cell):
    """The same values through the tiled NumPy kernels of :mod:`mindrlhf.algorithms.vocabulary` (CPU, float32).

    The weight, often most of a small model, never enters the graph: the kernels read it where it lies, and add its
    gradient to ``weight_gradient``, a NumPy array of this cell that the optimiser step collects. As a graph
    input and output it would be copied four times in every micro-batch. So ``bind`` must come before each run.
    """

    def __init__(self, weight: ms.Parameter):
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.weight_gradient = np.zeros(weight.shape, np.float32)
        # A list, since MindSpore cells do not take plain arrays as attributes that change.
        self._bound: list[np.ndarray] = []

        def forward(hidden, labels, mask):
            return vocabulary.forward(hidden, self._bound[0], labels, mask)

        def backward(hidden, labels, mask, entropy, log_normaliser, grad_logprobs, grad_entropy):
            results = (entropy, log_normaliser, grad_logprobs, grad_entropy)
            return vocabulary.backward(hidden, self._bound[0], labels, mask, *results, self.weight_gradient)

        self.forward_kernel = ops.Custom(
            forward,
            out_shape=lambda hidden, labels, mask: (labels, labels, labels),
            out_dtype=lambda hidden, labels, mask: (hidden, hidden, hidden),
            func_type="pyfunc",
        )
        self.backward_kernel = ops.Custom(
            backward,
            out_shape=lambda hidden, *others: hidden,
            out_dtype=lambda hidden, *others: hidden,
            func_type="pyfunc",
        )

    def bind(self) -> None:
        """Look up where the weight lies now. The kernels cannot: asking MindSpore from inside a run would deadlock."""
        # The first run may move a parameter; a copy outlives that.
        self._bound[:] = [self.weight.asnumpy() if self._bound else self.weight.asnumpy().copy()]

    def construct(self, hidden, labels, mask):
        """Return what :class:`GraphTokenLogProbs` returns, and the log-normaliser that ``bprop`` needs."""
        return self.forward_kernel(hidden, labels, mask)

    def bprop(self, hidden, labels, mask, out, dout):
        """Return the gradient of the hidden states; MindSpore calls this by name."""
        grad_hidden = self.backward_kernel(hidden, labels, mask, out[1], out[2], dout[0], dout[1])
        return grad_hidden, ops.zeros_like(labels), ops.zeros_like(mask)


class PolicyLogProbs(nn.Cell):
    """Log-probabilities of the labels under a model, at a sampling temperature."""

    def __init__(self, model, temperature: float, device: str):
        super().__init__(auto_prefix=False)
        self.model = model
        self.is_tiled = device == "cpu"
        self.token_logprobs = (TiledTokenLogProbs if self.is_tiled else GraphTokenLogProbs)(model.head_weight)
        self.inverse_temperature = 1.0 / temperature

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return log-probabilities and entropies, float32 [rows, length] each, 0 where ``mask`` is 0.

        All inputs are [rows, length] as in :class:`mindrlhf.data.packing.PackedRows`.
        """
        hidden = self.model(input_ids, segment_ids)
        # Scaling the hidden states scales the logits, at the width of the model instead of the vocabulary.
        hidden = ops.reshape(hidden, (-1, hidden.shape[-1])) * self.inverse_temperature
        outputs = self.token_logprobs(hidden, ops.reshape(labels, (-1,)), ops.reshape(mask, (-1,)))
        return ops.reshape(outputs[0], labels.shape), ops.reshape(outputs[1], labels.shape)

    def bind(self) -> None:
        """To be called before each run of a graph that holds this cell."""
        if self.is_tiled:
            self.token_logprobs.bind()

    def graph_parameters(self) -> list[ms.Parameter]:
        """Return the trained parameters that the graph differentiates: all, but an untied head that is tiled."""
        parameters = self.model.trainable_params()
        if not self.is_tiled or self.model.dims.tied:
            return parameters
        return [parameter for parameter in parameters if parameter is not self.model.head_weight]

    def collect_weight_gradient(self, accumulator: np.ndarray) -> None:
        """Add to ``accumulator`` [vocabulary, width] the part of the head's gradient that is not in the graph."""
        if self.is_tiled:
            accumulator += self.token_logprobs.weight_gradient
            self.token_logprobs.weight_gradient.fill(0.0)
