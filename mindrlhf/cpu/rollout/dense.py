"""The next token of each sample through a dense decoder: vLLM's own kernels, called without its layers.

Of a small model, the layers' Python costs as much as their arithmetic. What they do for the next token of running
samples is known: the same kernels on the same weights, so here they are called one after the other. Results are the
same bit for bit; the first token is computed in both ways, and where any bit differs vLLM's layers stay in use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralDecoderLayer, MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from mindrlhf.cpu.rollout.linear import PlainLinear

_LAYERS = {
    LlamaForCausalLM: LlamaDecoderLayer,
    MistralForCausalLM: MistralDecoderLayer,
    Qwen2ForCausalLM: Qwen2DecoderLayer,
    Qwen3ForCausalLM: Qwen3DecoderLayer,
}
# All of a rotation is in its table.
_ROTATIONS = (RotaryEmbedding, Llama3RotaryEmbedding)

_Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Layer:
    """Weights and cache of a layer. Weights and cache are those of vLLM, which loads into them."""

    input_norm: torch.Tensor  # [hidden]
    qkv: _Product
    head_norms: tuple[torch.Tensor, torch.Tensor] | None  # of queries and keys, [head size]
    rotation: torch.Tensor  # cosines and sines [positions, head size]
    caches: tuple[torch.Tensor, torch.Tensor]  # keys and values [blocks, key/value heads, block size, head size]
    output: _Product
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: _Product
    down: _Product


class DenseDecoder:
    """A model, from tokens to logits, for one token of each sample.

    Args:
        model: one of which ``supports`` is true, in one process, with its cache in place.
    """

    def __init__(self, model: torch.nn.Module):
        decoder = model.model
        first = decoder.layers[0]
        attention = first.self_attn
        self._embedding = decoder.embed_tokens.weight.data
        self._final_norm = decoder.norm.weight.data
        self._head, self._num_words = _product(model.lm_head), model.logits_processor.org_vocab_size
        self._epsilon = decoder.norm.variance_epsilon
        self._head_size = attention.attn.head_size
        self._sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        self._scale, self._isa = attention.attn.impl.scale, attention.attn.isa
        self._rotates_halves = attention.rotary_emb.is_neox_style
        self._layers = [_layer(layer) for layer in decoder.layers]

    @staticmethod
    def supports(model: torch.nn.Module) -> bool:
        """Return whether this computes all that ``model`` does."""
        layer_class = _LAYERS.get(type(model))
        return (
            layer_class is not None
            and all(_is_plain(layer, layer_class) for layer in model.model.layers)
            and isinstance(getattr(model.lm_head, "cpu_linear", None), PlainLinear)
            and (model.logits_processor.scale, model.logits_processor.soft_cap) == (1.0, None)
            and model.logits_processor.head_dtype in (None, torch.float32)
        )

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: CPUAttentionMetadata
    ) -> torch.Tensor:
        """Return logits, float32 [samples, vocabulary]; keys and values of the tokens go into the cache.

        Args:
            token_ids: int32 [samples].
            positions: int64 [samples].
            attention: of one token for each sample, in that order.
        """
        kernels, epsilon = torch.ops._C, self._epsilon
        rms_norm, add_and_norm = kernels.rms_norm.default, kernels.fused_add_rms_norm.default
        # Each layer adds to the residual in place; the first one's is not the embedding itself.
        residual = self._embedding.index_select(0, token_ids)
        hidden = torch.empty_like(residual)
        seen = residual.new_empty(len(token_ids), self._sizes[0])
        rms_norm(hidden, residual, self._layers[0].input_norm, epsilon)
        for number, layer in enumerate(self._layers):
            if number:
                add_and_norm(hidden, residual, layer.input_norm, epsilon)
            hidden = layer.output(self._attend(layer, layer.qkv(hidden), positions, attention, seen))
            add_and_norm(hidden, residual, layer.mlp_norm, epsilon)
            gate, up = layer.gate_up(hidden).chunk(2, -1)
            hidden = layer.down(torch.nn.functional.silu(gate).mul_(up))
        add_and_norm(hidden, residual, self._final_norm, epsilon)
        return self._head(hidden)[:, : self._num_words]

    def _attend(
        self,
        layer: _Layer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        attention: CPUAttentionMetadata,
        seen: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``seen``, [samples, query heads * head size], with what the heads see of these tokens."""
        kernels, size = torch.ops._C, self._head_size
        query, key, value = torch.split_with_sizes(qkv, self._sizes, -1)
        if layer.head_norms is not None:
            query, key = (
                self._norm_heads(heads, weight) for heads, weight in zip((query, key), layer.head_norms, strict=True)
            )
        kernels.rotary_embedding.default(positions, query, key, size, layer.rotation, self._rotates_halves)
        query, key, value = (_heads(states, size) for states in (query, key, value))
        kernels.cpu_attn_reshape_and_cache.default(
            key, value, *layer.caches, attention.slot_mapping, self._isa, 1.0, 1.0, "auto"
        )
        kernels.cpu_attention_with_kv_cache.default(
            query, *layer.caches, _heads(seen, size), attention.query_start_loc, attention.seq_lens, self._scale, True,
            None, -1, attention.block_table, 0.0, attention.scheduler_metadata, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return seen

    def _norm_heads(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = heads.reshape(-1, self._head_size)
        normed = torch.empty_like(rows)
        torch.ops._C.rms_norm.default(normed, rows, weight, self._epsilon)
        return normed.view(heads.shape)


def _heads(states: torch.Tensor, size: int) -> torch.Tensor:
    return states.view(states.shape[0], -1, size)


def _layer(layer: torch.nn.Module) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    cache = attention.attn.kv_cache
    keys, values = cache.view(*cache.shape[:2], 2 * cache.shape[2], -1).chunk(2, dim=2)
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
        layer.input_layernorm.weight.data,
        _product(attention.qkv_proj),
        (attention.q_norm.weight.data, attention.k_norm.weight.data) if has_norms else None,
        attention.rotary_emb.cos_sin_cache,
        (keys, values),
        _product(attention.o_proj),
        layer.post_attention_layernorm.weight.data,
        _product(mlp.gate_up_proj, may_lie_by_columns=True),
        _product(mlp.down_proj),
    )


def _product(linear: Any, may_lie_by_columns: bool = False) -> _Product:
    bias = getattr(linear, "bias", None)
    return linear.cpu_linear.of_rows(None if bias is None else bias.data, may_lie_by_columns)


def _is_plain(layer: torch.nn.Module, layer_class: type) -> bool:
    """Return whether a layer is a whole one, without what some models of its class have."""
    if type(layer) is not layer_class:
        return False
    attention = layer.self_attn
    linears = (attention.qkv_proj, attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    return (
        type(attention.attn) is Attention
        and type(attention.rotary_emb) in _ROTATIONS
        and attention.attn.impl.sliding_window == -1
        and attention.attn.impl.alibi_slopes is None
        and attention.attn.impl.sinks is None
        and not attention.attn.impl.logits_soft_cap
        and attention.attn.kv_cache_dtype == "auto"
        and getattr(attention, "qk_norm", False) is False
        and not getattr(attention, "do_llama_4_scaling", False)
        and getattr(layer, "ada_rms_norm_t_cond", None) is None
        and all(isinstance(linear.cpu_linear, PlainLinear) and not linear.skip_bias_add for linear in linears)
        and all(type(norm) is RMSNorm for norm in (layer.input_layernorm, layer.post_attention_layernorm))
    )
