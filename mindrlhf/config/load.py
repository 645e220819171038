"""A checked config from a YAML file and overrides, for each kind of run."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from mindrlhf.config import checks
from mindrlhf.config.parse import load
from mindrlhf.config.presets import CORRECTIONS, PRESETS
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.errors import UserError


def load_grpo_config(path: str | Path, overrides: Iterable[str] = (), *, world_size: int | None = 1) -> GrpoConfig:
    """Read and check a `mindrlhf train` config for a number of ranks; None leaves out what depends on it.

    Raises:
        UserError: any mistake that can be seen before a device is touched.
    """
    config, given = load(GrpoConfig, path, overrides)
    config = _apply_preset(config, given)
    checks.check_grpo(config, given, world_size)
    return config


def load_sft_config(path: str | Path, overrides: Iterable[str] = (), *, world_size: int = 1) -> SftConfig:
    """Read and check a `mindrlhf sft` config for a number of ranks; raises UserError like the other."""
    config, given = load(SftConfig, path, overrides)
    checks.check_sft(config, given, world_size)
    return config


def load_dpo_config(path: str | Path, overrides: Iterable[str] = (), *, world_size: int = 1) -> DpoConfig:
    """Read and check a `mindrlhf dpo` config for a number of ranks; raises UserError like the others."""
    config, given = load(DpoConfig, path, overrides)
    checks.check_preference(config, given, world_size)
    checks.check_dpo(config, given)
    return config


def load_reward_model_config(
    path: str | Path, overrides: Iterable[str] = (), *, world_size: int = 1
) -> RewardModelConfig:
    """Read and check a `mindrlhf reward-model` config for a number of ranks; raises UserError like the others."""
    config, given = load(RewardModelConfig, path, overrides)
    checks.check_preference(config, given, world_size)
    if "model.reference_path" in given:
        raise UserError("'model.reference_path' is set, but a reward model is trained without reference: remove it")
    return config


CONFIG_LOADERS = {
    "train": load_grpo_config,
    "sft": load_sft_config,
    "dpo": load_dpo_config,
    "reward-model": load_reward_model_config,
}


def _apply_preset(config: GrpoConfig, given: frozenset[str]) -> GrpoConfig:
    """Return the config with the keys of its presets filled in; ``given`` are the keys that the user set."""
    presets = {"algorithm": PRESETS[config.algorithm.name], "correction": CORRECTIONS[config.correction.preset]}
    filled = {}
    for section, preset in presets.items():
        values = {name: value for name, value in preset.items() if f"{section}.{name}" not in given}
        filled[section] = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **filled)
