"""Multi-head latent attention on the CPU: the parameters of MindFormers' MLASelfAttention."""

from mindspore import nn, ops

from mindrlhf.models.cpu_cells import AttentionFunction, ExchangeAxes, RmsNorm, Rotate, Weights


class LatentSelfAttention(nn.Cell):
    """Attention with keys and values made of a small latent; the interface of MindFormers' MLASelfAttention.

    DeepSeek-V2, arXiv:2405.04434, eqs. 37-47. All heads share the rotated part of the key.
    """

    def __init__(self, config, layer_number: int):
        super().__init__()
        del layer_number
        self.num_heads = config.num_attention_heads
        self.nope_dim, self.rope_dim = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.value_dim, self.kv_rank = config.v_head_dim, config.kv_lora_rank
        query_size = self.num_heads * (self.nope_dim + self.rope_dim)
        self.compresses_queries = config.q_lora_rank is not None
        if self.compresses_queries:
            self.linear_q_down_proj = Weights(config, (config.q_lora_rank, config.hidden_size), bias=False)
            self.q_layernorm = RmsNorm(config, config.q_lora_rank, config.layernorm_epsilon)
            self.linear_q_up_proj = Weights(config, (query_size, config.q_lora_rank), bias=False)
        else:
            self.linear_q_proj = Weights(config, (query_size, config.hidden_size), bias=False)
        self.linear_kv_down_proj = Weights(config, (self.kv_rank + self.rope_dim, config.hidden_size), bias=False)
        self.kv_layernorm = RmsNorm(config, self.kv_rank, config.layernorm_epsilon)
        key_value_size = self.num_heads * (self.nope_dim + self.value_dim)
        self.linear_kv_up_proj = Weights(config, (key_value_size, self.kv_rank), bias=False)
        self.linear_proj = Weights(config, (config.hidden_size, self.num_heads * self.value_dim), bias=False)
        self.matmul_transpose_b = ops.MatMul(transpose_b=True)
        self.split = ops.auto_generate.SplitWithSize()
        self.exchange_axes = ExchangeAxes()
        self.rotate = Rotate(self.rope_dim)
        self.concat = ops.Concat(-1)
        self.attention = AttentionFunction()

    def _queries(self, hidden_states, batch: int, length: int):
        """hidden `[B*S, H]` -> parts without and with position, `[B, N, S, nope_dim]` and `[B, N, S, rope_dim]`."""
        if self.compresses_queries:
            latent = self.q_layernorm(self._product(hidden_states, self.linear_q_down_proj))
            queries = self._product(latent, self.linear_q_up_proj)
        else:
            queries = self._product(hidden_states, self.linear_q_proj)
        return self._heads(queries, batch, length, self.nope_dim, self.rope_dim)

    def _product(self, rows, weights: Weights):
        return weights(rows, self.matmul_transpose_b(rows, weights.weight))

    def _heads(self, rows, batch: int, length: int, first: int, second: int):
        heads = self.exchange_axes(ops.reshape(rows, (batch, length, -1, first + second)))
        return self.split(heads, (first, second), 3)

    def construct(
        self,
        hidden_states,
        attention_mask=None,
        rotary_pos_emb=None,
        prefix_keys_values=None,
        actual_seq_len=None,
        attention_loss=0.0,
    ):
        batch, _, _, length = attention_mask.shape
        cos, sin, scaled_cos, scaled_sin, turn, scale = rotary_pos_emb
        query, query_rope = self._queries(hidden_states, batch, length)
        query = self.concat((query * scale, self.rotate(query_rope, scaled_cos, scaled_sin, turn)))
        down = self._product(hidden_states, self.linear_kv_down_proj)
        latent, key_rope = self.split(down, (self.kv_rank, self.rope_dim), 1)
        up = self._product(self.kv_layernorm(latent), self.linear_kv_up_proj)
        key, value = self._heads(up, batch, length, self.nope_dim, self.value_dim)
        key_rope = self.rotate(ops.reshape(key_rope, (batch, 1, length, self.rope_dim)), cos, sin, turn)
        key = self.concat((key, ops.tile(key_rope, (1, self.num_heads, 1, 1))))
        output, _ = self.attention(query, key, value, attention_mask)
        output = ops.reshape(self.exchange_axes(output), (-1, self.num_heads * self.value_dim))
        return self._product(output, self.linear_proj), attention_loss
