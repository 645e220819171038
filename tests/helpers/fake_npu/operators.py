"""Host versions of the fused operators of torch_npu that vLLM-Ascend calls."""

import math
from typing import Any

import torch
from fake_npu_kernels import on_host, on_npu


def install(torch_npu: Any) -> None:
    """Put them in the place of torch_npu's."""
    torch_npu._npu_rotary_embedding = rotary_embedding
    torch_npu.npu_rms_norm = rms_norm
    torch_npu.npu_add_rms_norm = add_rms_norm
    torch_npu.npu_swiglu = swiglu
    torch_npu._npu_reshape_and_cache = reshape_and_cache
    torch_npu.npu_fused_infer_attention_score = fused_infer_attention_score
    torch_npu.npu_top_k_top_p = top_k_top_p
    torch_npu.npu_grouped_matmul = grouped_matmul
    torch_npu.npu_moe_token_unpermute = moe_token_unpermute


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style=True) -> None:
    """Rotate queries and keys [tokens, heads x head_size] in place; the table [positions, rotated] is cos then sin."""
    angles = on_host(cos_sin_cache)[on_host(positions).long()].float()
    cos, sin = (part[:, None] for part in angles.chunk(2, -1))
    for tensor in (query, key):
        host = on_host(tensor)
        heads = host.reshape(host.shape[0], -1, head_size).float()
        rotated = heads[..., : angles.shape[-1]]
        if is_neox_style:
            first, second = rotated.chunk(2, -1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        else:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
            turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
        heads = torch.cat([turned, heads[..., angles.shape[-1] :]], -1)
        host.copy_(heads.reshape(host.shape).to(host.dtype))


def rms_norm(x, weight, epsilon=1e-6):
    """Return x / rms(x) * weight, and 1 / rms(x)."""
    wide = on_host(x).float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return on_npu((wide * inverse * on_host(weight).float()).to(x.dtype), x.device), on_npu(inverse, x.device)


def add_rms_norm(x, residual, weight, epsilon=1e-6, *_):
    """Return the norm of x + residual, 1 / rms, and the sum."""
    total = on_npu(on_host(x) + on_host(residual), x.device)
    return *rms_norm(total, weight, epsilon), total


def swiglu(x, dim=-1):
    """Return silu of the first half times the second."""
    gate, up = on_host(x).float().chunk(2, dim)
    return on_npu((torch.nn.functional.silu(gate) * up).to(x.dtype), x.device)


def reshape_and_cache(key=None, value=None, key_cache=None, value_cache=None, slot_indices=None) -> None:
    """Write keys and values [tokens, heads, channels] into slots of caches [blocks, size, heads, channels]."""
    slots = on_host(slot_indices).long()
    held = slots >= 0
    for tensor, cache in ((key, key_cache), (value, value_cache)):
        host = on_host(cache)
        host.view(-1, *host.shape[2:])[slots[held]] = on_host(tensor)[: len(slots)][held].view(-1, *host.shape[2:])


def fused_infer_attention_score(
    query=None, key=None, value=None, *, block_table=None, input_layout="TND", block_size=128, actual_seq_lengths=None,
    actual_seq_lengths_kv=None, num_key_value_heads=1, num_heads=1, scale=1.0, **_,
):  # fmt: skip
    """Causal attention of sequences behind one another, over keys and values of theirs or in blocks of a cache."""
    assert input_layout == "TND", input_layout
    queries, keys, values = on_host(query), on_host(key), on_host(value)
    result, start, read = torch.zeros_like(queries), 0, 0
    for number, end in enumerate(map(int, actual_seq_lengths)):
        length = int(actual_seq_lengths_kv[number])
        if block_table is None:
            own_keys, own_values = keys[read:length], values[read:length]
            read = length
        else:
            blocks = on_host(block_table)[number, : -(-length // block_size)].long()
            own_keys, own_values = (
                cache.reshape(-1, block_size, num_key_value_heads, queries.shape[-1])[blocks].flatten(0, 1)[:length]
                for cache in (keys, values)
            )
        if end > start:
            shared = num_heads // num_key_value_heads
            result[start:end] = attention(queries[start:end], own_keys, own_values, shared, scale)
        start = end
    return on_npu(result, query.device), on_npu(torch.zeros(1), query.device)


def attention(queries, keys, values, num_sharing, scale) -> torch.Tensor:
    """Attention of the last tokens of a sequence: queries [n, heads, channels], keys and values of all before them."""
    wide = [one.float().transpose(0, 1) for one in (queries, keys, values)]
    keys, values = (one.repeat_interleave(num_sharing, 0) for one in wide[1:])
    scores = wide[0] @ keys.transpose(1, 2) * scale
    num, length = scores.shape[1:]
    scores = scores.masked_fill(~torch.ones(num, length, dtype=torch.bool).tril(length - num), -math.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1).to(queries.dtype)


def top_k_top_p(logits, p=None, k=None):
    """Mask what is not among the k likeliest, or behind the probability p."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    host_k, host_p = (None if one is None else on_host(one) for one in (k, p))
    return on_npu(apply_top_k_top_p_pytorch(on_host(logits).clone(), host_k, host_p), logits.device)


def compute_slot_mapping(table: Any, num_requests: int, query_start_loc: torch.Tensor, positions: torch.Tensor) -> None:
    """Where in the cache each token's key goes (a kernel of Triton's in vLLM-Ascend)."""
    starts, places = on_host(query_start_loc).long(), on_host(positions).long()
    blocks, slots = on_host(table.block_table.gpu), on_host(table.slot_mapping.gpu)
    slots.fill_(-1)
    num_tokens, own = int(starts[num_requests]), starts[1 : num_requests + 1] - starts[:num_requests]
    rows = torch.repeat_interleave(torch.arange(num_requests), own)
    used, size = places[:num_tokens], table.block_size
    slots[:num_tokens] = (blocks[rows, used // size].long() * size + used % size).to(slots.dtype)


def moe_gating_top_k(
    x, *, k, k_group, group_count, renorm, norm_type, routed_scaling_factor=1.0, eps=1e-20, bias_opt=None, **_
):
    """Return weights and numbers of the k experts of each token [tokens, experts], and the scores.

    Where there are groups, the k_group whose best two experts are best together; a bias counts for the choice alone.
    """
    logits = on_host(x).float()
    scores = logits.sigmoid() if norm_type else logits.softmax(-1)
    wanted = scores if bias_opt is None else scores + on_host(bias_opt).float()
    if group_count > 1:
        grouped = wanted.view(len(wanted), group_count, -1)
        chosen = grouped.topk(2, -1).values.sum(-1).topk(k_group, -1).indices
        away = torch.ones(len(wanted), group_count, dtype=torch.bool).scatter_(1, chosen, False)
        wanted = grouped.masked_fill(away[..., None], -math.inf).flatten(1)
    experts = wanted.topk(k, -1).indices
    weights = scores.gather(1, experts)
    if renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return on_npu(weights, x.device), on_npu(experts.to(torch.int32), x.device), on_npu(scores, x.device)


def moe_init_routing(hidden_states, topk_ids, *, expert_num, active_expert_range, scale=None, quant_mode=-1, **_):
    """Return the tokens in order of their experts, where each went, and how many each expert has."""
    assert quant_mode == -1 and list(active_expert_range) == [0, expert_num], "quantised, or some of the experts"
    experts, num_chosen = on_host(topk_ids).long().flatten(), topk_ids.shape[1]
    order = experts.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    counts = torch.bincount(experts, minlength=expert_num)
    moved = on_host(hidden_states)[order // num_chosen]
    device = hidden_states.device
    return on_npu(moved, device), on_npu(places.to(torch.int32), device), on_npu(counts, device), scale


def grouped_matmul(x, weight, *, group_list, group_list_type=0, bias=None, **_):
    """Multiply the rows of each expert with its weight [experts, in, out]; numbers of rows, or where they end."""
    assert bias is None
    (rows,), (own,) = x, weight
    ends = on_host(group_list).long()
    ends = ends.cumsum(0) if group_list_type == 1 else ends
    host, weights = on_host(rows), on_host(own)
    made = torch.zeros(len(host), weights.shape[2], dtype=host.dtype)
    for expert, (start, end) in enumerate(zip([0, *ends.tolist()], ends.tolist())):
        made[start:end] = host[start:end] @ weights[expert]
    return [on_npu(made, rows.device)]


def moe_token_unpermute(permuted_tokens, sorted_indices, probs):
    """Return the sum of each token's parts, weighted."""
    parts = on_host(permuted_tokens)[on_host(sorted_indices).long()].float()
    weights = on_host(probs).float()
    total = (parts.view(*weights.shape, -1) * weights[..., None]).sum(1)
    return on_npu(total.to(permuted_tokens.dtype), permuted_tokens.device)
