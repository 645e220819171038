"""A starting config, commented, from a few choices."""

import dataclasses
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from mindrlhf.config.load import CONFIGS
from mindrlhf.config.parse import dotted_keys

_WIDTH = 110
NODE_SIZE = 8  # NPUs of a machine


# Tokens of a response on a CPU, whatever the data.
_MIN_RESPONSE, _MAX_RESPONSE = 32, 256
_SMALL_MODEL = 1_000_000_000  # parameters
# Tokens of a prompt with its whole group, above which attention in one row costs more than the shared prompt saves.
_LONGEST_ROW = 1024


class FoundVerifiers(Protocol):
    """Verifiers that fit the answers of the data, from :func:`mindrlhf.rewards.fitting.fitting_verifier`."""

    verifiers: tuple[str, ...]
    why: str  # one line
    kind: str
    by_choice: tuple[str, ...]
    options: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of model, data and machine; None, or 0, where unknown."""

    num_parameters: int | None = None
    sees_images: bool = False
    max_positions: int | None = None
    verifiers: FoundVerifiers | None = None
    longest_prompt: int = 0  # tokens
    usual_question: int = 0  # tokens, median, without what all prompts share
    answer_chars: int = 0  # of nearly all reference answers, at most
    num_cores: int = 1


@dataclasses.dataclass(frozen=True)
class Choices:
    """The user's choices."""

    task: str  # one of CONFIGS
    model_dir: str
    train_file: str
    eval_file: str = ""
    num_npus: int = 0  # 0 runs on the CPU
    verifier: str = ""  # empty: what fits the data
    lora_rank: int = 0  # 0 trains all weights
    facts: Facts = Facts()
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # dotted keys with which the model fits


