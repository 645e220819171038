"""Host versions of the fused operators of torch_npu that vLLM-Ascend calls."""

import math
from typing import Any

import torch
from fake_npu_graphs import launched
from fake_npu_kernels import on_host, on_npu
from fake_npu_rules import checked


def install(torch_npu: Any, library: torch.library.Library) -> None:
    """Put them in the place of torch_npu's; shapes without data, which compilers ask for, stay its own."""
    for function in (
        npu_rms_norm, npu_add_rms_norm, npu_swiglu, npu_fused_infer_attention_score, npu_top_k_top_p,
        npu_grouped_matmul, npu_moe_token_unpermute, npu_interleave_rope, npu_kv_rmsnorm_rope_cache,
        npu_fused_infer_attention_score_v2, npu_attention_update, npu_transpose_batchmatmul, npu_fast_gelu, npu_mrope,
        npu_rotary_mul,
    ):  # fmt: skip
        library.impl(function.__name__, launched(checked(function)), "PrivateUse1", allow_override=True)
    torch_npu._npu_rotary_embedding = launched(rotary_embedding)
    torch_npu._npu_reshape_and_cache = launched(reshape_and_cache)
    torch_npu.npu_scatter_pa_kv_cache = launched(scatter_pa_kv_cache)  # in its place from vLLM-Ascend 0.26 on
    torch_npu.npu_format_cast = lambda tensor, acl_format: tensor
    torch_npu.npu_fused_infer_attention_score.out = launched(fused_infer_attention_score_out)
    torch_npu.npu_fused_infer_attention_score_v2.out = launched(fused_infer_attention_score_v2_out)
    torch_npu._npu_fused_infer_attention_score_get_max_workspace = _workspace
    torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace = _workspace


def _workspace(query, *_, **__) -> torch.Tensor:
    return query.new_empty(1)


def fused_infer_attention_score_out(query, *, workspace, out, **options) -> None:
    """Write attention into tensors that are there."""
    found = checked(npu_fused_infer_attention_score)(query, **options)[0]
    on_host(out[0]).view(found.shape).copy_(on_host(found))


def fused_infer_attention_score_v2_out(*arguments, workspace, out, **options) -> None:
    """Write attention over latent channels into tensors that are there."""
    found = checked(npu_fused_infer_attention_score_v2)(*arguments, **options)[0]
    on_host(out[0]).view(found.shape).copy_(on_host(found))


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style=True) -> None:
    """Rotate queries and keys [tokens, heads x head_size] in place; the table [positions, rotated] is cos then sin."""
    rotate_heads((query, key), on_host(cos_sin_cache)[on_host(positions).long()], head_size, is_neox_style)


def rotate_heads(tensors, angles, head_size, is_neox_style=True) -> None:
    """Rotate [tokens, heads x head_size] in place by angles [tokens, cos and sin]."""
    cos, sin = (part[:, None] for part in angles.float().chunk(2, -1))
    for tensor in tensors:
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


def npu_mrope(positions, query, key, cos_sin_cache, head_size, *, mrope_section, rotary_mode="half"):
    """Rotate queries and keys [tokens, heads x head_size] by positions in time, rows and columns, [3, tokens]."""
    assert rotary_mode == "half", rotary_mode
    angles = on_host(cos_sin_cache)[on_host(positions).long()]
    if angles.ndim == 3:
        angles = angles_of_sections(angles, mrope_section, is_interleaved=False)
    turned = [on_npu(on_host(one), one.device) for one in (query, key)]
    rotate_heads(turned, angles, head_size)
    return tuple(turned)


def npu_rotary_mul(x, cos, sin, *_):
    """Rotate [batch, tokens, heads, channels] by [1, tokens, 1, channels], first against second half."""
    wide = on_host(x).float()
    first, second = wide.chunk(2, -1)
    turned = wide * on_host(cos).float() + torch.cat([-second, first], -1) * on_host(sin).float()
    return on_npu(turned.to(x.dtype), x.device)


def angles_of_sections(angles, sections, *, is_interleaved) -> torch.Tensor:
    """Choose from [3, tokens, cos and sin] which channels turn by time, row and column: sections, or in turns."""
    parts = []
    for part in angles.float().chunk(2, -1):
        if is_interleaved:
            chosen = part[0].clone()
            for axis in (1, 2):
                chosen[:, axis : 3 * sections[axis] : 3] = part[axis, :, axis : 3 * sections[axis] : 3]
        else:
            chosen = torch.cat([one[axis] for axis, one in enumerate(part.split(sections, -1))], -1)
        parts.append(chosen)
    return torch.cat(parts, -1)


