"""Templates: from an ``Example`` to the text of the prompt. All are Jinja, rendered in a sandbox."""

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

from mindrlhf.data.handlers import IMAGE_MARK, Example, Message, RecordError
from mindrlhf.data.pictures.processor import IMAGE_FRAME, IMAGE_TOKEN
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.errors import UserError

BUILT_IN = ("qwen", "plain", "r1")

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

# What chat templates of published models ask for beyond our own variables; they test it before use.
OPTIONAL_VARIABLES = frozenset({"tools", "documents", "enable_thinking", "add_vision_id", "strftime_now"})
VARIABLES = frozenset({"messages", "question", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"})


class PromptTemplate:
    """A template bound to a tokenizer's special tokens.

    Attributes:
        name: ``qwen``, ``plain``, ``r1``, or the file name of a custom template.
        sha256: hash (hex) of the Jinja source and the system prompt.
        ends_turns: the chat end token closes each turn, so it also closes the response.
    """

    def __init__(self, name: str, source: str, system: str | None, tokenizer: Tokenizer):
        self.name = name
        self.sha256 = hashlib.sha256(json.dumps([source, system]).encode()).hexdigest()
        self.ends_turns = tokenizer.chat_end_token is not None and tokenizer.chat_end_token in source
        self._system = system
        self._special_tokens = {"bos_token": tokenizer.bos_token or "", "eos_token": tokenizer.eos_token or ""}
        self._template, variables = _compile(source, name)
        self._takes_messages = "messages" in variables
        if not self._takes_messages:
            if "question" not in variables:
                raise UserError(f"template {name!r} uses neither 'messages' nor 'question', so all prompts are equal")
            if system is not None:
                raise UserError(f"template {name!r} has no place for a system prompt; leave --system out")

    def render(self, example: Example) -> str:
        """Return the prompt's text.

        A system prompt of this template takes the place of the record's own.

        Raises:
            RecordError: the template refuses the messages, or has no place for some of them.
        """
        messages = example.messages
        if self._system is not None:
            messages = (Message("system", self._system), *(m for m in messages if m.role != "system"))
        if not self._takes_messages and len(messages) > 1:
            raise RecordError(f"template {self.name!r} takes one question, the record has {len(messages)} messages")
        try:
            text = self._template.render(
                messages=[{"role": message.role, "content": _content(message)} for message in messages],
                question=_question(example.messages[-1]),
                add_generation_prompt=True,
                **self._special_tokens,
            )
        # A sandboxed template may fail with any error its expressions can raise.
        except Exception as error:
            raise RecordError(f"template {self.name!r} failed: {type(error).__name__}: {error}") from error
        if not text:
            raise RecordError(f"template {self.name!r} gives an empty prompt")
        return text


def load_template(name: str, tokenizer: Tokenizer, system: str | None = None) -> PromptTemplate:
    """Return a template.

    Args:
        name: ``qwen`` (the tokenizer's own chat template, whatever its family), ``plain`` (the question and a
            line break, nothing else), ``r1`` (a system prompt that asks for ``<think>`` and ``<answer>``, in
            the tokenizer's chat template where it has one), or the path of a Jinja file with the variables
            ``messages``, ``question``, ``add_generation_prompt``, ``bos_token`` and ``eos_token``. The last
            line break of the file is not part of the prompt.
        tokenizer: source of the chat template and the special tokens.
        system: system prompt; for ``r1`` it replaces the built-in wording.

    Raises:
        UserError: unknown name, no chat template, a faulty Jinja file, or no place for ``system``.
    """
    if name == "qwen":
        if tokenizer.chat_template is None:
            raise UserError(
                "template 'qwen' needs the chat template of the tokenizer, which has none: add tokenizer_config.json "
                "to the tokenizer, or choose template plain or r1"
            )
        return PromptTemplate(name, tokenizer.chat_template, system, tokenizer)
    if name == "plain":
        return PromptTemplate(name, PLAIN_SOURCE, system, tokenizer)
    if name == "r1":
        return PromptTemplate(name, tokenizer.chat_template or R1_PLAIN_SOURCE, system or R1_SYSTEM, tokenizer)
    path = Path(name)
    if not path.is_file():
        raise UserError(f"no template {name!r}: choose from {', '.join(BUILT_IN)}, or name a Jinja file")
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read template {path}: {error}") from error
    return PromptTemplate(path.name, source, system, tokenizer)


def response_end_id(template: PromptTemplate, tokenizer: Tokenizer) -> int:
    """Return the id that ends a response: the chat end token after a chat prompt, else eos.

    Raises:
        UserError: the tokenizer has neither.
    """
    if not tokenizer.eos_token_ids:
        raise UserError("the tokenizer has no end token, so responses would never end: set eos_token in its config")
    # The chat end token is first among the two.
    return tokenizer.eos_token_ids[0 if template.ends_turns else -1]


def _content(message: Message) -> str | list[dict[str, str]]:
    """Return the content as chat templates know it: a message with images is a list of parts."""
    if not message.images:
        return message.content
    parts: list[dict[str, str]] = []
    for number, text in enumerate(message.content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
    return parts


def _question(message: Message) -> str:
    """Return the question as templates without chat have it, images written as Qwen's models know them."""
    if not message.images:
        return message.content
    start, end = IMAGE_FRAME
    return message.content.replace(IMAGE_MARK, f"{start}{IMAGE_TOKEN}{end}")


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """The environment Hugging Face chat templates are written for, without the clock: prompts must repeat."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: object, indent: int | None = None, separators: Sequence[str] | None = None) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators and tuple(separators))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _compile(source: str, name: str) -> tuple[jinja2.Template, set[str]]:
    """Return the compiled template and the variables it reads."""
    environment = _environment()
    try:
        variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"template {name!r}, line {error.lineno}: {error.message}") from error
    # Jinja makes Python source of a template, which can break any limit of Python's compiler.
    except Exception as error:
        raise UserError(f"template {name!r} cannot be compiled: {type(error).__name__}: {error}") from error
    variables -= set(environment.globals)
    # Jinja renders an unknown name as nothing, so a slip of the pen would build wrong prompts in silence.
    unknown = variables - VARIABLES - OPTIONAL_VARIABLES if name not in BUILT_IN else set()
    if unknown:
        known = ", ".join(sorted(VARIABLES))
        raise UserError(f"template {name!r} uses unknown variable {min(unknown)!r}; it has {known}")
    return template, variables
