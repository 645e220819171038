"""Logits of a language model: training and generation never need them all at once."""

import mindspore as ms
from mindspore import nn, ops

from mindrlhf.models.causal_lm import CausalLM


class CausalLMLogits(nn.Cell):
    """Float32 logits `[B, S, V]` of a `CausalLM`."""

    def __init__(self, language_model: CausalLM):
        super().__init__(auto_prefix=False)
        self.language_model = language_model
        self.head_weight = language_model.head_weight

    def construct(self, input_ids, segment_ids):
        hidden_states = self.language_model(input_ids, segment_ids)
        weight = ops.cast(self.head_weight, hidden_states.dtype)
        rows = ops.reshape(hidden_states, (-1, hidden_states.shape[-1]))
        logits = ops.cast(ops.MatMul(transpose_b=True)(rows, weight), ms.float32)
        return ops.reshape(logits, segment_ids.shape + (-1,))
