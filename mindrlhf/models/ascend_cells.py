"""Surroundings of MindFormers' own decoder on Ascend: mask, layout and head, with sharding for semi-auto parallel.

Axes of strategies: data-parallel ranks (dp) share the rows, context-parallel ranks (cp) each row, model-parallel ranks
(tp) heads, channels and vocabulary; with sequence parallelism these share each row between the matrix products too.
"""

from dataclasses import replace

import mindspore as ms
import numpy as np
from mindformers.parallel_core.process_group_config import ModelCommProcessGroups
from mindformers.parallel_core.training_graph.base_models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.transformer.attention import SelfAttention
from mindformers.parallel_core.training_graph.transformer.flash_attention import FlashAttention
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindspore import Tensor, mint, nn, ops
from mindspore.common.initializer import initializer
from mindspore.ops.auto_generate import Muls
from mindspore.ops.auto_generate.gen_ops_prim import EmbeddingDenseBackward
from mindspore.ops.operations import Morph

from mindrlhf.models.ascend_layers import RMSNorm, as_first, on_each_rank, with_fused_kernels
from mindrlhf.models.ascend_linear_attention import AncestorsOfRows, LinearAttention
from mindrlhf.models.layers import layer_class
from mindrlhf.models.linear_attention import Gated
from mindrlhf.models.rotary import embedding_scale, rotary_frequencies, score_scale
from mindrlhf.models.vision.deepstack import NUM_ASCEND_TABLES, DeepstackLayer


def decoder_spec(config, dims):
    """MindFormers' layers with fused kernels: attention, norms, rotation, gated MLPs, grouped experts.

    Those of a model whose layers take image rows add them. Where YaRN turns whole heads their scores are scaled as on
    the CPU; see :func:`extend_rotation`.
    """
    spec = with_fused_kernels(get_gpt_decoder_block_spec(config), config)
    makes_scores = ModuleSpec(module=FlashAttention, params={"softmax_scale": score_scale(dims)})
    for number, layer in enumerate(spec.layer_specs):
        module, params = layer_class(dims, number, NUM_ASCEND_TABLES)
        if dims.vision and dims.vision.deepstack_blocks:
            module, params = DeepstackLayer, {"num_tables": NUM_ASCEND_TABLES}
        attention = layer.submodules.self_attention
        if dims.rotates_neighbours:
            attention.module = SelfAttentionOfNeighbours
        elif dims.gates_output:
            attention.module = GatedSelfAttention
        elif dims.latent is None and dims.hidden_size % dims.num_heads:
            attention.module = SelfAttentionOfAnyWidth
        if extends_whole_heads(dims) or dims.score_divisor:
            attention.submodules.core_attention = makes_scores
        submodules = layer.submodules
        if dims.zero_centred_norms:
            heads = replace(attention.submodules, q_layernorm=ZeroCentredNorm, k_layernorm=ZeroCentredNorm)
            attention = replace(attention, submodules=heads)
            submodules = replace(submodules, input_layernorm=ZeroCentredNorm, pre_mlp_layernorm=ZeroCentredNorm)
            spec.layer_norm = ZeroCentredNorm
        if dims.is_linear(number):
            attention = ModuleSpec(module=LinearAttention, params={"linear": dims.linear})
        submodules = replace(submodules, self_attention=attention)
        spec.layer_specs[number] = replace(layer, module=module, params=params, submodules=submodules)
    return spec


class ZeroCentredNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight."""

    def __init__(self, config, dim, eps):
        super().__init__(config, dim, eps)
        self.weight.set_data(initializer("zeros", (dim,), config.params_dtype))
        self.add_one = ops.Add().shard(((1,), ()))

    def construct(self, x):
        return self.norm(x, self.add_one(self.weight, 1.0))[0]


def extends_whole_heads(dims) -> bool:
    """Return whether YaRN is asked for by a model without latent attention."""
    return dims.yarn is not None and dims.latent is None


def extend_rotation(model, dims) -> None:
    """Give a GPTModel its frequencies where MindFormers has others: of an extended context, or of a part of a head.

    Its cells would multiply the angles by what YaRN multiplies cosines and sines by (ApplyRotaryPosEmb, 1.9.0). Here
    they are not; scaling the scores by the square comes to the same. Its own Llama 3.1 (1.9.0) knows one set of factors
    only.
    """
    if extends_whole_heads(dims) or dims.llama3 or dims.rotary_dim or dims.rope_factor != 1:
        model.rotary_pos_emb.inv_freq = Tensor(rotary_frequencies(dims))


class _Width(int):
    def __mod__(self, other: int) -> int:
        return 0


class SelfAttentionOfAnyWidth(SelfAttention):
    """MindFormers' cell, which refuses a width that the heads do not divide although they have a size of their own.

    The check (1.9.0) is the only thing that asks for the remainder.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_made = True
        self.hidden_size = int(self.config.hidden_size)

    def __setattr__(self, name, value):
        if name == "hidden_size" and not getattr(self, "is_made", False):
            value = _Width(value)
        super().__setattr__(name, value)


