"""Tools by name: ``calculator``, ``python``, a user's own function by ``path/to/file.py:function``, and all tools of an
MCP server by ``mcp:COMMAND ARGUMENTS``.

A tool is a function that takes its arguments by keyword and returns text, or anything JSON can hold. The model is told
its name, the first paragraph of its docstring, and its parameters with the types of their annotations.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.sandbox.run import SandboxLimits, run_python
from mindrlhf.sandbox.server import shared_server
from mindrlhf.sandbox.time_limit import remaining_s
from mindrlhf.tools.arithmetic import calculate
from mindrlhf.tools.mcp import PREFIX, Server, ServerTool, check_command

Tool = Callable[..., Any]

# Left of a call's time when the sandbox ends the program, so that the answer still arrives.
SANDBOX_MARGIN_S = 0.3
MAX_SANDBOX_S = 60.0
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def calculator(expression: str) -> int | float:
    """Compute an arithmetic expression such as (3 + 4) * 2."""
    return calculate(expression)


def python(code: str) -> str:
    """Run a Python program and return what it prints."""
    shared_server()  # its start, at the first call, counts
    limit_s = min(remaining_s(), MAX_SANDBOX_S)
    run = run_python(code, limits=SandboxLimits(time_s=max(limit_s - SANDBOX_MARGIN_S, limit_s / 2)))
    if run.succeeded:
        return run.stdout
    raise ValueError("\n".join(filter(None, (run.stdout.strip(), run.stderr.strip(), f"(ended by {run.ending})"))))


BUILT_IN: dict[str, Tool] = {"calculator": calculator, "python": python}


def tool_name(specification: str) -> str:
    """Return the name by which the model calls the tool: the function's."""
    return specification.rpartition(":")[2]


def check(specifications: Sequence[str]) -> None:
    """Check what can be known without running a user's file.

    Raises:
        UserError: an unknown tool, no such file or program, or two tools of one name.
    """
    functions = [specification for specification in specifications if not specification.startswith(PREFIX)]
    for specification in specifications:
        if specification.startswith(PREFIX):
            check_command(specification)
    for specification in functions:
        path, colon, name = specification.rpartition(":")
        if not colon and specification not in BUILT_IN:
            raise UserError(
                f"unknown tool '{specification}': there are {', '.join(BUILT_IN)}; "
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
        path, colon, name = specification.rpartition(":")
        found.append((name, _load(Path(path), name) if colon else BUILT_IN[name]))
    _refuse_repeated([name for name, _ in found])
    return dict(found)


def _refuse_repeated(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two tools are named '{name}': the model could not tell them apart; rename one")


def describe(name: str, tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool, in the form that chat templates take."""
    if isinstance(tool, ServerTool):
        return tool.describe()
    properties, required = {}, []
    for parameter in inspect.signature(tool).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
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


def _load(path: Path, name: str) -> Tool:
    specification = importlib.util.spec_from_file_location("mindrlhf_user_tools", path)
    if specification is None:
        raise UserError(f"tool file {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(specification)
    # Last, so that a helper beside the user's file is found but shadows nothing.
    sys.path.append(str(path.resolve().parent))
    try:
        specification.loader.exec_module(module)
    except BaseException as error:
        raise UserError(f"tool file {path} does not load: {type(error).__name__}: {error}") from error
    tool = getattr(module, name, None)
    if not callable(tool):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_"]
        raise UserError(f"tool file {path} has no function '{name}'; it has {', '.join(defined) or 'none'}")
    return tool
