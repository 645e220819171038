"""What surrounds MindFormers' own decoder on Ascend: mask and layout, with sharding for semi-auto parallel."""

import numpy as np
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from mindspore import Tensor, nn, ops


def decoder_spec(config):
    """MindFormers' dense layer, unchanged: fused attention, fused norms, interleaved weights."""
    return get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm)


class DecoderInputs(nn.Cell):
    """Embedded tokens `[S, B, H]`, the mask `[B, 1, S, S]` uint8 (1 = hidden), and the rotary angles."""

    def __init__(self, model, config, max_length: int, rope_theta: float):
        super().__init__(auto_prefix=False)
        del rope_theta  # MindFormers' rotary cell knows it
        self.embedding = model.embedding
        self.rotary = model.rotary_pos_emb
        self.causal = Tensor(np.triu(np.ones((1, max_length, max_length), np.uint8), k=1))
        ranks = config.data_parallel_size
        self.as_column = ops.ExpandDims().shard(((ranks, 1),))
        self.as_row = ops.ExpandDims().shard(((ranks, 1),))
        self.not_equal = ops.NotEqual().shard(((ranks, 1, 1), (ranks, 1, 1)))
        self.cast = ops.Cast().shard(((ranks, 1, 1),))
        self.maximum = ops.Maximum().shard(((ranks, 1, 1), (1, 1, 1)))
        self.add_head_axis = ops.ExpandDims().shard(((ranks, 1, 1),))

    def construct(self, input_ids, segment_ids):
        length = input_ids.shape[1]
        other_segment = self.not_equal(self.as_column(segment_ids, 2), self.as_row(segment_ids, 1))
        hidden = self.maximum(self.cast(other_segment, self.causal.dtype), self.causal[:, :length, :length])
        return self.embedding(input_ids, None), self.add_head_axis(hidden, 1), self.rotary(length)


class DecoderOutputs(nn.Cell):
    """`[S, B, H]` to `[B, S, H]`."""

    def __init__(self, config):
        super().__init__()
        self.transpose = ops.Transpose().shard(((1, config.data_parallel_size, 1),))

    def construct(self, hidden_states, input_ids):
        return self.transpose(hidden_states, (1, 0, 2))
