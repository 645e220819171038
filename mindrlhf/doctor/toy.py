"""Inputs of the rungs of ``doctor --device``: random models of about a million parameters, a tokenizer, prompts."""

import json
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.weights.convert import export_hf, random_hf_weights

DTYPES = {"cpu": "float32", "ascend": "bfloat16"}  # of a generator: attention on an NPU takes no float32
VOCABULARY, PROMPT_TOKENS, RESPONSE_TOKENS = 512, 8, 24
# Heads of 128 channels, which every attention kernel has; two key-value heads, for servers of two devices.
_DENSE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCABULARY, "hidden_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "initializer_range": 0.05, "torch_dtype": "float32",
}  # fmt: skip
_EXPERTS = _DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "attention_bias": False,
}  # fmt: skip
MODELS = {"dense": _DENSE, "experts": _EXPERTS}
_REWARD = '''"""The share of lower-case letters, which a random model learns to write."""


def lowercase_share(response: str, answer: str) -> float:
    return sum(map(str.islower, response)) / max(1, len(response))
'''


@dataclass(frozen=True)
class Ground:
    """Inputs of all rungs: their directory, "ascend" or "cpu", devices of this machine, vLLM's interpreter."""

    directory: str
    device: str
    num_devices: int
    python: str


def write_weights(name: str, seed: int, directory: Path, dtype: str = "float32") -> None:
    """Write random weights of a model as a Hugging Face directory, which must not be there."""
    export_hf(random_hf_weights(MODELS[name], seed), MODELS[name], directory, dtype=dtype)


def write_inputs(directory: Path, num_devices: int) -> None:
    """Write ``model`` (with its tokenizer), ``prompts.jsonl`` with responses to imitate, and ``reward.py``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write_weights("dense", 0, directory / "model")
    letters = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "model" / "tokenizer.json"))
    marks = {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    (directory / "model" / "tokenizer_config.json").write_text(json.dumps(marks), encoding="utf-8")
    stream = random.Random(0)
    with (directory / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(4 * _rows_per_step(num_devices)):  # two records to a row: two steps
            prompt = "".join(stream.choices(string.punctuation, k=PROMPT_TOKENS - 1))
            response = "".join(stream.choices(string.ascii_lowercase, k=RESPONSE_TOKENS - 1))
            file.write(json.dumps({"prompt": prompt, "answer": "none", "response": response}) + "\n")
    (directory / "reward.py").write_text(_REWARD, encoding="utf-8")


def data_arguments(directory: Path, task: str) -> list[str]:
    """Return the arguments of `mindrlhf` that turn the prompts into ``task.mindrecord``, for "prompts" or "sft"."""
    columns = "question=prompt,answer=answer" + (",response=response" if task == "sft" else "")
    return [
        "data", "build", "--input", str(directory / "prompts.jsonl"), "--output", str(directory / f"{task}.mindrecord"),
        "--tokenizer", str(directory / "model"), "--handler", "map_keys", "--map", columns, "--template", "plain",
        "--max-prompt-length", "32", "--task", task, *(["--max-length", "64"] if task == "sft" else []),
        "--processes", "1",
    ]  # fmt: skip


def run_config(directory: Path, output: Path, device: str, num_devices: int, python: str) -> dict[str, Any]:
    """Return the config of two GRPO steps on all devices."""
    pairs = num_devices if num_devices % 2 else num_devices // 2
    return _common(directory, output, device, num_devices, "prompts") | {
        "reward": {"verifier_function": f"{directory / 'reward.py'}:lowercase_share"},
        "rollout": {
            "python": python,
            "num_replicas": pairs if device == "ascend" else 1,
            "tensor_parallel": num_devices // pairs if device == "ascend" else 1,
            "gpu_memory_utilization": 0.3,
            "max_response_length": RESPONSE_TOKENS,
        },
        "algorithm": {"num_generations": 4},
        "training": {"chunk_size": 2 * num_devices, "micro_batch_size": 4, "sequence_lengths": [64]},
        "checkpoint": {"every_steps": 0},
    }


def supervised_config(directory: Path, output: Path, device: str, num_devices: int) -> dict[str, Any]:
    """Return the config of two steps of fine-tuning; one of a CPU makes them with one rank."""
    rows = _rows_per_step(num_devices)
    sizes = {"rows_per_step": rows, "micro_batch_size": 2, "sequence_lengths": [64]}
    return _common(directory, output, device, num_devices, "sft") | {"training": sizes}


def _rows_per_step(num_devices: int) -> int:
    return 2 * max(8, num_devices)


def _common(directory: Path, output: Path, device: str, num_devices: int, task: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "run": {"output_dir": str(output), "device": device, "max_steps": 2},
        "model": {"path": str(directory / "model")},
        "data": {
            "train_file": str(directory / f"{task}.mindrecord"),
            "tokenizer_dir": str(directory / "model"),
        },
        "optimizer": {"start_lr": 1e-3},
    }
    if device == "ascend":
        config["model"] |= {"param_dtype": "float32", "compute_dtype": "bfloat16"}
        config["parallel_config"] = {"data_parallel": num_devices, "enable_parallel_optimizer": num_devices > 1}
    return config
