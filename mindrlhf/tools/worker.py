"""The tools' part of a worker (``mindrlhf.sandbox.worker``).

An item is ``[name, arguments, columns, whether arguments are texts]``, its one step the call, the outcome ``[text, is
failure]``.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mindrlhf.sandbox.pipes import private_json
from mindrlhf.tools.registry import Tool, describe, own_columns, read_texts, resolve

MAX_ANSWER_CHARS = 20_000
_encode = private_json.JSONEncoder(ensure_ascii=False, default=str).encode


def setup(names: Sequence[str]) -> tuple[list[str], Callable[[int, Sequence[Any]], list[Any]]]:
    """Load tools; return their names, and the function that answers calls.

    Raises:
        UserError: one does not load.
    """
    tools = resolve(names)
    return list(tools), lambda _, call: list(answer_call(tools, *call))


def answer_call(
    tools: Mapping[str, Tool],
    name: str,
    arguments: Mapping[str, Any],
    extra: Mapping[str, Any] = MappingProxyType({}),
    is_text: bool = False,
) -> tuple[str, bool]:
    """Call a tool; return the text of its answer, and whether it is an error.

    Keyword-only parameters that have the name of a column in ``extra`` are given its value, and not by the model.
    Arguments that are texts become values of the types of their parameters.
    """
    if name not in tools:
        return f"Error: there is no tool '{name[:80]}'; there are {', '.join(tools)}", True
    signature = inspect.signature(tools[name])
    columns = {column: extra[column] for column in own_columns(signature, extra)}
    if given := columns.keys() & arguments.keys():
        return f"Error: {name}: got an unexpected argument '{min(given)}'", True
    if is_text:
        arguments = read_texts(arguments, describe(name, tools[name]))
    try:
        arguments = arguments | columns
        signature.bind(**arguments)
    except TypeError as error:
        return f"Error: {name}: {error}"[:MAX_ANSWER_CHARS], True
    try:
        value = tools[name](**arguments)
        text = value if isinstance(value, str) else _encode(value)
        return text[:MAX_ANSWER_CHARS], False
    except ValueError as error:  # the tool's own word on its arguments
        return f"Error: {error}"[:MAX_ANSWER_CHARS], True
    except BaseException as error:  # SystemExit too: a tool must not end its worker
        return f"Error: {type(error).__name__}: {error}"[:MAX_ANSWER_CHARS], True