class SelfAttentionOfNeighbours(SelfAttentionOfAnyWidth):
    """MindFormers' cell, where neighbouring channels are rotated as a pair.

    It knows how to for latent attention alone: there it moves them to the halves of a head first, of queries and keys
    alike, which leaves scores as they are.
    """

    def _apply_rotary_pos_emb(self, query, key, rotary_pos_emb):
        rotate = self.apply_rotary_pos_emb
        return rotate(query, rotary_pos_emb, False, True), rotate(key, rotary_pos_emb, False, True)


class GatedSelfAttention(SelfAttentionOfAnyWidth):
    """MindFormers' cell with a gate behind each head's query, whose sigmoid the head's output is times.

    The first of its masks is its own; the others are of layers with linear attention.
    """

    def __init__(self, config, submodules, layer_number: int):
        super().__init__(config, submodules, layer_number)
        size = 2 * self.q_hidden_size + 2 * self.kv_hidden_size
        self.linear_qkv = submodules.linear_qkv(
            config.hidden_size, size, config=config, init_method=self.init_method, bias=config.add_qkv_bias
        )
        self.gated, rows = Gated(is_silu=False), ("cp", "dp", "tp")
        self.gate_rows = on_each_rank(self._gate_rows, as_first, [rows, rows], rows)

    def construct(
        self, hidden_states, attention_mask, rotary_pos_emb=None, prefix_keys_values=None, actual_seq_len=None
    ):
        length, batch, _ = hidden_states.shape
        groups, size = self.kv_num_heads, self.head_dim
        mixed = self.reshape(self.linear_qkv(hidden_states)[0], (length, batch, groups, -1))
        query, key, value = self.split_qkv(mixed, (2 * self.n_rep * size, size, size), 3)
        query, gate = self.split_qkv(self.reshape(query, (length, batch, self.num_heads, 2 * size)), (size, size), 3)
        query, key = self._apply_rotary_pos_emb(self.q_layernorm(query), self.k_layernorm(key), rotary_pos_emb)
        dtype = self.compute_dtype if self.compute_dtype == ms.bfloat16 else ms.float16  # as MindFormers' cell
        query, key, value = (self.cast(one, dtype) for one in (query, key, value))
        rows = self.cast(self.core_attention(query, key, value, attention_mask[0]), self.compute_dtype)
        return self.linear_proj(self.gate_rows(rows, self.reshape(gate, rows.shape)))

    def _gate_rows(self, rows, gate):
        return self.gated(rows, gate)


