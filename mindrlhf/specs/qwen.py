"""Qwen2.5, Qwen3 and Qwen3 with experts."""

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import ExpertDims, ModelDims, positive_int
from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.rules import (
    BLOCK,
    EMBEDDING,
    EXPERTS,
    FINAL_NORM,
    INPUT_NORM,
    LAYER,
    MLP,
    MLP_NORM,
    OUTPUT,
    ROUTER,
    ParameterRule,
    norm,
)


def _query(dims: ModelDims) -> int:
    return dims.num_heads * dims.head_dim


def _key(dims: ModelDims) -> int:
    return dims.num_kv_heads * dims.head_dim


def _qwen3_experts(hf_config: dict) -> dict:
    num_layers = positive_int(hf_config, "num_hidden_layers")
    # transformers 5 writes the second name.
    count_key = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    num_experts, num_active = (positive_int(hf_config, key) for key in (count_key, "num_experts_per_tok"))
    if num_active > num_experts:
        raise UserError(
            f"config.json has num_experts_per_tok={num_active} and num_experts={num_experts}: "
            "the first must not be larger"
        )
    step = hf_config.get("decoder_sparse_step", 1)
    dense_layers = hf_config.get("mlp_only_layers") or ()
    experts = ExpertDims(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=positive_int(hf_config, "moe_intermediate_size"),
        shared_size=0,
        layers=tuple((layer + 1) % step == 0 and layer not in dense_layers for layer in range(num_layers)),
        score_function="softmax",
        normalized=bool(hf_config.get("norm_topk_prob", False)),
    )
    return {"experts": experts}


_QKV = ("q_proj", "k_proj", "v_proj")
QKV_WEIGHT = ParameterRule(
    tuple(f"{LAYER}self_attn.{part}.weight" for part in _QKV),
    f"{BLOCK}self_attention.linear_qkv.weight",
    "qkv",
    lambda dims: ((_query(dims), dims.hidden_size), (_key(dims), dims.hidden_size), (_key(dims), dims.hidden_size)),
    shard_axis=0,
)
QKV_BIAS = ParameterRule(
    tuple(f"{LAYER}self_attn.{part}.bias" for part in _QKV),
    f"{BLOCK}self_attention.linear_qkv.bias",
    "qkv",
    lambda dims: ((_query(dims),), (_key(dims),), (_key(dims),)),
    shard_axis=0,
)
QK_NORMS = tuple(
    norm(
        f"{LAYER}self_attn.{part}_norm.weight",
        f"{BLOCK}self_attention.{part}_layernorm.weight",
        lambda dims: dims.head_dim,
    )
    for part in ("q", "k")
)
ATTENTION_OUTPUT = ParameterRule(
    (f"{LAYER}self_attn.o_proj.weight",),
    f"{BLOCK}self_attention.linear_proj.weight",
    "copy",
    lambda dims: ((dims.hidden_size, _query(dims)),),
    shard_axis=1,
)
QUANTIZED = {
    "quantization_config": "only float32, float16 and bfloat16 are read: dequantise it, fp8 by mindrlhf weights convert"
}
_SLIDING_WINDOW = {"use_sliding_window": "sliding-window attention is not supported; use full attention"}
_ATTENTION_BIAS = {"attention_bias": "Qwen3 with attention biases is not supported"}

QWEN2 = ModelSpec(
    name="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    mcore_options={"add_qkv_bias": True, "qk_layernorm": False},
    parameter_rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV_WEIGHT,
        QKV_BIAS,
        ATTENTION_OUTPUT,
        MLP_NORM,
        *MLP,
        FINAL_NORM,
        OUTPUT,
    ),
    unsupported={**_SLIDING_WINDOW, **QUANTIZED},
    rope_types=("yarn",),
    yarn_gives_mscale=False,
)

_QWEN3_ATTENTION = (EMBEDDING, INPUT_NORM, QKV_WEIGHT, *QK_NORMS, ATTENTION_OUTPUT, MLP_NORM)

QWEN3 = ModelSpec(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    mcore_options={"add_qkv_bias": False, "qk_layernorm": True},
    parameter_rules=(*_QWEN3_ATTENTION, *MLP, FINAL_NORM, OUTPUT),
    unsupported={**_SLIDING_WINDOW, **_ATTENTION_BIAS, **QUANTIZED},
    rope_types=("yarn",),
    yarn_gives_mscale=False,
)

QWEN3_MOE = ModelSpec(
    name="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    mcore_options={"add_qkv_bias": False, "qk_layernorm": True},
    parameter_rules=(*_QWEN3_ATTENTION, *MLP, ROUTER, *EXPERTS, FINAL_NORM, OUTPUT),
    unsupported={**_SLIDING_WINDOW, **_ATTENTION_BIAS, **QUANTIZED},
    read_dims=_qwen3_experts,
    rope_types=("yarn",),
    yarn_gives_mscale=False,
)
