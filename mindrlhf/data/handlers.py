"""Handlers: from the raw record of a known data set to an ``Example``.

A handler is a function of the record's fields. What the record lacks is a ``RecordError`` with the
reason, which the builder reports with file and line.
"""

import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindrlhf.data.truths import FROM_SOLUTION, RecordError, Truth, read_truth
from mindrlhf.errors import UserError

# Roles that chat templates know. Another is given to the template too, and counted.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_TOOL_ROLES = ("tool", "function", "ipython")
_CALLS, _THOUGHTS = ("tool_calls", "function_call"), ("reasoning_content", "thinking")
MAPPED_FIELDS = ("question", "answer", "response", "rejected", "verifier", "images", "source")
# What reward functions are given of every sample: a kept column cannot have such a name.
SAMPLE_NAMES = ("completion", "answer", "prompt", "finish_reason", "num_tokens", "completions", "episode_return")
SAMPLE_NAMES += ("turn_texts", "token_texts")
_USUAL_NAMES = {
    "QUESTION": ("question", "prompt", "problem", "instruction", "query", "input", "q"),
    "ANSWER": ("answer", "solution", "ground_truth", "response", "output", "target", "label", "a"),
}
# Where an image stands in a text, and under which keys data sets keep one.
IMAGE_MARK = "<image>"
# Turns of Anthropic's hh-rlhf, whose conversations are one text.
_HH_TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}
IMAGE_KEYS = ("bytes", "image", "image_url", "url", "path", "base64")


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    ``images`` are what the record says of each image (see ``pictures.sources``); ``content`` has as many ``IMAGE_MARK``
    where they stand. In a message without images such a mark is text like any other. ``content`` is None beside calls
    of tools alone. ``more`` is what else the message has, such as ``tool_calls`` and ``name``, as JSON values: it goes
    to the template as it is.
    """

    role: str
    content: str | None
    images: tuple[object, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


class Row(dict):
    """The columns of a record that remember which of them are read.

    Attributes:
        used: keys that were read; dotted ones of nested objects, of which the rest counts as unread.
        notes: how values were read where that was not as they stand; a build counts them.
    """

    def __init__(self, fields: Mapping):
        super().__init__(fields)
        self.used: set[str] = set()
        self.notes: list[str] = []

    def __getitem__(self, key: str) -> Any:
        self.used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict; the key counts as read."""
        self.used.add(key)
        return super().get(key, default)

    def unread(self) -> list[str]:
        """Return the columns that hold something and were not read, dotted where only a part of one was not."""
        return list(self._unread(dict(self), ""))

    def _unread(self, fields: Mapping, prefix: str) -> Iterator[str]:
        for name, value in fields.items():
            path = f"{prefix}{name}"
            if path in self.used or value is None or value in ("", [], {}):
                continue
            if isinstance(value, Mapping) and any(used.startswith(f"{path}.") for used in self.used):
                yield from self._unread(value, f"{path}.")
            else:
                yield path


@dataclass(frozen=True)
class Example:
    """One problem, ready for a template.

    ``messages`` ends with the user's turn. ``answer`` is what verifiers compare with ("" when the data has
    none); ``response`` is a worked solution for supervised training, or the preferred one of a pair, and
    ``rejected`` the other of the pair: None when the data has none. ``verifier`` names, separated by commas, the
    verifiers that this problem chooses; "" when it chooses none.
    """

    messages: tuple[Message, ...]
    answer: str
    response: str | None = None
    source_id: str = ""
    rejected: str | None = None
    verifier: str = ""

    @property
    def question(self) -> str:
        """Text of the last message."""
        return self.messages[-1].content or ""


Handler = Callable[[Mapping], Example]


def load_handler(name: str, key_map: Mapping[str, str] | None = None) -> Handler:
    """Return the handler called ``name``.

    Args:
        name: a key of ``HANDLERS``, or ``map_keys``.
        key_map: for ``map_keys``: which key of the record holds the question (required), the answer and
            the response (for pairs: the preferred one, and ``rejected``), and the verifiers it chooses
            (``verifier``), its images, and its ``source``. A dotted key (``reward_model.ground_truth``) reaches into
            nested records.

    Raises:
        UserError: unknown name, or a key map that is missing, wrong or not wanted.
    """
    key_map = dict(key_map or {})
    if name == "map_keys":
        return _map_keys_handler(key_map)
    if name not in HANDLERS:
        raise UserError(f"unknown handler {name!r}; choose from {', '.join(handler_names())}")
    if key_map:
        raise UserError(f"handler {name!r} takes no key map; use handler map_keys, or leave the map out")
    return HANDLERS[name]


