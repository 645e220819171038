"""Tools by name: ``python``, a user's own function by ``path/to/file.py:function``, and all tools of an
MCP server by ``mcp:COMMAND ARGUMENTS``.

A tool is a function that takes its arguments by keyword and returns text, or anything JSON can hold. The model is told
its name, the first paragraph of its docstring, and its parameters with the types of their annotations. A keyword-only
parameter that has the name of a column which the prompts keep is given that column's value instead; the model neither
sees nor sets it.
"""

import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.sandbox.run import SandboxLimits, run_python
from mindrlhf.sandbox.server import shared_server
from mindrlhf.sandbox.time_limit import remaining_s
from mindrlhf.sandbox.user_files import load_named
from mindrlhf.tools.environments import PREFIX as ENVIRONMENT_PREFIX
from mindrlhf.tools.environments import check_environment, episode_tools
from mindrlhf.tools.mcp import PREFIX, Server, ServerTool, check_command

Tool = Callable[..., Any]

# Left of a call's time when the sandbox ends the program, so that the answer still arrives.
SANDBOX_MARGIN_S = 0.3
MAX_SANDBOX_S = 60.0
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def python(code: str) -> str:
    """Run a Python program and return what it prints."""
    shared_server()  # its start, at the first call, counts
    limit_s = min(remaining_s(), MAX_SANDBOX_S)
    run = run_python(code, limits=SandboxLimits(time_s=max(limit_s - SANDBOX_MARGIN_S, limit_s / 2)))
    if run.succeeded:
        return run.stdout
    raise ValueError("\n".join(filter(None, (run.stdout.strip(), run.stderr.strip(), f"(ended by {run.ending})"))))


BUILT_IN: dict[str, Tool] = {"python": python}


def tool_name(specification: str) -> str:
    """Return the name by which the model calls the tool: the function's."""
    return specification.rpartition(":")[2]


def check(specifications: Sequence[str]) -> None:
    """Check what can be known without running a user's file.

    Raises:
        UserError: an unknown tool, no such file or program, or two tools of one name.
    """
    functions = [one for one in specifications if not one.startswith((PREFIX, ENVIRONMENT_PREFIX))]
    for specification in specifications:
        if specification.startswith(PREFIX):
            check_command(specification)
        if specification.startswith(ENVIRONMENT_PREFIX):
            check_environment(specification.removeprefix(ENVIRONMENT_PREFIX))
    for specification in functions:
        path, colon, name = specification.rpartition(":")
        if not colon and specification not in BUILT_IN:
            raise UserError(
                f"unknown tool '{specification}': there is {', '.join(BUILT_IN)}; "
                "a function of your own is given as path/to/file.py:function, a server as mcp:COMMAND"
            )
        if colon and not name.isidentifier():
            raise UserError(f"tool '{specification}': write path/to/file.py:function")
        if colon and not Path(path).is_file():
            raise UserError(f"tool '{specification}': there is no file {path}")
    _refuse_repeated([tool_name(specification) for specification in functions])


def resolve(specifications: Sequence[str]) -> dict[str, Tool]:
    """Return the tools by name. A user's file or server is run: only tool workers and `mindrlhf tools` do that.

    Raises:
        UserError: as ``check``; a file that does not load, or has no such function; a server that does not start.
    """
    check(specifications)
    found: list[tuple[str, Tool]] = []
    for specification in specifications:
        if specification.startswith(PREFIX):
            found += [(tool.name, tool) for tool in Server(specification).tools()]
            continue
        if specification.startswith(ENVIRONMENT_PREFIX):
            found += episode_tools(specification.removeprefix(ENVIRONMENT_PREFIX)).items()
            continue
        path, colon, name = specification.rpartition(":")
        found.append((name, load_named(Path(path), name) if colon else BUILT_IN[name]))
    _refuse_repeated([name for name, _ in found])
    return dict(found)


def _refuse_repeated(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two tools are named '{name}': the model could not tell them apart; rename one")


def own_columns(signature: inspect.Signature, columns: Collection[str]) -> list[str]:
    """Return those of the ``columns`` of a prompt that a tool of this signature is given."""
    return [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.name in columns]


def read_texts(arguments: Mapping[str, str], description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that texts stand for by the types of a tool's parameters: JSON, but for those that are texts,
    of which ``null`` is none where the parameter may be null.

    A parameter without a type gets the value of JSON where the text is some; what fits no type stays a text.
    """
    properties = description["function"]["parameters"].get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    values = {}
    for name, text in arguments.items():
        schema = schemas.get(name)
        is_null = text.strip() == "null" and _takes(schema, "null", type(None))
        values[name] = None if is_null else text if _takes(schema, "string", str) else _read_text(text)
    return values


def _takes(schema: Any, kind: str, python_type: type) -> bool:
    if not isinstance(schema, Mapping):
        return False
    lists = {key: schema.get(key) if isinstance(schema.get(key), list) else [] for key in ("anyOf", "oneOf", "enum")}
    if any(_takes(part, kind, python_type) for part in [*lists["anyOf"], *lists["oneOf"]]):
        return True
    if (
        any(isinstance(value, python_type) for value in lists["enum"])
        or kind == "null"
        and schema.get("nullable") is True
    ):
        return True
    kinds = schema.get("type")
    return kinds == kind or (isinstance(kinds, list) and kind in kinds)


def _read_text(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        # As Python writes them.
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def describe(name: str, tool: Tool, columns: Collection[str] = ()) -> dict[str, Any]:
    """Return the JSON schema of a tool, in the form that chat templates take."""
    if isinstance(tool, ServerTool):
        return tool.describe()
    properties, required = {}, []
    signature = inspect.signature(tool)
    hidden = own_columns(signature, columns)
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in hidden:
            continue
        # Annotations are text after ``from __future__ import annotations``.
        by_name = {kind.__name__: json_type for kind, json_type in _JSON_TYPES.items()}
        json_type = by_name.get(getattr(parameter.annotation, "__name__", parameter.annotation))
        properties[parameter.name] = {"type": json_type} if json_type else {}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    description = (inspect.getdoc(tool) or "").partition("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
