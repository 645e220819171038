"""Calls that an NPU takes of each operator: those of the documents of CANN; others end with an error, as there.

Rules are of Atlas A2 and A3, from the pages named, in CANN's repositories ops-transformer (its pages of 2025-11 and
later) and ops-nn (2026-08), and of torch_npu's where there is none. A condition is an expression of the operator's
arguments, and holds too where one that it names is None. Not here: sizes of heads, which the pages give for layouts
without a cache in pages only.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

_HALF, _FLOAT = "bfloat16 float16", "bfloat16 float16 float32"


class Rule(NamedTuple):
    """Types of arguments, by name ("=x": that of x), and conditions on shapes and options."""

    page: str
    types: dict[str, str]
    conditions: tuple[str, ...] = ()


RULES = {
    "npu_rms_norm": Rule(
        "aclnnRmsNorm",
        {"x": _FLOAT, "weight": "=x float32"},
        ("tuple(x.shape[-len(weight.shape):]) == tuple(weight.shape)",),
    ),
    "npu_add_rms_norm": Rule(
        "aclnnAddRmsNorm",
        {"x": _FLOAT, "residual": "=x", "weight": "=x"},
        ("tuple(x.shape) == tuple(residual.shape)", "tuple(x.shape[-len(weight.shape):]) == tuple(weight.shape)"),
    ),
    "npu_swiglu": Rule("aclnnSwiGlu", {"x": _FLOAT}, ("x.shape[dim] % 2 == 0",)),
    "npu_fast_gelu": Rule("aclnnFastGelu", {"x": _FLOAT}, ("len(x.shape) <= 8",)),
    "npu_top_k_top_p": Rule(
        "aclnnApplyTopKTopP", {"logits": _FLOAT, "p": "=logits", "k": "int32"}, ("len(logits.shape) == 2",)
    ),
    "npu_transpose_batchmatmul": Rule(
        "aclnnTransposeBatchMatMul",
        {"x": _FLOAT, "weight": "=x"},
        ("len(x.shape) == len(weight.shape) == 3", "x.shape[2] == weight.shape[1]"),
    ),
    "npu_fused_infer_attention_score": Rule(
        "aclnnFusedInferAttentionScoreV3",
        {"query": _HALF + " int8", "key": "=query", "value": "=query", "query_rope": "=query", "key_rope": "=query",
         "block_table": "int32"},
        (
            "input_layout in ('BSH', 'BSND', 'BNSD', 'TND', 'NTD_TND', 'BSH_NBSD', 'BSND_NBSD', 'BNSD_NBSD')",
            "len(block_table.shape) == 2",
            "block_size % 16 == 0 and block_size <= 512",
            "len(actual_seq_lengths) <= 4096",
            "len(query) <= 1 << 20",
            "num_heads % num_key_value_heads == 0",
            "sparse_mode in (0, 3, 4)",
        ),
    ),
    "npu_fused_infer_attention_score_v2": Rule(
        "aclnnFusedInferAttentionScoreV3, queries of 512 channels",
        {"query": _HALF, "key": "=query", "value": "=query", "query_rope": "=query", "key_rope": "=query",
         "block_table": "int32"},
        (
            "query.shape[-1] == 512 and query_rope.shape[-1] == 64",
            "num_key_value_heads == 1 and num_query_heads in (1, 2, 4, 8, 16, 32, 64, 128)",
            "block_size in (16, 128)",
        ),
    ),
    "npu_kv_rmsnorm_rope_cache": Rule(
        "torch_npu.npu_kv_rmsnorm_rope_cache",
        {"kv": _HALF, "weight": "=kv", "cos": "=kv", "sin": "=kv", "index": "int64"},
        ("len(kv.shape) == 4 and kv.shape[1] == 1 and kv.shape[3] == 576", "tuple(weight.shape) == (512,)"),
    ),
    "npu_mrope": Rule(
        "aclnnRopeWithSinCosCache",
        {"positions": "int64", "query": _FLOAT, "key": "=query", "cos_sin_cache": "=query"},
        (
            "len(query.shape) == len(key.shape) == 2",
            "query.shape[1] % head_size == key.shape[1] % head_size == 0",
            "head_size % (16 if 'float32' in str(query.dtype) else 32) == 0",
            "list(mrope_section) in ([16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16])",
        ),
    ),
    "npu_rotary_mul": Rule(
        "aclnnRotaryPositionEmbedding",
        {"x": _FLOAT, "cos": "=x", "sin": "=x"},
        ("x.shape[-1] == cos.shape[-1] == sin.shape[-1]", "x.shape[-1] % 2 == 0 and x.shape[-1] <= 1024"),
    ),
    "moe_gating_top_k": Rule(
        "aclnnMoeGatingTopK",
        {"x": _FLOAT, "bias_opt": "=x"},
        (
            "len(x.shape) == 2 and x.shape[1] <= 2048",
            "x.shape[1] % group_count == 0",
            "1 <= k <= x.shape[1] // group_count * k_group",
        ),
    ),
    "moe_init_routing": Rule(
        "aclnnMoeInitRoutingV3",
        {"hidden_states": _FLOAT + " int8", "topk_ids": "int32"},
        ("0 <= active_expert_range[0] < active_expert_range[1] <= expert_num <= 10240",),
    ),
    "npu_grouped_matmul": Rule(
        "aclnnGroupedMatmulV4",
        {"x": _FLOAT, "weight": "=x", "group_list": "int64"},
        ("all(rows.shape[-1] < 65536 for rows in (*x, *weight))", "group_list_type in (0, 1, 2)"),
    ),
    "npu_moe_token_unpermute": Rule(
        "aclnnMoeTokenUnpermute",
        {"permuted_tokens": _FLOAT, "sorted_indices": "int32", "probs": _FLOAT},
        ("len(permuted_tokens.shape) == 2 and len(sorted_indices.shape) == 1", "probs.shape[1] <= 512"),
    ),
}  # fmt: skip


def check(name: str, arguments: dict[str, Any]) -> None:
    """Raise ``RuntimeError`` where a call, its arguments by name, is outside the operator's rule."""
    rule = RULES[name]
    for argument, text in rule.types.items():
        taken = [word for part in text.split() for word in (rule.types[part[1:]] if part[0] == "=" else part).split()]
        for tensor in _tensors(arguments.get(argument)):
            kind = _type(tensor)
            fits = kind in taken
            if text.startswith("=") and fits:
                fits = kind == _type(_tensors(arguments[text.split()[0][1:]])[0]) or kind in text.split()[1:]
            if not fits:
                raise RuntimeError(
                    f"call {rule.page} failed, 161002: Tensor {argument} not implemented for {kind}, should be in "
                    f"dtype support list {text}"
                )
    for condition in rule.conditions:
        words = compile(condition, name, "eval").co_names
        missing = any(word in arguments and arguments[word] is None for word in words)
        if not missing and not eval(condition, {}, dict(arguments)):
            raise RuntimeError(f"call {rule.page} failed, 161002: {name} is for {condition}")


def checked(function: Callable) -> Callable:
    """Return the host version of an operator that refuses what an NPU refuses, where there is a rule."""
    name, signature = function.__name__, inspect.signature(function)
    if name not in RULES:
        return function

    @functools.wraps(function)
    def call(*values: Any, **options: Any) -> Any:
        bound = signature.bind(*values, **options)
        bound.apply_defaults()
        check(name, bound.arguments)
        return function(*values, **options)

    return call


def _tensors(value: Any) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _type(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
