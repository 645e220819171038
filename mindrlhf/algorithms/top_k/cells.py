"""Log-probabilities of several words at each position: of given ones, with gradients, and of the likeliest."""

from mindspore import nn

from mindrlhf.algorithms.chunked_head import ChunkedTopWords
from mindrlhf.algorithms.head import WHOLE_HEAD, HeadTile
from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.system import speed_ups


class WordLogProbs(PolicyLogProbs):
    """Log-probabilities of the labels, and where words are given, of these; else as :class:`PolicyLogProbs`."""

    def construct(self, input_ids, segment_ids, labels, mask, words=None):
        """Return log-probabilities, entropies [rows, length], and with ``words``, int32 [rows, length, k], theirs.

        The last are float32 [rows, length, k + 1] with that of all other words together; all are 0 where ``mask`` is 0.
        See :meth:`PolicyLogProbs.construct`.
        """
        if words is None:
            return self.of_labels(input_ids, segment_ids, labels, mask)
        hidden = self.scaled_hidden(input_ids, segment_ids)
        return self.token_logprobs(hidden, labels, mask, words)


class TopWords(nn.Cell):
    """The likeliest words of a model at each position, and their log-probabilities; without gradients.

    Args:
        policy: log-probabilities of the model, of which it has the temperature.
        k: number of words.
        num_words: which may be chosen: the first so many, where another model's vocabulary has no more.
        tile: on Ascend, of how many logits there is memory at a time; all of them unless given.
    """

    def __init__(self, policy: PolicyLogProbs, k: int, num_words: int, tile: HeadTile = WHOLE_HEAD):
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.k = k
        if fast := speed_ups.of_rank(policy.device):
            self.top_words = fast.TiledTopWords(policy.token_logprobs, k, num_words)
        else:
            self.top_words = ChunkedTopWords(policy.model.head_weight, k, num_words, tile)

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return the labels' log-probabilities, float32 [rows, length], the words, and their log-probabilities.

        The words are int32 [rows, length, k] in the order of their numbers; of words at the edge that are equally
        likely, those of the smallest numbers are there. The last are float32 [rows, length, k + 1] with that of all
        other words together. All are 0 where ``mask`` is 0.
        """
        return self.top_words(self.policy.scaled_hidden(input_ids, segment_ids), labels, mask)