def handler_names() -> tuple[str, ...]:
    """Return every name that ``load_handler`` takes."""
    return (*HANDLERS, "map_keys")


def parse_columns(text: str) -> dict[str, str]:
    """Return ``{"level": "level", "topic": "meta.topic"}``, name -> key of the record, for ``level,topic=meta.topic``.

    Without a name a column has the last part of its key.

    Raises:
        UserError: a name that is no Python name, or is taken, or stands twice.
    """
    columns: dict[str, str] = {}
    for item in (part.strip() for part in text.split(",") if text):
        given, _, key = item.rpartition("=")
        name = given or key.rpartition(".")[2]
        if not key or not name.isidentifier() or keyword.iskeyword(name):
            raise UserError(f"column {item!r} cannot be a parameter's name: give it one, as in level={key or 'KEY'}")
        if name in SAMPLE_NAMES:
            raise UserError(
                f"column {item!r}: reward functions know {name!r} as something else; give it another name, as in "
                f"own_{name}={key}"
            )
        if name in columns:
            raise UserError(f"two columns are named {name!r}: give one another name, as in own_{name}={key}")
        columns[name] = key
    return columns


def read_columns(fields: Mapping, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of a record as JSON values, by name; None where the record has no such key, or a null.

    Raises:
        RecordError: a value that JSON has no word for, such as a time or NaN.
    """
    found = {}
    for name, key in columns.items():
        found[name] = _json_value(_found(fields, key), key)
    return found


def with_source(example: Example, place: str) -> Example:
    """Return ``example`` with its ``source_id``: the place where it was read, after the source that it names."""
    return replace(example, source_id=f"{example.source_id}:{place}" if example.source_id else place)


def read_gsm8k(fields: Mapping) -> Example:
    """GSM8K: the final number stands after the last ``#### ``; the whole answer text is the response."""
    solution = _required(fields, "answer")
    truth = read_truth(solution, "answer")
    if isinstance(solution, str) and not truth.how and truth.text == solution.strip():
        raise RecordError("no '#### ' before a final answer in field 'answer'")
    if truth.how != FROM_SOLUTION:  # which is the form of this data set
        _note(fields, truth)
    response = solution if isinstance(solution, str) else None
    return Example(_question_messages(_required(fields, "question"), "question"), truth.text, response=response)


def read_verl(fields: Mapping) -> Example:
    """The form of verl, and DAPO-Math-17k's: a chat in ``prompt``, ``reward_model.ground_truth``, ``images`` if any."""
    if fields.get("videos"):
        raise RecordError("field 'videos' is not empty; of what is seen only images are supported")
    prompt = _required(fields, "prompt")
    if not isinstance(prompt, list):
        raise RecordError(f"field 'prompt' must be a list of messages, found {type(prompt).__name__}")
    images = _images(fields, "images") if "images" in fields else None
    return Example(_question_messages(prompt, "prompt", images), _answer(fields, "reward_model.ground_truth"))


def read_orca_pairs(fields: Mapping) -> Example:
    """Orca DPO pairs: texts in ``system`` (may be empty), ``question``, ``chosen`` and ``rejected``."""
    messages = _question_messages(_required(fields, "question"), "question")
    if fields.get("system"):
        messages = (Message("system", _text(fields, "system")), *messages)
    return Example(messages, "", response=_text(fields, "chosen"), rejected=_text(fields, "rejected"))


def read_trl(fields: Mapping) -> Example:
    """TRL's forms of worked answers and pairs, each value a text or messages.

    ``messages``, whose last is the response; ``prompt`` and ``completion``; ``chosen`` and ``rejected`` behind a
    ``prompt``, or as whole conversations: chats (UltraFeedback) or texts with ``Human:`` and ``Assistant:`` (hh-rlhf).
    """
    forms = (("chosen", "rejected"), ("completion",), ("messages",))
    names = next((names for names in forms if _found(fields, names[0]) is not None), None)
    if names is None:
        raise RecordError("none of 'messages', 'completion' beside 'prompt', and 'chosen' with 'rejected' is there")
    parts = [_conversation(fields, name) for name in names]
    if parts[0][0] != parts[-1][0]:
        raise RecordError("'chosen' and 'rejected' answer different conversations")
    return Example(parts[0][0], "", response=parts[0][1], rejected=parts[1][1] if len(parts) > 1 else None)


def _conversation(fields: Mapping, key: str) -> tuple[tuple[Message, ...], str]:
    """Return the messages before a response, and its text."""
    value, prompt = _required(fields, key), _found(fields, "prompt")
    if isinstance(value, str) and prompt is not None:
        return _question_messages(prompt, "prompt"), _text(fields, key)
    if isinstance(value, str):
        # "\n\nHuman: ...\n\nAssistant: ...": behind each name what it says.
        before, *turns = _HH_TURN.split(f"\n\n{value.strip()}")
        if before or not turns:
            raise RecordError(f"field {key!r} is a text with neither a 'prompt' beside it nor 'Human:' in it")
        value = [{"role": _HH_ROLES[name], "content": text} for name, text in zip(turns[::2], turns[1::2])]
    if isinstance(value, list) and len(value) == 1 and prompt is not None:
        return _question_messages(prompt, "prompt"), _reply(value[0], key)
    if not isinstance(value, list) or len(value) < 2:
        raise RecordError(f"field {key!r} must be a chat of two messages or more")
    reply = _reply(value[-1], key)
    return _question_messages(value[:-1], key), reply


def _map_keys_handler(key_map: Mapping[str, str]) -> Handler:
    wrong = [name for name in key_map if name not in MAPPED_FIELDS]
    if wrong:
        raise UserError(f"unknown field {wrong[0]!r} in the key map; it takes {', '.join(MAPPED_FIELDS)}")
    if not key_map.get("question"):
        raise UserError("handler map_keys needs to know the question's key: --map question=KEY,answer=KEY")

    def read_mapped(fields: Mapping) -> Example:
        question_key = key_map["question"]
        images = _images(fields, key_map["images"]) if "images" in key_map else None
        return Example(
            messages=_question_messages(_required(fields, question_key), question_key, images),
            answer=_answer(fields, key_map["answer"]) if "answer" in key_map else "",
            response=_text(fields, key_map["response"]) if "response" in key_map else None,
            rejected=_text(fields, key_map["rejected"]) if "rejected" in key_map else None,
            verifier=_verifier(fields, key_map["verifier"]) if "verifier" in key_map else "",
            source_id=_source(fields, key_map["source"]) if "source" in key_map else "",
        )

    return read_mapped


HANDLERS: dict[str, Handler] = {
    "gsm8k": read_gsm8k,
    "deepscaler": _map_keys_handler({"question": "problem", "answer": "answer"}),
    "dapo_math_17k": read_verl,
    "orca_pairs": read_orca_pairs,
    "ultrafeedback": read_trl,
    "hh_rlhf": read_trl,
    "trl": read_trl,
    "geo3k": _map_keys_handler({"question": "problem", "answer": "answer", "images": "images"}),
    "verl": read_verl,
}


def _required(fields: Mapping, key: str) -> object:
    """Return the value at ``key``: the literal key when present, else the path that its dots spell."""
    if isinstance(fields, Row):
        fields.used.add(key)
        fields = dict(fields)  # looking on the way at what holds the value is no reading of all of it
    if key in fields:
        value = fields[key]
    else:
        value = fields
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise RecordError(f"no field {key!r}; {_mapping_for(fields)}")
            value = value[part]
    if value is None:
        raise RecordError(f"field {key!r} is null")
    return value


def _mapping_for(fields: Mapping) -> str:
    """Return the fields of a record, and the options that map them, with a guess at which is which."""
    guesses = [next((key for key in fields if key.lower() in names), usual) for usual, names in _USUAL_NAMES.items()]
    return (
        f"the record has {', '.join(map(repr, fields)) or 'none'}; name them as in --handler map_keys --map "
        f"question={guesses[0]},answer={guesses[1]}"
    )


def _found(fields: Mapping, key: str) -> object:
    """Return the value at ``key``; None where it is absent or null."""
    try:
        return _required(fields, key)
    except RecordError:
        return None


def _text(fields: Mapping, key: str) -> str:
    value = _required(fields, key)
    if not isinstance(value, str):
        raise RecordError(f"field {key!r} must be text, found {type(value).__name__}")
    if not value.strip():
        raise RecordError(f"field {key!r} is empty")
    return value


def _source(fields: Mapping, key: str) -> str:
    source = _text(fields, key)
    if ":" in source:
        raise RecordError(f"field {key!r} is {source!r}: the name of a source has no colon")
    return source


def _verifier(fields: Mapping, key: str) -> str:
    value = _required(fields, key)
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecordError(f"field {key!r} must name verifiers, as text with commas between or as a list")
    names = [name.strip() for name in names if name.strip()]
    for name in names:
        if not name.isidentifier():
            raise RecordError(f"field {key!r} holds {name[:40]!r}, which is no verifier's name")
    return ",".join(names)


def _answer(fields: Mapping, key: str) -> str:
    """Return the truth at a key (see ``truths``).

    ``test+entry_point`` is the object of these two fields: the tests of HumanEval lie in several.
    """
    if "+" in key and key not in fields:
        return json.dumps({part: _required(fields, part) for part in key.split("+")}, ensure_ascii=False)
    truth = read_truth(_required(fields, key), key)
    _note(fields, truth)
    return truth.text


def _note(fields: Mapping, truth: Truth) -> None:
    if truth.how and isinstance(fields, Row):
        fields.notes.append(f"answers {truth.how}")


def _question_messages(value: object, key: str, images: Sequence[object] | None = None) -> tuple[Message, ...]:
    """Return a question, given as text or as a chat, as messages; ``images`` None means that the record has no place
    for any but in the messages."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RecordError(f"field {key!r} must be text or a list of messages, found {type(value).__name__}")
    if not value:
        raise RecordError(f"field {key!r} holds no messages")
    messages = tuple(_message(item, key) for item in value)
    if messages[-1].role not in ("user", *_TOOL_ROLES):
        raise RecordError(
            f"the last message of field {key!r} is from {messages[-1].role!r}, not from 'user': move its text "
            "to a field that --map answer=FIELD names, or build --task sft by --handler trl"
        )
    return _with_images(messages, key, images)


def _images(fields: Mapping, key: str) -> Sequence[object]:
    """Return the images at ``key``, one or several; none where it is absent or null, as in rows of text alone."""
    value = _found(fields, key)
    if value is None:
        return ()
    return value if isinstance(value, list) else [value]


def _with_images(messages: tuple[Message, ...], key: str, images: Sequence[object] | None) -> tuple[Message, ...]:
    """Give each mark its image, in order. Where the texts have no marks, all images stand before the question."""
    if images is not None:
        messages = tuple(
            message if message.images else replace(message, images=(None,) * (message.content or "").count(IMAGE_MARK))
            for message in messages
        )
    given = list(images or ())
    num_open = sum(message.images.count(None) for message in messages)
    if not num_open and given:
        last = messages[-1]
        marked = replace(last, content=IMAGE_MARK * len(given) + (last.content or ""), images=(*given, *last.images))
        return (*messages[:-1], marked)
    if num_open != len(given):
        raise RecordError(f"the text of field {key!r} has {num_open} places for images, the record has {len(given)}")
    remaining = iter(given)
    return tuple(
        replace(message, images=tuple(next(remaining) if image is None else image for image in message.images))
        for message in messages
    )


def _reply(item: object, key: str) -> str:
    """Return the text of the assistant's last message."""
    reply = _message(item, key)
    if reply.role != "assistant":
        raise RecordError(f"the last message of field {key!r} is from {reply.role!r}, not from 'assistant'")
    if reply.images:
        raise RecordError(f"the last message of field {key!r} holds an image, which a response cannot")
    for name in (*_CALLS, *_THOUGHTS):
        if reply.more.get(name):
            raise RecordError(f"the last message of field {key!r} has {name!r}: a response is its text alone")
    return reply.content


def _message(item: object, key: str) -> Message:
    fields = item if isinstance(item, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    images: tuple[object, ...] = ()
    if isinstance(content, list):
        content, images = _join_parts(content, key)
    if not isinstance(role, str) or not role.strip():
        raise RecordError(f"a message of field {key!r} has role {role!r}; expected one of {', '.join(ROLES)}")
    # Tables have every key in every row, with nulls.
    more = {name: value for name, value in fields.items() if name not in ("role", "content") and value is not None}
    may_be_empty = role in _TOOL_ROLES or role == "assistant" and any(more.get(name) for name in _CALLS)
    if content is not None and not isinstance(content, str) or not (may_be_empty or (content or "").strip()):
        raise RecordError(f"a message of field {key!r} has no text in 'content'")
    return Message(role, content, images, _json_value(more, key))


def _json_value(value: Any, key: str) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"field {key!r} cannot be kept, as it is no JSON value ({error})") from error


def _join_parts(parts: Sequence[object], key: str) -> tuple[str, tuple[object, ...]]:
    """Return the text of a message's parts, a mark in place of each image, and the images: None where a part says only
    that one stands there."""
    texts, images = [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image", "image_url"):
            texts.append(IMAGE_MARK)
            images.append(next((part[name] for name in IMAGE_KEYS if part.get(name)), None))
        else:
            raise RecordError(f"a message of field {key!r} has a part of type {kind!r}; supported are text and image")
    text = "".join(texts)
    if images and text.count(IMAGE_MARK) != len(images):
        raise RecordError(f"a message of field {key!r} writes {IMAGE_MARK} out beside parts that are images")
    return text, tuple(images)
