"""Starts agents, one process each, forked from one that has the user's file loaded: ``main``, with SOCKET_FD.

Its socket carries messages. The first is JSON, its settings: ``agent`` (path/to/file.py:function, or the words of a
command), ``port`` of the endpoint, ``is_open``, ``memory_limit_bytes``. It answers ``{"ready"}`` or ``{"error"}``. Each
further message is the directory of an agent, with a socket that is its own: no record, key or result of any agent
comes to the process that all are forked from. An agent that is not open first sends the trainer, by this socket, the
listener on its loopback, of which the trainer takes connections itself. Then it is sent a line of JSON with ``record``
and ``key``, and at its end it sends ``{"result"}`` or ``{"failure"}``. When the trainer hangs up, all of it is killed.

Each agent has three processes. The first leaves, for one that is not open, the namespaces of this one for some without
a network and without other processes. The second is the first in these, listens, and waits for the third, which is the
agent: it sees of the directories of agents its own alone, and may write nowhere else. What it leaves behind when it
ends is killed before its result is read.
"""

import asyncio
import contextlib
import fcntl
import inspect
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mindrlhf.errors import Unavailable, UserError
from mindrlhf.sandbox.limits import landlock, namespaces
from mindrlhf.sandbox.user_files import load_named
from mindrlhf.system.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    end_with_starter,
    refuse_new_rights,
    signal_all,
)

MAX_RESULT_BYTES = 64 << 10
MAX_ERROR_BYTES = 1000
_MAX_MESSAGE_BYTES = 1 << 16
_KILL_INTERVAL_S = 0.002
_FLAGS = namespaces.NETWORK_AND_PROCESSES
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_FAILED = 1
UNAVAILABLE = 75  # EX_TEMPFAIL of sysexits.h: the agent could not do its work, whatever the model wrote


def main() -> int:
    """Serve until the other side hangs up."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    end_with_starter()
    settings = json.loads(connection.recv(_MAX_MESSAGE_BYTES))
    try:
        function = _prepared(settings)
    except UserError as error:
        connection.send(json.dumps({"error": str(error)[:MAX_ERROR_BYTES]}).encode())
        return _FAILED
    connection.send(b'{"ready": true}')
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents here
    while True:
        directory, fds, *_ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 1)
        if not directory:
            return 0
        if os.fork() == 0:
            try:
                connection.close()
                _be_first(settings, function, directory.decode(), socket.socket(fileno=fds[0]))
            finally:
                os._exit(_FAILED)
        os.close(fds[0])


def _prepared(settings: Mapping[str, Any]) -> Any:
    """Return the function that is the agent, None for a command, once all is there that agents need."""
    function, agent = None, settings["agent"]
    if isinstance(agent, str):
        path, _, name = agent.rpartition(":")
        function = load_named(Path(path), name)
    if not settings["is_open"] and not _can_be_closed():
        raise UserError(
            "this system allows no namespaces, so that the network cannot be closed to agents: allow them, or "
            "set tools.agent_open=true"
        )
    return function


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


def _be_first(settings: Mapping[str, Any], function: Any, directory: str, channel: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parent, is_open = os.getppid(), settings["is_open"]
    os.setsid()
    die_with_parent(parent)
    if not is_open:
        _leave()
    own = os.getpid()
    second = os.fork()
    if second:
        channel.close()
        os._exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]) & 0xFF)
    die_with_parent(own if is_open else None)
    adopt_orphans()
    if not is_open:
        with _settle(settings["port"]) as listener:
            _hide_others(directory)
            socket.send_fds(channel, [b"l"], [listener.fileno()])
    outputs = [os.pipe() for _ in range(3)]  # what it prints, its complaints, the result of a function
    agent = os.fork()
    if agent == 0:
        try:
            _be_agent(settings, function, directory, channel, [pair[1] for pair in outputs])
        finally:
            os._exit(_FAILED)
    for pair in outputs:
        os.close(pair[1])
    outcome = _watch(agent, [pair[0] for pair in outputs], channel, function is not None)
    channel.sendall(json.dumps(outcome).encode())
    os._exit(0)


def _hide_others(directory: str) -> None:
    """Show of the directory in which that of an agent lies nothing else."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    namespaces.mount("tmpfs", os.path.dirname(directory), "tmpfs", 0, "size=64k,mode=0755")
    os.mkdir(directory)
    namespaces.mount(f"/proc/self/fd/{fd}", directory, None, namespaces.BIND)
    os.close(fd)


