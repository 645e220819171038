"""Log-probabilities of several words at each position: of given ones, with gradients, and of the likeliest."""

from mindspore import nn, ops

from mindrlhf.algorithms.chunked_head import ChunkedTopWords
from mindrlhf.algorithms.logprobs import PolicyLogProbs, TiledTokenLogProbs, name_kernel
from mindrlhf.cpu.training import vocabulary


class TiledWordLogProbs(nn.Cell):
    """What :class:`TiledTokenLogProbs` computes, and beside it the log-probabilities of given words (CPU, float32).

    Args:
        plain: whose weight, and the gradient of it, this cell shares; it is bound and collected there.
    """

    def __init__(self, plain: TiledTokenLogProbs):
        super().__init__(auto_prefix=False)
        bound, weight_gradient = plain.bound, plain.weight_gradient

        def forward(hidden, labels, mask, words):
            return vocabulary.forward(hidden, bound[0], labels, mask, words)

        def backward(
            hidden, labels, mask, words, entropy, log_normaliser, results, grad_logprobs, grad_entropy, slopes
        ):
            of_tokens = (entropy, log_normaliser, grad_logprobs, grad_entropy)
            given = (words, results, slopes)
            return vocabulary.backward(hidden, bound[0], labels, mask, *of_tokens, weight_gradient, given)

        self.forward_kernel = ops.Custom(
            forward,
            out_shape=lambda hidden, labels, mask, words: (labels, labels, labels, [words[0], words[1] + 1]),
            out_dtype=lambda hidden, labels, mask, words: (hidden, hidden, hidden, hidden),
            func_type="pyfunc",
        )
        self.backward_kernel = ops.Custom(
            backward,
            out_shape=lambda hidden, *others: hidden,
            out_dtype=lambda hidden, *others: hidden,
            func_type="pyfunc",
        )
        name_kernel(self, self.forward_kernel, forward)
        name_kernel(self, self.backward_kernel, backward)

    def construct(self, hidden, labels, mask, words):
        """Return what :func:`mindrlhf.cpu.training.vocabulary.forward` does."""
        return self.forward_kernel(hidden, labels, mask, words)

    def bprop(self, hidden, labels, mask, words, out, dout):
        """Return the gradient of the hidden states; MindSpore calls this by name."""
        results = (out[1], out[2], out[3], dout[0], dout[1], dout[3])
        grad_hidden = self.backward_kernel(hidden, labels, mask, words, *results)
        return grad_hidden, ops.zeros_like(labels), ops.zeros_like(mask), ops.zeros_like(words)


class WordLogProbs(PolicyLogProbs):
    """Log-probabilities of the labels, and where words are given, of these; else as :class:`PolicyLogProbs`."""

    def __init__(self, model, temperature: float, device: str, tile: vocabulary.HeadTile = vocabulary.WHOLE_HEAD):
        super().__init__(model, temperature, device, tile)
        self.word_logprobs = TiledWordLogProbs(self.token_logprobs) if self.is_tiled else self.token_logprobs

    def construct(self, input_ids, segment_ids, labels, mask, words=None):
        """Return log-probabilities, entropies [rows, length], and with ``words``, int32 [rows, length, k], theirs.

        The last are float32 [rows, length, k + 1] with that of all other words together; all are 0 where ``mask`` is 0.
        See :meth:`PolicyLogProbs.construct`.
        """
        if words is None:
            return self.of_labels(input_ids, segment_ids, labels, mask)
        hidden = self.scaled_hidden(input_ids, segment_ids)
        if not self.is_tiled:
            return self.word_logprobs(hidden, labels, mask, words)
        flat = (ops.reshape(labels, (-1,)), ops.reshape(mask, (-1,)), ops.reshape(words, (-1, words.shape[-1])))
        outputs = self.word_logprobs(hidden, *flat)
        shape = labels.shape
        word_logprobs = ops.reshape(outputs[3], (*shape, words.shape[-1] + 1))
        return ops.reshape(outputs[0], shape), ops.reshape(outputs[1], shape), word_logprobs


class TopWords(nn.Cell):
    """The likeliest words of a model at each position, and their log-probabilities; without gradients.

    Args:
        policy: log-probabilities of the model, of which it has the temperature; to be bound before each run.
        k: number of words.
        num_words: which may be chosen: the first so many, where another model's vocabulary has no more.
        tile: on Ascend, of how many logits there is memory at a time; all of them unless given.
    """

    def __init__(
        self, policy: PolicyLogProbs, k: int, num_words: int, tile: vocabulary.HeadTile = vocabulary.WHOLE_HEAD
    ):
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.k = k
        if policy.is_tiled:
            self.top_words = _tiled_top_words(self, policy.token_logprobs, k, num_words)
        else:
            self.top_words = ChunkedTopWords(policy.model.head_weight, k, num_words, tile)

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return the labels' log-probabilities, float32 [rows, length], the words, and their log-probabilities.

        The words are int32 [rows, length, k] in the order of their numbers; of words at the edge that are equally
        likely, those of the smallest numbers are there. The last are float32 [rows, length, k + 1] with that of all
        other words together. All are 0 where ``mask`` is 0.
        """
        hidden = self.policy.scaled_hidden(input_ids, segment_ids)
        if not self.policy.is_tiled:
            return self.top_words(hidden, labels, mask)
        logprobs, words, word_logprobs = self.top_words(hidden, ops.reshape(labels, (-1,)), ops.reshape(mask, (-1,)))
        words = ops.reshape(words, (*labels.shape, self.k))
        return ops.reshape(logprobs, labels.shape), words, ops.reshape(word_logprobs, (*labels.shape, self.k + 1))


def _tiled_top_words(owner: nn.Cell, plain: TiledTokenLogProbs, k: int, num_words: int) -> ops.Custom:
    bound = plain.bound

    def forward(hidden, labels, mask):
        return vocabulary.top_words(hidden, bound[0], labels, mask, k, num_words)

    kernel = ops.Custom(
        forward,
        out_shape=lambda hidden, labels, mask: (labels, [*labels, k], [*labels, k + 1]),
        out_dtype=lambda hidden, labels, mask: (hidden, labels, hidden),
        func_type="pyfunc",
    )
    name_kernel(owner, kernel, forward)
    return kernel
