"""GLM-4 and GLM-Z1 of 2025 (9B and 32B, arXiv:2406.12793), GLM-4.5 and GLM-4.5-Air (arXiv:2508.06471).

Half of each head is rotated. GLM-4 normalises what attention and MLP add too; GLM-4.5 has experts as DeepSeek-V3.
"""

from dataclasses import replace

from mindrlhf.errors import UserError
from mindrlhf.specs.deepseek import sigmoid_experts
from mindrlhf.specs.dims import rotary_dim
from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.qwen import ATTENTION_OUTPUT, QK_NORMS, QKV_BIAS, QKV_WEIGHT, QUANTIZED
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
    SELECTION_BIAS,
    SHARED_EXPERT,
    ParameterRule,
    norms_of_outputs,
)

# What transformers' Glm4Config and Glm4MoeConfig have where config.json says nothing.
_DEFAULTS = {
    "attention_bias": True,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}
_MOE_DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
}


def _read_dims(hf_config: dict) -> dict:
    return {
        "rotary_dim": rotary_dim(hf_config),
        "rotates_neighbours": True,
        "norms_outputs": True,
        "qkv_bias": bool(hf_config["attention_bias"]),
    }


def _read_moe_dims(hf_config: dict) -> dict:
    if not hf_config.get("attention_bias", False):
        raise UserError("config.json has attention_bias=false: of GLM-4.5 only models with that bias are supported")
    return {
        "experts": sigmoid_experts(hf_config),
        "rotary_dim": rotary_dim(hf_config),
        "qk_norms": bool(hf_config.get("use_qk_norm", False)),
        "num_draft_layers": hf_config.get("num_nextn_predict_layers", hf_config.get("num_mtp_layers")) or 0,
    }


_GATE_UP = ParameterRule(
    (f"{LAYER}mlp.gate_up_proj.weight",),
    f"{BLOCK}mlp.linear_fc1.weight",
    "halves",
    lambda dims: ((2 * dims.intermediate_size, dims.hidden_size),),
    shard_axis=0,
)

GLM4 = ModelSpec(
    name="glm4",
    hf_architecture="Glm4ForCausalLM",
    mcore_options={"add_qkv_bias": lambda dims: dims.qkv_bias, "qk_layernorm": False},
    parameter_rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV_WEIGHT,
        replace(QKV_BIAS, present=lambda dims: dims.qkv_bias),
        ATTENTION_OUTPUT,
        MLP_NORM,
        _GATE_UP,
        MLP[1],
        *norms_of_outputs("post_self_attn_layernorm", "post_mlp_layernorm"),
        FINAL_NORM,
        OUTPUT,
    ),
    unsupported=QUANTIZED,
    read_dims=_read_dims,
    text_config=lambda hf_config: {**_DEFAULTS, **hf_config},
)
GLM4_MOE = ModelSpec(
    name="glm4_moe",
    hf_architecture="Glm4MoeForCausalLM",
    mcore_options={"add_qkv_bias": True, "qk_layernorm": lambda dims: dims.qk_norms},
    parameter_rules=(
        EMBEDDING,
        INPUT_NORM,
        QKV_WEIGHT,
        QKV_BIAS,
        *(replace(rule, present=lambda dims: dims.qk_norms) for rule in QK_NORMS),
        ATTENTION_OUTPUT,
        MLP_NORM,
        *MLP,
        ROUTER,
        SELECTION_BIAS,
        *EXPERTS,
        *SHARED_EXPERT,
        FINAL_NORM,
        OUTPUT,
    ),
    unsupported=QUANTIZED,
    read_dims=_read_moe_dims,
    text_config=lambda hf_config: {**_MOE_DEFAULTS, **hf_config},
)
