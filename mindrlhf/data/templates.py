"""Templates: from an ``Example`` to the text of the prompt. All are Jinja, rendered by transformers in its sandbox."""

import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mindrlhf.data.calls import render_calls
from mindrlhf.data.handlers import IMAGE_MARK, Example, Message, RecordError
from mindrlhf.data.pictures.processor import IMAGE_FRAME, IMAGE_TOKEN
from mindrlhf.data.readers import limited_memory
from mindrlhf.data.tokenizers import DEFAULT_TEMPLATE, Tokenizer
from mindrlhf.errors import UserError

if TYPE_CHECKING:
    from mindrlhf.data.mindrecord import PromptFileHeader

CHAT = "chat"
BUILT_IN = (CHAT, "plain", "r1")

PLAIN_SOURCE = "{{ question + '\\n' }}"

# The output format is that of DeepSeek-R1-Zero's template (arXiv:2501.12948, table 1).
R1_SYSTEM = (
    "Work the problem out before you answer it. Put your reasoning between <think> and </think>, and after it "
    "nothing but the final answer between <answer> and </answer>: "
    "<think>your reasoning</think><answer>your final answer</answer>"
)
R1_PLAIN_SOURCE = (
    "{% for message in messages %}"
    "{{ message.content if message.role == 'system' else message.role | capitalize + ': ' + message.content }}"
    "{{ '\\n\\n' }}"
    "{% endfor %}"
    "{{ 'Assistant:\\n' }}"
)

# What a record can set for itself, as in TRL's data sets: the variables of its template.
OPTIONS_COLUMN = "chat_template_kwargs"
CLOCK = "strftime_now"
# What a template that asks for today's date is told: prompts must repeat. Templates of Llama 3 fall back to this date
# where there is no clock.
DATE = "2024-07-26"
# Set here, or by transformers' function.
_RESERVED = frozenset({"messages", "question", "add_generation_prompt", "raise_exception", "conversations"})
_RESERVED |= {"chat_template", "continue_final_message", "return_assistant_tokens_mask"}
# What a template of a question may read, even where it has no value.
_QUESTION_VARIABLES = frozenset({"question", "add_generation_prompt", "bos_token", "eos_token", CLOCK})
_QUESTION_VARIABLES |= {"tools", "documents", "enable_thinking", "add_vision_id"}
# Stands for a turn that is looked for in what a template makes of it.
TURN_MARK = "MINDRLHF-TURN"
_MAX_REASON_CHARS = 500
_MAX_RENDER_S = 30.0

Options = Mapping[str, Any]


