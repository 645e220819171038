"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: decoders of Qwen2 and Qwen3 with three-axis rotary positions, behind a tower.

The tower exists in no MindFormers release: its parameters have the names of checkpoints.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import ModelDims, VisionDims, positive_int
from mindrlhf.specs.qwen import QWEN2, QWEN3
from mindrlhf.specs.rules import VISION_PREFIX, ParameterRule

# Keys of config.json that belong to the whole model, also where the decoder's are nested.
_WHOLE_MODEL_KEYS = ("architectures", "tie_word_embeddings")
_MAX_BLOCKS = 10_000
_MAX_DEEPSTACK = 8


def _text_config(hf_config: dict) -> dict:
    """The decoder's part of config.json: beside the tower's in files of the hub, below `text_config` in newer ones."""
    text = hf_config.get("text_config") or {}
    if not isinstance(text, dict):
        raise UserError(f"config.json has text_config={text!r}: give a mapping")
    merged = {**hf_config, **text, **{key: hf_config[key] for key in _WHOLE_MODEL_KEYS if key in hf_config}}
    options = merged.pop("rope_parameters", None) or merged.pop("rope_scaling", None)
    merged.pop("rope_scaling", None)
    if not isinstance(options, dict):
        raise UserError(f"config.json has rope_scaling={options!r}: give a mapping with mrope_section")
    kind = options.get("rope_type", options.get("type", "default"))
    # The three axes are what `mrope` means; newer files say `default`, and name the sections all the same.
    rope = {key: value for key, value in options.items() if key != "type"}
    return {**merged, "rope_parameters": {**rope, "rope_type": "default" if kind == "mrope" else kind}}


def _vision_dims(hf_config: dict) -> dict:
    """Qwen2.5-VL's: most blocks attend within windows."""
    vision = _vision_config(hf_config, "silu", width="out_hidden_size")
    dims = VisionDims(
        hidden_size=_size(vision, "hidden_size"),
        intermediate_size=_size(vision, "intermediate_size"),
        window_size=_size(vision, "window_size"),
        full_attention_blocks=tuple(int(block) for block in vision.get("fullatt_block_indexes", ())),
        **_common_sizes(vision, hf_config),
    )
    _check(dims, hf_config)
    return {"vision": dims}


def _first_vision_dims(hf_config: dict) -> dict:
    """Qwen2-VL's: all blocks attend to the whole image, so that a window of one token orders patches as they are."""
    vision = _vision_config(hf_config, "quick_gelu", width="hidden_size")
    sizes = _common_sizes(vision, hf_config)
    width = _size(vision, "embed_dim")
    dims = VisionDims(
        hidden_size=width,
        intermediate_size=int(width * float(vision.get("mlp_ratio", 4))),
        window_size=sizes["merge_size"] * sizes["patch_size"],
        full_attention_blocks=tuple(range(sizes["depth"])),
        activation="quick_gelu",
        **sizes,
    )
    _check(dims, hf_config)
    return {"vision": dims}


def _deep_vision_dims(hf_config: dict) -> dict:
    """Qwen3-VL's, whose outputs also enter behind the first layers of the decoder; else as Qwen2-VL's."""
    vision = _vision_config(hf_config, "gelu_pytorch_tanh", width="out_hidden_size")
    sizes = _common_sizes(vision, hf_config)
    dims = VisionDims(
        hidden_size=_size(vision, "hidden_size"),
        intermediate_size=_size(vision, "intermediate_size"),
        window_size=sizes["merge_size"] * sizes["patch_size"],
        full_attention_blocks=tuple(range(sizes["depth"])),
        activation="gelu_tanh",
        num_positions=_size(vision, "num_position_embeddings"),
        deepstack_blocks=tuple(int(block) for block in vision.get("deepstack_visual_indexes", ())),
        is_interleaved=True,
        pixel_mean=(0.5, 0.5, 0.5),
        pixel_std=(0.5, 0.5, 0.5),
        **sizes,
    )
    _check(dims, hf_config)
    deep = dims.deepstack_blocks
    most = min(_MAX_DEEPSTACK, positive_int(hf_config, "num_hidden_layers"))
    if list(deep) != sorted(set(deep)) or len(deep) > most or any(not 0 <= block < dims.depth for block in deep):
        raise UserError(
            f"vision_config has deepstack_visual_indexes={list(deep)}: give at most {most} blocks in order, each below "
            f"depth={dims.depth}"
        )
    if math.isqrt(dims.num_positions) ** 2 != dims.num_positions:
        raise UserError(f"vision_config has num_position_embeddings={dims.num_positions}: give a square")
    return {"vision": dims}


