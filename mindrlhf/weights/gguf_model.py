"""A GGUF file of llama.cpp as a Hugging Face directory: weights, config.json and tokenizer."""

import os
import tempfile
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.specs import Llama3Dims, find_spec
from mindrlhf.specs.llama import slow_down
from mindrlhf.weights.convert import hf_shapes
from mindrlhf.weights.fp8 import write_converted
from mindrlhf.weights.gguf_file import GgufFile
from mindrlhf.weights.gguf_tokenizer import tokenizer_files
from mindrlhf.weights.hf import TensorDirectory
from mindrlhf.weights.tensors import TensorInfo

# By llama.cpp's name of the architecture.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_ROTATION = "rope_freqs.weight"
# Of Llama 3.1 and later: what a file does not say, and its rope_freqs must agree with.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufModel(TensorDirectory):
    """The tensors of a GGUF file under their Hugging Face names and in transformers' order of rows.

    Attributes:
        hf_config: the config.json that the file's metadata amounts to.

    Raises:
        UserError: the file is damaged, or of an architecture or variant that is not supported.
    """

    def __init__(self, path: str | os.PathLike):
        self.file = GgufFile(path)
        self.directory = self.file.path
        try:
            self.hf_config = _config(self.file)
        except UserError:
            raise
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"{path} has metadata of a wrong type or value ({error}): download it again") from error
        spec = find_spec(self.hf_config)
        dims = spec.dims(self.hf_config)
        named = _gguf_names(self.hf_config, hf_shapes(spec, dims))
        self._names = {named.get(name, name): name for name in self.file.tensors if name != _ROTATION}
        self._adds_one = dims.zero_centred_norms
        # llama.cpp turns neighbouring channels of Llama's heads, transformers channel i with i + half of them.
        heads = {"q_proj": dims.num_heads, "k_proj": dims.num_kv_heads} if self._is_turned() else {}
        self._heads = {name: heads[part] for name in self._names for part in heads if f".{part}." in name}

    def _is_turned(self) -> bool:
        return self.file.metadata["general.architecture"] == "llama"

    def names(self) -> list[str]:
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        return self.file.tensors[self._names[name]]._replace(name=name)

    def read(self, name: str) -> np.ndarray:
        array = self.file.read(self._names[name])
        if name in self._heads:
            rows = array.reshape(self._heads[name], -1, 2, *array.shape[1:])
            array = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(array.shape)
        if self._adds_one and name.endswith("norm.weight"):  # llama.cpp multiplies by what it stores, 1 + weight
            array = array - np.float32(1)
        return array

    def release(self, name: str) -> None:
        self.file.release(self._names[name])


def convert_gguf(path: str | os.PathLike, out_dir: str | os.PathLike, dtype: str | None = None) -> None:
    """Write a GGUF file as a Hugging Face directory, with its tokenizer and chat template.

    Args:
        dtype: of the files; None keeps that of stored numbers, and makes float32, exactly, of quantised ones.

    Raises:
        UserError: the file is damaged or not supported, or ``out_dir`` is in use.
    """
    model = GgufModel(path)
    files = tokenizer_files(model.file)
    with tempfile.TemporaryDirectory(prefix="mindrlhf-gguf-") as directory:
        for name, content in files.items():
            (Path(directory) / name).write_text(content, encoding="utf-8")
        write_converted(model, model.hf_config, out_dir, dtype, tokenizer_dir=directory)


