"""Keys that were changed, but that nothing reads: each key, or its section, says under which condition it is read.

A condition is a key that is set (``algorithm.beta``), has one of some values (``algorithm.loss=sapo|vespo``) or has
not (``correction.mask!=none``); alternatives have `` or `` between them.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mindrlhf.config.derived import correction_weight
from mindrlhf.config.keys import RunConfig
from mindrlhf.errors import Rules

# Keys with a value `auto` that stands for another.
_RESOLVED = {"correction.weight": correction_weight}
_CONDITION = re.compile(r"(\w+)\.(\w+)(?:(!?)=(.+))?")


def conditions(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the condition of each key that has one."""
    for section in dataclasses.fields(config):
        shared = section.metadata["read_with"]
        for field in dataclasses.fields(section.metadata["section"]):
            name = f"{section.name}.{field.name}"
            condition = field.metadata["read_with"] or shared
            if condition and name not in (part.partition("=")[0].rstrip("!") for part in condition.split(" or ")):
                yield name, condition


def unread_rules(config: RunConfig, given: frozenset[str], presets: Mapping[str, Mapping[str, Any]]) -> Rules:
    """Rules of all conditions.

    Args:
        given: the keys that the user changed.
        presets: what presets set, by section and key: what a run wrote to its config.yaml must load again.
    """
    for name, condition in conditions(config):
        section, _, key = name.partition(".")
        is_preset = key in presets.get(section, {}) and getattr(getattr(config, section), key) == presets[section][key]
        yield name in given and not is_preset and not holds(config, condition), (
            f"'{name}' is set, but read only with {_shown(condition)}: set it so, or remove the key"
        )


def holds(config: RunConfig, condition: str) -> bool:
    """Return whether a condition holds; it does where it is about sections that the kind of run has not."""
    parts = [_CONDITION.fullmatch(part).groups() for part in condition.split(" or ")]
    known = [part for part in parts if hasattr(config, part[0])]
    return not known or any(_part_holds(config, *part) for part in known)


def _part_holds(config: RunConfig, section: str, key: str, negation: str, values: str | None) -> bool:
    resolve = _RESOLVED.get(f"{section}.{key}")
    value = resolve(config) if resolve else getattr(getattr(config, section), key)
    if values is None:
        return bool(value)
    chosen = value if isinstance(value, tuple) else (value,)
    return any(item in values.split("|") for item in chosen) != bool(negation)


def _shown(condition: str) -> str:
    shown = condition.replace("!=", " other than ").replace("|", " or ")
    return shown.replace("=", " ")
