"""YAML as its specification has it, where PyYAML is lenient or wrong."""

import re
from collections.abc import Sequence
from typing import IO, Any

import yaml

from mindrlhf.errors import UserError

# What PyYAML's constructors of single types raise for text that is none, beside its own errors.
YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)
# YAML 1.1 reads 12:30 as 750; 1.2, and everybody who writes it, as text.
_BASE_60 = re.compile(r"^[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$")
_MERGE = "tag:yaml.org,2002:merge"
_INTEGER = "tag:yaml.org,2002:int"


def _first_wins(mappings: Sequence[yaml.MappingNode]) -> yaml.MappingNode:
    """Return one mapping for a list of merged ones, of which the first that has a key gives it (yaml.org/type/merge).

    PyYAML 6.0.4 has the last one give it.
    """
    pairs = {}
    for mapping in mappings:
        for key_node, value_node in mapping.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else id(key_node)
            pairs.setdefault(key, (key_node, value_node))
    first, last = mappings[0], mappings[-1]
    return yaml.MappingNode(first.tag, list(pairs.values()), first.start_mark, last.end_mark)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses keys written twice, of which plain YAML takes the last."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for place, (key_node, value_node) in enumerate(node.value):
            if key_node.tag != _MERGE:
                continue
            merged = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for part in merged:
                if isinstance(part, yaml.MappingNode):
                    self.flatten_mapping(part)
            if len(merged) > 1 and all(isinstance(part, yaml.MappingNode) for part in merged):
                node.value[place] = key_node, _first_wins(merged)
        super().flatten_mapping(node)

    def resolve(self, kind: type, value: str | None, implicit: tuple[bool, bool]) -> str:
        if kind is yaml.ScalarNode and implicit[0] and _BASE_60.match(value):
            return self.DEFAULT_SCALAR_TAG
        return super().resolve(kind, value, implicit)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        digits, line = node.value.lstrip("+-"), node.start_mark.line + 1
        if node.tag == _INTEGER and re.fullmatch("0[0-7]*[1-7][0-7]*", digits):
            old, new = int(digits, 8), int(digits)
            both = f"{old} in YAML 1.1 and {new} in 1.2"
            raise UserError(f"{digits} (line {line}) is {both}: write one of them")
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"a key is no text (line {key_node.start_mark.line + 1}): write 'key: value'")
            if key_node.value in seen:
                line = key_node.start_mark.line + 1
                raise UserError(f"key '{key_node.value}' is given twice (line {line}): keep one")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def load_yaml(source: str | IO[str]) -> Any:
    """Return what a text or file says.

    Raises:
        UserError: a key is given twice or is no text, or a number is another in YAML 1.1 than in 1.2.
        yaml.YAMLError: it is not YAML; for values of a type that they do not fit, also what its constructors raise.
    """
    return yaml.load(source, Loader=_StrictLoader)  # noqa: TID251
