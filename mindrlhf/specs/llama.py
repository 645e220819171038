"""Llama 2, 3 and 3.x (arXiv:2307.09288, arXiv:2407.21783), SmolLM2, and Mistral (arXiv:2310.06825)."""

import math
from dataclasses import replace

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import Llama3Dims, positive_int, rope_options
from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.qwen import QKV_BIAS, QUANTIZED, QWEN2

# What transformers' MistralConfig has where config.json says nothing.
_MISTRAL_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def _llama3(hf_config: dict) -> dict:
    options = rope_options(hf_config)
    if options.get("rope_type", options.get("type")) != "llama3":
        return {}
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        if key not in options:
            raise UserError(f"config.json asks for rope_type 'llama3' without {key!r}: add it to rope_scaling")
    factor, low, high = (float(options[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if not (factor >= 1 and 0 < low < high):
        raise UserError(
            f"config.json asks for rope_type 'llama3' with factor={factor:g}, low_freq_factor={low:g} and "
            f"high_freq_factor={high:g}: the first must be at least 1, the last larger than the second"
        )
    length = positive_int({**hf_config, **options}, "original_max_position_embeddings")
    return {"llama3": Llama3Dims(factor, low, high, length)}


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
    read_dims=_llama3,
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


def slow_down(frequencies: np.ndarray, llama3: Llama3Dims) -> np.ndarray:
    """Llama 3.1's mixture of kept and slowed frequencies, float32: transformers' `_compute_llama3_parameters`.

    The ramp runs between the channels that turn `low_freq_factor` and `high_freq_factor` times in the original length.

    Args:
        frequencies: radians per position, float32.
    """
    num_turns = llama3.original_length * frequencies / np.float32(2 * math.pi)
    run = llama3.high_freq_factor - llama3.low_freq_factor
    kept = np.clip((num_turns - np.float32(llama3.low_freq_factor)) / np.float32(run), 0, 1)
    return (frequencies / np.float32(llama3.factor) * (1 - kept) + frequencies * kept).astype(np.float32)
