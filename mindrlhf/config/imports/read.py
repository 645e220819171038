"""Flat keys of a foreign config: of a YAML or JSON file, `key=value` arguments, a launch script's commands."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.config.imports.tables import flatten
from mindrlhf.errors import UserError
from mindrlhf.system.strict_yaml import YAML_ERRORS, load_yaml

_SHELL = (".sh", ".bash", ".slurm", ".sbatch")
_OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w@]*(?:[./][\w-]+)+)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_EMPTY = "${...}"  # a script's argument, or a variable of its environment

RunScript = Callable[[str], list[list[str]]]


def read(path: Path, run_script: RunScript, is_known: Callable[[str], bool]) -> dict[str, Any]:
    """Return the keys of a YAML or JSON file, or of the commands that a launch script runs.

    Args:
        path: the file.
        run_script: returns the words of the commands of a script's text.
        is_known: tells a key of the stack; of several commands the one with most of them counts.

    Raises:
        UserError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())})") from None
    if path.suffix == ".py":
        raise UserError(f"{path} is a program: give its arguments as YAML, or the shell script that starts it")
    if path.suffix in _SHELL or re.match(r"#!.*sh\b", text):
        found = [read_words(words) for words in run_script(text)]
        return max(found, key=lambda keys: sum(map(is_known, keys)), default={})
    try:
        content = load_yaml(text)
        if not isinstance(content, dict):
            raise UserError("it has no keys")
        keys = {name: _number(value) for name, value in flatten(content)}
    except (*YAML_ERRORS, UserError) as error:
        raise UserError(f"{path} is no config in YAML: {' '.join(str(error).split())}") from None
    return keys


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the keys of words `key.name=value`; without these of `--name value`, `--name=value` and switches."""
    keys: dict[str, str] = {}
    values: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if match := _OVERRIDE.fullmatch(word):
            keys[match[1].replace("/", ".")] = match[2] or _EMPTY
        elif match := _FLAG.fullmatch(word):
            current = values[match[1].replace("-", "_")] = [] if match[2] is None else [match[2]]
        elif word.endswith(".py") or re.fullmatch(r"-[a-z]+", word):
            current = []  # a launcher's flags end here
        elif word:
            current.append(word)
    keys = keys or {name: _joined(texts) for name, texts in values.items()}
    flat: dict[str, Any] = {}
    for name, text in keys.items():
        value = _value(text)
        flat |= dict(flatten({name: value})) if isinstance(value, dict) else {name: value}
    return flat


def _joined(texts: list[str]) -> str:
    """The text of a flag's values: none is a switch, several are a list."""
    if not texts or texts[0].startswith(("{", "[")):
        return " ".join(texts) or "true"
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _value(text: str) -> Any:
    """Return a value as Hydra's and argparse's command lines write it; text where it is no YAML."""
    if text.startswith("{"):
        text = re.sub(r"(?<=[{,])(\s*[\w'\"]+):(?=\S)", r"\1: ", text)
    try:
        value = load_yaml(text)
    except (*YAML_ERRORS, UserError):
        return text
    if isinstance(value, str) and value != text and value.startswith("["):
        return _value(value)  # quotes within quotes
    return "" if value is None and text.strip() != "null" else _number(value)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text."""
    if isinstance(value, list):
        return [_number(item) if isinstance(item, str) else item for item in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
