"""Starts agents, one process each, forked from one that has the user's file loaded: ``python -m
mindrlhf.tools.agent_host SOCKET_FD``.

It reads lines of JSON. The first are its settings: ``agent`` (path/to/file.py:function, or the words of a command),
``port`` and ``path`` of the endpoint, ``is_open``, ``memory_limit_bytes``. Then ``{"start": number, "record", "key",
"directory"}`` and ``{"kill": number}``. It answers ``{"ready"}`` or ``{"error"}``, and for each agent that has ended
``{"ended": number, "result"}`` or with ``"failure"`` in place of the result.

An agent that is not open has three processes. The first leaves the namespaces of this one for some without a network
and without other processes. The second is the first in these, and passes connections to its loopback on to the
endpoint's Unix socket, which is all that can be reached. The third is the agent, which may write to its directory only.
What is left of an agent when it ends is killed.
"""

import asyncio
import contextlib
import fcntl
import inspect
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindrlhf.errors import Unavailable, UserError
from mindrlhf.sandbox.limits import landlock, namespaces
from mindrlhf.system.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_with_starter,
    kill_tree,
    refuse_new_rights,
    signal_all,
)
from mindrlhf.tools.loading import load_named

MAX_RESULT_BYTES = 64 << 10
MAX_ERROR_BYTES = 1000
_MAX_LINE_BYTES = 64 << 20
_FLAGS = namespaces.NETWORK_AND_PROCESSES
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_FAILED = 1
UNAVAILABLE = 75  # EX_TEMPFAIL of sysexits.h: the agent could not do its work, whatever the model wrote
_kept: list[Any] = []


