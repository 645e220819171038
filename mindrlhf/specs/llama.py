"""Llama 2, 3 and 3.x (arXiv:2307.09288, arXiv:2407.21783), SmolLM2, and Mistral (arXiv:2310.06825)."""

from dataclasses import replace

from mindrlhf.specs.dims import positive_int
from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.qwen import QKV_BIAS, QUANTIZED, QWEN2

# What transformers' MistralConfig has where config.json says nothing.
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def _window(hf_config: dict) -> dict:
    return {"window": None if hf_config["sliding_window"] is None else positive_int(hf_config, "sliding_window")}


LLAMA = ModelSpec(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    mcore_options={"add_qkv_bias": False, "qk_layernorm": False},
    parameter_rules=tuple(rule for rule in QWEN2.parameter_rules if rule is not QKV_BIAS),
    unsupported={
        "attention_bias": "Llama with biases in attention, the one behind it too, is not supported",
        "mlp_bias": "Llama with biases in the MLP is not supported",
        **QUANTIZED,
    },
    rope_types=("llama3",),
)
MISTRAL = replace(
    LLAMA,
    name="mistral",
    hf_architecture="MistralForCausalLM",
    unsupported=QUANTIZED,
    rope_types=(),
    text_config=lambda hf_config: {**_MISTRAL_DEFAULTS, **hf_config},
    read_dims=_window,
)
