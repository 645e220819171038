"""A number for each token from hidden states: the output of reward models and critics."""

import mindspore as ms
from mindspore import nn, ops


class ScoreProjection(nn.Cell):
    """One number for each token from its hidden state.

    Args:
        weight: [1, width].
        after_token: of :class:`TokenScores`.
        splits: ranks that share the rows, each row, and the model's matrices.
    """

    def __init__(self, weight: ms.Parameter, *, after_token: bool, splits: tuple[int, int, int] = (1, 1, 1)):
        super().__init__(auto_prefix=False)
        is_split, tokens = max(splits) > 1, splits[:2]
        assert not (after_token and is_split), "the next position may be another rank's"
        self.weight = weight
        self.after_token = after_token
        # The matrix product's reshape of rows that are split along two axes would gather them first; and the compiler
        # would split it over ranks that hold the same hidden states.
        self.project = _SplitProject(tokens) if is_split else _project
        self.mask = ops.Mul().shard((tokens, tokens))
        self.blank = ops.Mul().shard((tokens, ()))

    def construct(self, hidden, mask):
        """Return scores and zeros, float32 [rows, length] each.

        ``hidden`` is [rows, length, width], ``mask`` float32 [rows, length]: where it is 0, scores are.
        """
        scores = self.project(ops.cast(hidden, ms.float32), ops.cast(self.weight, ms.float32))
        if self.after_token:
            # The hidden state of a label is one position further: position t predicts the token at t + 1.
            scores = ops.concat((scores[:, 1:], ops.zeros_like(scores[:, :1])), 1)
        return self.mask(scores, mask), self.blank(mask, 0.0)


def _project(hidden, weight):
    flat = ops.reshape(hidden, (-1, hidden.shape[-1]))
    return ops.reshape(ops.matmul(flat, weight.transpose(1, 0)), hidden.shape[:-1])


class _SplitProject(nn.Cell):
    def __init__(self, tokens: tuple[int, int]):
        super().__init__(auto_prefix=False)
        hidden = (*tokens, 1)
        self.multiply = ops.Mul().shard((hidden, (1, 1)))
        self.sum = ops.ReduceSum().shard((hidden,))

    def construct(self, hidden, weight):
        return self.sum(self.multiply(hidden, weight), -1)


class TokenScores(nn.Cell):
    """Scores of a model whose spec ``is_scorer``, in the place of :class:`mindrlhf.algorithms.logprobs.PolicyLogProbs`.

    Args:
        model: :class:`mindrlhf.models.causal_lm.CausalLM` with a ``score_weight``; only a critic's may be sharded.
        after_token: at each response token's position, score the text that ends with that token (a reward model);
            otherwise the text before it (a critic: the value of the state in which the token is chosen).
    """

    def __init__(self, model, *, after_token: bool):
        super().__init__(auto_prefix=False)
        self.model = model
        self.projection = ScoreProjection(model.score_weight, after_token=after_token, splits=model.splits)

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return scores, and zeros in the place of entropies: float32 [rows, length] each, 0 where ``mask`` is 0.

        All inputs are [rows, length] as in :class:`mindrlhf.data.packing.PackedRows`.
        """
        return self.projection(self.model(input_ids, segment_ids), mask)