def _vision_config(hf_config: dict, activation: str, *, width: str) -> dict:
    """Return the tower's part of config.json; ``width`` is what it calls that of the decoder."""
    vision = hf_config.get("vision_config")
    if not isinstance(vision, dict):
        raise UserError(f"config.json has vision_config={vision!r}: give the sizes of the vision tower")
    if vision.get("hidden_act", activation) != activation:
        raise UserError(f"vision_config has hidden_act={vision['hidden_act']!r}: only {activation!r} is supported")
    if vision.get(width, hf_config.get("hidden_size")) != hf_config.get("hidden_size"):
        raise UserError(
            f"vision_config has {width}={vision[width]!r}, but the decoder has "
            f"hidden_size={hf_config.get('hidden_size')!r}: they must be equal"
        )
    return vision


def _common_sizes(vision: dict, hf_config: dict) -> dict:
    depth = _size(vision, "depth")
    if depth > _MAX_BLOCKS:
        raise UserError(f"vision_config has depth={depth}: it is damaged")
    return {
        "depth": depth,
        "num_heads": _size(vision, "num_heads"),
        "in_channels": _size({"in_channels": vision.get("in_chans", 3), **vision}, "in_channels"),
        "patch_size": _size(vision, "patch_size"),
        "temporal_patch_size": _size({"temporal_patch_size": 2, **vision}, "temporal_patch_size"),
        "merge_size": _size({"spatial_merge_size": 2, **vision}, "spatial_merge_size"),
        "image_token": positive_int(hf_config, "image_token_id"),
        "mrope_sections": _sections(hf_config),
    }


def _size(vision: dict, key: str) -> int:
    try:
        return positive_int(vision, key)
    except UserError as error:
        raise UserError(f"vision_config: {error}") from None


def _sections(hf_config: dict) -> tuple[int, int, int]:
    sections = hf_config["rope_parameters"].get("mrope_section")
    is_whole = isinstance(sections, list) and len(sections) == 3 and all(type(part) is int for part in sections)
    half = (hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]) // 2
    if not is_whole or min(sections) < 0 or sum(sections) != half:
        raise UserError(
            f"config.json has mrope_section={sections!r}: give three numbers (time, row, column) that add up to "
            f"{half}, half of the channels of a head"
        )
    return tuple(sections)


def _check(dims: VisionDims, hf_config: dict) -> None:
    if dims.hidden_size % dims.num_heads or dims.head_dim % 4:
        raise UserError(
            f"vision_config has hidden_size={dims.hidden_size} and num_heads={dims.num_heads}: the channels of a head "
            "must be a multiple of 4"
        )
    if dims.window_size % (dims.merge_size * dims.patch_size):
        raise UserError(
            f"vision_config has window_size={dims.window_size}: give a multiple of patch_size * spatial_merge_size = "
            f"{dims.merge_size * dims.patch_size}"
        )
    if not 0 <= dims.image_token < positive_int(hf_config, "vocab_size"):
        raise UserError(f"config.json has image_token_id={dims.image_token}, which is not in the vocabulary")


def _parameter(name: str, shape: Callable[[ModelDims], tuple[int, ...]]) -> ParameterRule:
    """A tensor of the tower: whole on every rank, and not trained."""
    options: dict = {"shard_axis": None, "trained": False, "keeps_whole": True}
    return ParameterRule((name,), name, "copy", lambda dims: (shape(dims),), **options)


def _linear(
    name: str, outputs: Callable[[VisionDims], int], inputs: Callable[[VisionDims], int]
) -> tuple[ParameterRule, ParameterRule]:
    return (
        _parameter(f"{name}.weight", lambda dims: (outputs(dims.vision), inputs(dims.vision))),
        _parameter(f"{name}.bias", lambda dims: (outputs(dims.vision),)),
    )


def _width(vision: VisionDims) -> int:
    return vision.hidden_size


def _inner(vision: VisionDims) -> int:
    return vision.intermediate_size


def _merged(vision: VisionDims) -> int:
    return vision.merged_size


def _patch_shape(dims: ModelDims) -> tuple[int, ...]:
    vision = dims.vision
    return (
        vision.hidden_size,
        vision.in_channels,
        vision.temporal_patch_size,
        vision.patch_size,
        vision.patch_size,
    )


_BLOCK = "visual.blocks.{layer}."
_MERGER = "visual.merger."

_PATCHES = _parameter("visual.patch_embed.proj.weight", _patch_shape)
_ATTENTION = (
    *_linear(f"{_BLOCK}attn.qkv", lambda vision: 3 * vision.hidden_size, _width),
    *_linear(f"{_BLOCK}attn.proj", _width, _width),
)
_PROJECTOR = (
    *_linear(f"{_MERGER}mlp.0", _merged, _merged),
    _parameter(f"{_MERGER}mlp.2.weight", lambda dims: (dims.hidden_size, dims.vision.merged_size)),
    _parameter(f"{_MERGER}mlp.2.bias", lambda dims: (dims.hidden_size,)),
)


