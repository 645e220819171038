"""Other stacks' config files as ours: `mindrlhf config import`."""

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.config.imports import mindrlhf_05, mindspeed_rl, trl, verl
from mindrlhf.config.imports.rules import Source, Translation, translate
from mindrlhf.config.load import read_content
from mindrlhf.errors import UserError

STACKS = {"mindspeed-rl": mindspeed_rl, "mindrlhf": mindrlhf_05, "verl": verl, "trl": trl}
# What a config cannot do without, and what stands there until the user has put in their own.
_PLACEHOLDERS = {
    "model.path": "path/to/model",
    "data.train_file": "path/to/train.mindrecord",
    "data.tokenizer_dir": "path/to/tokenizer",
    "reward.verifier_function": ["accuracy_reward"],
    "run.device": "ascend",
}
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_UNUSED = re.compile(r"'([\w.]+)' is set, but")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,[^}]*)?\}")


def convert(stack: str, path: Path, num_processes: int = 1) -> tuple[str, Translation]:
    """Return the YAML text of our config, with a comment for each key of theirs, and what became of the keys.

    Args:
        stack: one of ``STACKS``.
        path: their YAML file; or a shell script whose command line has ``key.name=value`` words.
        num_processes: ranks that the run had; the batches of some stacks count by process.

    Raises:
        UserError: the file cannot be read, or has no key of that stack.
    """
    module = STACKS[stack]
    given = _read(path)
    if module is trl:
        given["num_processes"] = num_processes
    result = translate(Source(given, module.DEFAULTS), module.RULES)
    if len(result.unknown) == len(given) or not given:
        raise UserError(f"{path} has no key of {stack}: is it one of {', '.join(name for name in STACKS)}?")
    for name, value in _PLACEHOLDERS.items():
        if not result.values.get(name):
            result.values[name] = value
            result.origins[name] = ["needed: put yours here"]
    _leave_out_unused(result)
    return _render(stack, path, result), result


def _leave_out_unused(result: Translation) -> None:
    """Leave out what our own check calls set but unused: it says nothing in that stack either."""
    for _ in range(len(result.values)):
        reading = read_content("train", _nested(result.values), world_size=None)
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


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
    if path.suffix == ".sh":
        return _overrides_of_script(path, text)
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is no config: it has no keys")
    flat = dict(_flatten(content))
    return {name: _dereferenced(value, flat) for name, value in flat.items()}


def _overrides_of_script(path: Path, text: str) -> dict[str, Any]:
    """The words ``key.name=value`` of a script; its plain variables are put in."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"{path} is no shell script: {error}") from None
    variables: dict[str, str] = {}
    given = {}
    for word in words:
        word = _VARIABLE.sub(lambda found: variables.get(found[1], found[0]), word)
        if match := _OVERRIDE.fullmatch(word):
            given[match[1]] = yaml.safe_load(match[2]) if match[2] else ""
        elif match := _ASSIGNMENT.fullmatch(word):
            variables[match[1]] = match[2]
    return given


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _number(value)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    return value


def _dereferenced(value: Any, flat: Mapping[str, Any]) -> Any:
    """Follow Hydra's ``${other.key}``; what leads nowhere is as if it were not given."""
    for _ in range(10):
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        value = flat.get(match[1])
    return None


def _render(stack: str, path: Path, result: Translation) -> str:
    sections = _nested({name: value for name, value in result.values.items() if value is not None})
    lines = [
        f"# {path.name} of {stack}, as a config of MindRLHF. Check it: mindrlhf config check FILE",
        "# Behind each key stands where it comes from; (default) is what that stack does where nothing is said.",
    ]
    for section, values in sections.items():
        lines.append(f"{section}:")
        for key, value in values.items():
            origin = ", ".join(dict.fromkeys(result.origins[f"{section}.{key}"]))
            lines.append(f"  {key}: {_scalar(value)}  # {origin}")
    for title, entries in (
        ("To do by hand", result.for_user),
        ("Without a counterpart, and without need of one", result.dropped),
        ("Unknown", dict.fromkeys(result.unknown, "not a key that is known of that stack: what is it for?")),
    ):
        if entries:
            lines += ["", f"# {title}:", *(f"#   {name}: {text}" for name, text in entries.items())]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, float) and value == int(value) and abs(value) < 1e6:
        return f"{value:.1f}"
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
