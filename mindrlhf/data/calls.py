"""Calls of tools in a prompt's history, in the form that its chat template takes.

Data sets have the arguments of a call as an object or as JSON text, and templates take the one or the other:
transformers documents objects, which vLLM makes of texts too, and DeepSeek's templates join texts. Beside calls the
content may be null, which some templates ask for and others would write out.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindrlhf.data.truths import RecordError

Chat = Sequence[Mapping[str, Any]]
Rendered = list[str | RecordError]


def render_calls(
    render: Callable[[Sequence[tuple]], Rendered], chats: Sequence[tuple[Chat, Mapping]], empty: str | list = ""
) -> Rendered:
    """Render chats with the arguments of calls as objects; where the template fails on these, as text.

    Content that is null stays so, unless the template fails on it or would write "None": then it is empty.

    Args:
        render: renders pairs of messages and variables; a template's failure is a ``RecordError`` in its place.
        empty: content without text, as the template has content.
    """
    plain = render([(_with_arguments(chat, as_text=False), variables) for chat, variables in chats])
    return [
        _in_some_form(render, *chat, empty, text) if any(map(_is_special, chat[0])) else text
        for chat, text in zip(chats, plain)
    ]


def _is_special(message: Mapping[str, Any]) -> bool:
    return message["content"] is None or bool(message.get("tool_calls"))


def _in_some_form(
    render: Callable[[Sequence[tuple]], Rendered],
    chat: Chat,
    variables: Mapping,
    empty: str | list,
    text: str | RecordError,
) -> str | RecordError:
    """Return the text of a chat in the first form that the template takes; ``text`` is that of the chat as given."""
    filled = [{**one, "content": empty} if one["content"] is None else one for one in chat]
    for as_text in (False, True):
        if as_text:
            (text,) = render([(_with_arguments(chat, as_text=True), variables)])
        if filled != list(chat):
            (other,) = render([(_with_arguments(filled, as_text=as_text), variables)])
            writes_none = isinstance(text, str) and text.count("None") > str(other).count("None")
            if isinstance(text, RecordError) or isinstance(other, str) and writes_none:
                text = other
        if isinstance(text, str):
            return text
    return text


def _with_arguments(chat: Chat, *, as_text: bool) -> list[dict[str, Any]]:
    """Return a chat with the arguments of all calls in one form; what is no JSON object stays as it is."""
    return [
        {**message, "tool_calls": [_call(one, as_text) for one in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else dict(message)
        for message in chat
    ]


def _call(call: Any, as_text: bool) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    function = {**function, "arguments": _in_form(function["arguments"], as_text)}
    return {**call, "function": function} if "function" in call else function


def _in_form(arguments: Any, as_text: bool) -> Any:
    if as_text:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
