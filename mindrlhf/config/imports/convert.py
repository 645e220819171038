"""Other stacks' configs as ours: `mindrlhf config import`."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.config.imports import mindrlhf_05, mindspeed_rl, trl, verl
from mindrlhf.config.imports.read import RunScript, read, read_words
from mindrlhf.config.imports.tables import Source, Translation, find, translate
from mindrlhf.config.load import read_content
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError

STACKS = {"mindspeed-rl": mindspeed_rl, "mindrlhf": mindrlhf_05, "verl": verl, "trl": trl}
# A config's needs, and what stands there until the user has put in their own.
_PLACEHOLDERS = {
    "model.path": "path/to/model",
    "data.train_file": "path/to/train.mindrecord",
    "data.tokenizer_dir": "path/to/tokenizer",
    "reward.verifier_function": ["accuracy_reward"],
    "run.device": "ascend",
}
# Where a run writes, what it reads, how it learns, in the order in which a config is read.
_FIRST = ("run", "model", "data", "reward", "rollout", "algorithm", "training", "optimizer")
_NEEDED = "needed: put yours here"
_UNUSED = re.compile(r"'([\w.]+)'(?: is set, but| has (\w+), which neither)")


def convert(
    stack: str, path: Path | None, arguments: Sequence[str] = (), *, run_script: RunScript, num_processes: int = 0
) -> tuple[str, Translation]:
    """Return the YAML text of our config, with a comment for each key of theirs, and what became of the keys.

    Args:
        stack: one of ``STACKS``.
        path: their YAML or JSON file, or the shell script that starts the run.
        arguments: further keys as on their command line, which win.
        run_script: returns the words of the commands of a script's text.
        num_processes: ranks that the run had; the batches of TRL count by process. 0: what the script says.

    Raises:
        UserError: the file cannot be read, or has no key of that stack.
    """
    module = STACKS[stack]
    keys = read(path, run_script, lambda name: find(module, name) is not None) if path else {}
    keys |= read_words(arguments)
    if num_processes and module is trl:
        keys[trl.NUM_PROCESSES] = num_processes
    result = translate(Source(keys, module.DEFAULTS), module)
    if module is verl and keys and not any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in keys):
        raise UserError(f"{path or 'the arguments'}: of verl its reinforcement learning is read: `actor_rollout_ref`")
    if not any(find(module, name) for name in keys):
        others = ", ".join(name for name in STACKS if name != stack)
        raise UserError(f"{path or 'the arguments'}: no key of {stack} is there: is it one of {others}?")
    for name, value in _PLACEHOLDERS.items():
        if not result.values.get(name):
            has_tokenizer = name == "data.tokenizer_dir" and result.origins["model.path"] != [_NEEDED]
            result.values[name] = result.values["model.path"] if has_tokenizer else value
            result.origins[name] = ["of the model"] if has_tokenizer else [_NEEDED]
    _leave_out_unused(result)
    return _render(stack, path, result), result


def _leave_out_unused(result: Translation) -> None:
    """Leave out what our own check calls set but unused: it says nothing in that stack either."""
    for _ in range(len(result.values)):
        reading = read_content("train", _nested(result.values), world_size=None)
        matches = filter(None, map(_UNUSED.search, reading.mistakes.messages))
        unused = [name for match in matches if (name := ".".join(filter(None, match.groups()))) in result.values]
        if not unused:
            return
        for name in unused:
            del result.values[name]
            result.without += [origin for origin in result.origins.pop(name) if not origin.endswith(" (default)")]


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        *path, key = name.split(".")
        mapping: dict[str, Any] = sections
        for part in path:
            mapping = mapping.setdefault(part, {})
        mapping[key] = value
    return sections


def _render(stack: str, path: Path | None, result: Translation) -> str:
    order = [*_FIRST, *(field.name for field in dataclasses.fields(GrpoConfig) if field.name not in _FIRST)]
    sections = _nested({name: value for name, value in result.values.items() if value is not None})
    lines = [
        f"# {_line(path.name if path else 'Arguments')} of {stack}, as a config of MindRLHF. "
        "Check it: mindrlhf config check FILE",
        "# Behind each key stands where it comes from; (default) is what that stack does where nothing is said.",
    ]
    for section, values in sorted(sections.items(), key=lambda item: order.index(item[0])):
        lines += _block(section, values, result.origins)
    for title, entries in (
        ("To do by hand", [f"{name}: {text}" for name, text in result.for_user.items()]),
        ("Without a counterpart, or without effect here", result.without),
    ):
        if entries:
            lines += ["", f"# {title}:", *(f"#   {_line(entry)}" for entry in dict.fromkeys(entries))]
    return "\n".join(lines) + "\n"


def _block(name: str, value: Any, origins: Mapping[str, Sequence[str]]) -> Iterator[str]:
    indent, key = "  " * name.count("."), name.rpartition(".")[2]
    if name in origins:
        yield f"{indent}{key}: {_scalar(value)}  # {', '.join(dict.fromkeys(map(_line, origins[name])))}"
        return
    yield f"{indent}{key}:"
    for part, inner in value.items():
        yield from _block(f"{name}.{part}", inner, origins)


def _line(text: str) -> str:
    """Return a text that stays within its comment."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    text = text.removesuffix("...\n").strip()
    return json.dumps(str(value)) if "\n" in text or not text.isprintable() else text