def _config(file: GgufFile) -> dict:
    metadata = file.metadata
    if (num_parts := metadata.get("split.count", 1)) != 1:
        raise UserError(f"{file.path} is one of {num_parts} parts: join them with llama-gguf-split --merge")
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UserError(
            f"{file.path} holds a model of general.architecture {architecture!r}: of GGUF files those of "
            f"{', '.join(_ARCHITECTURES)} are converted; take the model's safetensors instead"
        )

    def value(key: str, default=None):
        return metadata.get(f"{architecture}.{key}", default)

    if value("expert_count", 0):
        raise UserError(f"{file.path} holds a mixture of experts: take the model's safetensors instead")
    config = {"architectures": [_ARCHITECTURES[architecture]], "model_type": architecture}
    for name, key in _SIZES.items():
        config[name] = _whole(file, f"{architecture}.{key}", value(key))
    config["num_key_value_heads"] = _whole(
        file, f"{architecture}.attention.head_count_kv", value("attention.head_count_kv", config["num_attention_heads"])
    )
    config["head_dim"] = _head_dim(file, architecture, config)
    config["vocab_size"] = _vocabulary(file)
    config |= {
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _shortest(value("rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture == "gemma3":
        config |= _gemma3(file, value, config)
    if (window := value("attention.sliding_window")) is not None and architecture == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    for key in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    if scaling := _rope_scaling(value):
        config["rope_scaling"] = scaling
    if _ROTATION in file.tensors:
        config |= _llama3_scaling(file, config)
    return config


def _gemma3(file: GgufFile, value, config: dict) -> dict:
    """Settings of Gemma 3 alone. llama.cpp knows the rest by heart: every sixth layer attends to all, the others turn
    by base 10,000, and scores of the model with 62 layers alone are scaled by the width that a head would have.
    """
    if value("attn_logit_softcapping") or value("final_logit_softcapping"):
        raise UserError(f"{file.path} caps scores or logits, which is not computed: take a Gemma 3 that does not")
    window = _whole(file, "gemma3.attention.sliding_window", value("attention.sliding_window"))
    is_27b = config["num_hidden_layers"] == 62
    divisor = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    del config["hidden_act"]
    activation = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"}
    return {**activation, "sliding_window": window, "sliding_window_pattern": 6, "query_pre_attn_scalar": divisor}


def _whole(file: GgufFile, name: str, value: object) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise UserError(f"{file.path} has {name} = {value!r}, where one positive number for all layers is needed")
    return value


def _head_dim(file: GgufFile, architecture: str, config: dict) -> int:
    names = [
        f"{architecture}.{key}" for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    ]
    stated = {name: file.metadata[name] for name in names if name in file.metadata}
    size = stated.get(names[0], config["hidden_size"] // config["num_attention_heads"])
    for name, found in stated.items():
        if found != size:
            raise UserError(
                f"{file.path} has {name} = {found!r}, but heads of {size} channels: only equal ones are read"
            )
    return _whole(file, names[0], size)


def _vocabulary(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if embedding is None or len(tokens) > embedding.shape[0]:
        raise UserError(f"{file.path} is damaged, its embedding lacks rows for {len(tokens)} tokens: download it again")
    return embedding.shape[0]


def _shortest(number: float) -> float:
    """The shortest decimal that is this float32, which the metadata has: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _rope_scaling(value) -> dict:
    kind = value("rope.scaling.type", "none")
    if kind == "none":
        return {}
    found = {"rope_type": kind, "factor": _shortest(value("rope.scaling.factor", 1.0))}
    original = value("rope.scaling.original_context_length")
    return {**found, **({"original_max_position_embeddings": original} if original else {})}


def _llama3_scaling(file: GgufFile, config: dict) -> dict:
    """The context extension whose divisors of frequencies the file holds; nothing where all of them are 1."""
    divisors = file.read(_ROTATION).astype(np.float64).ravel()
    if np.all(divisors == 1.0):
        return {}
    factor, low, high, length = _shortest(divisors.max()), *_LLAMA3.values()
    frequencies = config["rope_theta"] ** (-np.arange(0, config["head_dim"], 2, dtype=np.float32) / config["head_dim"])
    expected = frequencies / slow_down(frequencies, Llama3Dims(factor, low, high, length))
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise UserError(
            f"{file.path} has {_ROTATION} of another kind than Llama 3.1's: take the model's safetensors instead"
        )
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, **_LLAMA3}}


def _gguf_names(config: dict, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Hugging Face names by llama.cpp's."""
    import gguf

    kind = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found = {}
    for name in shapes:
        stem, _, ending = name.rpartition(".")
        found[f"{names.get_name(stem)}.{ending}"] = name
    return found
