"""Agents on other nodes: the process that starts them there, and how the source of episodes on rank 0 uses it.

On one connection per node, a :class:`mindrlhf.launch.nodes.channel.Channel`, which notices a node that is lost:

    ready, or failed {message}                     the node, once
    start {number, record, key}, kill {number}     rank 0
    ended {number, result}                         the node
    open {stream}                                  the node: an agent connects to the endpoint
    data {stream} + bytes, close {stream}          both: what either says there

So agents reach the endpoint of rank 0 by the signed link alone, whatever network they have.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.launch.nodes.channel import LOST, Channel
from mindrlhf.launch.nodes.helper import NodeHelper
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.system.wire import ConnectionClosed, ProtocolError
from mindrlhf.tools.agents import START_TIMEOUT_S, AgentResult, run_to_end

if TYPE_CHECKING:
    from mindrlhf.config.reward import ToolSection

_READY_LIMIT_S = START_TIMEOUT_S + 30
_CHUNK_BYTES = 64 << 10
# More than the longest question: of whoever does not read, the connection ends.
_MAX_UNREAD_BYTES = 16 << 20


class Streams:
    """Connections of agents, by number, whose other ends are on another node. All of it is done in one loop."""

    def __init__(self, send: Callable[..., None]):
        self._send = send
        self._writers: dict[int, asyncio.StreamWriter] = {}

    async def follow(self, stream: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send on what comes from here, until it ends."""
        self._writers[stream] = writer
        in_thread = asyncio.get_running_loop().run_in_executor  # the link may be slow
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                arrays = {"bytes": np.frombuffer(chunk, np.uint8)}
                await in_thread(None, partial(self._send, "data", arrays, stream=stream))
        except OSError:
            pass
        finally:
            del self._writers[stream]
            writer.close()
            with contextlib.suppress(RuntimeError):  # the loop is closing
                in_thread(None, partial(self._send, "close", stream=stream))

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take what comes from the other node; of a stream that has ended here it is nothing."""
        writer = self._writers.get(message["stream"])
        if writer is None or writer.transport.is_closing():
            return
        if message["kind"] == "close":
            writer.close()
            return
        writer.write(message["arrays"]["bytes"].tobytes())
        if writer.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            writer.transport.abort()

    def close(self) -> None:
        """Hang up on all."""
        for writer in [*self._writers.values()]:
            writer.transport.abort()


class RemoteAgents:
    """Runs agents on another node, as :class:`mindrlhf.tools.agents.AgentRunner` does here.

    Args:
        name: of the node, for messages.
        port: of the endpoint.
        forget: called, in the loop, with this when the node is lost.

    Raises:
        UserError, RunFailure: the agent cannot be started there.
    """

    def __init__(
        self,
        connection: SignedConnection,
        name: str,
        port: int,
        forget: Callable[["RemoteAgents"], object],
    ):
        try:
            said, _ = connection.receive(_READY_LIMIT_S)
        except (ConnectionClosed, ProtocolError, TimeoutError) as error:
            raise RunFailure(f"agents of {name} did not start ({error}); see the log of its first rank") from None
        if said["kind"] != "ready":
            raise UserError(f"{name}: {said['message']}")
        self._connection, self._name, self._port, self._forget = connection, name, port, forget
        self._running: dict[int, asyncio.Future[AgentResult]] = {}
        self._number = 0

    async def start(self) -> None:
        """Run agents from now on, in this loop."""
        loop, messages = asyncio.get_running_loop(), asyncio.Queue()
        self._channel = Channel(self._connection, partial(loop.call_soon_threadsafe, messages.put_nowait))
        self._streams = Streams(self._channel.send)
        self._following = loop.create_task(self._follow(messages))

    async def run(
        self, record: Mapping[str, Any], key: str, timeout_s: float, clock: Callable[[], float]
    ) -> AgentResult:
        """Run an agent to its end; see :meth:`mindrlhf.tools.agents.AgentRunner.run`."""
        self._number += 1
        number, ended = self._number, asyncio.get_running_loop().create_future()
        self._running[number] = ended
        try:
            self._channel.send("start", number=number, record=dict(record), key=key)
            return await run_to_end(ended, timeout_s, clock)
        finally:
            del self._running[number]
            if not ended.done():
                self._channel.send("kill", number=number)

    async def close(self) -> None:
        """End the connection, and with it the agents there."""
        self._channel.close()
        self._following.cancel()
        self._streams.close()

    async def _follow(self, messages: asyncio.Queue) -> None:
        streams: set[asyncio.Task] = set()
        while True:
            message = await messages.get()
            if message["kind"] == LOST:
                self._lose(message["how"])
            elif message["kind"] == "ended":
                ended = self._running.get(message["number"])
                if ended is not None and not ended.done():
                    ended.set_result(AgentResult(**message["result"]))
            elif message["kind"] == "open":
                try:
                    pair = await asyncio.open_connection("127.0.0.1", self._port)
                except OSError:
                    self._channel.send("close", stream=message["stream"])
                    continue
                task = asyncio.ensure_future(self._streams.follow(message["stream"], *pair))
                streams.add(task)
                task.add_done_callback(streams.discard)
                await asyncio.sleep(0)  # it has begun when its first data are heard
            elif message["kind"] in ("data", "close"):
                self._streams.hear(message)

    def _lose(self, how: str) -> None:
        line = f"mindrlhf: {self._name} {how}; the {len(self._running)} agents there are lost"
        print(line, file=sys.stderr, flush=True)
        self._forget(self)
        self._streams.close()
        for ended in self._running.values():
            if not ended.done():
                ended.set_result(AgentResult(failure=f"{self._name} {how}", is_lost=True))


def start_agents(tools: "ToolSection", stack: contextlib.ExitStack) -> NodeHelper | None:
    """Start what runs agents on this node, which is not rank 0's; ``stack`` ends it."""
    if not tools.agent:
        return None
    names = ("agent", "agent_open", "memory_limit_mib", "agent_python")
    values = asdict(tools)
    agents = NodeHelper("mindrlhf.tools.agent_node", {name: values[name] for name in names})
    stack.callback(agents.close)
    return agents
