"""Tools of MCP servers: a minimal client of the Model Context Protocol over stdio.

Source: the specification, version 2025-06-18 (https://modelcontextprotocol.io/specification/2025-06-18): JSON-RPC 2.0,
one message a line; ``initialize``, ``tools/list`` and ``tools/call`` are all that tools need. Everything else that a
server may ask of a client is answered with "not supported".
"""

import atexit
import contextlib
import itertools
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import mindrlhf
from mindrlhf.data.control_tokens import COMMON_CONTROL_TOKENS, neutralised_value
from mindrlhf.errors import UserError
from mindrlhf.sandbox.time_limit import remaining_s
from mindrlhf.sandbox.worker_process import MARKER

PREFIX = "mcp:"
PROTOCOL_VERSION = "2025-06-18"
KNOWN_VERSIONS = ("2024-11-05", "2025-03-26", PROTOCOL_VERSION, "2025-11-25")
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 1.0
MAX_LINE_BYTES = 8 << 20
MAX_TOOLS = 256
MAX_DESCRIPTION_CHARS = 64 << 10  # of one tool, with its schema: it stands in every prompt
MAX_DEPTH = 100  # of a schema
_MAX_REASON_CHARS = 300
# What a server gets of our environment, as the specification's own clients do; keys for judges and the like stay here.
PASSED_VARIABLES = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "USER", MARKER)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_METHOD_NOT_FOUND = -32601


class ServerError(RuntimeError):
    """The server ended, or does not keep to the protocol; one line."""


def check_command(specification: str) -> list[str]:
    """Return the command of ``mcp:COMMAND ARGUMENTS``.

    Raises:
        UserError: there is none, or no such program.
    """
    try:
        command = shlex.split(specification.removeprefix(PREFIX))
    except ValueError as error:
        raise UserError(f"tool '{specification}': {error}") from None
    if not command or shutil.which(command[0]) is None:
        raise UserError(f"tool '{specification}': there is no program '{(command or [''])[0]}'; write mcp:COMMAND ...")
    return command


