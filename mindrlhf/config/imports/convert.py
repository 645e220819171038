"""Other stacks' config files as ours: `mindrlhf config import`."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from mindrlhf.config.imports import mindrlhf_05, mindspeed_rl, openrlhf, slime, trl, verl, verl_sft
from mindrlhf.config.imports.files import read
from mindrlhf.config.imports.rules import Source, Translation, find, translate
from mindrlhf.config.load import CONFIGS, read_content
from mindrlhf.errors import UserError

STACKS = {
    "mindspeed-rl": mindspeed_rl,
    "mindrlhf": mindrlhf_05,
    "verl": verl,
    "trl": trl,
    "openrlhf": openrlhf,
    "slime": slime,
}
# What a config cannot do without, and what stands there until the user has put in their own.
_PLACEHOLDERS = {
    "model.path": "path/to/model",
    "data.train_file": "path/to/train.mindrecord",
    "data.tokenizer_dir": "path/to/tokenizer",
    "reward.verifier_function": ["accuracy_reward"],
    "run.device": "ascend",
}
# Where a run writes, what it reads, how it learns, in the order in which a config is read.
_FIRST = ("run", "model", "data", "reward", "rollout", "algorithm", "training", "optimizer")
_OTHERS = dict.fromkeys(field.name for cls in CONFIGS.values() for field in dataclasses.fields(cls))
_SECTIONS = [*_FIRST, *(name for name in _OTHERS if name not in _FIRST)]
_NEEDED = "needed: put yours here"
_UNUSED = re.compile(r"'([\w.]+)' is set, but")


def convert(stack: str, path: Path, num_processes: int = 0) -> tuple[str, Translation]:
    """Return the YAML text of our config, with a comment for each key of theirs, and what became of the keys.

    Args:
        stack: one of ``STACKS``.
        path: their YAML or JSON file; a shell script with their command line; for TRL, the program.
        num_processes: ranks that the run had; the batches of some stacks count by process. 0: what the script says.

    Raises:
        UserError: the file cannot be read, or has no key of that stack.
    """
    module = STACKS[stack]
    aliases = getattr(module, "ALIASES", {})
    known = module.RULES.keys() | aliases
    reading = read(path, module.DEFAULTS, known.__contains__, of_program="GRPOConfig" if module is trl else "")
    if module is verl and verl_sft.is_one(reading.given.keys() | reading.unknown.keys()):
        module = verl_sft
    if module is trl:
        reading.given.setdefault(module.NUM_PROCESSES, num_processes or reading.num_processes or 1)
    source = Source(reading.given, module.DEFAULTS, reading.unknown, aliases)
    result = translate(source, module.RULES)
    if not any(find(module.RULES, name) for name in [*source.given, *source.unknown] if name != trl.NUM_PROCESSES):
        others = ", ".join(name for name in STACKS if name != stack)
        raise UserError(f"{path} has no key of {stack}: is it one of {others}?")
    result.for_user |= reading.remarks
    task = _task(module)
    for name, value in _PLACEHOLDERS.items():
        if not result.values.get(name) and not (task == "sft" and name.startswith("reward.")):
            result.values[name] = value
            result.origins[name] = [_NEEDED]
    _leave_out_weights(result)
    _leave_out_unused(task, result)
    return _render(stack, path, result), result


def _task(module: ModuleType) -> str:
    return getattr(module, "TASK", "train")


def _leave_out_weights(result: Translation) -> None:
    """Leave weights to the user where the verifiers are, too: theirs are of other functions than our placeholder."""
    weights = result.values.get("reward.verifier_weight")
    if result.origins.get("reward.verifier_function") == [_NEEDED] and isinstance(weights, list) and len(weights) != 1:
        shown = ",".join(map(str, weights))
        for origin in result.origins.pop("reward.verifier_weight"):
            result.for_user[origin] = f"set reward.verifier_weight={shown} beside as many verifiers"
        del result.values["reward.verifier_weight"]


def _leave_out_unused(task: str, result: Translation) -> None:
    """Leave out what our own check calls set but unused: it says nothing in that stack either."""
    for _ in range(len(result.values)):
        reading = read_content(task, _nested(result.values), world_size=None)
        found = [match[1] for message in reading.mistakes.messages if (match := _UNUSED.search(message))]
        unused = [name for name in found if name in result.values]
        if not unused:
            return
        for name in unused:
            del result.values[name]
            for origin in result.origins.pop(name):
                if not origin.endswith(" (default)"):
                    result.dropped.setdefault(origin, f"'{name}' has no effect beside the other keys")


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return sections


def _render(stack: str, path: Path, result: Translation) -> str:
    sections = _nested({name: value for name, value in result.values.items() if value is not None})
    lines = [
        f"# {_line(path.name)} of {stack}, as a config of MindRLHF. Check it: mindrlhf config check FILE",
        "# Behind each key stands where it comes from; (default) is what that stack does where nothing is said.",
    ]
    for section, values in sorted(sections.items(), key=lambda item: _SECTIONS.index(item[0])):
        lines.append(f"{section}:")
        for key, value in values.items():
            origin = ", ".join(dict.fromkeys(map(_line, result.origins[f"{section}.{key}"])))
            lines.append(f"  {key}: {_scalar(value)}  # {origin}")
    for title, entries in (
        ("To do by hand", result.for_user),
        ("Without a counterpart, and without need of one", result.dropped),
        ("Unknown", dict.fromkeys(result.unknown, "not a key that is known of that stack: what is it for?")),
    ):
        if entries:
            lines += ["", f"# {title}:", *(f"#   {_line(name)}: {_line(text)}" for name, text in entries.items())]
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    """Return a text that stays within its comment."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _scalar(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return f"{value:.1f}"
    if isinstance(value, str) and not value.isprintable():
        return json.dumps(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = text.removesuffix("...\n").strip()
    return json.dumps(str(value)) if "\n" in text else text