def _norm(
    name: str, parts: tuple[str, ...], size: Callable[[VisionDims], int] = _width
) -> tuple[ParameterRule, ...]:
    return tuple(_parameter(f"{name}.{part}", lambda dims: (size(dims.vision),)) for part in parts)


def _rules(norm_parts: tuple[str, ...], mlp: tuple[ParameterRule, ...]) -> tuple[ParameterRule, ...]:
    return (
        _PATCHES,
        *_norm(f"{_BLOCK}norm1", norm_parts),
        *_ATTENTION,
        *_norm(f"{_BLOCK}norm2", norm_parts),
        *mlp,
        *_norm(f"{_MERGER}ln_q", norm_parts),
        *_PROJECTOR,
    )


_GATED_MLP = (
    *_linear(f"{_BLOCK}mlp.gate_proj", _inner, _width),
    *_linear(f"{_BLOCK}mlp.up_proj", _inner, _width),
    *_linear(f"{_BLOCK}mlp.down_proj", _width, _inner),
)
_PLAIN_MLP = (*_linear(f"{_BLOCK}mlp.fc1", _inner, _width), *_linear(f"{_BLOCK}mlp.fc2", _width, _inner))

QWEN2_5_VL = replace(
    QWEN2,
    rope_types=(),
    name="qwen2_5_vl",
    hf_architecture="Qwen2_5_VLForConditionalGeneration",
    text_config=_text_config,
    text_architecture=QWEN2.hf_architecture,
    read_dims=_vision_dims,
    vision_rules=_rules(("weight",), _GATED_MLP),
)
QWEN2_VL = replace(
    QWEN2_5_VL,
    name="qwen2_vl",
    hf_architecture="Qwen2VLForConditionalGeneration",
    read_dims=_first_vision_dims,
    vision_rules=_rules(("weight", "bias"), _PLAIN_MLP),
)


def _deep_projector(name: str, size: Callable[[VisionDims], int]) -> tuple[ParameterRule, ...]:
    return (
        *_norm(f"{name}norm", ("weight", "bias"), size),
        *_linear(f"{name}linear_fc1", _merged, _merged),
        _parameter(f"{name}linear_fc2.weight", lambda dims: (dims.hidden_size, dims.vision.merged_size)),
        _parameter(f"{name}linear_fc2.bias", lambda dims: (dims.hidden_size,)),
    )


def _deepstack(number: int) -> tuple[ParameterRule, ...]:
    rules = _deep_projector(f"visual.deepstack_merger_list.{number}.", _merged)
    return tuple(replace(rule, present=lambda dims: number < len(dims.vision.deepstack_blocks)) for rule in rules)


_DEEP_RULES = (
    _PATCHES,
    _parameter("visual.patch_embed.proj.bias", lambda dims: (dims.vision.hidden_size,)),
    _parameter("visual.pos_embed.weight", lambda dims: (dims.vision.num_positions, dims.vision.hidden_size)),
    *_norm(f"{_BLOCK}norm1", ("weight", "bias")),
    *_ATTENTION,
    *_norm(f"{_BLOCK}norm2", ("weight", "bias")),
    *_linear(f"{_BLOCK}mlp.linear_fc1", _inner, _width),
    *_linear(f"{_BLOCK}mlp.linear_fc2", _width, _inner),
    *_deep_projector(_MERGER, _width),
    *(rule for number in range(_MAX_DEEPSTACK) for rule in _deepstack(number)),
)


def _nested(rule: ParameterRule) -> ParameterRule:
    """The rule with the names of checkpoints in which the decoder and the tower are two parts of the model."""
    if rule.mf_name.startswith(VISION_PREFIX):
        return replace(rule, hf_names=tuple(f"model.{name}" for name in rule.hf_names))
    if not rule.hf_names[0].startswith("model."):
        return rule
    return replace(rule, hf_names=tuple(f"model.language_{name}" for name in rule.hf_names))


QWEN3_VL = replace(
    QWEN3,
    name="qwen3_vl",
    hf_architecture="Qwen3VLForConditionalGeneration",
    text_config=_text_config,
    text_architecture=QWEN3.hf_architecture,
    read_dims=lambda hf_config: {**QWEN3.read_dims(hf_config), **_deep_vision_dims(hf_config)},
    parameter_rules=tuple(_nested(rule) for rule in QWEN3.parameter_rules),
    vision_rules=tuple(_nested(rule) for rule in _DEEP_RULES),
)
