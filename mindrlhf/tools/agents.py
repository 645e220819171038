"""The trainer's side of agents: which they are, and how one is run, watched and ended."""

import asyncio
import contextlib
import json
import math
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.sandbox.user_files import declared_signature
from mindrlhf.system.child import Child, inherited, module_words
from mindrlhf.tools.environments import MAX_REWARD

BACKLOG = 1024  # of what many agents call at once; asyncio takes 100, whatever the socket had
START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 15.0  # of an agent that is killed
_MIN_WAIT_S = 0.02
_FUNCTION = re.compile(r"\S+\.py:[^\W\d]\w*")
# Of this process's environment, what agents see.
_SHARED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DOCKER_HOST")


@dataclass(frozen=True)
class AgentResult:
    """Result of an agent: the reward and the text that it gave, each None where it gave none."""

    reward: float | None = None  # where roles have rewards, that of the first
    text: str | None = None
    failure: str = ""
    is_unscored: bool = False  # it failed by no doing of the model
    rewards: Mapping[str, float] = field(default_factory=dict)  # of roles, where it gave each its own


def is_function(agent: str) -> bool:
    """True for an agent that is a function of a file, and no command."""
    return _FUNCTION.fullmatch(agent) is not None


def command_words(agent: str) -> list[str]:
    """Return the words of a command; those that are files are named whole, since agents are not run where they lie.

    Raises:
        UserError: quotes that do not match, or nothing.
    """
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise UserError(f"'tools.agent' is {agent}: {str(error).lower()}") from None
    if not words:
        raise UserError("'tools.agent' is blank: give path/to/agent.py:function, or a command line")
    return [str(Path(word).absolute()) if "/" in word and Path(word).exists() else word for word in words]


def check_agent(agent: str, python: str = "") -> None:
    """Check what can be known without running anything; ``agent`` is empty where there is none, ``python`` where it is
    run by this interpreter.

    Raises:
        UserError: no such file, function, program or interpreter, or a function that cannot be called as agents are.
    """
    if not agent:
        return
    if python and not is_function(agent):
        raise UserError(
            f"'tools.agent_python' is {python}, but tools.agent is a command, which names its own interpreter: "
            "remove it, or give path/to/agent.py:function"
        )
    if python and shutil.which(python) is None:
        raise UserError(f"'tools.agent_python' is {python}: there is no such program; give the path of a Python")
    if not is_function(agent):
        word = command_words(agent)[0]
        if shutil.which(word) is None:
            raise UserError(
                f"'tools.agent' is {agent}: there is no program {word}: give its path, or path/to/agent.py:function"
            )
        return
    path, _, name = agent.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"'tools.agent' is {agent}: there is no file {path}")
    signature = declared_signature(Path(path), name)
    if signature is not None:
        try:
            signature.bind({}, "", "")
        except TypeError as error:
            raise UserError(
                f"'tools.agent' is {agent}: it is called as {name}(record, base_url, api_key), but {error}"
            ) from None


