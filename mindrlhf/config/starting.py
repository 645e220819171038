"""A starting config, commented, from a few choices."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.config.load import CONFIGS
from mindrlhf.config.parse import dotted_keys

_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class Choices:
    """What the user says about a run to be."""

    task: str  # one of CONFIGS
    model_dir: str
    train_file: str
    eval_file: str = ""
    num_npus: int = 0  # 0 runs on the CPU
    verifier: str = "accuracy_reward"


def starting_config(choices: Choices, path: str) -> str:
    """Return the YAML text of a config with the keys that a first run decides about, each with what it means.

    Args:
        path: where it will be written, for the commands that its head names.
    """
    docs = {dotted: field.metadata["doc"] for dotted, field, _ in dotted_keys(CONFIGS[choices.task])}
    num_ranks = max(1, choices.num_npus)
    workers = f" --workers {num_ranks}" if num_ranks > 1 else ""
    where = f"{choices.num_npus} NPUs" if choices.num_npus else "the CPU"
    lines = [
        f"# A `mindrlhf {choices.task}` run on {where}. Every key and its default: docs/config.md.",
        f"#   mindrlhf config check {path}{workers}",
    ]
    if choices.task == "train" and choices.num_npus:
        lines.append(f"#   mindrlhf plan {path}{workers} --search    # does it fit, and which layout fits better")
    lines.append(f"#   mindrlhf {choices.task} {path}{workers}")
    section = None
    for dotted, value in _values(choices).items():
        name, _, key = dotted.partition(".")
        if name != section:
            section = name
            lines.append(f"{name}:")
        setting = f"  {key}: {_plain(value)}"
        comment = f"# {docs[dotted]}"
        one_line = f"{setting:34s}  {comment}"
        lines += [one_line] if len(one_line) <= _WIDTH else [f"  {comment}", setting]
    return "\n".join(lines) + "\n"


def _values(choices: Choices) -> dict[str, Any]:
    on_npus = choices.num_npus > 0
    values: dict[str, Any] = {
        "run.output_dir": f"runs/{Path(choices.model_dir).name or 'model'}_{choices.task}",
        "run.device": "ascend" if on_npus else "cpu",
        "model.path": choices.model_dir,
    }
    if on_npus:
        values |= {"model.compute_dtype": "bfloat16", "model.recompute": True}
    values |= {"data.train_file": choices.train_file, "data.tokenizer_dir": choices.model_dir}
    if choices.eval_file:
        values["data.eval_file"] = choices.eval_file
    values |= {"train": _train_values, "sft": _sft_values}.get(choices.task, _preference_values)(choices)
    values["optimizer.start_lr"] = 1e-5 if choices.task == "sft" else 1e-6
    values["optimizer.warmup_steps"] = 5
    values["checkpoint.every_steps"] = 20
    return values


def _train_values(choices: Choices) -> dict[str, Any]:
    values: dict[str, Any] = {
        "reward.verifier_function": choices.verifier,
        "rollout.max_response_length": 1024 if choices.num_npus else 256,
    }
    if choices.num_npus:
        values |= {"rollout.dtype": "bfloat16", "rollout.num_replicas": choices.num_npus}
    values |= {
        "algorithm.name": "grpo",
        "algorithm.num_generations": 8,
        "training.chunk_size": 8 * max(1, choices.num_npus),
        "training.num_rollouts": 1,
        "training.micro_batch_size": 1,
    }
    if choices.eval_file:
        values |= {"evaluation.every_steps": 10}
    return values


def _sft_values(choices: Choices) -> dict[str, Any]:
    ranks = max(1, choices.num_npus)
    return {"supervised.rows_per_step": 8 * ranks, "supervised.epochs": 1, "supervised.micro_batch_size": 1}


def _preference_values(choices: Choices) -> dict[str, Any]:
    values: dict[str, Any] = {
        "preference.pairs_per_step": 8 * max(1, choices.num_npus),
        "preference.epochs": 1,
        "preference.micro_batch_size": 2,
    }
    return values | ({"dpo.loss": "sigmoid", "dpo.beta": 0.1} if choices.task == "dpo" else {})


def _plain(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")