class PromptTemplate:
    """A template bound to a tokenizer's special tokens.

    Attributes:
        name: ``chat``, ``plain``, ``r1``, the tokenizer's name for one of its templates, or a file name.
        source: Jinja.
        options: values of variables of the template, for all records.
        sha256: hash (hex) of the Jinja source, the system prompt and the options.
        ends_turns: the chat end token closes each turn, so it also closes the response.
        end_token: the token that closes each turn; None of a tokenizer without any.
        takes_messages: it renders a chat, and not only one question.
        kept_source: the source of a chat template that cannot be found again by its name; "" of others.
    """

    def __init__(
        self, name: str, source: str, system: str | None, tokenizer: Tokenizer, options: Options | None = None
    ):
        self.name = name
        self.source = source
        self.options = dict(options or {})
        hashed = [source, system, self.options] if self.options else [source, system]
        self.sha256 = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()
        self.ends_turns = tokenizer.chat_end_token is not None and tokenizer.chat_end_token in source
        self.end_token = tokenizer.chat_end_token if self.ends_turns else tokenizer.eos_token
        self._system = system
        self._special_tokens = tokenizer.special_tokens
        try:
            self.variables = _find_variables(source)
        except Exception as error:  # compilers can raise anything
            raise UserError(f"template {name!r} cannot be compiled: {_reason(error)}") from error
        self.takes_messages = "messages" in self.variables
        self.kept_source = source if self.takes_messages and not _is_named(name, tokenizer) else ""
        self._begin = "" if self.takes_messages else tokenizer.bos_prefix
        self._check(system)
        self._has_parts = False
        self._has_parts = self.takes_messages and self._needs_parts()

    def _check(self, system: str | None) -> None:
        for option in self.options:
            if option not in self.variables:
                read = ", ".join(sorted(self.variables - _RESERVED)) or "none that an option gives"
                raise UserError(f"template {self.name!r} reads no variable {option!r}; it reads {read}")
        if self.takes_messages:
            return
        if "question" not in self.variables:
            raise UserError(f"template {self.name!r} uses neither 'messages' nor 'question', so all prompts are equal")
        if system is not None:
            raise UserError(f"template {self.name!r} has no place for a system prompt; leave --system out")
        # Jinja renders an unknown name as nothing, so a slip of the pen would build wrong prompts in silence. Chat
        # templates of published models do read names that are not there.
        known = {*_QUESTION_VARIABLES, *self._special_tokens, *self.options}
        for name in sorted(self.variables - known):
            raise UserError(f"template {self.name!r} uses unknown variable {name!r}; it has {', '.join(sorted(known))}")

    def _needs_parts(self) -> bool:
        """Tell templates of models with vision that leave out a text that is not a list of parts."""
        parts = [{"type": "text", "text": TURN_MARK}]
        as_text, as_parts = (self._shows([{"role": "user", "content": content}]) for content in (TURN_MARK, parts))
        return as_parts and not as_text

    def _shows(self, chat: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return TURN_MARK in self.render_chat(chat)
        except RecordError:
            return False

    def render(self, example: Example, options: Options | None = None) -> str:
        """Return the prompt's text. A system prompt of this template takes the place of the record's own.

        A plain question gets the text that the tokenizer puts before a text, once; chat templates write theirs.

        Args:
            options: values of variables for this example, before those of the template.

        Raises:
            RecordError: the template refuses the messages, or has no place for some of them.
        """
        messages = example.messages
        if self._system is not None:
            messages = (Message("system", self._system), *(m for m in messages if m.role != "system"))
        if not self.takes_messages and len(messages) > 1:
            raise RecordError(f"template {self.name!r} takes one question, the record has {len(messages)} messages")
        options = dict(options or {})
        if "question" in self.variables:
            options["question"] = _question(example.messages[-1])
        text = self.render_messages(messages, options)
        while self._begin and text.startswith(self._begin):  # written by the template, or by the record itself
            text = text.removeprefix(self._begin)
        return self._begin + text

    def render_messages(self, messages: Sequence[Message | Mapping[str, Any]], options: Options | None = None) -> str:
        """Return the text of a chat, ready for the next turn, with its calls in a form that the template takes.

        Args:
            messages: or what ``apply_chat_template`` takes in their place.
            options: values of variables beside those of the template.

        Raises:
            RecordError: the template refuses the messages.
        """
        empty = [{"type": "text", "text": ""}] if self._has_parts else ""
        chat = [self._as_chat(message) for message in messages]
        return render_calls(lambda form: self.render_chat(form, options), chat, empty)

    def render_chat(self, chat: Sequence[Message | Mapping[str, Any]], options: Options | None = None) -> str:
        """Return the text of a chat as it stands; see ``render_messages``."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self._special_tokens, CLOCK: DATE, **self.options, **(options or {})}
        variables[CLOCK] = datetime.fromisoformat(variables[CLOCK]).strftime
        try:
            with _limited_time():
                (text,), _ = render_jinja_template(
                    [[self._as_chat(message) for message in chat]],
                    chat_template=self.source,
                    **{"add_generation_prompt": True, **variables},
                )
        except Exception as error:  # expressions of a template can raise anything
            raise RecordError(f"template {self.name!r} failed: {_reason(error)}") from error
        if not text:
            raise RecordError(f"template {self.name!r} gives an empty prompt")
        return text

    def _as_chat(self, message: Message | Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as chat templates know it: with images, and for some always, a list of parts."""
        if isinstance(message, Mapping):
            return dict(message)
        if message.content is None or not (message.images or self._has_parts):
            return {**message.more, "role": message.role, "content": message.content}
        texts = message.content.split(IMAGE_MARK) if message.images else [message.content]
        parts: list[dict[str, str]] = []
        for number, text in enumerate(texts):
            parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
        return {**message.more, "role": message.role, "content": parts}


@contextmanager
def _limited_time() -> Iterator[None]:
    """End a template that this thread renders without end, such as one of loops within loops."""
    end_s, previous = time.monotonic() + _MAX_RENDER_S, sys.gettrace()

    def trace(frame: FrameType, _event: str, _argument: object):
        if frame.f_code.co_filename != "<template>":
            return None
        if time.monotonic() > end_s:
            raise TimeoutError(f"it takes longer than {_MAX_RENDER_S:.0f} s")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)


