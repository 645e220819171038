"""A checked config from a YAML file and overrides, for each kind of run."""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mindrlhf.config.algorithm import (
    CORRECTIONS,
    PRESETS,
    adapters_reference_rules,
    algorithm_rules,
    critic_rules,
)
from mindrlhf.config.evaluation import evaluation_rules
from mindrlhf.config.memory import memory_rules
from mindrlhf.config.model import lora_rules
from mindrlhf.config.observe import checkpoint_rules, profiler_rules
from mindrlhf.config.offline import preference_rules, supervised_batch_rules, supervised_rules
from mindrlhf.config.parse import Reading, dotted_keys, read, read_yaml
from mindrlhf.config.refusals import refusal_rules
from mindrlhf.config.reward import reward_rules, tool_rules
from mindrlhf.config.rollout import schedule_rules, server_rules, stop_rules
from mindrlhf.config.run import run_rules
from mindrlhf.config.schema import DpoConfig, GrpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from mindrlhf.config.training import batch_rules, cpu_rules, optimizer_rules, parallel_rules, resolve_data_parallel
from mindrlhf.config.unread import unread_rules
from mindrlhf.errors import Mistakes, Rules, UserError, refuse

# By the command that runs them.
CONFIGS = {"train": GrpoConfig, "sft": SftConfig, "dpo": DpoConfig, "reward-model": RewardModelConfig}
# Of required keys that say nothing about sizes.
_STAND_INS = {
    "data": {"train_file": "prompts", "tokenizer_dir": "tokenizer"},
    "reward": {"verifier_function": "accuracy_reward"},
}
_SHARDING = tuple(f"parallel_config.{name}" for name in ("model_parallel", "pipeline_stage", "context_parallel"))


def read_config(task: str, path: str | Path, overrides: Iterable[str] = (), *, world_size: int | None = 1) -> Reading:
    """Read a config and check it as far as its keys alone tell; the mistakes are noted, not raised.

    Args:
        task: one of ``CONFIGS``.
        world_size: number of ranks; None leaves out what depends on it (`train` only).

    Raises:
        UserError: the file cannot be read, or is the config of another task.
    """
    content = read_yaml(path)
    _check_task(task, content, path)
    return read_content(task, content, overrides, world_size=world_size)


def read_content(
    task: str, content: Mapping[str, Any], overrides: Iterable[str] = (), *, world_size: int | None = 1
) -> Reading:
    """Return the same as ``read_config`` of what a file would hold; nothing is raised."""
    reading = read(CONFIGS[task], content, overrides)
    if task == "train":
        reading = dataclasses.replace(reading, config=_apply_preset(reading.config, reading.given))
    reading.mistakes.check(check_config, reading.config, reading.changed, world_size)
    return reading


def load_config(task: str, path: str | Path, overrides: Iterable[str] = (), *, world_size: int | None = 1) -> Any:
    """Read and check a config for a number of ranks; see ``read_config``.

    Raises:
        UserError: every mistake that the keys alone show, a line for each.
    """
    reading = read_config(task, path, overrides, world_size=world_size)
    reading.mistakes.raise_if_any()
    return reading.config


def load_layout_config(path: str | Path, overrides: Iterable[str] = ()) -> GrpoConfig:
    """Read and check a config of `train` for a plan or compiled strategies, which need no data, tokenizer or rewards.

    Raises:
        UserError: every mistake that the keys alone show, a line for each.
    """
    content = read_yaml(path)
    _check_task("train", content, path)
    for section, stand_ins in _STAND_INS.items():
        keys = {} if content.get(section) is None else content[section]
        if isinstance(keys, dict):
            content[section] = stand_ins | keys
    reading = read_content("train", content, overrides, world_size=None)
    reading.mistakes.raise_if_any()
    return reading.config


CONFIG_LOADERS = {task: partial(load_config, task) for task in CONFIGS}
load_grpo_config = CONFIG_LOADERS["train"]


def check_config(config: Any, given: frozenset[str], world_size: int | None) -> None:
    """Check what the keys of a config alone tell; ``given`` are those the user changed.

    Raises:
        UserError: all broken rules.
    """
    mistakes = Mistakes()
    if isinstance(config, GrpoConfig):
        mistakes.judge(_reinforcement_rules(config, given))
    else:
        mistakes.judge(_offline_rules(config, given))
    if world_size is not None:
        mistakes.check(_check_ranks, config, world_size, needs=_SHARDING)
    mistakes.raise_if_any()