def starting_config(choices: Choices, path: str) -> str:
    """Return the YAML text of a config with the keys that a first run decides about, each with what it means."""
    docs = {dotted: field.metadata["doc"] for dotted, field, _ in dotted_keys(CONFIGS[choices.task])}
    workers = _workers(choices.num_npus)
    where = f"{choices.num_npus} NPUs" if choices.num_npus else "the CPU"
    lines = [
        f"# A `mindrlhf {choices.task}` run on {where}. Every key and its default: docs/config.md.",
        f"#   mindrlhf config check {path}{workers}",
    ]
    if choices.task == "train" and choices.num_npus:
        plan = f"mindrlhf plan {path} --workers {choices.num_npus} --search"
        lines.append(f"#   {plan}    # does it fit, and which layout fits better")
    lines.append(f"#   mindrlhf {choices.task} {path}{workers}")
    section, values = None, _values(choices) | choices.layout
    sections = list(dict.fromkeys(dotted.partition(".")[0] for dotted in values))
    for dotted, value in sorted(values.items(), key=lambda item: sections.index(item[0].partition(".")[0])):
        name, _, key = dotted.partition(".")
        if name != section:
            section = name
            lines.append(f"{name}:")
        setting = f"  {key}: {_plain(value)}"
        one_line = f"{setting:34s}  # {docs[dotted]}"
        wrapped = textwrap.wrap(docs[dotted], _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
        lines += [one_line] if len(one_line) <= _WIDTH else [*wrapped, setting]
        if dotted == "data.tokenizer_dir" and not choices.eval_file:
            lines.append("  # eval_file: held_out.mindrecord  # prompts kept from training, for accuracy")
    return "\n".join(lines) + "\n"


def _workers(num_npus: int) -> str:
    """Return the options of a run on so many NPUs, on machines of 8."""
    if num_npus <= NODE_SIZE or num_npus % NODE_SIZE:
        return f" --workers {num_npus}" if num_npus > 1 else ""
    return f" --workers {NODE_SIZE} --nodes {num_npus // NODE_SIZE}"


def row_length(choices: Choices) -> int:
    """Return a row on NPUs that holds the longest prompt with its response: one graph, whatever the data."""
    facts, response = choices.facts, response_length(choices)
    longest = (facts.longest_prompt or 1024) + response
    return min(-(-longest // 1024) * 1024, (facts.max_positions or longest * 2) // 16 * 16)


def _values(choices: Choices) -> dict[str, Any]:
    on_npus = choices.num_npus > 0
    values: dict[str, Any] = {
        "run.output_dir": f"runs/{Path(choices.model_dir).name or 'model'}_{choices.task}",
        "run.device": "ascend" if on_npus else "cpu",
        "model.path": choices.model_dir,
    }
    if on_npus:
        values |= {"model.compute_dtype": "bfloat16", "model.recompute": True}
    if choices.num_npus > 1:
        values["parallel_config.enable_parallel_optimizer"] = True
    values |= {"data.train_file": choices.train_file, "data.tokenizer_dir": choices.model_dir}
    if choices.eval_file:
        values["data.eval_file"] = choices.eval_file
    values |= {"train": _train_values, "sft": _sft_values}.get(choices.task, _preference_values)(choices)
    if choices.lora_rank:
        values["lora.rank"] = choices.lora_rank
    values["optimizer.start_lr"] = learning_rate(choices)
    values["optimizer.warmup_steps"] = 5
    values["checkpoint.every_steps"] = 20
    return values


def remarks(choices: Choices) -> list[str]:
    """Return a line for each choice that was made for the user, with what it rests on."""
    facts, found = choices.facts, choices.facts.verifiers
    lines = []
    if choices.task == "train" and not choices.verifier:
        verifier = ",".join(found.verifiers) if found else "accuracy_reward"
        why = found.why if found else f"{choices.train_file} is not there yet, so its answers are not known"
        lines.append(f"reward.verifier_function is {verifier}: {why}")
    if choices.task == "train" and facts.usual_question and not choices.num_npus:
        lines.append(
            f"rollout.max_response_length is {response_length(choices)}: a question of the data has "
            f"{facts.usual_question} tokens in the median, without what all prompts share"
        )
    if choices.eval_file:
        lines.append(f"data.eval_file is {choices.eval_file}: accuracy is that of its prompts")
    size = "a model that is not there yet" if facts.num_parameters is None else f"{facts.num_parameters:,} parameters"
    what = f"adapters of {size}" if choices.lora_rank else size
    return [*lines, f"optimizer.start_lr is {learning_rate(choices):g}: for {what}"]


def learning_rate(choices: Choices) -> float:
    """Return the learning rate to begin with.

    For reinforcement learning 1e-6, as DAPO (Yu et al. 2025, arXiv:2503.14476, section 4.1) and DeepSeekMath's GRPO
    (Shao et al. 2024, arXiv:2402.03300, section 4.2) train models of billions of parameters. Models of less than one
    need more: 1e-5, below 0.3 billion 2e-5, which the quickstart's and SmolLM2-135M's runs rest on. Adapters take ten
    times as much (docs/lora.md), and for small models 1e-3, with which SmolLM2-135M learned sums in 20 steps.
    """
    size, is_adapted = choices.facts.num_parameters, choices.lora_rank > 0
    if choices.task != "train":
        return (1e-5 if choices.task == "sft" else 1e-6) * (10 if is_adapted else 1)
    if size is None or size >= _SMALL_MODEL:
        return 1e-5 if is_adapted else 1e-6
    return 1e-3 if is_adapted else 2e-5 if size < 0.3 * _SMALL_MODEL else 1e-5


def response_length(choices: Choices) -> int:
    """Return the most tokens of a response: on NPUs 1024, on a CPU what answers of such data take.

    The solutions of GSM8K take twice the tokens of their question in the median, and four times the usual question at
    the 95th percentile: so four times, or twice the reference where that is longer. It is never more than the model's
    positions leave.
    """
    facts = choices.facts
    kind = facts.verifiers.kind if facts.verifiers else "any"
    length = 1024 if choices.num_npus else _MAX_RESPONSE
    if kind == "tests":
        length *= 2
    elif not choices.num_npus and facts.usual_question:
        wanted = max(4 * facts.usual_question, 2 * facts.answer_chars / 3)  # about three characters a token
        length = min(max(_MIN_RESPONSE, -(-int(wanted) // 16) * 16), _MAX_RESPONSE)
    if facts.max_positions and facts.longest_prompt:
        length = min(length, max(1, facts.max_positions - facts.longest_prompt))
    return length


def _train_values(choices: Choices) -> dict[str, Any]:
    facts, found, num_generations = choices.facts, choices.facts.verifiers, 8
    values: dict[str, Any] = {"reward.verifier_function": choices.verifier or "accuracy_reward"}
    if found is not None and not choices.verifier:
        values["reward.verifier_function"] = ",".join(found.verifiers)
        if found.by_choice:
            values["reward.by_choice"] = list(found.by_choice)
        if found.options:
            values["reward.options"] = dict(found.options)
    length = response_length(choices)
    values["rollout.max_response_length"] = length
    if choices.num_npus:
        values["rollout.num_replicas"] = choices.num_npus
        values["training.sequence_lengths"] = [row_length(choices)]
    elif facts.num_cores > 2:
        values["rollout.num_threads"] = facts.num_cores // 2
    values |= {
        "algorithm.name": "grpo",
        "algorithm.num_generations": num_generations,
        "training.chunk_size": 8 * max(1, choices.num_npus),
        "training.num_rollouts": 1,
        "training.micro_batch_size": 1,
    }
    is_whole = facts.longest_prompt and facts.longest_prompt + num_generations * length <= _LONGEST_ROW
    if not choices.num_npus and is_whole and not facts.sees_images:
        values["training.packing"] = "shared_prompts"
    if choices.eval_file:
        values |= {"evaluation.every_steps": 10}
    return values


def _sft_values(choices: Choices) -> dict[str, Any]:
    ranks = max(1, choices.num_npus)
    return {"training.rows_per_step": 8 * ranks, "training.epochs": 1, "training.micro_batch_size": 1}


def _preference_values(choices: Choices) -> dict[str, Any]:
    values: dict[str, Any] = {
        "training.pairs_per_step": 8 * max(1, choices.num_npus),
        "training.epochs": 1,
        "training.micro_batch_size": 2,
    }
    return values | ({"dpo.loss": "sigmoid", "dpo.beta": 0.1} if choices.task == "dpo" else {})


def _plain(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else yaml.safe_dump(value, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("\n...")
