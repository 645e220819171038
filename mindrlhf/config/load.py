"""A checked config from a YAML file and overrides, for each kind of run."""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mindrlhf.config import checks
from mindrlhf.config.algorithm import CORRECTIONS, PRESETS
from mindrlhf.config.parse import Reading, read, read_yaml
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.errors import UserError

# By the command that runs them.
CONFIGS = {"train": GrpoConfig, "sft": SftConfig, "dpo": DpoConfig, "reward-model": RewardModelConfig}
_CHECKS = {
    "train": checks.check_grpo,
    "sft": checks.check_sft,
    "dpo": checks.check_dpo,
    "reward-model": checks.check_reward_model,
}


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
    reading.mistakes.check(_CHECKS[task], reading.config, reading.changed, world_size)
    return reading


def load_config(task: str, path: str | Path, overrides: Iterable[str] = (), *, world_size: int | None = 1) -> Any:
    """Read and check a config for a number of ranks; see ``read_config``.

    Raises:
        UserError: every mistake that the keys alone show, a line for each.
    """
    reading = read_config(task, path, overrides, world_size=world_size)
    reading.mistakes.raise_if_any()
    return reading.config


CONFIG_LOADERS = {task: partial(load_config, task) for task in CONFIGS}
load_grpo_config, load_sft_config = CONFIG_LOADERS["train"], CONFIG_LOADERS["sft"]
load_dpo_config, load_reward_model_config = CONFIG_LOADERS["dpo"], CONFIG_LOADERS["reward-model"]


def tasks_of(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the tasks that have every section of a file, as far as sections are known at all; () for a mixture."""
    sections = {task: {field.name for field in dataclasses.fields(cls)} for task, cls in CONFIGS.items()}
    known = set(content) & set().union(*sections.values())
    return tuple(task for task, names in sections.items() if known <= names)


def _check_task(task: str, content: Mapping[str, Any], path: str | Path) -> None:
    tasks = tasks_of(content)
    if tasks and task not in tasks:
        here = {field.name for field in dataclasses.fields(CONFIGS[task])}
        there = {field.name for field in dataclasses.fields(CONFIGS[tasks[0]])}
        strange = next(name for name in content if name in there - here)
        commands = " or ".join(f"`mindrlhf {name} {path}`" for name in tasks)
        raise UserError(
            f"unknown key '{strange}', which `mindrlhf {task}` does not have: {path} is a config of another task, so "
            f"use {commands}"
        )


def _apply_preset(config: GrpoConfig, given: frozenset[str]) -> GrpoConfig:
    """Return the config with the keys of its presets filled in; ``given`` are the keys that the user set."""
    presets = {"algorithm": PRESETS[config.algorithm.name], "correction": CORRECTIONS[config.correction.preset]}
    filled = {}
    for section, preset in presets.items():
        values = {name: value for name, value in preset.items() if f"{section}.{name}" not in given}
        filled[section] = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **filled)