def _reinforcement_rules(config: GrpoConfig, given: frozenset[str]) -> Rules:
    model, run = config.model, config.run
    yield from unread_rules(config, given, _presets(config))
    yield from run_rules(run)
    yield from parallel_rules(config.parallel_config)
    yield from cpu_rules(config)
    yield from lora_rules(config.lora)
    yield from adapters_reference_rules(config)
    yield from memory_rules(config.memory, model.recompute, run.device, has_head=True, shares_devices=True)
    yield from algorithm_rules(config)
    yield from critic_rules(config)
    yield from batch_rules(config)
    yield from stop_rules(config)
    yield from schedule_rules(config)
    yield from optimizer_rules(config.optimizer)
    yield from reward_rules(config.reward)
    yield from evaluation_rules(config)
    yield from server_rules(config)
    yield from checkpoint_rules(config.checkpoint, knows_best=True)
    yield from tool_rules(config)
    yield from profiler_rules(config.profiler, run.max_steps)
    yield from refusal_rules(config)


def _offline_rules(config: OfflineConfig, given: frozenset[str]) -> Rules:
    model, run, has_head = config.model, config.run, not isinstance(config, RewardModelConfig)
    yield from unread_rules(config, given, {})
    yield from run_rules(run)
    yield from parallel_rules(config.parallel_config)
    yield from cpu_rules(config)
    yield from lora_rules(config.lora)
    yield from memory_rules(config.memory, model.recompute, run.device, has_head=has_head, shares_devices=False)
    yield from optimizer_rules(config.optimizer)
    yield from checkpoint_rules(config.checkpoint, knows_best=False)
    no_servers = "this run samples nothing, so it has no rollout server"
    yield from profiler_rules(config.profiler, run.max_steps, no_servers)
    if isinstance(config, SftConfig):
        yield from supervised_rules(given)
    else:
        yield from preference_rules(given)
    if isinstance(config, RewardModelConfig):
        yield "model.reference_path" in given, (
            "'model.reference_path' is set, but a reward model is trained without reference: remove it"
        )


def _check_ranks(config: Any, world_size: int) -> None:
    if isinstance(config, SftConfig):
        refuse(supervised_batch_rules(config, world_size))
    else:
        resolve_data_parallel(config.parallel_config, world_size)


def tasks_of(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tasks that have every key of a file, as far as keys are known at all; () for a mixture.

    `train` comes last: its configs have the section `reward`, which no other task has.
    """
    names = {task: _names(cls) for task, cls in CONFIGS.items()}
    known = _given_names(content) & set().union(*names.values())
    tasks = [task for task, of_task in names.items() if known <= of_task]
    return tuple(sorted(tasks, key=lambda task: task == "train"))


def _names(cls: type) -> set[str]:
    """Return the sections of a config and their keys, dotted."""
    return {name for dotted, _, _ in dotted_keys(cls) for name in (dotted.partition(".")[0], dotted)}


def _given_names(content: Mapping[str, Any]) -> set[str]:
    sections = ((section, keys) for section, keys in content.items() if isinstance(keys, Mapping))
    return {str(section) for section in content} | {f"{section}.{key}" for section, keys in sections for key in keys}


def _check_task(task: str, content: Mapping[str, Any], path: str | Path) -> None:
    tasks = tasks_of(content)
    if tasks and task not in tasks:
        strange = min(_given_names(content) & _names(CONFIGS[tasks[0]]) - _names(CONFIGS[task]))
        commands = " or ".join(f"`mindrlhf {name} {path}`" for name in tasks)
        raise UserError(
            f"unknown key '{strange}', which `mindrlhf {task}` does not have: {path} is a config of another task, so "
            f"use {commands}"
        )


def _apply_preset(config: GrpoConfig, given: frozenset[str]) -> GrpoConfig:
    """Return the config with the keys of its presets filled in; ``given`` are the keys that the user set."""
    filled = {}
    for name, preset in _presets(config).items():
        section = getattr(config, name)
        values = {key: value for key, value in preset.items() if f"{name}.{key}" not in given}
        if "options" in preset:
            values["options"] = {**preset["options"], **section.options}
        filled[name] = dataclasses.replace(section, **values)
    return dataclasses.replace(config, **filled)


def _presets(config: GrpoConfig) -> dict[str, dict[str, Any]]:
    return {"algorithm": PRESETS[config.algorithm.name], "correction": CORRECTIONS[config.correction.preset]}
