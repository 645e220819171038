"""What a chat template leaves out of a record: turns, their fields, tools, thoughts.

A piece counts as rendered if its text stands in the prompt. Where it does not, or is too short to tell, the prompt is
rendered again without the piece: if it comes out the same, the template has no place for it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindrlhf.data.handlers import IMAGE_MARK, Example, Message, RecordError, Row
from mindrlhf.data.templates import Options, PromptTemplate

# What else a record may give a template, as apply_chat_template takes it: lists of objects, or JSON of these.
ROW_VARIABLES = ("tools", "documents")
_MIN_CHARS = 12  # of a text that is not in a prompt by chance
_MARK = "MINDRLHF-TURN"
_END_OF_THOUGHTS = "</think>"


@dataclass(frozen=True)
class _Piece:
    """A part of a record that may be missing in its prompt, and the record without it."""

    name: str
    texts: tuple[str, ...]
    example: Example
    options: Options


def row_variables(fields: Row, template: PromptTemplate) -> dict[str, list]:
    """Return what a record has of ``ROW_VARIABLES`` that the template reads and nothing else has read; what is no list
    of objects stays unread."""
    found = {}
    for name in ROW_VARIABLES:
        value = None if name in fields.used or name not in template.variables else dict(fields).get(name)
        try:
            value = json.loads(value) if isinstance(value, str) else json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            continue
        if value and isinstance(value, list) and all(isinstance(one, dict) for one in value):
            found[name] = value
            fields.used.add(name)
    return found


def left_out(
    template: PromptTemplate, records: Sequence[tuple[Example, Options, str | RecordError]]
) -> list[tuple[str, ...]]:
    """Return for each record what its prompt lacks, by name.

    Args:
        template: that has rendered them.
        records: examples, their own variables, and their prompts; those without one lack nothing.
    """
    suspects: list[tuple[int, _Piece]] = []
    missing: list[list[str]] = [[] for _ in records]
    for index, (example, options, prompt) in enumerate(records):
        if isinstance(prompt, RecordError):
            continue
        missing[index] += [f"chat_template_kwargs.{name}" for name in options if name not in template.variables]
        missing[index] += _lost_thoughts(example, prompt)
        suspects += [(index, piece) for piece in _pieces(example, options, template) if not _is_in(piece.texts, prompt)]
    again = template.render_all([(piece.example, piece.options) for _, piece in suspects])
    for (index, piece), text in zip(suspects, again):
        if text == records[index][2]:
            missing[index].append(piece.name)
    return [tuple(dict.fromkeys(names)) for names in missing]


def _pieces(example: Example, options: Options, template: PromptTemplate) -> Iterator[_Piece]:
    """Yield the parts that a template may leave out: all but the text of the question, when it comes last."""
    messages = example.messages
    for place, message in enumerate(messages):
        is_question = place == len(messages) - 1 and message.role == "user"
        if message.content and not is_question:
            other = replace(message, content=_MARK + IMAGE_MARK * len(message.images))
            yield _piece(f"messages from {message.role!r}", message.content, example, place, other, options)
        for name, value in message.more.items():
            rest = {key: one for key, one in message.more.items() if key != name}
            yield _piece(f"{name!r} of messages", value, example, place, replace(message, more=rest), options)
    for name in ROW_VARIABLES:
        if options.get(name) and name in template.variables:
            rest = {key: one for key, one in options.items() if key != name}
            yield _Piece(name, tuple(_texts(options[name])), example, rest)


def _piece(name: str, value: Any, example: Example, place: int, other: Message, options: Options) -> _Piece:
    messages = (*example.messages[:place], other, *example.messages[place + 1 :])
    return _Piece(name, tuple(_texts(value)), replace(example, messages=messages), options)


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value that a template would write."""
    if isinstance(value, str):
        yield from value.split(IMAGE_MARK)
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield name
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _is_in(texts: Sequence[str], prompt: str) -> bool:
    """Whether the longest of the texts is long enough to tell, and in the prompt."""
    longest = max((text.strip() for text in texts), key=len, default="")
    return len(longest) >= _MIN_CHARS and (longest in prompt or json.dumps(longest)[1:-1] in prompt)


def _lost_thoughts(example: Example, prompt: str) -> list[str]:
    """Name the thoughts in earlier turns, which templates of reasoning models leave out."""
    for message in example.messages:
        if message.role == "assistant" and message.content and _END_OF_THOUGHTS in message.content:
            thoughts = message.content.partition(_END_OF_THOUGHTS)[0].replace("<think>", "").strip()
            if thoughts and thoughts not in prompt:
                return ["thoughts in earlier turns"]
    return []
