"""Agents on other nodes: the process that starts them there, ``main``, and how the
source of episodes on rank 0 uses it.

That process serves the same endpoint to the agents of its node; rank 0 answers what they ask. On one connection per
node, a :class:`mindrlhf.system.rpc.Link`, which notices a node that is lost:

    ready                                               the node, once
    start {number, record, key}, kill {number}          rank 0
    ended {number, result, num_refused}                 the node
    call {number, asked, call}                          the node
    answer {asked} + replies, prompt_ids, or refused    rank 0
    unread {number, asked}                              the node: the client has gone without the answer

So agents reach the model by the signed link alone, whatever network they have.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindrlhf.errors import UserError
from mindrlhf.launch.nodes.helper import NodeHelper
from mindrlhf.rollout.agents.protocols import Answer, Call, Reply
from mindrlhf.rollout.chat_server import MODEL_NAME, REFUSALS, Caller, HttpServer, Refused, as_refused, settled
from mindrlhf.system.files import take_directory
from mindrlhf.system.handshake import SignedConnection, introduce_node
from mindrlhf.system.processes import SERVER_PREFIX
from mindrlhf.system.rpc import LOST, Link, await_ready, say_ready
from mindrlhf.system.wire import ProtocolError
from mindrlhf.tools.agents import START_TIMEOUT_S, AgentResult, AgentRunner, run_to_end

if TYPE_CHECKING:
    from mindrlhf.config.reward import ToolSection

_READY_LIMIT_S = START_TIMEOUT_S + 30
_UNLIMITED_S = 1e9  # rank 0 looks at the time


class _Episode:
    """The caller behind a key, whose calls rank 0 answers."""

    def __init__(self, number: int, link: Link):
        self._number = number
        self._link = link
        self.num_refused = 0
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}  # calls, by number
        self._num_asked = 0

    async def answer(self, call: Call) -> Answer:
        self._num_asked += 1
        asked = self._num_asked
        self.waiting[asked] = asyncio.get_running_loop().create_future()
        unread = partial(self._link.send, "unread", number=self._number, asked=asked)
        try:
            self._link.send("call", number=self._number, asked=asked, call=asdict(call))
            said = await self.waiting[asked]
        except asyncio.CancelledError:
            unread()
            raise
        finally:
            del self.waiting[asked]
        if "refused" in said:
            raise Refused(*said["refused"])
        return Answer(tuple(Reply(**one) for one in said["replies"]), tuple(said["prompt_ids"]), unread)


class _Node:
    def __init__(self, settings: Mapping[str, Any], directory: Path):
        self._keys: dict[str, _Episode] = {}
        self._episodes: dict[int, _Episode] = {}
        self._tasks: dict[int, asyncio.Task] = {}
        self._http = HttpServer(self._keys.get, MODEL_NAME)
        self._runner = AgentRunner(
            settings["agent"],
            self._http.port,
            str(directory),
            self._http.listen,
            is_open=settings["agent_open"],
            memory_limit_bytes=settings["memory_limit_mib"] << 20,
            python=settings["agent_python"],
        )

    def serve(self) -> int:
        """Run agents until rank 0, or the rank that started this, has gone; return the exit status."""
        try:
            return asyncio.run_coroutine_threadsafe(self._serve(), self._http.loop).result()
        finally:
            asyncio.run_coroutine_threadsafe(self._runner.close(), self._http.loop).result()
            self._http.close()

    async def _serve(self) -> int:
        loop, failure = asyncio.get_running_loop(), None
        try:
            await self._runner.start()
        except UserError as error:
            failure = error
        if not (line := await loop.run_in_executor(None, sys.stdin.readline)):
            return 0
        told = json.loads(line)
        place = (told["host"], told["port"], told["token"].encode(), told["node"])
        link = await loop.run_in_executor(None, introduce_node, *place)
        say_ready(link, failure)
        if failure is not None:
            return 1
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        tell = partial(loop.call_soon_threadsafe, messages.put_nowait)
        self._link = Link(link, tell, watches=False)  # rank 0 computes in its own process, and may miss beats
        threading.Thread(target=lambda: (sys.stdin.read(), tell({"kind": LOST})), daemon=True).start()
        num_run = 0
        while (message := await messages.get())["kind"] != LOST:
            number = message.get("number")
            if message["kind"] == "start":
                num_run += 1
                self._tasks[number] = asyncio.ensure_future(self._run(number, message["record"], message["key"]))
            elif message["kind"] == "kill" and number in self._tasks:
                self._tasks[number].cancel()
            elif message["kind"] == "answer" and number in self._episodes:
                waiting = self._episodes[number].waiting.get(message["asked"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)
        print(f"mindrlhf: this node has run {num_run} agents for the run", file=sys.stderr, flush=True)
        return 0

    async def _run(self, number: int, record: Mapping[str, Any], key: str) -> None:
        episode = self._keys[key] = self._episodes[number] = _Episode(number, self._link)
        try:
            result = await self._runner.run(record, key, _UNLIMITED_S)
            await settled()
            self._link.send("ended", number=number, result=asdict(result), num_refused=episode.num_refused)
        finally:
            del self._keys[key], self._tasks[number], self._episodes[number]


class RemoteAgents:
    """Runs agents on another node, as :class:`mindrlhf.tools.agents.AgentRunner` does here.

    Args:
        name: of the node, for messages.
        find: returns the caller behind a key.
        forget: called, in the loop, with this when the node is lost.

    Raises:
        UserError, RunFailure: the agent cannot be started there.
    """

    def __init__(
        self,
        connection: SignedConnection,
        name: str,
        find: Callable[[str], Caller | None],
        forget: Callable[["RemoteAgents"], object],
    ):
        await_ready(connection, name, _READY_LIMIT_S)
        self._connection, self._name, self._find, self._forget = connection, name, find, forget
        self._running: dict[int, tuple[asyncio.Future[AgentResult], str]] = {}  # with the key
        self._calls: dict[tuple[int, int], asyncio.Task[Answer | None]] = {}
        self._number = 0

    async def start(self) -> None:
        """Run agents from now on, in this loop."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue()
        self._link = Link(self._connection, partial(loop.call_soon_threadsafe, messages.put_nowait))
        self._following = loop.create_task(self._follow(messages))

    async def run(
        self, record: Mapping[str, Any], key: str, timeout_s: float, clock: Callable[[], float]
    ) -> AgentResult:
        self._number += 1
        number, ended = self._number, asyncio.get_running_loop().create_future()
        self._running[number] = ended, key
        try:
            self._link.send("start", number=number, record=dict(record), key=key)
            return await run_to_end(ended, timeout_s, clock)
        finally:
            del self._running[number]
            for call in [call for call in self._calls if call[0] == number]:
                self._calls.pop(call).cancel()
            if not ended.done():
                self._link.send("kill", number=number)

    async def close(self) -> None:
        self._link.close()
        self._following.cancel()

    async def _follow(self, messages: asyncio.Queue) -> None:
        while (message := await messages.get())["kind"] != LOST:
            ended, key = self._running.get(message.get("number"), (None, ""))
            if ended is None or ended.done():
                continue
            call = message["number"], message.get("asked")
            if message["kind"] == "call":
                self._calls[call] = asyncio.ensure_future(self._answer(*call, key, message["call"]))
            elif message["kind"] == "unread":
                if not self._calls[call].done():
                    self._calls[call].cancel()
                elif (answer := self._calls[call].result()) is not None:
                    answer.unread()
            elif message["kind"] == "ended":
                if (caller := self._find(key)) is not None:
                    caller.num_refused += message["num_refused"]
                ended.set_result(AgentResult(**message["result"]))
        self._lose(message["how"])

    async def _answer(self, number: int, asked: int, key: str, call: Mapping[str, Any]) -> Answer | None:
        answer = None
        try:
            if (caller := self._find(key)) is None:
                raise Refused(410, "the episode has ended")
            answer = await caller.answer(Call(**call))
            said = {"replies": [asdict(one) for one in answer.replies], "prompt_ids": answer.prompt_ids}
        except REFUSALS as error:
            refused = as_refused(error)
            said = {"refused": [refused.status, str(refused)]}
        send = partial(self._link.send, "answer", number=number, asked=asked, **said)
        # The link may be slow, but what is on its way is no more broken off: it may be unread all the same.
        asyncio.get_running_loop().run_in_executor(None, send)
        return answer

    def _lose(self, how: str) -> None:
        line = f"mindrlhf: {self._name} {how}; the {len(self._running)} agents there are lost"
        print(line, file=sys.stderr, flush=True)
        self._forget(self)
        for ended, _ in self._running.values():
            if not ended.done():
                ended.set_result(AgentResult(failure=f"{self._name} {how}", is_unscored=True))


def start_agents(tools: "ToolSection", stack: contextlib.ExitStack) -> NodeHelper | None:
    """Start what runs agents on this node, which is not rank 0's; ``stack`` ends it."""
    if not tools.agent:
        return None
    names = ("agent", "agent_open", "memory_limit_mib", "agent_python")
    values = asdict(tools)
    agents = NodeHelper("mindrlhf.rollout.agents.nodes", {name: values[name] for name in names})
    stack.callback(agents.close)
    return agents


def main() -> int:
    """Serve until rank 0, or the rank that started this, has gone."""
    settings = json.loads(sys.stdin.readline())
    directory, lock = take_directory(Path(tempfile.gettempdir()), SERVER_PREFIX)
    try:
        return _Node(settings, directory).serve()
    except (OSError, ProtocolError) as error:
        print(f"mindrlhf: rank 0 cannot use the agents of this node ({error})", file=sys.stderr, flush=True)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(lock)