def main() -> int:
    """Serve until the other side hangs up."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    end_with_starter()
    asyncio.run(_Host(connection).serve())
    return 0


class _Host:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pids: dict[int, int] = {}  # of the first process of each agent
        self._settings: dict[str, Any] = {}
        self._function = None
        self._following: set[asyncio.Task] = set()

    async def serve(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=_MAX_LINE_BYTES)
        self._settings = json.loads(await reader.readline())
        try:
            agent = self._settings["agent"]
            if isinstance(agent, str):
                path, _, name = agent.rpartition(":")
                self._function = load_named(Path(path), name)
            if not self._settings["is_open"] and not _can_be_closed():
                raise UserError(
                    "this system allows no namespaces, so that the network cannot be closed to agents: allow them, or "
                    "set tools.agent_open=true"
                )
        except UserError as error:
            self._tell({"error": str(error)})
            return
        self._tell({"ready": True})
        while line := await reader.readline():
            message = json.loads(line)
            if "kill" in message:
                if pid := self._pids.get(message["kill"]):
                    kill_tree(pid)
            else:
                self._start(message)
        for pid in self._pids.values():
            kill_tree(pid)

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _start(self, message: Mapping[str, Any]) -> None:
        reading, writing = os.pipe()
        loop = asyncio.get_running_loop()
        inherited = [loop, *asyncio.all_tasks(loop)]
        pid = os.fork()
        if pid == 0:
            try:
                # Never taken apart here: its epoll is the parent's too, which would lose what it waits for.
                _kept.extend(inherited)
                os.close(reading)
                self._connection.detach()
                _be_first(self._settings, self._function, message, writing)
            finally:
                os._exit(_FAILED)
        os.close(writing)
        self._pids[message["start"]] = pid
        task = loop.create_task(self._follow(message["start"], pid, reading))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow(self, number: int, pid: int, reading: int) -> None:
        told = await _read_all(reading, MAX_RESULT_BYTES + 4096)
        status = await _ended(pid)
        del self._pids[number]
        try:
            outcome = json.loads(told)
        except ValueError:
            outcome = {"failure": f"its process died (status {status})", "is_lost": status == -signal.SIGKILL}
        self._tell({"ended": number, **outcome})


async def _ended(pid: int) -> int:
    """Wait for the end of a child and return its exit status, negative for a signal."""
    loop, fd, is_over = asyncio.get_running_loop(), os.pidfd_open(pid), asyncio.Event()
    loop.add_reader(fd, is_over.set)
    try:
        await is_over.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def _read_all(fd: int, most: int) -> bytes:
    """Return the last bytes that come from a pipe until all its writers have gone."""
    reader, found = asyncio.StreamReader(), b""
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    try:
        while chunk := await reader.read(1 << 16):
            found = (found + chunk)[-most:]
    finally:
        transport.close()
    return found


def _can_be_closed() -> bool:
    child = os.fork()
    if child == 0:
        try:
            _leave()
            first = os.fork()
            if first == 0:
                _settle(0)
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
        finally:
            os._exit(_FAILED)
    return os.waitpid(child, 0)[1] == 0 and landlock.version() > 0


def _leave() -> None:
    """Leave the namespaces of the network and, for children, of processes."""
    user, group = os.geteuid(), os.getegid()
    namespaces.leave(_FLAGS, is_root=user == 0)
    if user != 0:
        namespaces.keep_user(user, group)


def _settle(port: int) -> socket.socket:
    """As the first process of the namespaces: mount their ``/proc``, and listen on their loopback."""
    namespaces.mount_own_proc()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP).ljust(40, b"\0"))
    return socket.create_server(("127.0.0.1", port), backlog=128)


def _be_first(settings: Mapping[str, Any], function: Any, message: Mapping[str, Any], writing: int) -> NoReturn:
    parent = os.getppid()
    os.setsid()
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    is_open = settings["is_open"]
    if not is_open:
        _leave()
    own = os.getpid()
    second = os.fork()
    if second:
        os.close(writing)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) & 0xFF)
    die_with_parent(None if not is_open else own)
    listener = _settle(settings["port"]) if not is_open else None
    adopt_orphans()
    outputs = [os.pipe() for _ in range(3)]  # what it prints, its complaints, the result of a function
    agent = os.fork()
    if agent == 0:
        try:
            os.close(writing)
            if listener is not None:
                listener.close()
            _be_agent(settings, function, message, [pair[1] for pair in outputs])
        finally:
            os._exit(_FAILED)
    for pair in outputs:
        os.close(pair[1])
    # The loop of the process that this one was forked from is not this one's.
    asyncio.events._set_running_loop(None)
    asyncio.set_event_loop(None)
    outcome = asyncio.run(
        _watch(agent, [pair[0] for pair in outputs], listener, settings["path"], function is not None)
    )
    os.write(writing, json.dumps(outcome).encode())
    if is_open:
        signal_all([one.pid for one in descendants(os.getpid())], signal.SIGKILL)
    os._exit(0)


async def _watch(
    agent: int, outputs: Sequence[int], listener: socket.socket | None, path: str, is_function: bool
) -> dict[str, Any]:
    """Pass connections on until the agent has ended; return what came of it."""
    if listener is not None:
        await asyncio.start_server(lambda *streams: _relay(*streams, path), sock=listener)
    texts = [asyncio.ensure_future(_read_all(fd, MAX_RESULT_BYTES)) for fd in outputs]
    status = await _ended(agent)
    # A process that it has left behind may hold the pipes.
    await asyncio.wait(texts, timeout=0.5)
    printed, complaints, result = (one.result() if one.done() else b"" for one in texts)
    if status != 0:
        last = " ".join(complaints[-MAX_ERROR_BYTES:].decode(errors="replace").split())
        return {"failure": f"exit status {status}: {last}", "is_lost": status == UNAVAILABLE}
    return {"result": _read_result(result if is_function else printed, is_function)}


def _read_result(text: bytes, is_function: bool) -> Any:
    """Return what a function has returned; of what a command has printed the last line if that is JSON, else all."""
    whole = text.decode(errors="replace").strip()
    if is_function:
        return json.loads(whole) if whole else None
    last = whole.rpartition("\n")[2]
    try:
        return json.loads(last) if last else None
    except (ValueError, RecursionError):
        return whole


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> None:
    with contextlib.suppress(OSError):
        other_reader, other_writer = await asyncio.open_unix_connection(path)
        await asyncio.gather(_pass_on(reader, other_writer), _pass_on(other_reader, writer))
    writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.close()


def _be_agent(
    settings: Mapping[str, Any], function: Any, message: Mapping[str, Any], outputs: Sequence[int]
) -> NoReturn:
    os.setsid()
    die_with_parent()
    directory, key = message["directory"], message["key"]
    os.chdir(directory)
    record = json.dumps(message["record"])
    Path("record.json").write_text(record, encoding="utf-8")
    base = f"http://127.0.0.1:{settings['port']}"
    os.environ |= {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": key, "HOME": directory, "TMPDIR": directory}
    os.environ |= {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": key}
    for target, fd in enumerate((os.open("record.json", os.O_RDONLY), *outputs[:2])):
        os.dup2(fd, target)
    result = os.dup(outputs[2])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit := settings["memory_limit_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if not settings["is_open"]:
        _close_in(directory)
    if function is None:
        os.closerange(3, 1 << 12)
        words = settings["agent"]
        try:
            os.execvp(words[0], words)
        except OSError as error:
            os.write(2, f"{words[0]}: {error.strerror}".encode())
            os._exit(127)
    os.closerange(3, result)
    os.closerange(result + 1, 1 << 12)
    os._exit(_call(function, message["record"], f"{base}/v1", key, result))


def _close_in(directory: str) -> None:
    """Take all rights over namespaces from this process, and all files to write but those of its directory."""
    refuse_new_rights()
    namespaces.drop_capabilities()
    landlock.restrict(("/",), (directory, *namespaces.DEVICES), allows_network=True)


def _call(function: Any, record: dict[str, Any], base_url: str, key: str, result: int) -> int:
    """Call a user's function, which prints to pipes; return the exit status."""
    asyncio.events._set_running_loop(None)
    asyncio.set_event_loop(None)
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, closefd=False) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))  # noqa: SIM115
    try:
        value = function(record, base_url, key)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        data = json.dumps(value).encode()
    except BaseException as error:  # SystemExit too
        sys.stderr.write(f"{type(error).__name__}: {error}"[:MAX_ERROR_BYTES])
        sys.stderr.flush()
        return UNAVAILABLE if isinstance(error, Unavailable) else _FAILED
    if len(data) > MAX_RESULT_BYTES:
        sys.stderr.write(f"it returned {len(data)} bytes, and {MAX_RESULT_BYTES} are the most")
        sys.stderr.flush()
        return _FAILED
    while data:
        data = data[os.write(result, data) :]
    return 0


async def _await(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    sys.exit(main())
