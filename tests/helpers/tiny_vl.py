"""A tiny random Qwen2.5-VL checkpoint with a byte-level tokenizer, made without PyTorch.

usage: python tests/helpers/tiny_vl.py DIR
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from byte_tokenizers import byte_backend
from safetensors.numpy import save_file

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TOKEN = {token: 256 + number for number, token in enumerate(SPECIAL)}
IMAGE, VISION_START, VISION_END, TURN_END = (
    TOKEN[name] for name in ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>")
)
# As in the published checkpoints, videos aside.
CHAT_TEMPLATE = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}\
<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class TinyVl:
    """Sizes of the model; ``is_flat`` writes config.json as published checkpoints of 2025 have it."""

    hidden: int = 128
    intermediate: int = 256
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vision_hidden: int = 64
    vision_intermediate: int = 128
    vision_depth: int = 2
    vision_heads: int = 2
    window_size: int = 112
    full_attention: tuple[int, ...] = (1,)  # blocks of the tower that attend beyond windows
    max_positions: int = 4096
    is_tied: bool = True
    is_flat: bool = False
    family: str = "qwen2_5_vl"  # or qwen2_vl, qwen3_vl; the last one nested, with DeepStack
    deepstack: tuple[int, ...] = (0, 2)  # blocks of the tower whose rows go behind the first layers
    std: float = 0.08
    seed: int = 0

    @property
    def vocab_size(self) -> int:
        return -(-(256 + len(SPECIAL)) // 32) * 32

    @property
    def mrope_section(self) -> list[int]:
        half = self.hidden // self.heads // 2
        side = half * 3 // 8
        return [half - 2 * side, side, side]


def write_tiny_vl(directory: str | Path, model: TinyVl | None = None) -> Path:
    """Write config.json, model.safetensors, tokenizer files and preprocessor_config.json; return the directory."""
    model, directory = model or TinyVl(), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", config_of(model))
    save_file(weights_of(model), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    _write_json(
        directory / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "min_pixels": 4 * 28 * 28,
            "max_pixels": 64 * 28 * 28,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5] * 3 if model.family == "qwen3_vl" else [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.5] * 3 if model.family == "qwen3_vl" else [0.26862954, 0.26130258, 0.27577711],
        },
    )
    return directory


def config_of(model: TinyVl) -> dict:
    """Return config.json's fields, nested (transformers 5) or flat (the published checkpoints)."""
    text = {
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": model.max_positions,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "vocab_size": model.vocab_size,
        "bos_token_id": None,
        "eos_token_id": TURN_END,
    }
    vision = {
        "depth": model.vision_depth,
        "fullatt_block_indexes": list(model.full_attention),
        "hidden_act": "silu",
        "hidden_size": model.vision_hidden,
        "intermediate_size": model.vision_intermediate,
        "num_heads": model.vision_heads,
        "out_hidden_size": model.hidden,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": model.window_size,
    }
    shared = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": IMAGE,
        "video_token_id": TOKEN["<|video_pad|>"],
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": model.is_tied,
    }
    if model.family == "qwen3_vl":
        shared |= {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
        text |= {"head_dim": model.hidden // model.heads, "attention_bias": False}
        for name in ("fullatt_block_indexes", "tokens_per_second", "window_size"):
            del vision[name]
        vision |= {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 25}
        vision["deepstack_visual_indexes"] = list(model.deepstack)
    if model.family == "qwen2_vl":
        shared |= {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
        vision = {name: vision[name] for name in ("depth", "num_heads", "patch_size", "spatial_merge_size")}
        vision |= {"hidden_size": model.hidden, "embed_dim": model.vision_hidden, "hidden_act": "quick_gelu"}
        vision |= {"mlp_ratio": model.vision_intermediate // model.vision_hidden, "temporal_patch_size": 2}
    if model.is_flat:
        rope = {"rope_theta": 1000000.0, "rope_scaling": {"type": "mrope", "mrope_section": model.mrope_section}}
        vision |= {"in_chans": 3, "spatial_patch_size": 14}
        return shared | text | rope | {"torch_dtype": "float32", "vision_config": vision}
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": model.mrope_section}
    if model.family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    text |= {"model_type": f"{shared['model_type']}_text", "rope_parameters": rope}
    vision |= {"model_type": shared["model_type"], "in_channels": 3}
    return shared | {"dtype": "float32", "text_config": text, "vision_config": vision}


def weights_of(model: TinyVl) -> dict[str, np.ndarray]:
    """Return every tensor by its name in a checkpoint, float32; biases and norms are random too, or mistakes hide."""
    rng = np.random.default_rng(model.seed)
    weights = {}
    for name, shape in _shapes(model).items():
        values = rng.standard_normal(shape, np.float32) * np.float32(model.std if len(shape) > 1 else 0.05)
        is_norm = len(shape) == 1 and name.endswith(".weight")
        weights[name] = values + np.float32(is_norm)
    return weights


def _shapes(model: TinyVl) -> dict[str, tuple[int, ...]]:
    hidden, head = model.hidden, model.hidden // model.heads
    shapes = {"model.embed_tokens.weight": (model.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (hidden,)
        for name, size in (("q", model.heads * head), ("k", model.kv_heads * head), ("v", model.kv_heads * head)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, model.heads * head)
        for name in ("gate", "up"):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = (model.intermediate, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, model.intermediate)
    if not model.is_tied:
        shapes["lm_head.weight"] = (model.vocab_size, hidden)
    width, inner = model.vision_hidden, model.vision_intermediate
    norm = ("weight",) if model.family == "qwen2_5_vl" else ("weight", "bias")
    shapes["visual.patch_embed.proj.weight"] = (width, 3, 2, 14, 14)
    for block in range(model.vision_depth):
        prefix = f"visual.blocks.{block}."
        shapes |= {f"{prefix}{name}.{part}": (width,) for name in ("norm1", "norm2") for part in norm}
        linears = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        if model.family == "qwen3_vl":
            linears |= {"mlp.linear_fc1": (inner, width), "mlp.linear_fc2": (width, inner)}
        elif model.family == "qwen2_vl":
            linears |= {"mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}
        else:
            linears |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
        for name, shape in linears.items():
            shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
    if model.family == "qwen3_vl":
        return _deep_shapes(model, shapes)
    shapes |= {f"visual.merger.ln_q.{part}": (width,) for part in norm}
    for name, shape in {"mlp.0": (4 * width, 4 * width), "mlp.2": (hidden, 4 * width)}.items():
        shapes |= {f"visual.merger.{name}.weight": shape, f"visual.merger.{name}.bias": shape[:1]}
    return shapes


def _deep_shapes(model: TinyVl, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Qwen3-VL's: norms of heads in the place of biases, more in the tower, and other names."""
    hidden, head, width = model.hidden, model.hidden // model.heads, model.vision_hidden
    shapes = {name: shape for name, shape in shapes.items() if "self_attn" not in name or not name.endswith(".bias")}
    for layer in range(model.layers):
        shapes |= {f"model.layers.{layer}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
    shapes |= {"visual.patch_embed.proj.bias": (width,), "visual.pos_embed.weight": (25, width)}
    mergers = {"merger": width} | {f"deepstack_merger_list.{n}": 4 * width for n in range(len(model.deepstack))}
    for name, size in mergers.items():
        shapes |= {f"visual.{name}.norm.{part}": (size,) for part in ("weight", "bias")}
        for linear, shape in {"linear_fc1": (4 * width, 4 * width), "linear_fc2": (hidden, 4 * width)}.items():
            shapes |= {f"visual.{name}.{linear}.weight": shape, f"visual.{name}.{linear}.bias": shape[:1]}

    def full_name(name: str) -> str:
        return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else f"model.{name}"

    return {name if name.startswith("lm_head") else full_name(name): shape for name, shape in shapes.items()}


def _write_tokenizer(directory: Path) -> None:
    byte_backend(SPECIAL).save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHAT_TEMPLATE,
            "added_tokens_decoder": {
                str(number): {"content": token, "special": True, "normalized": False} for token, number in TOKEN.items()
            },
        },
    )


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


if __name__ == "__main__":
    print(write_tiny_vl(sys.argv[1]), json.dumps(asdict(TinyVl())))
