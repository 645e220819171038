"""The CPU decoder: which cells stand in for MindFormers' own, and what goes in and comes out."""

import numpy as np
from mindformers.parallel_core.training_graph.transformer.transformer_block import TransformerBlockSubmodules
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayerSubmodules
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindspore import Tensor, nn, ops

from mindrlhf.models.cpu_cells import GatedMlp, RmsNorm, SelfAttention, ZeroCentredRmsNorm
from mindrlhf.models.cpu_expert_cells import ExpertMlp
from mindrlhf.models.cpu_latent_attention import LatentSelfAttention
from mindrlhf.models.layers import layer_class
from mindrlhf.models.rotary import embedding_scale, rotary_tables, score_scale, turn_matrix
from mindrlhf.models.vision.deepstack import NUM_CPU_TABLES
from mindrlhf.specs import ModelDims

HIDDEN_SCORE = -(2.0**30)


def decoder_spec(config, dims: ModelDims) -> TransformerBlockSubmodules:
    """The decoder of `dims.num_layers` layers built from CPU cells."""
    norm = ZeroCentredRmsNorm if dims.zero_centred_norms else RmsNorm
    attention = LatentSelfAttention if dims.latent else ModuleSpec(module=SelfAttention, params={"norm": norm})
    layers = []
    for layer in range(dims.num_layers):
        module, params = layer_class(dims, layer, NUM_CPU_TABLES)
        submodules = TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            pre_mlp_layernorm=norm,
            mlp=ExpertMlp if dims.has_experts(layer) else GatedMlp,
        )
        layers.append(ModuleSpec(module=module, params=params, submodules=submodules))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


class DecoderInputs(nn.Cell):
    """What the CPU decoder needs: embedded tokens, the mask added to the scores, and the rotary tables."""

    def __init__(self, model, config, max_length: int, dims: ModelDims):
        super().__init__(auto_prefix=False)
        self.word_embeddings = model.embedding.word_embeddings
        self.num_groups = dims.num_kv_heads
        self.heads_per_group = dims.heads_per_group
        self.hidden_size = dims.hidden_size
        self.scale = score_scale(dims)
        self.embedding_scale = embedding_scale(dims)
        self.tables = self._tables(max_length, dims)
        # The heads of keys, which take the first two tables, and of queries, which take the last.
        keys, queries = (self.num_groups, 1), (self.num_groups, self.heads_per_group)
        if dims.latent:
            keys, queries = (1,), (dims.num_heads,)
        self.heads_of_tables = (keys, keys, queries, queries)
        self.turn = Tensor(turn_matrix(dims))
        self.matmul = ops.BatchMatMul()
        self.causal = Tensor(np.triu(np.full((max_length, max_length), HIDDEN_SCORE, np.float32), k=1))
        self.window = dims.local.window if dims.local else 0
        if dims.local:
            self.local_tables = self._tables(max_length, dims.of_local_layers)
            far = np.tril(np.full((max_length, max_length), HIDDEN_SCORE, np.float32), k=-self.window)
            self.local_causal = Tensor(self.causal.asnumpy() + far)

    def _tables(self, max_length: int, dims: ModelDims) -> tuple[Tensor, ...]:
        """Cosines and sines of keys, and of queries, which also have the scale of scores."""
        cos, sin = rotary_tables(max_length, dims)
        scale = np.float32(self.scale)
        return tuple(Tensor(table) for table in (cos, sin, cos * scale, sin * scale))

    def construct(self, input_ids, segment_ids):
        if input_ids.ndim == 3:
            return self._with_shared_prompts(input_ids, segment_ids)
        mask, rotary = self.mask(segment_ids), self._rotary(self.tables, segment_ids)
        if self.window:
            mask = mask, self._mask(self._apart(segment_ids), segment_ids, self.local_causal)
            rotary = rotary, self._rotary(self.local_tables, segment_ids)
        return self.embed(input_ids), mask, rotary

    def _rotary(self, tables, segment_ids, positions=None):
        """The tables of each head, of positions `[B, S]` or of all, with what else attention takes."""
        batch, length = segment_ids.shape
        found = ()
        for table, heads in zip(tables, self.heads_of_tables):
            rows = table[:length] if positions is None else ops.gather(table, positions, 0)
            num_rows, num_copies = (1, batch) if positions is None else (batch, 1)
            rows = ops.reshape(rows, (num_rows,) + (1,) * len(heads) + (length, -1))
            found += (self._for_all_heads(rows, num_copies, heads),)
        return found + (self.turn, self.scale)

    def _with_shared_prompts(self, inputs, segment_ids):
        """The same for inputs `[B, 3, S]`; see CausalLM."""
        keys = ops.expand_dims(segment_ids, 1)
        other = ops.logical_and(
            ops.not_equal(ops.expand_dims(segment_ids, 2), keys), ops.not_equal(ops.expand_dims(inputs[:, 1], 2), keys)
        )
        apart = ops.cast(other, self.causal.dtype) * -HIDDEN_SCORE
        mask, rotary = self._mask(apart, segment_ids), self._rotary(self.tables, segment_ids, inputs[:, 2])
        if self.window:
            # By positions: a response lies behind others of its prompt.
            beyond = ops.relu(self._differences(inputs[:, 2]) - (self.window - 1.0))
            mask = mask, self._mask(apart - beyond * HIDDEN_SCORE, segment_ids)
            rotary = rotary, self._rotary(self.local_tables, segment_ids, inputs[:, 2])
        return self.embed(inputs[:, 0]), mask, rotary

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
        """What is added to scores, `[B, G, r*S, S]`: tokens see earlier ones of their own segment."""
        return self._mask(self._apart(segment_ids), segment_ids)

    def _apart(self, segment_ids):
        """0 where two tokens are of a segment, else 2^30 or more, `[B, S, S]`."""
        return ops.abs(self._differences(segment_ids, HIDDEN_SCORE))

    def _differences(self, numbers, factor=1.0):
        """(n_i - n_j) * factor as (n_i, 1) @ (1, -n_j), exact: the CPU kernel of comparisons is four times slower."""
        numbers = ops.cast(numbers, self.causal.dtype)
        ones = ops.ones_like(numbers)
        rows, columns = ops.stack((numbers, ones), 2), ops.stack((ones, -numbers), 1)
        return self.matmul(rows, columns * factor)

    def _mask(self, apart, segment_ids, causal=None):
        """What is added to scores, `[B, G, r*S, S]`: 0, or -``apart`` `[B, S, S]`, or less where ``causal`` hides."""
        batch, length = segment_ids.shape
        # Not by indices: their kernel copies single elements.
        mask = ops.slice(self.causal if causal is None else causal, (0, 0), (length, length)) - apart
        return ops.tile(ops.reshape(mask, (batch, 1, length, length)), (1, self.num_groups, self.heads_per_group, 1))


class DecoderOutputs(nn.Cell):
    """`[B*S, H]` to `[B, S, H]`."""

    def __init__(self, config):
        super().__init__()
        self.hidden_size = config.hidden_size

    def construct(self, hidden_states, segment_ids):
        return ops.reshape(hidden_states, segment_ids.shape + (self.hidden_size,))
