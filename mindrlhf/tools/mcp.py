"""Tools of MCP servers over stdio or Streamable HTTP, by the official SDK of the Model Context Protocol, `mcp`."""

import atexit
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import mindrlhf
from mindrlhf.data.control_tokens import COMMON_CONTROL_TOKENS, neutralised_value
from mindrlhf.errors import UserError
from mindrlhf.sandbox.time_limit import remaining_s
from mindrlhf.system.processes import MARKER

PREFIX = "mcp:"
START_TIMEOUT_S = 60.0
MAX_TOOLS = 256
MAX_DESCRIPTION_CHARS = 64 << 10  # of one tool, with its schema: it stands in every prompt
_MAX_REASON_CHARS = 300
# Of our environment, beside the SDK's own choice of variables; keys for judges and the like stay here.
PASSED_VARIABLES = ("LANG", "TMPDIR", MARKER)
_URLS = ("http://", "https://")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ServerError(RuntimeError):
    """The server ended, gave no answer in time, or does not keep to the protocol; one line."""


def check_command(specification: str) -> list[str]:
    """Return the command of ``mcp:COMMAND ARGUMENTS``; of ``mcp:http://...`` the URL alone.

    Raises:
        UserError: there is none, or no such program.
    """
    try:
        command = shlex.split(specification.removeprefix(PREFIX))
    except ValueError as error:
        raise UserError(f"tool '{specification}': {error}") from None
    if len(command) == 1 and command[0].startswith(_URLS):
        return command
    if not command or shutil.which(command[0]) is None:
        raise UserError(f"tool '{specification}': there is no program '{(command or [''])[0]}'; write mcp:COMMAND ...")
    return command


class Server:
    """A running MCP server; one that has ended or did not answer is started anew for the next call.

    It runs with the rights of this process, inherits its limit of memory, and ends with it.
    """

    def __init__(self, specification: str):
        self._specification = specification
        self._command = check_command(specification)
        # The SDK is asynchronous: its event loop runs in a thread.
        self._portal = self._session = None
        self._stack = contextlib.ExitStack()
        atexit.register(self.close)

    def tools(self) -> "list[ServerTool]":
        """Return the tools that the server offers, started if need be.

        Raises:
            UserError: it does not start, speaks another version, or its tools are not as specified; or the package
                `mcp` is not there.
        """
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise UserError(f"tool '{self._specification}' needs the package mcp: pip install 'mcp>=2.3,<3'") from error
        try:
            return [_tool(self, tool) for tool in self._ask(_listed, START_TIMEOUT_S)]
        except (ServerError, ValueError) as error:
            raise UserError(f"tool '{self._specification}': {_one_line(error)}") from None

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return the text of its result.

        Raises:
            ValueError: the tool's own error, or one in the arguments.
            ServerError: the server ended, gave no answer in time, or does not keep to the protocol.
        """
        result = self._ask(lambda session: session.call_tool(name, arguments), remaining_s())
        text = _text(result)
        if result.is_error:
            raise ValueError(text)
        return text

    def close(self) -> None:
        """End the server: its input is closed, and it is killed if it does not end by that."""
        self._session = None
        with contextlib.suppress(Exception):
            self._stack.close()

    def _ask(self, question: Callable[[Any], Awaitable[Any]], timeout_s: float) -> Any:
        """Return what the server answers; what it says is wrong is a ValueError."""
        import anyio
        import mcp
        from mcp_types import CONNECTION_CLOSED

        async def within(action: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
            with anyio.fail_after(limit_s):
                return await action()

        try:
            if self._session is None:
                self._start()
            return self._portal.call(within, functools.partial(question, self._session), timeout_s)
        # Answers that are none are of many kinds; the event loop wraps them in groups.
        except Exception as error:
            while group := getattr(error, "exceptions", ()):
                error = group[0]
            if isinstance(error, mcp.MCPError) and error.code != CONNECTION_CLOSED:
                raise ValueError(_one_line(error)) from None
            reasons = {TimeoutError: "it gave no answer in time", mcp.MCPError: "it ended: see its messages above"}
            reason = reasons.get(type(error)) or _one_line(error)
        self.close()
        raise ServerError(reason)

    def _start(self) -> None:
        from anyio.from_thread import start_blocking_portal

        self._portal = self._stack.enter_context(start_blocking_portal())
        opened = self._portal.wrap_async_context_manager(_session(self._command))
        self._session = self._stack.enter_context(opened)


@contextlib.asynccontextmanager
async def _session(command: list[str]) -> AsyncIterator[Any]:
    import anyio
    import mcp
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp_types import Implementation

    client = Implementation(name="mindrlhf", version=mindrlhf.__version__)
    environment = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    parameters = mcp.StdioServerParameters(command=command[0], args=command[1:], env=environment)
    transport = streamable_http_client(command[0]) if command[0].startswith(_URLS) else stdio_client(parameters)
    async with transport as streams, mcp.ClientSession(*streams, client_info=client) as session:
        with anyio.fail_after(START_TIMEOUT_S):
            await session.initialize()
        yield session


async def _listed(session: Any) -> list[Any]:
    from mcp_types import PaginatedRequestParams

    tools, cursor = [], None
    while True:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if len(tools) > MAX_TOOLS:
            raise ServerError(f"it offers more than {MAX_TOOLS} tools")
        if not cursor:
            return tools


class ServerTool:
    """One tool of a server; called like any other, with arguments by keyword."""

    def __init__(self, server: Server, name: str, description: str, schema: dict[str, Any]):
        self.name = name
        self._server = server
        self._description = description
        self._schema = schema

    def __call__(self, /, **arguments: Any) -> str:
        return self._server.call(self.name, arguments)

    def describe(self) -> dict[str, Any]:
        """Return the tool's own JSON schema, in the form that chat templates take."""
        function = {"name": self.name, "description": self._description, "parameters": self._schema}
        return {"type": "function", "function": function}


def _tool(server: Server, tool: Any) -> ServerTool:
    if not _NAME.fullmatch(tool.name):
        raise ServerError(f"it offers a tool of the name {tool.name!r:.80}: letters, digits, _, . and - are allowed")
    description, schema = (tool.description or "").strip(), tool.input_schema
    if len(description) + len(json.dumps(schema)) > MAX_DESCRIPTION_CHARS:
        raise ServerError(f"its tool '{tool.name}' is described by more than {MAX_DESCRIPTION_CHARS} characters")
    # What it says of itself is text in a system prompt, and must not end that turn or forge another.
    description, schema = neutralised_value([description, schema], COMMON_CONTROL_TOKENS)
    return ServerTool(server, tool.name, description, schema)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__


def _text(result: Any) -> str:
    """The text of a result, that of resources too; of other content what kind it is."""
    if not result.content and isinstance(result.structured_content, dict):
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_part_text, result.content))


def _part_text(part: Any) -> str:
    if part.type == "resource_link":
        return f"[{part.name}]({part.uri})"
    text = getattr(part.resource if part.type == "resource" else part, "text", None)
    return f"[{part.type}]" if text is None else text
