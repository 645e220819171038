"""Configs of runs whose model, data and verifier are names alone."""

import dataclasses

from mindrlhf.config.schema import GrpoConfig

SECTIONS = {field.name: field.metadata["section"] for field in dataclasses.fields(GrpoConfig)}
NAMES = {
    "model": {"path": "model"},
    "data": {"train_file": "train", "tokenizer_dir": "tokenizer"},
    "reward": {"verifier_function": ("length",)},
}


def grpo_config(**sections) -> GrpoConfig:
    """Return a config with these sections, each a dictionary of the keys that are set."""
    return GrpoConfig(**{name: SECTIONS[name](**keys) for name, keys in (NAMES | sections).items()})
