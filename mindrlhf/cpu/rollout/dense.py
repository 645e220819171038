"""The next token of each sample through a dense decoder: vLLM's own kernels, called without its layers.

Of a small model the Python of layers costs half as much as their arithmetic. Here the same kernels are called on the
same weights, one after the other, with the same results bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

_LAYERS = {
    LlamaForCausalLM: LlamaDecoderLayer,
    Qwen2ForCausalLM: Qwen2DecoderLayer,
    Qwen3ForCausalLM: Qwen3DecoderLayer,
}

_Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Layer:
    """Weights and products of a layer, as they are after the last update."""

    input_norm: torch.Tensor  # [hidden]
    qkv: _Product
    head_norms: tuple[torch.Tensor, torch.Tensor] | None  # of queries and keys, [head size]
    caches: tuple[torch.Tensor, torch.Tensor]  # keys and values [blocks, key/value heads, block size, head size]
    output: _Product
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: _Product
    down: _Product


class DenseDecoder:
    """A model, from tokens to logits, for one token of each sample.

    Args:
        model: one of which ``supports`` is true, in one process, with its cache in place. An update of its weights
            takes another decoder: vLLM packs them anew.
    """

    def __init__(self, model: torch.nn.Module):
        decoder = model.model
        self._embedding, self._final_norm = decoder.embed_tokens.weight, decoder.norm.weight
        self._epsilon = decoder.norm.variance_epsilon
        self._head, self._vocab_size = _product(model.lm_head), model.logits_processor.org_vocab_size
        self._layers = [_layer(layer) for layer in decoder.layers]
        attention = decoder.layers[0].self_attn
        self._rotary, self._head_size = attention.rotary_emb, attention.attn.head_size
        self._sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        self._scale, self._isa = attention.attn.impl.scale, attention.attn.isa

    @staticmethod
    def supports(model: torch.nn.Module) -> bool:
        """Return True where this computes all that ``model`` does, in float32."""
        layer_class = _LAYERS.get(type(model))
        return (
            layer_class is not None
            and model.lm_head.weight.dtype == torch.float32
            and (model.logits_processor.scale, model.logits_processor.soft_cap) == (1.0, None)
            and all(type(layer) is layer_class and _is_plain(layer) for layer in model.model.layers)
        )

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, seen: CPUAttentionMetadata) -> torch.Tensor:
        """Return logits, float32 [samples, vocabulary]; keys and values of the tokens go into the cache.

        Args:
            token_ids: int32 [samples].
            positions: int64 [samples].
            seen: what each token attends to, in that order.
        """
        residual, change = self._embedding.index_select(0, token_ids), None
        for layer in self._layers:
            residual = residual if change is None else change + residual
            attended = self._attend(layer, layer.qkv(self._norm(residual, layer.input_norm)), positions, seen)
            residual = layer.output(attended) + residual
            gate, up = layer.gate_up(self._norm(residual, layer.mlp_norm)).chunk(2, -1)
            change = layer.down(silu(gate) * up)
        return self._head(self._norm(change + residual, self._final_norm))[:, : self._vocab_size]

    def _attend(
        self, layer: _Layer, qkv: torch.Tensor, positions: torch.Tensor, seen: CPUAttentionMetadata
    ) -> torch.Tensor:
        """Return what the heads see of these tokens, float32 [samples, query heads * head size]."""
        kernels, size, rotary = torch.ops._C, self._head_size, self._rotary
        query, key, value = torch.split_with_sizes(qkv, self._sizes, -1)
        if layer.head_norms is not None:
            query = self._norm(query.unflatten(-1, (-1, size)), layer.head_norms[0]).flatten(1)
            key = self._norm(key.unflatten(-1, (-1, size)), layer.head_norms[1]).flatten(1)
        kernels.rotary_embedding.default(positions, query, key, size, rotary.cos_sin_cache, rotary.is_neox_style)
        query, key, value = (states.view(len(states), -1, size) for states in (query, key, value))
        kernels.cpu_attn_reshape_and_cache.default(
            key, value, *layer.caches, seen.slot_mapping, self._isa, 1.0, 1.0, "auto"
        )
        output = qkv.new_empty(query.shape)
        kernels.cpu_attention_with_kv_cache.default(
            query, *layer.caches, output, seen.query_start_loc, seen.seq_lens, self._scale, True,
            None, -1, seen.block_table, 0.0, seen.scheduler_metadata, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return output.flatten(1)

    def _norm(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(states, weight.shape, weight, self._epsilon)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    cache = attention.attn.kv_cache  # [blocks, key/value heads, block size, 2 * head size]
    keys, values = cache.view(*cache.shape[:2], 2 * cache.shape[2], -1).chunk(2, dim=2)
    return _Layer(
        layer.input_layernorm.weight,
        _product(attention.qkv_proj),
        (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None,
        (keys, values),
        _product(attention.o_proj),
        layer.post_attention_layernorm.weight,
        _product(mlp.gate_up_proj),
        _product(mlp.down_proj),
    )


def _product(linear: Any) -> _Product:
    multiply, weight, bias = linear.cpu_linear, linear.weight, getattr(linear, "bias", None)
    return lambda states: multiply(states, weight, bias)


def _is_plain(layer: Any) -> bool:
    """Return True for a layer without what some models of its class have."""
    attention, mlp = layer.self_attn, layer.mlp
    implementation = attention.attn.impl
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return (
        type(attention.attn) is Attention
        and type(attention.rotary_emb) in (RotaryEmbedding, Llama3RotaryEmbedding)  # whose table is all
        and implementation.sliding_window == -1
        and not (implementation.alibi_slopes or implementation.sinks or implementation.logits_soft_cap)
        and attention.attn.kv_cache_dtype == "auto"
        and not getattr(attention, "qk_norm", False)
        and all(type(linear.quant_method) is UnquantizedLinearMethod for linear in linears)
    )