class Server:
    """A running MCP server; one that has ended is started anew for the next call.

    It runs with the rights of this process, inherits its limit of memory, and ends with it.
    """

    def __init__(self, specification: str):
        self._specification = specification
        self._command = check_command(specification)
        self._process: subprocess.Popen | None = None
        self._unread = b""
        self._ids = itertools.count(1)
        atexit.register(self.close)

    def tools(self) -> "list[ServerTool]":
        """Return the tools that the server offers, started if need be.

        Raises:
            UserError: it does not start, speaks another version, or its tools are not as specified.
        """
        try:
            self._start()
            listed = itertools.islice(self._listed(time.monotonic() + START_TIMEOUT_S), MAX_TOOLS + 1)
            tools = [_tool(self, value) for value in listed]
            if len(tools) > MAX_TOOLS:
                self.close()
                raise ServerError(f"it offers more than {MAX_TOOLS} tools")
            return tools
        except ServerError as error:
            raise UserError(f"tool '{self._specification}': {error}") from None

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return the text of its result.

        Raises:
            ValueError: the tool's own error, or one in the arguments.
            ServerError: the server ended, or does not keep to the protocol.
        """
        self._start()
        result = self._request("tools/call", {"name": name, "arguments": arguments}, time.monotonic() + remaining_s())
        text = _text(result)
        if result.get("isError"):
            raise ValueError(text)
        return text

    def close(self) -> None:
        """End the server: its input is closed, and a second later it is killed."""
        process, self._process = self._process, None
        self._unread = b""
        if process is None:
            return
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        environment = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
            )
        except OSError as error:
            raise ServerError(f"it does not start: {error.strerror}") from None
        os.set_blocking(self._process.stdin.fileno(), False)
        client = {"name": "mindrlhf", "version": mindrlhf.__version__}
        greeting = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": client}
        try:
            result = self._request("initialize", greeting, time.monotonic() + START_TIMEOUT_S)
        except ValueError as error:
            raise ServerError(f"it refuses to start: {_one_line(error)}") from None
        version = result.get("protocolVersion")
        if version not in KNOWN_VERSIONS:
            raise ServerError(f"it speaks version {version!r:.40} of MCP; known are {', '.join(KNOWN_VERSIONS)}")
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"}, time.monotonic() + START_TIMEOUT_S)

    def _listed(self, deadline_s: float) -> Iterator[Any]:
        parameters: dict[str, Any] = {}
        for _ in range(MAX_TOOLS):  # pages
            try:
                result = self._request("tools/list", parameters, deadline_s)
            except ValueError as error:
                raise ServerError(f"it lists no tools: {_one_line(error)}") from None
            tools = result.get("tools")
            if not isinstance(tools, list):
                raise ServerError("its list of tools is none")
            yield from tools
            if not isinstance(result.get("nextCursor"), str):
                return
            parameters = {"cursor": result["nextCursor"]}
        raise ServerError(f"its list of tools has more than {MAX_TOOLS} pages")

    def _request(self, method: str, parameters: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a request and return its result; an error that the server returns is a ValueError."""
        number = next(self._ids)
        self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": parameters}, deadline_s)
        while True:
            message = self._receive(deadline_s)
            if "method" in message:
                self._answer(message, deadline_s)
            elif message.get("id") == number:
                break
        if isinstance(error := message.get("error"), dict):
            raise ValueError(str(error.get("message", "unknown error")))
        if not isinstance(message.get("result"), dict):
            raise ServerError(f"its answer to {method} has neither result nor error")
        return message["result"]

    def _answer(self, message: dict[str, Any], deadline_s: float) -> None:
        """Answer what a server asks of its client; notifications want no answer."""
        if "id" not in message:
            return
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            answer["result"] = {}
        else:
            answer["error"] = {"code": _METHOD_NOT_FOUND, "message": "not supported"}
        self._send(answer, deadline_s)

    def _send(self, message: dict[str, Any], deadline_s: float) -> None:
        """Write a message. What a server writes before it has read all of it is read meanwhile."""
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        process = self._process
        while unsent:
            readable, writable = self._wait([process.stdout], [process.stdin], deadline_s)
            if readable:
                self._read()
            try:
                unsent = unsent[(process.stdin.write(unsent) or 0) if writable else 0 :]
            except OSError:
                raise self._ended() from None

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            self._wait([self._process.stdout], [], deadline_s)
            self._read()
        self._wait([], [], deadline_s)  # a server that writes without end does not wait for what it is asked
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self.close()
            raise ServerError(f"it wrote what is no message: {line[:80].decode(errors='replace')!r}")
        return message

    def _wait(self, reading: list[Any], writing: list[Any], deadline_s: float) -> tuple[list[Any], list[Any]]:
        wait_s = deadline_s - time.monotonic()
        readable, writable = [], []
        if wait_s > 0 and (reading or writing):
            readable, writable, _ = select.select(reading, writing, [], None if wait_s == float("inf") else wait_s)
        if wait_s <= 0 or ((reading or writing) and not (readable or writable)):
            self.close()
            raise ServerError("it gave no answer in time")
        return readable, writable

    def _read(self) -> None:
        chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        if not chunk:
            raise self._ended()
        self._unread += chunk
        if len(self._unread) > MAX_LINE_BYTES:
            self.close()
            raise ServerError(f"it sent a message of over {MAX_LINE_BYTES} bytes")

    def _ended(self) -> ServerError:
        process = self._process
        self.close()
        return ServerError(f"the server ended with status {process.returncode}: see its messages above")


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


def _tool(server: Server, value: Any) -> ServerTool:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ServerError(f"it offers a tool of the name {name!r:.80}: letters, digits, _, . and - are allowed")
    schema, description = value.get("inputSchema"), value.get("description", "")
    if not isinstance(schema, dict) or not isinstance(description, str):
        raise ServerError(f"its tool '{name}' has no inputSchema, or a description that is no text")
    if _is_deep(schema):
        raise ServerError(f"the inputSchema of its tool '{name}' is nested too deeply: at most {MAX_DEPTH} levels")
    if len(description) + len(json.dumps(schema)) > MAX_DESCRIPTION_CHARS:
        raise ServerError(f"its tool '{name}' is described by more than {MAX_DESCRIPTION_CHARS} characters")
    # What it says of itself is text in a system prompt, and must not end that turn or forge another.
    description, schema = neutralised_value([description.strip(), schema], COMMON_CONTROL_TOKENS)
    return ServerTool(server, name, description, schema)


def _is_deep(value: Any) -> bool:
    """Whether containers lie in one another more than ``MAX_DEPTH`` times."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list)))
        level = [part for parts in inner for part in parts]
    return bool(level)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARS]


def _text(result: dict[str, Any]) -> str:
    """The text of a result; of other content what kind it is."""
    content = result.get("content")
    if not isinstance(content, list):
        raise ServerError("its result has no content")
    parts = []
    for item in content:
        kind = item.get("type") if isinstance(item, dict) else None
        text = item.get("text") if kind == "text" else None
        parts.append(text if isinstance(text, str) else f"[{kind if isinstance(kind, str) else 'unknown'}]")
    if not parts and isinstance(result.get("structuredContent"), dict):
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(parts)