@lru_cache
def _find_variables(source: str) -> frozenset[str]:
    """Compile a template and return the names that it may read, also those that it sets in one branch only."""
    # Without PyTorch, which nothing here needs, transformers says so when it is imported.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import jinja2.meta

    operators = [value for _, kind, value in jinja2.Environment().lex(source) if kind == "operator"]
    if any(value == "**" and before not in "(," for before, value in itertools.pairwise(operators)):
        raise ValueError("powers, of which some take hours, are not supported")
    from transformers.utils import chat_template_utils

    with limited_memory():  # constants are computed
        environment = chat_template_utils._compile_jinja_template(source).environment
    environment.filters["random"] = lambda _context, choices: random.Random(0).choice(choices)  # repeats
    tree = environment.parse(source)
    clock = {CLOCK} & {node.name for node in tree.find_all(jinja2.nodes.Name)}  # to Jinja a global name
    return frozenset(jinja2.meta.find_undeclared_variables(tree) | clock)


def _reason(error: Exception) -> str:
    place = f"line {error.lineno}" if getattr(error, "lineno", None) else type(error).__name__
    return " ".join(f"{place}: {getattr(error, 'message', error)}"[:_MAX_REASON_CHARS].split())


def load_template(
    name: str, tokenizer: Tokenizer, system: str | None = None, options: Options | None = None
) -> PromptTemplate:
    """Return a template.

    Args:
        name: ``chat`` (the tokenizer's own chat template; ``qwen`` is its old name), ``plain`` (the question and a
            line break, nothing else), ``r1`` (a system prompt that asks for ``<think>`` and ``<answer>``, in
            the tokenizer's chat template where it has one), the name of one of several templates of the tokenizer,
            or the path of a Jinja file: a chat template, or one that reads ``question``. The last
            line break of the file is not part of the prompt.
        tokenizer: source of the chat template and the special tokens.
        system: system prompt; for ``r1`` it replaces the built-in wording.
        options: values of variables of the template, as JSON has them.

    Raises:
        UserError: unknown name, no chat template, a faulty Jinja file, an option that the template does not read or no
            place for ``system``.
    """
    options = checked_options(options or {})
    if name == CHAT:
        source = _chat_template(tokenizer, options)
        if source is None:
            raise UserError(
                f"template {name!r} needs the chat template of the tokenizer, which has none: add "
                "tokenizer_config.json to the tokenizer, or choose template plain or r1"
            )
    elif name == "plain":
        source = _bos(tokenizer) + PLAIN_SOURCE
    elif name == "r1":
        source, system = _chat_template(tokenizer, options), system or R1_SYSTEM
        source = source or _bos(tokenizer) + R1_PLAIN_SOURCE
    elif name in tokenizer.chat_templates:
        source = tokenizer.chat_templates[name]
    else:
        path = Path(name)
        name, source = path.name, _read_template(path, tokenizer)
    return PromptTemplate(name, source, system, tokenizer, options)


