"""The CPU decoder: which cells stand in for MindFormers' own, and what goes in and comes out."""

import numpy as np
from mindformers.parallel_core.training_graph.transformer.transformer_block import TransformerBlockSubmodules
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayerSubmodules
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindspore import Tensor, nn, ops

from mindrlhf.models.cpu_cells import GatedMlp, RmsNorm, SelfAttention, ZeroCentredRmsNorm
from mindrlhf.models.cpu_expert_cells import ExpertMlp
from mindrlhf.models.cpu_latent_attention import LatentSelfAttention
from mindrlhf.models.cpu_linear_attention import GatedSelfAttention, LinearAttention
from mindrlhf.models.layers import layer_class
from mindrlhf.models.rotary import embedding_scale, rotary_tables, score_scale, turn_matrix
from mindrlhf.models.vision.deepstack import NUM_CPU_TABLES
from mindrlhf.specs import ModelDims

HIDDEN_SCORE = -(2.0**30)


def decoder_spec(config, dims: ModelDims) -> TransformerBlockSubmodules:
    """The decoder of `dims.num_layers` layers built from CPU cells."""
    norm = ZeroCentredRmsNorm if dims.zero_centred_norms else RmsNorm
    attention = LatentSelfAttention if dims.latent else ModuleSpec(module=SelfAttention, params={"norm": norm})
    if dims.linear:
        attention = ModuleSpec(module=GatedSelfAttention, params={"norm": norm})
    linear = ModuleSpec(module=LinearAttention, params={"linear": dims.linear})
    layers = []
    for layer in range(dims.num_layers):
        mixer = linear if dims.is_linear(layer) else attention
        mlp = ExpertMlp if dims.has_experts(layer) else GatedMlp
        parts = {"input_layernorm": norm, "self_attention": mixer, "pre_mlp_layernorm": norm, "mlp": mlp}
        module, params = layer_class(dims, layer, NUM_CPU_TABLES)
        layers.append(ModuleSpec(module=module, params=params, submodules=TransformerLayerSubmodules(**parts)))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


class DecoderInputs(nn.Cell):
    """Inputs of the CPU decoder: embedded tokens, the mask added to the scores, and the rotary tables."""

    def __init__(self, model, config, max_length: int, dims: ModelDims):
        super().__init__(auto_prefix=False)
        self.word_embeddings = model.embedding.word_embeddings
        self.num_groups = dims.num_kv_heads
        self.heads_per_group = dims.heads_per_group
        self.hidden_size = dims.hidden_size
        cos, sin = rotary_tables(max_length, dims)
        self.scale, self.embedding_scale = score_scale(dims), embedding_scale(dims)
        scale = np.float32(self.scale)
        self.tables = tuple(Tensor(table) for table in (cos, sin, cos * scale, sin * scale))
        # The heads of keys, which take the first two tables, and of queries, which take the last.
        keys, queries = (self.num_groups, 1), (self.num_groups, self.heads_per_group)
        if dims.latent:
            keys, queries = (1,), (dims.num_heads,)
        self.heads_of_tables = (keys, keys, queries, queries)
        self.turn = Tensor(turn_matrix(dims))
        self.matmul = ops.BatchMatMul()
        self.causal = Tensor(np.triu(np.full((max_length, max_length), HIDDEN_SCORE, np.float32), k=1))

    def construct(self, input_ids, segment_ids):
        if input_ids.ndim == 3:
            return self._with_shared_prompts(input_ids, segment_ids)
        batch, length = segment_ids.shape
        tables = ()
        for table, heads in zip(self.tables, self.heads_of_tables):
            rows = ops.reshape(table[:length], (1,) + (1,) * len(heads) + (length, -1))
            tables += (self._for_all_heads(rows, batch, heads),)
        return self.embed(input_ids), self.mask(segment_ids), tables + (self.turn, self.scale)

    def _with_shared_prompts(self, inputs, segment_ids):
        """The same for inputs `[B, 3, S]`; see CausalLM."""
        batch, length = segment_ids.shape
        keys = ops.expand_dims(segment_ids, 1)
        other = ops.logical_and(
            ops.not_equal(ops.expand_dims(segment_ids, 2), keys), ops.not_equal(ops.expand_dims(inputs[:, 1], 2), keys)
        )
        apart = ops.cast(other, self.causal.dtype) * -HIDDEN_SCORE
        tables = ()
        for table, heads in zip(self.tables, self.heads_of_tables):
            rows = ops.reshape(ops.gather(table, inputs[:, 2], 0), (batch,) + (1,) * len(heads) + (length, -1))
            tables += (self._for_all_heads(rows, 1, heads),)
        return self.embed(inputs[:, 0]), self._mask(apart, batch, length), tables + (self.turn, self.scale)

    def _for_all_heads(self, rows, batch, heads):
        """Whole copies of a table, which all layers share.

        The CPU kernel for broadcast multiplication is several times slower, and keeps the places of both factors of
        each element, 16 bytes, for as long as its graph is there.
        """
        return ops.tile(rows, (batch,) + heads + (1, 1))

    def embed(self, input_ids):
        """The embeddings `[B*S, H]` of tokens `[B, S]`."""
        rows = ops.reshape(ops.gather(self.word_embeddings.weight, input_ids, 0), (-1, self.hidden_size))
        return rows if self.embedding_scale is None else rows * self.embedding_scale

    def mask(self, segment_ids):
        """Mask added to scores, `[B, G, r*S, S]`: tokens see earlier ones of their own segment."""
        batch, length = segment_ids.shape
        # (n_i, 1) @ (1, -n_j), exact: the CPU kernel of comparisons is four times slower.
        numbers = ops.cast(segment_ids, self.causal.dtype)
        ones = ops.ones_like(numbers)
        rows, columns = ops.stack((numbers, ones), 2), ops.stack((ones, -numbers), 1)
        return self._mask(ops.abs(self.matmul(rows, columns * HIDDEN_SCORE)), batch, length)

    def _mask(self, apart, batch, length):
        """Mask added to scores, `[B, G, r*S, S]`: 0, or -``apart`` `[B, S, S]`, or less where a key is later."""
        # Not by indices: their kernel copies single elements.
        mask = ops.slice(self.causal, (0, 0), (length, length)) - apart
        return ops.tile(ops.reshape(mask, (batch, 1, length, length)), (1, self.num_groups, self.heads_per_group, 1))


class DecoderOutputs(nn.Cell):
    """`[B*S, H]` to `[B, S, H]`."""

    def __init__(self, config):
        super().__init__()
        self.hidden_size = config.hidden_size

    def construct(self, hidden_states, segment_ids):
        return ops.reshape(hidden_states, segment_ids.shape + (self.hidden_size,))
