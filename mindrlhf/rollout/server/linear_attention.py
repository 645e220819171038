"""Linear attention by the gated delta rule (Qwen3.5) in vLLM, and on a CPU in float32, which vLLM 0.32 refuses there.

vLLM's module of the family imports processors of images, see :mod:`mindrlhf.rollout.server.vision`.
"""

import functools
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from vllm import ModelRegistry
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import _resolve_layer_name

from mindrlhf.rollout.server import cpu
from mindrlhf.rollout.server.vision import hf_config_of, import_processors
from mindrlhf.specs import QWEN3_5, has_linear_attention

_EPSILON = 1e-6  # beside the squares of queries and keys


def engine_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM is told of a model with linear attention, whose class is registered too; else nothing.

    On a CPU no prefix is cached: the state of a prompt is not in blocks of tokens, and vLLM keeps copies of it only
    where it may read prompts in parts.
    """
    if not has_linear_attention(hf_config_of(config["model_dir"])):
        return {}
    register()
    return {"enable_prefix_caching": False} if config["device"] == "cpu" else {}


@functools.cache
def register() -> None:
    """Have vLLM take the class of the model as it is, and its layers compute float32 on a CPU.

    Every process of vLLM has to call this; see :func:`mindrlhf.rollout.server.vision.register`.
    """
    import_processors()
    from vllm.model_executor.models import qwen3_5

    ModelRegistry.register_model(QWEN3_5.hf_architecture, getattr(qwen3_5, QWEN3_5.hf_architecture))
    if not cpu.is_known():
        return
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    of_bfloat16 = gdn_attention.cpu_gdn_attention_core

    def core(  # as vLLM calls it
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: gdn_attention.LayerNameType,
    ) -> None:
        if mixed_qkv.dtype == torch.bfloat16:
            of_bfloat16(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is not None and context.attn_metadata[layer.prefix].num_actual_tokens:
            conv = layer.kv_cache[0]
            conv = conv if gdn_attention.is_conv_state_dim_first() else conv.transpose(-1, -2)
            _compute(layer, context.attn_metadata[layer.prefix], conv, mixed_qkv, b, a, core_attn_out)

    gdn_attention.cpu_gdn_attention_core = core


def _compute(layer, batch, conv, mixed_qkv, b, a, outputs) -> None:
    """Write the outputs `[tokens, heads, dv]` of a batch, first samples that get a token each, then prompts.

    Args:
        layer: vLLM's.
        batch: vLLM's metadata of it.
        conv: what the convolution has seen last, `[slots, channels, width - 1]`.
        mixed_qkv: `[tokens, channels]`.
        b, a: `[tokens, heads]`, of which rates and decays are made.
    """
    taps = layer.conv1d.weight.flatten(1)
    slots, heads, value_dim, key_dim = layer.kv_cache[1].size()
    states = layer.kv_cache[1].view(slots, heads, key_dim, value_dim)
    places = batch.non_spec_state_indices_tensor.long()
    rate = torch.sigmoid(b.float())
    decay = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias)
    number = batch.num_decodes
    if number:
        held = places[:number]
        window = torch.cat([conv[held], mixed_qkv[:number, :, None]], -1)
        conv[held] = window[:, :, 1:]
        query, key, value = _heads(layer, (window * taps).sum(-1), heads)
        states[held], outputs[:number] = _step(states[held], query, key, value, decay[:number], rate[:number])
    if not batch.num_prefills:
        return
    held = places[number : number + batch.num_prefills]
    starts = batch.non_spec_query_start_loc[number : number + batch.num_prefills + 1].tolist()
    goes_on = batch.has_initial_state[number : number + batch.num_prefills].to(states.dtype)
    before = conv[held] * goes_on[:, None, None]
    rows = []
    for place, (first, last) in enumerate(zip(starts, starts[1:])):
        window = torch.cat([before[place], mixed_qkv[first:last].T], -1)
        conv[held[place]] = window[:, -before.shape[-1] :]
        rows.append(functional.conv1d(window[None], taps[:, None], groups=len(taps))[0].T)
    # All prompts go on together, a token of each at a time; where one has ended, nothing decays and nothing is learned.
    inputs = (*_heads(layer, torch.cat(rows), heads), decay[starts[0] : starts[-1]], rate[starts[0] : starts[-1]])
    lengths = [last - first for first, last in zip(starts, starts[1:])]
    padded = [pad_sequence(one.split(lengths), batch_first=True) for one in inputs]
    state, found = states[held] * goes_on[:, None, None, None], []
    for token in range(max(lengths)):
        state, output = _step(state, *(one[:, token] for one in padded))
        found.append(output)
    states[held] = state
    found = torch.stack(found, 1)
    outputs[starts[0] : starts[-1]] = torch.cat([found[place, :length] for place, length in enumerate(lengths)])


def _heads(layer, rows: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values `[tokens, heads, d]`, each head of values with its own, of what was convolved."""
    query, key, value = (one[0] for one in layer.rearrange_mixed_qkv(functional.silu(rows)))
    times = heads // query.shape[1]
    query, key = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + _EPSILON) for one in (query, key))
    return (query * query.shape[-1] ** -0.5).repeat_interleave(times, 1), key.repeat_interleave(times, 1), value


def _step(state, query, key, value, decay, rate) -> tuple[torch.Tensor, torch.Tensor]:
    """The states `[n, heads, dk, dv]` behind a token of each sample, and the outputs `[n, heads, dv]`."""
    state = state * decay.exp()[..., None, None]
    learned = (value - torch.einsum("nhkv,nhk->nhv", state, key)) * rate[..., None]
    state = state + key[..., None] * learned[..., None, :]
    return state, torch.einsum("nhkv,nhk->nhv", state, query)
