"""Log-probabilities of several tokens at each position: of given ones, with gradients, and of the likeliest."""

from mindspore import nn

from mindrlhf.algorithms.chunked_head import ChunkedTopTokens
from mindrlhf.algorithms.head import WHOLE_HEAD, HeadTile
from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.system import speed_ups


class TopKLogProbs(PolicyLogProbs):
    """Log-probabilities of the labels, and where tokens are given, of these; else as :class:`PolicyLogProbs`."""

    def construct(self, input_ids, segment_ids, labels, mask, token_ids=None):
        """Return log-probabilities, entropies [rows, length], and with ``token_ids``, int32 [rows, length, k], theirs.

        The last are float32 [rows, length, k + 1] with that of all other tokens together; all are 0 where ``mask``
        is 0. See :meth:`PolicyLogProbs.construct`.
        """
        if token_ids is None:
            return self.of_labels(input_ids, segment_ids, labels, mask)
        hidden = self.scaled_hidden(input_ids, segment_ids)
        return self.token_logprobs(hidden, labels, mask, token_ids)


class TopTokens(nn.Cell):
    """The top-k tokens of a model at each position, and their log-probabilities; without gradients.

    Args:
        policy: log-probabilities of the model, of which it has the temperature.
        k: number of tokens.
        vocab_size: which may be chosen: the first so many, where another model's vocabulary has no more.
        tile: on Ascend, of how many logits there is memory at a time; all of them unless given.
    """

    def __init__(self, policy: PolicyLogProbs, k: int, vocab_size: int, tile: HeadTile = WHOLE_HEAD):
        super().__init__(auto_prefix=False)
        self.policy = policy
        self.k = k
        if fast := speed_ups.of_rank(policy.device):
            self.top_tokens = fast.TiledTopTokens(policy.token_logprobs, k, vocab_size)
        else:
            self.top_tokens = ChunkedTopTokens(policy.model.head_weight, k, vocab_size, tile)

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return the labels' log-probabilities, float32 [rows, length], the tokens, and their log-probabilities.

        The tokens are int32 [rows, length, k] in the order of their numbers; of tokens at the edge that are equally
        likely, those of the smallest numbers are there. The last are float32 [rows, length, k + 1] with that of all
        other tokens together. All are 0 where ``mask`` is 0.
        """
        return self.top_tokens(self.policy.scaled_hidden(input_ids, segment_ids), labels, mask)
