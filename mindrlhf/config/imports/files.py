"""What a foreign file gives: flat keys with their values, and those whose value only the shell knows."""

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.config.imports.interpolations import resolve
from mindrlhf.config.imports.rules import only_shell_knows
from mindrlhf.config.imports.shell import commands_of
from mindrlhf.config.imports.shell_syntax import SyntaxMistakeError
from mindrlhf.config.imports.shell_values import unknown_part
from mindrlhf.config.parse import MAX_FILE_BYTES
from mindrlhf.errors import UserError
from mindrlhf.system.strict_yaml import load_yaml

_SHELL = (".sh", ".bash", ".slurm", ".sbatch")
_OVERRIDE = re.compile(r"(?:\+{0,2}|~)([A-Za-z_][\w@]*(?:[./][\w-]+)+)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_PROCESSES = ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus")
_MAX_NESTING, _MAX_KEYS = 30, 20_000
# What PyYAML raises beside its own errors for text that is none.
_YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError, ArithmeticError)


@dataclass
class Reading:
    """Flat keys.

    Attributes:
        given: what the file says.
        unknown: keys whose value only the shell or the program knows, and a text that says so.
        remarks: further things that the user has to do, by what they are about.
        num_processes: ranks that a launcher in the file starts on a node; 0 where none says so.
    """

    given: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    num_processes: int = 0

    def put(self, name: str, text: str) -> None:
        """Take the text of a value; the last one counts."""
        self.given.pop(name, None)
        self.unknown.pop(name, None)
        if part := unknown_part(text):
            self.unknown[name] = only_shell_knows(part)
        elif isinstance(value := _value(text), dict) and value:
            self.given |= {f"{name}.{key}": one for key, one in _flatten(value)}
        else:
            self.given[name] = value