class DecoderInputs(nn.Cell):
    """Embedded tokens `[S, B, H]`, the mask `[B, 1, S, S]` uint8 (1 = hidden), and the rotary tables.

    Fused attention takes any mask (MindFormers' sparse_mode 0), so that shared prompts need no other kernel.
    """

    def __init__(self, model, config, max_length: int, dims):
        super().__init__(auto_prefix=False)
        self.embedding = model.embedding
        self.rotary, self.tables = model.rotary_pos_emb, model.rotary_tables
        self.embedding_scale = embedding_scale(dims)
        self.window = dims.local.window if dims.local else 0
        if dims.local:
            self.local_rotary = RotaryEmbedding(dims.head_dim, rotary_base=dims.local.rope_theta)
            self.local_rotary.shard(config)
        self.ancestors = AncestorsOfRows(dims.linear) if dims.linear else None
        # Small constants: a square one would be as large as the mask, on every rank.
        places = np.arange(max_length, dtype=np.int32)
        self.row_places, self.column_places = Tensor(places.reshape(1, -1, 1)), Tensor(places.reshape(1, 1, -1))
        dp, cp = config.data_parallel_size, config.context_parallel_size
        self.as_column = ops.ExpandDims().shard(((dp, cp),))
        self.as_row = ops.ExpandDims().shard(((dp, 1),))
        self.not_equal = ops.NotEqual().shard(((dp, cp, 1), (dp, 1, 1)))
        self.both = ops.LogicalAnd().shard(((dp, cp, 1), (dp, cp, 1)))
        self.cast = ops.Cast().shard(((dp, cp, 1),))
        self.no_more_than = ops.Minimum().shard(((dp, cp, 1), ()))
        self.add_places = ops.Add().shard(((dp, cp, 1), (1, cp, 1)))
        self.before = ops.Less().shard(((dp, cp, 1), (1, 1, 1)))
        self.either = ops.LogicalOr().shard(((dp, cp, 1), (dp, cp, 1)))
        self.between_places = ops.Sub().shard(((dp, cp, 1), (1, 1, 1)))
        self.between_positions = ops.Sub().shard(((dp, cp, 1), (dp, 1, 1)))
        self.no_less_than = ops.GreaterEqual().shard(((dp, cp, 1), ()))
        length_axis = "cp_tp" if config.sequence_parallel or cp > 1 else "cp"
        self.multiply = Muls().shard((layout(length_axis, "dp", "None"),))
        self.add_head_axis = ops.ExpandDims().shard(((dp, cp, 1),))
        self.slice = ops.StridedSlice().shard(((1, 1, 1),))
        self.slice_rows = ops.StridedSlice().shard(((dp, 1, 1),))
        self.squeeze = ops.Squeeze(1).shard(((dp, 1, 1),))
        self.gather = ops.Gather().shard(((1, 1), (1, dp)))
        self.positions_first = ops.Transpose().shard(((dp, 1),))
        self.add_rotary_axis = ops.ExpandDims().shard(((1, dp, 1),))

    def construct(self, input_ids, segment_ids):
        length = segment_ids.shape[1]
        other_segment = self.not_equal(self.as_column(segment_ids, 2), self.as_row(segment_ids, 1))
        positions = prefix_ids = None
        if input_ids.ndim == 3:
            prefix_ids, positions = self._channel(input_ids, 1), self._channel(input_ids, 2)
            input_ids = self._channel(input_ids, 0)
            other_prefix = self.not_equal(self.as_column(prefix_ids, 2), self.as_row(segment_ids, 1))
            other_segment = self.both(other_segment, other_prefix)
        rows = self.slice(self.row_places, (0, 0, 0), (1, length, 1), (1, 1, 1))
        columns = self.slice(self.column_places, (0, 0, 0), (1, 1, length), (1, 1, 1))
        # Zeros, which the compiler cannot know: it would fold a comparison of constants into a square one.
        rows = self.add_places(self.no_more_than(self.as_column(segment_ids, 2), 0), rows)
        hidden = self.either(other_segment, self.before(rows, columns))
        mask, rotary = self._as_mask(hidden), self._angles(self.rotary, length, positions)
        if self.window:
            if positions is None:
                back = self.between_places(rows, columns)
            else:  # a response may lie far behind its prompt
                back = self.between_positions(self.as_column(positions, 2), self.as_row(positions, 1))
            mask = mask, self._as_mask(self.either(hidden, self.no_less_than(back, self.window)))
            rotary = rotary, self._angles(self.local_rotary, length, positions)
        if self.ancestors is not None:
            mask = (mask, *self.ancestors(segment_ids, prefix_ids))
        embedded = self.embedding(input_ids, None)
        if self.embedding_scale is not None:
            embedded = self.multiply(embedded, self.embedding_scale)
        return embedded, mask, rotary

    def _as_mask(self, hidden):
        return self.add_head_axis(self.cast(hidden, ms.uint8), 1)

    def _angles(self, cell, length, positions):
        angles = cell(length)
        return self.tables(angles if positions is None else self._by_row(angles, positions))

    def _channel(self, inputs, number):
        """One of the three arrays `[B, S]` of `[B, 3, S]`; see CausalLM."""
        shape = (inputs.shape[0], 1, inputs.shape[2])
        start, stop = (0, number, 0), (shape[0], number + 1, shape[2])
        return self.squeeze(self.slice_rows(inputs, start, stop, (1, 1, 1)))

    def _by_row(self, rotary, positions):
        """The angles `[S, B, 1, D]` of positions `[B, S]`, from those of all positions `[S, 1, 1, D]`."""
        angles, scale = rotary
        table = ops.reshape(angles, (angles.shape[0], angles.shape[-1]))
        return self.add_rotary_axis(self.gather(table, self.positions_first(positions, (1, 0)), 0), 2), scale


