"""YAML as its specification has it, where PyYAML is lenient or wrong."""

import re
from collections.abc import Sequence
from typing import IO, Any

import yaml

from mindrlhf.errors import UserError

# What PyYAML's constructors of single types raise for text that is none, beside its own errors.
YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)
MAX_MERGED_KEYS = 10_000
MAX_NUMBER_CHARS = 4300  # as Python's int
MAX_DEPTH, MAX_VALUES = 50, 200_000
# YAML 1.1 reads 12:30 as 750; 1.2, and everybody who writes it, as text.
_BASE_60 = re.compile(r"^[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$")
_MERGE = "tag:yaml.org,2002:merge"
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


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
    """SafeLoader that refuses keys written twice, of which plain YAML takes the last, and merges that multiply."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        # A few lines of merges of merges stand for more keys than fit any memory: counted before they are written out.
        num_keys = len(node.value)
        for place, (key_node, value_node) in enumerate(node.value):
            if key_node.tag != _MERGE:
                continue
            merged = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for part in merged:
                if isinstance(part, yaml.MappingNode):
                    self.flatten_mapping(part)
                    num_keys += len(part.value)
                if num_keys > MAX_MERGED_KEYS:
                    line = key_node.start_mark.line + 1
                    raise UserError(f"merges ('<<') make over {MAX_MERGED_KEYS} keys (line {line}): write them out")
            if len(merged) > 1 and all(isinstance(part, yaml.MappingNode) for part in merged):
                node.value[place] = key_node, _first_wins(merged)
        super().flatten_mapping(node)

    depth = 0

    def __init__(self, stream: str | IO[str]) -> None:
        super().__init__(stream)
        self.num_values: dict[int, int] = {}  # by node, which its parent or its anchor keeps

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        # PyYAML looks through all open levels at each token.
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UserError(f"it is nested more than {MAX_DEPTH} levels deep (line {self.line + 1})")
        line, is_alias = self.line + 1, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self.depth -= 1
        if id(node) not in self.num_values:
            if is_alias:
                raise UserError(f"an alias stands within what it names (line {line}): write it out")
            self.num_values[id(node)] = self._count(node, line)
        return node

    def _count(self, node: yaml.Node, line: int) -> int:
        """Return how many values a node stands for: an alias stands for all that it names."""
        if isinstance(node, yaml.ScalarNode):
            return 1
        parts = node.value
        if isinstance(node, yaml.MappingNode):  # merges are counted when they are written out
            parts = [part for pair in parts if pair[0].tag != _MERGE for part in pair]
        number = 1 + sum(self.num_values[id(part)] for part in parts)
        if number > MAX_VALUES:
            raise UserError(f"aliases ('*') stand for over {MAX_VALUES} values (line {line}): write them out")
        return number

    def resolve(self, kind: type, value: str | None, implicit: tuple[bool, bool]) -> str:
        if kind is yaml.ScalarNode and implicit[0] and _BASE_60.match(value):
            return self.DEFAULT_SCALAR_TAG
        return super().resolve(kind, value, implicit)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        digits, line = node.value.lstrip("+-"), node.start_mark.line + 1
        if node.tag == _NUMBER_TAGS[0] and re.fullmatch("0[0-7]*[1-7][0-7]*", digits):
            old, new = int(digits, 8), int(digits)
            both = f"{old} in YAML 1.1 and {new} in 1.2"
            raise UserError(f"{digits} (line {line}) is {both}: write one of them")
        # Arithmetic on digits takes the square of their number.
        if node.tag in _NUMBER_TAGS and len(node.value) > MAX_NUMBER_CHARS:
            raise UserError(f"a number has {len(node.value)} characters (line {line}): shorten it")
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
        UserError: a key is given twice or is no text, merges make over ``MAX_MERGED_KEYS`` keys, or a number has more
            digits than anybody means.
        yaml.YAMLError: it is not YAML; for values of a type that they do not fit, also what its constructors raise.
    """
    return yaml.load(source, Loader=_StrictLoader)