def split_qkv_rmsnorm_mrope(
    qkv, q_weight, k_weight, cos_sin, num_q_heads, num_kv_heads, head_size, eps, mrope_section, is_interleaved,
    rope_dim=None, q_bias=None, k_bias=None, has_gate=False,
):  # fmt: skip
    """Return queries and keys, normed by head and turned by [3, tokens, cos and sin], values, and no gate."""
    assert q_bias is None and k_bias is None and not has_gate
    sizes = [num_q_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
    query, key, value = (one.contiguous() for one in on_host(qkv).split(sizes, -1))
    normed = []
    for one, weight in ((query, q_weight), (key, k_weight)):
        heads = one.view(len(one), -1, head_size).float()
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * on_host(weight).float()
        normed.append(heads.to(qkv.dtype).view(one.shape))
    rotate_heads(normed, angles_of_sections(on_host(cos_sin), mrope_section, is_interleaved=is_interleaved), head_size)
    return [on_npu(one, qkv.device) for one in (*normed, value, value[:, :0])]


def npu_fast_gelu(x):
    """Return x times the logistic function of 1.702 x."""
    wide = on_host(x).float()
    return on_npu((wide * torch.sigmoid(1.702 * wide)).to(x.dtype), x.device)


def npu_rms_norm(x, weight, epsilon=1e-6):
    """Return x / rms(x) * weight, and 1 / rms(x)."""
    wide = on_host(x).float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return on_npu((wide * inverse * on_host(weight).float()).to(x.dtype), x.device), on_npu(inverse, x.device)


def npu_add_rms_norm(x, residual, weight, epsilon=1e-6, *_):
    """Return the norm of x + residual, 1 / rms, and the sum."""
    total = on_npu(on_host(x) + on_host(residual), x.device)
    return *npu_rms_norm(total, weight, epsilon), total


def npu_swiglu(x, dim=-1):
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


def scatter_pa_kv_cache(key, value, key_cache, value_cache, slot_mapping, *, cache_mode) -> None:
    assert cache_mode == "Norm", cache_mode
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def npu_fused_infer_attention_score(
    query=None, key=None, value=None, *, block_table=None, input_layout="TND", block_size=128, actual_seq_lengths=None,
    actual_seq_lengths_kv=None, num_key_value_heads=1, num_heads=1, scale=1.0, sparse_mode=0, query_rope=None,
    key_rope=None, **_,
):  # fmt: skip
    """Attention of sequences behind one another, over keys and values of theirs or in blocks of a cache.

    Causal with ``sparse_mode`` 3. Queries and keys may have their rotated channels apart.

    Returns:
        [tokens, heads, channels], and the logarithm of each sum of exponentials, [tokens, heads, 1].
    """
    assert input_layout == "TND", input_layout
    queries, keys, values = _joined(query, query_rope), _joined(key, key_rope), on_host(value)
    if block_table is not None:
        keys, values = (one.reshape(len(one), block_size, num_key_value_heads, -1) for one in (keys, values))
        if list(actual_seq_lengths) == list(range(1, len(queries) + 1)):
            found = attention_of_new_tokens(queries, keys, values, on_host(block_table), actual_seq_lengths_kv, scale)
            return tuple(on_npu(one.to(query.dtype), query.device) for one in found)
    result, sums = torch.zeros(*queries.shape[:2], values.shape[-1]), torch.zeros(*queries.shape[:2], 1)
    start, read = 0, 0
    for number, end in enumerate(map(int, actual_seq_lengths)):
        length = int(actual_seq_lengths_kv[number])
        if block_table is None:
            own = [one[read:length] for one in (keys, values)]
            read = length
        else:
            blocks = on_host(block_table)[number, : -(-length // block_size)].long()
            own = [cache[blocks].flatten(0, 1)[:length] for cache in (keys, values)]
        if end > start:
            shared = num_heads // num_key_value_heads
            found = attention(queries[start:end], *own, shared, scale, is_causal=sparse_mode == 3)
            result[start:end], sums[start:end] = found
        start = end
    return on_npu(result.to(query.dtype), query.device), on_npu(sums, query.device)


def _joined(channels, rotated) -> torch.Tensor:
    return on_host(channels) if rotated is None else torch.cat([on_host(channels), on_host(rotated)], -1)


def attention(queries, keys, values, num_sharing, scale, *, is_causal) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the last tokens of a sequence: queries [n, heads, channels], keys and values of all before them."""
    wide = [one.float().transpose(0, 1) for one in (queries, keys, values)]
    keys, values = (one.repeat_interleave(num_sharing, 0) for one in wide[1:])
    scores = wide[0] @ keys.transpose(1, 2) * scale
    num, length = scores.shape[1:]
    if is_causal:
        scores = scores.masked_fill(~torch.ones(num, length, dtype=torch.bool).tril(length - num), -math.inf)
    return (scores.softmax(-1) @ values).transpose(0, 1), scores.logsumexp(-1, keepdim=True).transpose(0, 1)


def attention_of_new_tokens(queries, keys, values, table, lengths, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token of each sequence, all at once: queries [n, heads, channels], keys and values in blocks."""
    num, size, heads = len(queries), keys.shape[1], keys.shape[2]
    lengths = torch.tensor(lengths[:num]).long()
    blocks = table[:num, : -(-int(lengths.max()) // size)].long()
    keys, values = (one[blocks].flatten(1, 2).float() for one in (keys, values))  # [n, tokens, heads, channels]
    held = (torch.arange(keys.shape[1]) < lengths[:, None])[..., None, None]
    keys, values = (one.masked_fill(~held, 0.0) for one in (keys, values))  # what is behind may be no number
    scores = torch.einsum("nhsc,nthc->nhst", queries.float().unflatten(1, (heads, -1)), keys) * scale
    scores = scores.masked_fill(~held[:, None, None, :, 0, 0], -math.inf)
    result = torch.einsum("nhst,nthc->nhsc", scores.softmax(-1), values)
    return result.flatten(1, 2), scores.logsumexp(-1, keepdim=True).flatten(1, 2)


def npu_fused_infer_attention_score_v2(
    query, key, value, *, query_rope, key_rope, input_layout, num_query_heads, num_key_value_heads, softmax_scale,
    block_table, block_size, actual_seq_kvlen, **_,
):  # fmt: skip
    """Attention of one new token a sequence [sequences, heads, 1, channels] over a cache of latent channels.

    Returns:
        [heads, sequences, 1, channels], and sums that nobody reads.
    """
    assert input_layout == "BNSD_NBSD" and num_key_value_heads == 1, input_layout
    queries, tables = _joined(query, query_rope)[:, :, 0], on_host(block_table).long()
    latent, rotated = (on_host(one).reshape(-1, block_size, 1, one.shape[-1]) for one in (key, key_rope))
    result = torch.zeros(num_query_heads, len(queries), 1, latent.shape[-1])
    for number, length in enumerate(map(int, actual_seq_kvlen)):
        if number < len(queries) and length:
            blocks = tables[number, : -(-length // block_size)]
            own, turned = (cache[blocks].flatten(0, 1)[:length] for cache in (latent, rotated))
            keys, one = torch.cat([own, turned], -1), queries[number : number + 1]
            result[:, number] = attention(one, keys, own, num_query_heads, softmax_scale, is_causal=True)[0][0, :, None]
    return on_npu(result.to(query.dtype), query.device), on_npu(torch.zeros(1), query.device)


def npu_attention_update(sums, parts, _):
    """Put attention over parts of the keys together: results [rows, channels] and the logarithms of their sums."""
    weights = torch.stack([on_host(one).float() for one in sums]).softmax(0)
    total = sum(weight[:, None] * on_host(part).float() for weight, part in zip(weights, parts))
    return on_npu(total, parts[0].device), sums[0]


def npu_interleave_rope(x, cos, sin):
    """Rotate [batch, heads, length, channels] whose pairs of channels stand beside each other; they go apart."""
    return on_npu(_interleaved(on_host(x), on_host(cos), on_host(sin)).to(x.dtype), x.device)


def _interleaved(x, cos, sin) -> torch.Tensor:
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    apart, turned = torch.cat([first, second], -1), torch.cat([-second, first], -1)
    return apart * cos.float() + turned * sin.float()


def npu_kv_rmsnorm_rope_cache(kv, weight, cos, sin, index, k_cache, ckv_cache, *, epsilon, cache_mode, **_):
    """Norm the latent channels of [tokens, 1, 1, latent + rotated], rotate the others, write both into their caches."""
    assert cache_mode == "PA", cache_mode
    host, size = on_host(kv), weight.shape[-1]
    latent = host[..., :size].float()
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + epsilon) * on_host(weight).float()
    rotated = _interleaved(host[..., size:], on_host(cos), on_host(sin))
    slots = on_host(index).long()
    for values, cache in ((rotated, k_cache), (latent, ckv_cache)):
        rows = on_host(cache).view(-1, values.shape[-1])
        rows[slots[slots >= 0]] = values.reshape(-1, values.shape[-1])[: len(slots)][slots >= 0].to(cache.dtype)
    return k_cache, ckv_cache, *(on_npu(one.to(kv.dtype), kv.device) for one in (rotated, latent))


def kv_cache_load(cache_latent, cache_rotated, block_table, lengths, starts, key, value) -> None:
    """Copy each sequence's part of two caches [blocks, size, heads, channels] behind one another."""
    tables = on_host(block_table).long()
    for cache, target in ((cache_latent, key), (cache_rotated, value)):
        host, place = on_host(cache), 0
        for number, (start, length) in enumerate(zip(on_host(starts).tolist(), on_host(lengths).tolist())):
            rows = host[tables[number]].flatten(0, 1)[start : start + length]
            on_host(target)[place : place + length] = rows.reshape(length, *target.shape[1:])
            place += length


def npu_transpose_batchmatmul(x, weight, *, perm_y, **_):
    """Multiply [heads, tokens, in] with [heads, in, out], tokens before heads."""
    return on_npu((on_host(x) @ on_host(weight)).permute(*perm_y).contiguous(), x.device)


def npu_top_k_top_p(logits, p=None, k=None):
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


def npu_grouped_matmul(x, weight, *, group_list, group_list_type=0, bias=None, **_):
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


def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs):
    """Return the sum of each token's parts, weighted."""
    parts = on_host(permuted_tokens)[on_host(sorted_indices).long()].float()
    weights = on_host(probs).float()
    total = (parts.view(*weights.shape, -1) * weights[..., None]).sum(1)
    return on_npu(total.to(permuted_tokens.dtype), permuted_tokens.device)