def _watch(agent: int, outputs: Sequence[int], channel: socket.socket, is_function: bool) -> dict[str, Any]:
    """Return what came of an agent when it has ended; when the trainer hangs up before, kill it."""
    ended, texts, poller = os.pidfd_open(agent), dict.fromkeys(outputs, b""), select.poll()
    poller.register(channel, select.POLLRDHUP)
    for fd in (ended, *outputs):
        poller.register(fd, select.POLLIN)
    ready: list[int] = []
    while ended not in ready and channel.fileno() not in ready:
        ready = [fd for fd, _ in poller.poll()]
        for fd in texts.keys() & ready:
            texts[fd], is_over = _read_more(fd, texts[fd])
            if is_over:
                poller.unregister(fd)
    # First of all, so that nothing that it has left behind asks on.
    while pids := [process.pid for process in descendants(os.getpid()) if process.returncode is None]:
        signal_all(pids, signal.SIGKILL)
        time.sleep(_KILL_INTERVAL_S)
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    for fd in texts:
        is_over = False
        while not is_over:
            texts[fd], is_over = _read_more(fd, texts[fd])
    printed, complaints, result = texts.values()
    if status != 0:
        last = " ".join(complaints[-MAX_ERROR_BYTES:].decode(errors="replace").split())
        return {"failure": f"exit status {status}: {last}", "is_unscored": status == UNAVAILABLE}
    return {"result": _read_result(result if is_function else printed, is_function)}


def _read_more(fd: int, text: bytes) -> tuple[bytes, bool]:
    """Return the last bytes of a pipe with what has come since, and True when all its writers have gone."""
    chunk = os.read(fd, 1 << 16)
    return (text + chunk)[-MAX_RESULT_BYTES:], not chunk


def _read_result(text: bytes, is_function: bool) -> Any:
    """Return what a function has returned; of what a command has printed the last line if that is JSON, else all."""
    whole = text.decode(errors="replace").strip()
    last = whole if is_function else whole.rpartition("\n")[2]
    try:
        return json.loads(last) if last else None
    except (ValueError, RecursionError):
        return whole


def _be_agent(
    settings: Mapping[str, Any], function: Any, directory: str, channel: socket.socket, outputs: Sequence[int]
) -> NoReturn:
    os.setsid()
    die_with_parent()
    with channel, channel.makefile("rb") as file:
        message = json.loads(file.readline())
    record, key = message["record"], message["key"]
    os.chdir(directory)
    if function is None:
        Path("record.json").write_text(json.dumps(record), encoding="utf-8")
    base = f"http://127.0.0.1:{settings['port']}"
    os.environ |= {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": key, "HOME": directory, "TMPDIR": directory}
    os.environ |= {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": key}
    source = os.devnull if function is not None else "record.json"
    for target, fd in enumerate((os.open(source, os.O_RDONLY), *outputs[:2])):
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
    os._exit(_call(function, record, f"{base}/v1", key, result, settings["is_open"]))


def _close_in(directory: str) -> None:
    """Take all rights over namespaces from this process, and all files to write but those of its directory."""
    refuse_new_rights()
    namespaces.drop_capabilities()
    # Whoever is root owns the devices of disks, on which records of others may lie.
    readable = [f"/{name}" for name in os.listdir("/") if name != "dev"]
    landlock.restrict(readable, (directory, *namespaces.DEVICES), allows_network=True, listable=("/",))


def _call(function: Any, record: dict[str, Any], base_url: str, key: str, result: int, is_open: bool) -> int:
    """Call a user's function, which prints to pipes; return the exit status."""
    sys.stdin, sys.stdout, sys.stderr = (open(fd, mode, closefd=False) for fd, mode in ((0, "r"), (1, "w"), (2, "w")))  # noqa: SIM115
    try:
        value = function(record, base_url, key)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        if not is_open:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all that it leaves behind, but itself and the first process here
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