def read(path: Path, defaults: Mapping[str, Any], is_known: Callable[[str], bool], of_program: str = "") -> Reading:
    """Read a YAML or JSON file, a shell script or a Python program.

    Args:
        defaults: what the stack says where the file does not; interpolations find it.
        is_known: whether the stack has a key: of several commands of a script the one with most of them counts.
        of_program: the class whose arguments a Python program gives; empty where the stack reads none.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UserError(f"{path} has {size} bytes, and a config at most {MAX_FILE_BYTES}: is it one?")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())})") from None
    if path.suffix == ".py":
        return _of_program(path, text, of_program)
    if path.suffix in _SHELL or re.match(r"#!.*sh\b", text):
        return _of_script(path, text, is_known)
    return _of_yaml(path, text, defaults)


def _of_yaml(path: Path, text: str, defaults: Mapping[str, Any]) -> Reading:
    try:
        content = load_yaml(text)
        flat = dict(itertools.islice(_flatten(content), _MAX_KEYS)) if isinstance(content, dict) else None
    except (*_YAML_ERRORS, UserError) as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if flat is None:
        raise UserError(f"{path} is no config: it has no keys")
    reading = Reading()
    for name, value in flat.items():
        value, unknown = resolve(name, value, {**defaults, **flat})
        if unknown:
            reading.unknown[name] = only_shell_knows(unknown)
        else:
            reading.given[name] = value
    return reading


def _of_script(path: Path, text: str, is_known: Callable[[str], bool]) -> Reading:
    """The words ``key.name=value`` of a script, and the flags of the command that has most flags of the stack."""
    try:
        commands = commands_of(text)
    except SyntaxMistakeError as error:
        raise UserError(f"{path} is no shell script that can be followed: {error}") from None
    reading = Reading()
    for words in commands:
        for word in words:
            if match := _OVERRIDE.fullmatch(word):
                reading.put(match[1].replace("/", "."), match[2])
            elif _is_variable(word) and any(map(_OVERRIDE.fullmatch, words)):
                reading.remarks[word[1:-1]] = f"{only_shell_knows('its words')}: further keys?"
    flags = [_flags(words) for words in commands]
    counts = [sum(is_known(name) for name, _ in found.pairs) for found in flags]
    if counts and max(counts):
        best = flags[counts.index(max(counts))]
        for name, value in best.pairs:
            reading.put(name, value)
        reading.remarks |= best.remarks
        reading.num_processes = best.num_processes
    flat = {**reading.given}
    for name, value in flat.items():
        reading.given[name], unknown = resolve(name, value, flat)
        if unknown:
            del reading.given[name]
            reading.unknown[name] = only_shell_knows(unknown)
    return reading


@dataclass
class _Flags:
    pairs: list[tuple[str, str]] = field(default_factory=list)
    remarks: dict[str, str] = field(default_factory=dict)
    num_processes: int = 0


def _flags(words: list[str]) -> _Flags:
    """Return ``--name value``, ``--name=value`` and switches behind the program, ``-`` in names as ``_``."""
    start = len(words) - words[::-1].index("--") if "--" in words else 0
    for at, word in enumerate(words[start:], start):
        if word.endswith(".py") or at and words[at - 1] in ("-m", "--module") or words[:1] == ["trl"] and at == 1:
            start = at + 1
            break
    found, values = _Flags(), []
    for word in words[start:]:
        if match := _FLAG.fullmatch(word):
            values = [] if match[2] is None else [match[2]]
            found.pairs.append((match[1].replace("-", "_"), values))
        elif found.pairs and not (_is_variable(word) and (values or word.endswith(f"[@]}}{word[-1]}"))):
            values.append(word)
        elif _is_variable(word):
            found.remarks[unknown_part(word)] = f"{only_shell_knows('its words')}: further flags?"
    found.pairs = [(name, _joined(values)) for name, values in found.pairs]
    for at, word in enumerate(words[:start]):
        name, _, value = word.lstrip("-").partition("=")
        value = value or "".join(words[at + 1 : at + 2])
        if word.startswith("--") and name in _PROCESSES and value.isdecimal() and len(value) < 7:
            found.num_processes = int(value)
    return found


def _is_variable(word: str) -> bool:
    """Whether a word is one that only the shell knows, from its first character to the last."""
    part = unknown_part(word) or ""
    return part.startswith("$") and part == word[1:-1]


def _joined(values: list[str]) -> str:
    """The text of a flag's values: none is a switch, several are a list."""
    values = [value for value in values if value] or values[:1]
    if not values:
        return "true"
    if values[0].startswith(("{", "[")):
        return " ".join(values)
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def _of_program(path: Path, text: str, of_class: str) -> Reading:
    """The arguments that a program gives to a class: literals, and names that it sets to literals before."""
    if not of_class:
        raise UserError(f"{path} is a program: give the YAML file or the shell script that starts it")
    try:
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path} is no Python program: {' '.join(str(error).split())}") from None
    names = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    reading = Reading()
    if not any(_name_of(call) == of_class for call in calls):
        raise UserError(f"{path} makes no {of_class}: give the YAML file or the shell script that starts it")
    for call in calls:
        name = _name_of(call)
        prefix = {of_class: "", "LoraConfig": "lora_"}.get(name)
        for argument in call.keywords if prefix is not None else ():
            key = "" if argument.arg is None else _key_of(prefix, argument.arg)
            value = argument.value
            value = names.get(value.id, value) if isinstance(value, ast.Name) else value
            if argument.arg is None:
                reading.remarks[ast.unparse(value)[:60]] = "only the program knows its arguments"
                continue
            try:
                reading.given[key] = ast.literal_eval(value)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                reading.unknown[key] = f"only the program knows {ast.unparse(value)[:60]}"
        if name == "LoraConfig":
            reading.given["use_peft"] = True
    return reading


def _key_of(prefix: str, argument: str) -> str:
    """`LoraConfig` has `r` and `use_rslora`, a command line `lora_r` and `use_rslora`."""
    return argument if argument.startswith((prefix or " ", "use_")) else prefix + argument


def _name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _value(text: str) -> Any:
    """Return a value as Hydra's and argparse's command lines write it; text where it is no YAML."""
    try:
        value = load_yaml(re.sub(r"(?<=[{,])(\s*[\w'\"]+):(?=\S)", r"\1: ", text) if text.startswith("{") else text)
        if isinstance(value, str) and value != text and value.startswith("["):
            return _value(value)  # quotes within quotes
        return "" if value is None and text.strip() != "null" else _number(value)
    except (*_YAML_ERRORS, UserError):
        return text


def _flatten(content: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_NESTING:
        raise ValueError(f"more than {_MAX_NESTING} mappings within each other")
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", _number(value)


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-6 as text."""
    if isinstance(value, list):
        return [_number(one) if isinstance(one, str) else one for one in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value
