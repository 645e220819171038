"""Qwen2.5-VL: the decoder of Qwen2.5 with three-axis rotary positions, and a vision tower in front of it.

The tower exists in no MindFormers release: its parameters have the names of checkpoints.
"""

from collections.abc import Callable
from dataclasses import replace

from mindrlhf.errors import UserError
from mindrlhf.specs.dims import ModelDims, VisionDims, positive_int
from mindrlhf.specs.qwen import QWEN2
from mindrlhf.specs.rules import ParameterRule

# Keys of config.json that belong to the whole model, also where the decoder's are nested.
_WHOLE_MODEL_KEYS = ("architectures", "tie_word_embeddings")
_MAX_BLOCKS = 10_000


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
    vision = hf_config.get("vision_config")
    if not isinstance(vision, dict):
        raise UserError(f"config.json has vision_config={vision!r}: give the sizes of the vision tower")
    if vision.get("hidden_act", "silu") != "silu":
        raise UserError(f"vision_config has hidden_act={vision['hidden_act']!r}: only 'silu' is supported")
    if vision.get("out_hidden_size", hf_config.get("hidden_size")) != hf_config.get("hidden_size"):
        raise UserError(
            f"vision_config has out_hidden_size={vision['out_hidden_size']!r}, but the decoder has "
            f"hidden_size={hf_config.get('hidden_size')!r}: they must be equal"
        )
    dims = VisionDims(
        depth=_size(vision, "depth"),
        hidden_size=_size(vision, "hidden_size"),
        intermediate_size=_size(vision, "intermediate_size"),
        num_heads=_size(vision, "num_heads"),
        in_channels=_size({"in_channels": vision.get("in_chans", 3), **vision}, "in_channels"),
        patch_size=_size(vision, "patch_size"),
        temporal_patch_size=_size({"temporal_patch_size": 2, **vision}, "temporal_patch_size"),
        merge_size=_size({"spatial_merge_size": 2, **vision}, "spatial_merge_size"),
        window_size=_size(vision, "window_size"),
        full_attention_blocks=tuple(int(block) for block in vision.get("fullatt_block_indexes", ())),
        image_token=positive_int(hf_config, "image_token_id"),
        mrope_sections=_sections(hf_config),
    )
    _check(dims, hf_config)
    return {"vision": dims}


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
    if dims.depth > _MAX_BLOCKS:
        raise UserError(f"vision_config has depth={dims.depth}: it is damaged")
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
    return ParameterRule((name,), name, "copy", lambda dims: (shape(dims),), shard_axis=None, trained=False)


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

VISION_RULES = (
    _parameter("visual.patch_embed.proj.weight", _patch_shape),
    _parameter(f"{_BLOCK}norm1.weight", lambda dims: (dims.vision.hidden_size,)),
    *_linear(f"{_BLOCK}attn.qkv", lambda vision: 3 * vision.hidden_size, _width),
    *_linear(f"{_BLOCK}attn.proj", _width, _width),
    _parameter(f"{_BLOCK}norm2.weight", lambda dims: (dims.vision.hidden_size,)),
    *_linear(f"{_BLOCK}mlp.gate_proj", _inner, _width),
    *_linear(f"{_BLOCK}mlp.up_proj", _inner, _width),
    *_linear(f"{_BLOCK}mlp.down_proj", _width, _inner),
    _parameter(f"{_MERGER}ln_q.weight", lambda dims: (dims.vision.hidden_size,)),
    *_linear(f"{_MERGER}mlp.0", _merged, _merged),
    _parameter(f"{_MERGER}mlp.2.weight", lambda dims: (dims.hidden_size, dims.vision.merged_size)),
    _parameter(f"{_MERGER}mlp.2.bias", lambda dims: (dims.hidden_size,)),
)

QWEN2_5_VL = replace(
    QWEN2,
    supports_yarn=False,
    name="qwen2_5_vl",
    hf_architecture="Qwen2_5_VLForConditionalGeneration",
    text_config=_text_config,
    text_architecture=QWEN2.hf_architecture,
    read_dims=_vision_dims,
    vision_rules=VISION_RULES,
)