def template_of(header: "PromptFileHeader", tokenizer: Tokenizer) -> PromptTemplate | None:
    """Return the chat template that made the prompts of a file, for the turns that follow; None when none did."""
    name, options = header.template, header.template_options
    if header.template_source:
        return PromptTemplate(name, header.template_source, None, tokenizer, options)
    if not _is_named(name, tokenizer):
        return None
    template = load_template(name, tokenizer, options=options)
    return template if template.takes_messages else None


def _is_named(name: str, tokenizer: Tokenizer) -> bool:
    return name in BUILT_IN or name in tokenizer.chat_templates


def checked_options(options: Options) -> dict[str, Any]:
    """Return the values of a template's variables that a user gives.

    Raises:
        UserError: one that is not the user's to give, or a date that is none.
    """
    for name in options.keys() & _RESERVED:
        raise UserError(f"{name!r} is no option of a template: the record and the command set it")
    if CLOCK in options:
        try:
            datetime.fromisoformat(options[CLOCK])
        except (TypeError, ValueError):
            raise UserError(f"{CLOCK} is {options[CLOCK]!r}: give a date such as {DATE}") from None
    return dict(options)


def record_options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record sets of its template's variables: an object, or JSON of one, in ``chat_template_kwargs``.

    Null stands for a name that is not there, since tables have every column in every row.

    Raises:
        RecordError: it is no such object.
    """
    value = fields.get(OPTIONS_COLUMN)
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, Mapping | None):
            raise ValueError(f"found {type(value).__name__}")
        return checked_options({name: one for name, one in (value or {}).items() if one is not None})
    except (ValueError, RecursionError, UserError) as error:
        raise RecordError(f"field {OPTIONS_COLUMN!r} must hold an object of template variables: {error}") from None


def response_end_id(template: PromptTemplate, tokenizer: Tokenizer) -> int:
    """Return the id that ends a response: the chat end token after a chat prompt, else eos.

    Raises:
        UserError: the tokenizer has neither.
    """
    if not tokenizer.eos_token_ids:
        raise UserError("the tokenizer has no end token, so responses would never end: set eos_token in its config")
    own = tokenizer.turn_end_id if template.ends_turns else tokenizer.eos_token_id
    return tokenizer.eos_token_ids[0] if own is None else own


def _bos(tokenizer: Tokenizer) -> str:
    """Return the head of our own templates: the text that the tokenizer puts before a text; chat templates write it."""
    return f"{{{{ {json.dumps(tokenizer.bos_prefix, ensure_ascii=False)} }}}}" if tokenizer.bos_prefix else ""


def _chat_template(tokenizer: Tokenizer, options: Options) -> str | None:
    """Choose among a tokenizer's templates as transformers does."""
    templates = tokenizer.chat_templates
    name = "tool_use" if options.get("tools") is not None and "tool_use" in templates else DEFAULT_TEMPLATE
    if templates and name not in templates:
        names = ", ".join(sorted(templates))
        raise UserError(f"the tokenizer has several chat templates and no default: choose template {names}")
    return templates.get(name)


def _read_template(path: Path, tokenizer: Tokenizer) -> str:
    if not path.is_file():
        choice = ", ".join([*BUILT_IN, *sorted(tokenizer.chat_templates.keys() - {DEFAULT_TEMPLATE})])
        raise UserError(f"no template {str(path)!r}: choose from {choice}, or name a Jinja file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read template {path}: {error}") from error


def _question(message: Message) -> str:
    """Return the question as templates without chat have it, images written as Qwen's models know them."""
    if not message.images:
        return message.content or ""
    start, end = IMAGE_FRAME
    return (message.content or "").replace(IMAGE_MARK, f"{start}{IMAGE_TOKEN}{end}")
