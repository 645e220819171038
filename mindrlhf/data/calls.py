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


def render_calls(render: Callable[[Chat], str], chat: Chat, empty: str | list = "") -> str:
    """Render a chat with the arguments of calls as objects; where the template fails on these, as text.

    Content that is null stays so, unless the template fails on it or would write "None": then it is empty.

    Args:
        render: raises a ``RecordError`` where the template fails.
        empty: content without text, as the template has content.
    """
    if not any(message["content"] is None or message.get("tool_calls") for message in chat):
        return render(chat)
    filled = [{**message, "content": empty} if message["content"] is None else message for message in chat]
    forms = [chat] if filled == list(chat) else [chat, filled]
    failure = None
    for as_text in (False, True):
        texts = []
        for form in forms:
            try:
                texts.append(render(_with_arguments(form, as_text)))
            except RecordError as error:
                failure = error
        if texts:
            return min(texts, key=lambda text: text.count("None"))
    raise failure


def _with_arguments(chat: Chat, as_text: bool) -> list[dict[str, Any]]:
    """Return a chat with the arguments of all calls in one form; what is no JSON object stays as it is."""
    return [
        {**message, "tool_calls": [_call(call, as_text) for call in message["tool_calls"]]}
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
