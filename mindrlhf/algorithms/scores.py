"""A number for each token from hidden states: the output of reward models and critics."""

import mindspore as ms
from mindspore import nn, ops


class TokenScores(nn.Cell):
    """Scores of a model whose spec ``is_scorer``, in the place of :class:`mindrlhf.algorithms.logprobs.PolicyLogProbs`.

    Args:
        model: :class:`mindrlhf.models.causal_lm.CausalLM` with a ``score_weight``.
        after_token: at each response token's position, score the text that ends with that token (a reward model);
            otherwise the text before it (a critic: the value of the state in which the token is chosen).
    """

    def __init__(self, model, *, after_token: bool):
        super().__init__(auto_prefix=False)
        self.model = model
        self.weight = model.score_weight
        self.after_token = after_token

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return scores, and zeros in the place of entropies: float32 [rows, length] each, 0 where ``mask`` is 0.

        All inputs are [rows, length] as in :class:`mindrlhf.data.packing.PackedRows`.
        """
        hidden = ops.cast(self.model(input_ids, segment_ids), ms.float32)
        flat = ops.reshape(hidden, (-1, hidden.shape[-1]))
        scores = ops.reshape(ops.matmul(flat, ops.cast(self.weight, ms.float32).transpose(1, 0)), mask.shape)
        if self.after_token:
            # The hidden state of a label is one position further: position t predicts the token at t + 1.
            scores = ops.concat((scores[:, 1:], ops.zeros_like(scores[:, :1])), 1)
        return scores * mask, ops.zeros_like(mask)

    def bind(self) -> None:
        """Nothing to look up: the graph holds every weight."""

    def graph_parameters(self) -> list[ms.Parameter]:
        """Return the trained parameters, all of which the graph differentiates."""
        return self.model.trainable_params()

    def collect_weight_gradient(self, accumulator) -> None:
        """Nothing to collect: every gradient is the graph's."""
