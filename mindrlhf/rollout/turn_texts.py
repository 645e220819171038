"""The text between two turns of a model: what a chat template writes there, ready for the next turn."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.data.handlers import Message, RecordError
from mindrlhf.data.templates import CHAT, TURN_MARK, Options, PromptTemplate, load_template
from mindrlhf.data.tokenizers import Tokenizer
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.tools.calls import (
    TURN_END,
    TURN_START,
    answer_turn,
    answers_text,
    call_messages,
    observation_turn,
    without_markup,
)

# How templates take a turn with calls: arguments as an object or as text, and no text beside them as "" or as null.
CALL_STYLES = [
    {"has_text": has_text, "as_json_text": as_json_text} for as_json_text in (False, True) for has_text in (True, False)
]


class TurnTexts:
    """The text between two turns of the model: that of the chat template which made the prompt, with the values that
    its variables had. Without one it is the tokenizer's own where that has Qwen's turn markers, and without that these
    markers stand around it.

    Args:
        tokenizer: of the model.
        template: None where the prompts were made by none, or by one that takes no chat.
    """

    def __init__(self, tokenizer: Tokenizer, template: PromptTemplate | None = None):
        self._is_chat = None not in (tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END))
        self._template = template
        if template is None and self._is_chat and tokenizer.chat_template:
            with contextlib.suppress(UserError):  # a faulty one has made no prompt either
                self._template = load_template(CHAT, tokenizer)
        self._ends = {one: tokenizer.decode([one], skip_special_tokens=False) for one in tokenizer.eos_token_ids}
        source, reads = ("", ()) if self._template is None else (self._template.source, self._template.variables)
        styles = CALL_STYLES if "tool_calls" in source else []
        found = [(len(text), number) for number, style in enumerate(styles) if (text := self._try(style))]
        # DeepSeek's template writes a second, empty turn where a turn with calls has a text, if only an empty one.
        self._style = styles[min(found)[1]] if found else None
        self._has_tool_role = bool(found) or ("tools" in reads and bool(self._try(None)))

    def _try(self, style: dict[str, bool] | None) -> str:
        """Return what the template makes of an answer in a style, "" where it takes none."""
        with contextlib.suppress(RecordError):
            text = self._tool_messages(["f"], ["MINDRLHF-ANSWER"], {}, None, style)
            return text if "MINDRLHF-ANSWER" in text else ""
        return ""

    def end_of(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of the end token of a turn, None if it has none, "" where a stop string ended the turn."""
        token = int(token_ids[-1])
        return (self._ends[token] or None) if token in self._ends else ""

    def answers(self, texts: Sequence[str], options: Options, names: Sequence[str] = (), end: str | None = None) -> str:
        """Return what tools have answered to the calls of a turn, in their order.

        Where the template has tools, it writes each answer as a message of the role ``tool``; else they are one message
        of the user, in ``<tool_response>``.

        Args:
            texts: the answers.
            options: what the record sets of the template's variables.
            names: of the tools.
            end: of the turn, see ``end_of``; None for the usual one.
        """
        if self._template is None:
            return answer_turn(texts, is_chat=self._is_chat, is_open=end == "")
        if not self._has_tool_role:
            return self._next_turn([Message("user", answers_text(texts))], options, end)
        try:
            return self._tool_messages(names or ["tool"] * len(texts), texts, options, end, self._style)
        except RecordError as error:
            raise _unwritten(error) from None

    def following(
        self, messages: Sequence[Mapping[str, Any]], options: Options, names: Sequence[str] = (), end: str | None = None
    ) -> str:
        """Return what a client says behind a turn: answers of tools, then messages of any role; see ``answers``."""
        count = next((number for number, one in enumerate(messages) if one["role"] != "tool"), len(messages))
        texts, rest = [one["content"] for one in messages[:count]], messages[count:]
        names = [*names, *["tool"] * count][:count]
        if not rest:
            return self.answers(texts, options, names, end)
        if count and self._has_tool_role:
            try:
                return self._tool_messages(names, texts, options, end, self._style, rest)
            except RecordError as error:
                raise _unwritten(error) from None
        told = [Message("user", answers_text(texts))] if count else []
        return self._next_turn([*told, *rest], options, end)

    def observation(self, text: str, options: Options, end: str | None = None) -> str:
        """Return what an environment shows after a turn; see ``answers``."""
        if self._template is None:
            return observation_turn(text, is_chat=self._is_chat, is_open=end == "")
        return self._next_turn([Message("user", without_markup(text))], options, end)

    def _next_turn(self, messages: Sequence[Message | Mapping[str, Any]], options: Options, end: str | None) -> str:
        try:
            return next_turn(self._template, messages, options, ends=tuple(self._ends.values()), end=end)
        except RecordError as error:
            raise _unwritten(error) from None

    def _tool_messages(
        self,
        names: Sequence[str],
        texts: Sequence[str],
        options: Options,
        end: str | None,
        style: dict[str, bool] | None,
        rest: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the answers as messages of the role ``tool``, behind a turn with calls in a style that the template
        takes, or with None behind one of text; ``rest`` follows them."""
        ends = tuple(self._ends.values())
        if style is None:
            messages = [Message("tool", without_markup(text)) for text in texts]
            return next_turn(self._template, [*messages, *rest], options, ends=ends, end=end)
        failure = None
        for num_calls in dict.fromkeys((len(texts), 1)):
            turn, answers = call_messages(names, texts, TURN_MARK, num_calls=num_calls, **style)
            try:
                return next_turn(self._template, [*answers, *rest], options, turn=turn, ends=ends, end=end)
            except RecordError as error:  # Llama 3's takes one call in a turn
                failure = failure or error
        raise failure


def _unwritten(error: RecordError) -> RunFailure:
    return RunFailure(f"a turn of a conversation cannot be written: {error}")


def next_turn(
    template: PromptTemplate,
    messages: Sequence[Message | Mapping[str, Any]],
    options: Options | None = None,
    *,
    turn: Mapping[str, Any] | None = None,
    ends: Sequence[str] = (),
    end: str | None = None,
) -> str:
    """Return the text between an assistant's turn, as it was sampled, and the assistant's next turn.

    Args:
        template: of the prompt.
        messages: between the two turns: what tools have answered, or the user.
        options: what the record sets of the template's variables.
        turn: the assistant's turn where it is one with calls, as ``apply_chat_template`` takes it; the last thing
            that it says is ``TURN_MARK``.
        ends: the texts of all tokens that end a turn; empty leaves it to the template's own.
        end: which of them it was sampled with, "" where none: a stop string has ended it. None: the template's.

    Raises:
        RecordError: the template refuses the messages, or leaves turns out.
    """
    head = [Message("user", "?"), turn or Message("assistant", TURN_MARK)]
    options = options or {}
    whole, alone = template.render_chat([*head, *messages], options), None
    with contextlib.suppress(RecordError):
        alone = template.render_chat(head, {**options, "add_generation_prompt": False})
    before = alone.split(TURN_MARK) if isinstance(alone, str) else [""] * 2
    pieces = whole.split(TURN_MARK, max(1, len(before) - 1))
    if len(pieces) < max(2, len(before)):
        raise RecordError(f"template {template.name!r} leaves the turns of the assistant out")
    rest = pieces[-1]
    texts = set(filter(None, ends or (template.end_token,)))
    place, _, token = min(((rest.find(one), -len(one), one) for one in texts if one in rest), default=(-1, 0, ""))
    if turn is None and rest[: max(place, 0)].strip():
        token = ""
    if not token:
        if turn is not None and not (isinstance(alone, str) and whole.startswith(alone)):
            raise RecordError(f"template {template.name!r} does not tell where a turn with calls ends")
        return rest if turn is None else whole[len(alone) :]
    # A token that does not stand there without the messages begins the first of them (GLM's <|observation|>).
    is_kept = end == "" or (token not in before[-1] and isinstance(alone, str) and end != token)
    return rest[place + (0 if is_kept else len(token)) :]
