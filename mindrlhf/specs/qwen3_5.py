"""Qwen3.5, dense, text: three of four layers have linear attention by the gated delta rule (arXiv:2412.06464).

The others have softmax attention with a gate behind it, and rotate a quarter of each head. Checkpoints of
`Qwen3_5ForConditionalGeneration` hold such a decoder beside a vision tower; see :func:`text_config_of`.
"""

from collections.abc import Callable
from dataclasses import replace

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import LinearDims, ModelDims, positive_int, rotary_dim
from mindrlhf.specs.model import ModelSpec
from mindrlhf.specs.qwen import ATTENTION_OUTPUT, QK_NORMS, QKV_WEIGHT, QUANTIZED
from mindrlhf.specs.rules import BLOCK, EMBEDDING, FINAL_NORM, INPUT_NORM, LAYER, MLP, MLP_NORM, OUTPUT, ParameterRule

WITH_VISION = "Qwen3_5ForConditionalGeneration"
# How the decoder's names begin in a checkpoint with vision, and those that are left out of it.
DECODER_PREFIX, LEFT_OUT = "model.language_model.", ("model.visual.", "mtp.")
# What transformers' Qwen3_5TextConfig has where config.json says nothing.
_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "attn_output_gate": True,
}
_KINDS = ("full_attention", "linear_attention")


def text_config_of(hf_config: dict) -> dict:
    """config.json of the text model in one with a vision tower.

    Raises:
        UserError: there is none.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"config.json has text_config={text!r}: give the sizes of the decoder")
    whole = {key: hf_config[key] for key in ("tie_word_embeddings", "quantization_config") if key in hf_config}
    return {**text, **whole, "architectures": [QWEN3_5.hf_architecture], "model_type": "qwen3_5_text"}


def _read_dims(hf_config: dict) -> dict:
    if not hf_config["attn_output_gate"]:
        raise UserError("config.json has attn_output_gate=false: of Qwen3.5 only models with that gate are supported")
    num_layers = positive_int(hf_config, "num_hidden_layers")
    kinds = hf_config.get("layer_types")
    if kinds is None:
        interval = positive_int(hf_config, "full_attention_interval")
        kinds = [_KINDS[bool((layer + 1) % interval)] for layer in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_KINDS):
        raise UserError(
            f"config.json has layer_types={kinds!r}: give {' or '.join(_KINDS)} for each of the {num_layers} layers"
        )
    linear = LinearDims(
        layers=tuple(kind == _KINDS[1] for kind in kinds),
        key_heads=positive_int(hf_config, "linear_num_key_heads"),
        value_heads=positive_int(hf_config, "linear_num_value_heads"),
        key_dim=positive_int(hf_config, "linear_key_head_dim"),
        value_dim=positive_int(hf_config, "linear_value_head_dim"),
        conv_width=positive_int(hf_config, "linear_conv_kernel_dim"),
    )
    if linear.value_heads % linear.key_heads:
        raise UserError(
            f"config.json has linear_num_value_heads={linear.value_heads} and linear_num_key_heads={linear.key_heads}: "
            "the second must divide the first"
        )
    return {
        "linear": linear,
        "gates_output": True,
        "rotary_dim": rotary_dim(hf_config),
        "zero_centred_norms": True,
        "num_draft_layers": hf_config.get("mtp_num_hidden_layers") or 0,
    }


def _is_full(dims: ModelDims, layer: int) -> bool:
    return not dims.is_linear(layer)


def _linear(
    hf_names: tuple[str, ...],
    mf_name: str,
    shape: Callable[[ModelDims], tuple[int, ...]],
    transform: str = "copy",
    shard_axis: int | None = 0,
    **options: bool,
) -> ParameterRule:
    """The rule of tensors of one shape of a layer with linear attention."""
    return ParameterRule(
        tuple(f"{LAYER}linear_attn.{name}" for name in hf_names),
        f"{BLOCK}self_attention.{mf_name}",
        transform,
        lambda dims: (shape(dims),) * len(hf_names),
        shard_axis,
        in_layer=ModelDims.is_linear,
        **options,
    )


_QKV = replace(
    QKV_WEIGHT,
    shape=lambda dims: (
        (dims.num_kv_heads * dims.query_rows, dims.hidden_size),
        *((dims.num_kv_heads * dims.head_dim, dims.hidden_size),) * 2,
    ),
)
_LINEAR_ATTENTION = (
    _linear(
        ("in_proj_qkv.weight",),
        "in_proj_qkv.weight",
        lambda dims: (dims.linear.conv_size, dims.hidden_size),
        "delta",
    ),
    _linear(
        ("conv1d.weight",), "conv1d.weight", lambda dims: (dims.linear.conv_size, 1, dims.linear.conv_width), "delta"
    ),
    _linear(("in_proj_z.weight",), "in_proj_z.weight", lambda dims: (dims.linear.value_size, dims.hidden_size)),
    # Per value head: how much is learned of a token, how much is forgotten.
    _linear(
        ("in_proj_b.weight", "in_proj_a.weight"),
        "gates.weight",
        lambda dims: (dims.linear.value_heads, dims.hidden_size),
        "gate_up",
        is_hidden_matrix=False,
    ),
    *(
        _linear((name,), name, lambda dims: (dims.linear.value_heads,), keeps_float32=True)
        for name in ("dt_bias", "A_log")
    ),
    _linear(("norm.weight",), "norm.weight", lambda dims: (dims.linear.value_dim,), shard_axis=None),
    _linear(
        ("out_proj.weight",),
        "out_proj.weight",
        lambda dims: (dims.hidden_size, dims.linear.value_size),
        shard_axis=1,
    ),
)

QWEN3_5 = ModelSpec(
    name="qwen3_5_text",
    hf_architecture="Qwen3_5ForCausalLM",
    mcore_options={"add_qkv_bias": False, "qk_layernorm": True},
    parameter_rules=(
        EMBEDDING,
        INPUT_NORM,
        *(replace(rule, in_layer=_is_full) for rule in (_QKV, *QK_NORMS, ATTENTION_OUTPUT)),
        *_LINEAR_ATTENTION,
        MLP_NORM,
        *MLP,
        FINAL_NORM,
        OUTPUT,
    ),
    unsupported={"attention_bias": "Qwen3.5 with attention biases is not supported", **QUANTIZED},
    read_dims=_read_dims,
    text_config=lambda hf_config: {**_DEFAULTS, **hf_config},
)
