"""Parts of a record that do not stand in its prompt: turns, their fields, tools, thoughts."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mindrlhf.data.handlers import IMAGE_MARK, Example, Row
from mindrlhf.data.templates import Options, PromptTemplate

# What else a record may give a template, as apply_chat_template takes it: lists of objects, or JSON of these.
ROW_VARIABLES = ("tools", "documents")
_MIN_CHARS = 12  # of a line that is not in a prompt by chance
_END_OF_THOUGHTS = "</think>"


def row_variables(fields: Row, template: PromptTemplate) -> dict[str, list]:
    """Return what a record has of ``ROW_VARIABLES`` that the template reads and nothing else has read; what is no list
    of objects stays unread."""
    values = {}
    for name in ROW_VARIABLES:
        value = None if name in fields.used or name not in template.variables else dict(fields).get(name)
        try:
            value = json.loads(value) if isinstance(value, str) else json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            continue
        if value and isinstance(value, list) and all(isinstance(item, dict) for item in value):
            values[name] = value
            fields.used.add(name)
    return values


def left_out(template: PromptTemplate, example: Example, options: Options, prompt: str) -> list[str]:
    """Return the names of the parts of which a prompt lacks the longest line; short ones cannot be told."""
    names = [f"chat_template_kwargs.{name}" for name in options if name not in template.variables]
    names += [name for name, value in _parts(example, options, template) if _is_missing(value, prompt)]
    return list(dict.fromkeys(names))


def _parts(example: Example, options: Options, template: PromptTemplate) -> Iterator[tuple[str, Any]]:
    for message in example.messages:
        thoughts, _, answer = (message.content or "").rpartition(_END_OF_THOUGHTS)
        yield f"messages from {message.role!r}", answer
        yield "thoughts in earlier turns", thoughts.replace("<think>", "")
        for name, value in message.more.items():
            yield f"{name!r} of messages", value
    for name in ROW_VARIABLES:
        if name in template.variables:
            yield name, options.get(name)


def _is_missing(value: Any, prompt: str) -> bool:
    lines = [line.strip() for text in _texts(value) for line in text.splitlines()]
    longest = max(lines, key=len, default="")
    spellings = (longest, json.dumps(longest)[1:-1], json.dumps(longest, ensure_ascii=False)[1:-1])
    return len(longest) >= _MIN_CHARS and not any(spelling in prompt for spelling in spellings)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value that a template would write."""
    if isinstance(value, str):
        yield from value.split(IMAGE_MARK)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