class AgentRunner:
    """Runs agents, each in a process and a directory of its own. All of it is done in one thread, that of a loop.

    Args:
        agent: see ``tools.agent``.
        port: of the endpoint on the loopback.
        directory: under which each has its own.
        serve: takes connections of a listener on the loopback of the agent that has a key.
        is_open: agents have this machine's network and files.
        memory_limit_bytes: of each process of an agent.
        python: interpreter that loads and runs a function; "" means this one.
    """

    def __init__(
        self,
        agent: str,
        port: int,
        directory: str,
        serve: Callable[[socket.socket, str], Awaitable[asyncio.Server]],
        *,
        is_open: bool,
        memory_limit_bytes: int,
        python: str = "",
    ):
        self._settings = {
            "agent": str(Path(agent).absolute()) if is_function(agent) else command_words(agent),
            "port": port,
            "is_open": is_open,
            "memory_limit_bytes": memory_limit_bytes,
        }
        self._directory = Path(directory) / "agents"  # an agent sees of it nothing but its own
        self._directory.mkdir()
        self._serve = serve
        self._python = python or sys.executable
        self._process: Child | None = None
        self._number = 0  # of agents that have begun
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process that agents are forked from, if there is none.

        Raises:
            UserError: the user's file does not load, or the network cannot be closed.
        """
        async with self._starting:
            if self._process is not None:
                if self._process.poll() is None:
                    return
                line = "the process that starts agents has ended, and another takes its place"
                print(f"mindrlhf: {line}", file=sys.stderr, flush=True)
            await self.close()
            self._host, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            self._host.settimeout(START_TIMEOUT_S)
            with theirs:
                self._process = Child(
                    module_words("mindrlhf.tools.agent_host", theirs.fileno(), python=self._python),
                    environment=inherited(_SHARED),
                    output=2,
                    descriptors=[theirs.fileno()],
                )
            self._host.send(json.dumps(self._settings).encode())
            try:
                answer = json.loads(await _in_thread(self._host.recv, 1 << 16) or b"null")
            except OSError:  # its time is over, or it has gone
                answer = None
            if not answer or "error" in answer:
                await self.close()
                raise UserError(answer["error"] if answer else "the process of the agents did not start: see the log")

    async def run(
        self, record: Mapping[str, Any], key: str, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> AgentResult:
        """Run an agent to its end, and kill what is left of it; ``clock`` tells the seconds that count."""
        try:
            await self.start()
        except UserError as error:
            return AgentResult(failure=str(error), is_unscored=True)
        self._number += 1
        directory = tempfile.mkdtemp(dir=self._directory)
        own, theirs = socket.socketpair()
        own.setblocking(False)
        message = json.dumps({"record": dict(record), "key": key}).encode()
        ended = asyncio.ensure_future(self._follow(own, theirs, directory, key, message))
        try:
            result = await run_to_end(ended, timeout_s, clock)
            if not ended.done():  # all of it is killed when it sees that nobody listens
                own.shutdown(socket.SHUT_WR)
                await asyncio.wait([ended], timeout=_END_TIMEOUT_S)
            return result
        finally:
            ended.cancel()
            await asyncio.wait([ended])
            own.close()
            shutil.rmtree(directory, ignore_errors=True)

    async def _follow(
        self, own: socket.socket, theirs: socket.socket, directory: str, key: str, message: bytes
    ) -> AgentResult:
        """Begin an agent, and return how it ended."""
        loop, told = asyncio.get_running_loop(), b""
        with contextlib.ExitStack() as stack:
            try:
                with theirs:
                    await _in_thread(socket.send_fds, self._host, [directory.encode()], [theirs.fileno()])
                if not self._settings["is_open"]:
                    server = await self._serve(await _received_listener(own), key)
                    stack.callback(server.close)
                await loop.sock_sendall(own, message + b"\n")
                while chunk := await loop.sock_recv(own, 1 << 16):
                    told += chunk
                return read_result(json.loads(told))
            except (OSError, ValueError):
                return AgentResult(failure="the process that starts agents died", is_unscored=True)

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            self._host.close()


async def _in_thread(function: Callable, *arguments: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)


async def _received_listener(channel: socket.socket) -> socket.socket:
    """Return the listener that comes by a socket.

    Raises:
        OSError: none does.
    """
    loop, is_ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(channel)
    _, fds, *_ = socket.recv_fds(channel, 1, 1)
    if not fds:
        raise OSError("the other side has gone")
    return socket.socket(fileno=fds[0])


async def run_to_end(ended: "asyncio.Future[AgentResult]", timeout_s: float, clock: Callable[[], float]) -> AgentResult:
    """Return how an agent has ended, at the latest when its time by a clock is over."""
    end_s = clock() + timeout_s
    while not ended.done() and (left_s := end_s - clock()) > 0:
        await asyncio.wait([ended], timeout=max(left_s, _MIN_WAIT_S))
    if ended.done():
        return ended.result()
    return AgentResult(failure=f"it had not ended after {timeout_s:g} s (tools.agent_timeout_s)")


def read_result(message: Mapping[str, Any]) -> AgentResult:
    """Return what an agent has said: a number is a reward, a text what verifiers read, an object may hold both, and
    rewards of roles by their names in the place of one."""
    if message.get("failure"):
        return AgentResult(failure=str(message["failure"]), is_unscored=bool(message.get("is_unscored")))
    result = message.get("result")
    given = result if isinstance(result, dict) else {}
    if isinstance(result, (int, float)):
        given = {"reward": result}
    elif isinstance(result, str):
        given = {"text": result}
    unknown: Collection[str] = given.keys() - {"reward", "text"}
    reward, text = given.get("reward"), given.get("text")
    rewards = reward if isinstance(reward, dict) and reward else {"": 0.0 if reward is None else reward}
    are_numbers = all(
        isinstance(one, (int, float)) and math.isfinite(one) and abs(one) <= MAX_REWARD for one in rewards.values()
    )
    if unknown or isinstance(result, list) or not are_numbers or not isinstance(text, str | None):
        shown = json.dumps(result)[:100]
        return AgentResult(failure=f'it returned {shown}, and not a reward, a text, or {{"reward": ..., "text": ...}}')
    rewards = {role: float(one) for role, one in rewards.items()}
    first = None if reward is None else next(iter(rewards.values()))
    return AgentResult(first, text, rewards=rewards if isinstance(reward, dict) else {})
