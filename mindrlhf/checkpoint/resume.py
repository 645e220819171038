"""Check that a config may continue a checkpoint: keys that may differ, and keys that would make it another run."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mindrlhf.config.keys import REMOVED_WITHOUT_EFFECT
from mindrlhf.config.parse import dotted_keys
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.errors import UserError

# Sections and keys that say where, how long, on how much and with what reports a run works, not what it computes.
# All others must stay as they were. A key that a release adds has what runs did before as its default.
FREE_KEYS = frozenset(
    {
        "run.output_dir",
        "run.max_steps",
        "run.hang_timeout_s",
        "run.ports",
        "run.start_timeout_s",
        "data.eval_file",
        "training.epochs",
        "rollout.python",
        "rollout.env",
        "rollout.num_replicas",
        "rollout.num_threads",
        "rollout.gpu_memory_utilization",
        "rollout.engine_args",
        "rollout.weight_buffer_gib",
        "rollout.restarts",
        "correction.preset",  # the keys that it sets are compared
        "reward.num_workers",
        "reward.timeout_s",
        "parallel_config",
        "training.skip_zero_advantages",  # like the layout: what is summed, not what comes of it but for rounding
        "memory",
        "evaluation",
        "checkpoint",
        "guard",
        "observe",
        "msprobe",
        "profiler",
    }
)
# A learning rate that decays reaches its end at the last step: the number of steps is then part of its course.
DECAY_KEYS = frozenset({"run.max_steps", "training.epochs"})


def config_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys whose values differ or that only one config has, sorted; lists equal tuples."""
    return _differences(dict(_leaves(old)), dict(_leaves(new)))


def defaults() -> dict[str, Any]:
    """Return the default of each key that has one, of all commands, by its dotted name."""
    found = {}
    for config in (GrpoConfig, SftConfig, DpoConfig, RewardModelConfig):
        for dotted, field, _ in dotted_keys(config):
            if field.default_factory is not dataclasses.MISSING:
                found[dotted] = field.default_factory()
            elif field.default is not dataclasses.MISSING:
                found[dotted] = field.default
    return dict(_leaves(found))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    one_sided = before.keys() ^ now.keys()
    return sorted(one_sided | {key for key in before.keys() & now.keys() if before[key] != now[key]})


def check_resumable(old: Mapping[str, Any], new: Mapping[str, Any], compared: Collection[str] = ()) -> list[str]:
    """Check that a run with config ``new`` continues exactly what a run with config ``old`` began.

    Args:
        old: config of the checkpoint, as nested dicts.
        new: config of this run.
        compared: keys of files that are compared by what they hold, and so may have moved.

    Returns:
        Keys of ``old`` that are left out: releases since do not have them, and they never changed what is computed.

    Raises:
        UserError: they differ in a key that changes what is computed; the message names each such key and both
            values.
    """
    before, now = dict(_leaves(old)), dict(_leaves(new))
    removed = sorted(before.keys() & REMOVED_WITHOUT_EFFECT.keys())
    before = {key: value for key, value in defaults().items() if key in now} | before
    decays = "constant" not in (before.get("optimizer.lr_schedule"), now.get("optimizer.lr_schedule"))
    free = (FREE_KEYS - DECAY_KEYS if decays else FREE_KEYS).union(compared, removed)
    refused = [key for key in _differences(before, now) if not _is_free(key, free)]
    if refused:
        changes = [f"{key} was {_shown(before, key)} and is now {_shown(now, key)}" for key in refused]
        them = "it" if len(refused) == 1 else "them"
        raise UserError(f"cannot resume the checkpoint: {'; '.join(changes)}: set {them} back, or start a new run")
    return removed


def _is_free(key: str, free: frozenset[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:length]) in free for length in range(1, len(parts) + 1))


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return repr(leaves[key]) if key in leaves else "not set"


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value