class DecoderOutputs(nn.Cell):
    """`[S, B, H]` to `[B, S, H]`."""

    def __init__(self, config):
        super().__init__()
        # By name, not by number: numbers would make the first axis the outermost of the ranks.
        length_axis = "cp_tp" if config.sequence_parallel else "cp"
        self.transpose = ops.Transpose().shard((layout(length_axis, "dp", "None"),))

    def construct(self, hidden_states, segment_ids):
        return self.transpose(hidden_states, (1, 0, 2))


class _First(nn.Cell):
    def construct(self, first, second):
        return first


def drop_balancing_loss(model) -> None:
    """Leave the routers' balancing loss, whose coefficient is 0, out of layers with experts.

    MindFormers hands it on from stage to stage. Unused at the end, its gradient is a constant, which MindSpore's
    pipeline scheduler cannot send back (it ends with a null pointer).
    """
    for layer in model.decoder.layers:
        if hasattr(layer.mlp, "router"):
            layer.mlp.add_loss = _First()


class Embedding(nn.Cell):
    """Looks tokens up in what a rank has of the table, in the compute dtype; gradients are summed in float32.

    Rows are the same as those of a float32 table that are cast later; what ranks gather and exchange is half as large.

    Args:
        table: MindFormers' cell.
        keeps_whole: every rank has the whole table, else its part of the vocabulary.
    """

    def __init__(self, table, config, keeps_whole: bool):
        super().__init__(auto_prefix=False)
        self.cast, self.dtype = ops.Cast(), config.compute_dtype
        self.lookup, self.is_sequence_parallel = Lookup(table.weight.dtype), config.sequence_parallel
        length_axis, vocabulary_axis, local = "cp", "tp", self._of_part
        if keeps_whole:
            vocabulary_axis, local = "None", self._of_whole
        else:
            self.first, self.last = table.vocab_start_index, table.parallel_num_embeddings
            # MindFormers makes a second group of the same ranks for it. MindSpore, which records one group for a set of
            # ranks, would write the ranks of the whole world beside the name of the second.
            group = ModelCommProcessGroups.use_parallel_state_groups(required_groups=["tp"]).tp.group
            self.add_up = ops.ReduceScatter(group=group) if config.sequence_parallel else ops.AllReduce(group=group)
        # With sequence parallelism each rank goes on with its part of the tokens.
        out_axis = "cp_tp" if config.sequence_parallel else "cp"
        if keeps_whole:
            length_axis = out_axis
        self.on_each_rank = Morph(local, _lookup_shape, _lookup_dtype).add_prim_attr("self_define_shard", True)
        self.on_each_rank.shard(
            in_strategy=(layout("dp", length_axis), layout(vocabulary_axis, "None")),
            out_strategy=(layout("dp", out_axis, "None"),),
        )

    def construct(self, input_ids, weight):
        """Return the rows [rows, length, width] of tokens [rows, length]."""
        return self.on_each_rank(input_ids, self.cast(weight, self.dtype))

    def _of_whole(self, input_ids, weight):
        return self.lookup(input_ids, weight)

    def _of_part(self, input_ids, weight):
        index = input_ids - self.first
        own = ops.minimum(ops.relu(index), self.last)
        inside = ops.cast(ops.equal(index, own), weight.dtype)
        rows = self.lookup(own, weight) * ops.expand_dims(inside, -1)
        if not self.is_sequence_parallel:
            return self.add_up(rows)
        return ops.transpose(self.add_up(ops.transpose(rows, (1, 0, 2))), (1, 0, 2))


class Lookup(nn.Cell):
    """Rows of a table, whose gradient is summed in a dtype of its own: a token may occur thousands of times."""

    def __init__(self, gradient_dtype):
        super().__init__(auto_prefix=False)
        self.dtype, self.add_up = gradient_dtype, EmbeddingDenseBackward()

    def construct(self, ids, table):
        """Return [.., width] of ids [..] and a table [n, width]."""
        return mint.nn.functional.embedding(ids, table)

    def bprop(self, ids, table, rows, slope):
        """The sums of the slopes of each row of the table."""
        return ops.zeros_like(ids), self.add_up(ops.cast(slope, self.dtype), ids, table.shape[0])


def place_embedding(model, config, keeps_whole: bool) -> None:
    """Have tokens looked up by :class:`Embedding`, which see."""
    table = model.embedding.word_embeddings
    table.embedding_morph = Embedding(table, config, keeps_whole)


def _lookup_shape(ids_shape, weight_shape):
    return [*ids_shape, weight_shape[1]]


def _lookup_dtype(ids_dtype, weight_dtype):
    return weight_dtype
