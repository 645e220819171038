"""Gemma 3, text only: 270M and 1B, and the decoders of 4B to 27B. arXiv:2503.19786."""

from dataclasses import replace

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import LocalDims, positive_int, rope_theta
from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.qwen import QUANTIZED, QWEN3
from mindrlhf.specs.rules import LAYER, MLP_NORM, norms_of_outputs

# What transformers' Gemma3TextConfig has where config.json says nothing.
_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_KINDS = ("full_attention", "sliding_attention")
_VARIANTS = {
    "final_logit_softcapping": "Gemma 3 with capped logits is not supported",
    "attn_logit_softcapping": "Gemma 3 with capped scores is not supported",
    "attention_bias": "Gemma 3 with attention biases is not supported",
    "use_bidirectional_attention": "a language model is trained with causal attention",
}


def _text_config(hf_config: dict) -> dict:
    """With defaults, and rotary parameters where other families have them: transformers 5 has them by kind of layer."""
    filled = {**_DEFAULTS, **hf_config}
    by_kind = filled.get("rope_parameters")
    if isinstance(by_kind, dict) and set(by_kind) & set(_KINDS):
        full, local = (by_kind.get(kind) or {} for kind in _KINDS)
        if local.get("rope_type", "default") != "default":
            raise UserError(
                f"config.json asks for rope_type={local['rope_type']!r} in sliding_attention: only 'default' is "
                "supported"
            )
        base = local.get("rope_theta", filled["rope_local_base_freq"])
        filled |= {"rope_parameters": full, "rope_local_base_freq": base}
    return filled


def _read_dims(hf_config: dict) -> dict:
    num_layers = positive_int(hf_config, "num_hidden_layers")
    kinds = hf_config.get("layer_types")
    if kinds is None:
        pattern = positive_int(hf_config, "sliding_window_pattern")
        kinds = [_KINDS[bool((layer + 1) % pattern)] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise UserError(
            f"config.json has layer_types={kinds!r}: give {' or '.join(_KINDS)} for each of the {num_layers} layers"
        )
    is_local = tuple(kind == _KINDS[1] for kind in kinds)
    divisor = float(hf_config["query_pre_attn_scalar"])
    if not divisor > 0:
        raise UserError(f"config.json has query_pre_attn_scalar={divisor:g}: give a positive number")
    theta = rope_theta({"rope_theta": hf_config["rope_local_base_freq"]})
    return {
        "norms_outputs": True,
        "zero_centred_norms": True,
        "score_divisor": divisor,
        "scales_embedding": True,
        "activation": "gelu",
        "local": LocalDims(is_local, positive_int(hf_config, "sliding_window"), theta) if any(is_local) else None,
    }


GEMMA3 = ModelSpec(
    name="gemma3_text",
    hf_architecture="Gemma3ForCausalLM",
    mcore_options={"add_qkv_bias": False, "qk_layernorm": True},
    parameter_rules=tuple(
        replace(rule, hf_names=(f"{LAYER}pre_feedforward_layernorm.weight",)) if rule is MLP_NORM else rule
        for rule in (
            *QWEN3.parameter_rules[:-2],
            *norms_of_outputs("post_attention_layernorm", "post_feedforward_layernorm"),
            *QWEN3.parameter_rules[-2:],
        )
    ),
    unsupported={**_VARIANTS, **QUANTIZED},
    read_dims=_read_dims,
    rope_types=("linear",),
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    text_config=_text_config,
)
