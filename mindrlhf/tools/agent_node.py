"""``python -m mindrlhf.tools.agent_node``: starts agents of a node for rank 0 on another; see ``agent_nodes``."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.launch.nodes.channel import LOST, Channel
from mindrlhf.system.files import take_directory
from mindrlhf.system.handshake import introduce_node
from mindrlhf.system.ports import listen
from mindrlhf.system.processes import SERVER_PREFIX
from mindrlhf.system.wire import ProtocolError
from mindrlhf.tools.agent_nodes import Streams
from mindrlhf.tools.agents import BACKLOG, AgentRunner

_UNLIMITED_S = 1e9  # rank 0 looks at the time


class _Node:
    def __init__(self, settings: dict[str, Any], directory: Path):
        self._directory = directory
        self._settings = settings
        self._tasks: dict[int, asyncio.Task] = {}
        self._num_streams = self._num_run = 0
        self._channel: Channel | None = None

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        listener = listen("127.0.0.1", backlog=BACKLOG)
        await self._listen(listener)
        settings = self._settings
        runner = AgentRunner(
            settings["agent"],
            listener.getsockname()[1],
            str(self._directory),
            self._listen,
            is_open=settings["agent_open"],
            memory_limit_bytes=settings["memory_limit_mib"] << 20,
            python=settings["agent_python"],
        )
        failure = ""
        try:
            await runner.start()
        except UserError as error:
            failure = str(error)
        try:
            if not (line := await loop.run_in_executor(None, sys.stdin.readline)):
                return 0
            place = json.loads(line)
            place = (place["host"], place["port"], place["token"].encode(), place["node"])
            link = await loop.run_in_executor(None, introduce_node, *place)
            if failure:
                link.send({"kind": "failed", "message": failure})
                return 1
            link.send({"kind": "ready"})
            messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            tell = partial(loop.call_soon_threadsafe, messages.put_nowait)
            self._channel = Channel(link, tell, watches=False)  # rank 0 computes in its own process, and may miss beats
            self._streams = Streams(self._channel.send)
            threading.Thread(target=lambda: (sys.stdin.read(), tell({"kind": LOST})), daemon=True).start()
            await self._follow(runner, messages)
            print(f"mindrlhf: this node has run {self._num_run} agents for the run", file=sys.stderr, flush=True)
            return 0
        finally:
            await runner.close()

    async def _follow(self, runner: AgentRunner, messages: asyncio.Queue) -> None:
        while (message := await messages.get())["kind"] != LOST:
            number = message.get("number")
            if message["kind"] == "start":
                self._tasks[number] = asyncio.ensure_future(self._run(runner, number, message))
            elif message["kind"] == "kill" and number in self._tasks:
                self._tasks[number].cancel()
            elif message["kind"] in ("data", "close"):
                self._streams.hear(message)

    async def _run(self, runner: AgentRunner, number: int, message: dict[str, Any]) -> None:
        try:
            result = await runner.run(message["record"], message["key"], _UNLIMITED_S)
            self._num_run += 1
            self._channel.send("ended", number=number, result=asdict(result))
        finally:
            del self._tasks[number]

    async def _listen(self, listener: socket.socket, key: str = "") -> asyncio.Server:
        return await asyncio.start_server(self._connected, sock=listener, backlog=BACKLOG)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._channel is None:
            writer.close()
            return
        self._num_streams += 1
        self._channel.send("open", stream=self._num_streams)
        await self._streams.follow(self._num_streams, reader, writer)


def main() -> int:
    """Serve until rank 0, or the rank that started this, has gone."""
    settings = json.loads(sys.stdin.readline())
    directory, lock = take_directory(Path(tempfile.gettempdir()), SERVER_PREFIX)
    try:
        return asyncio.run(_Node(settings, directory).serve())
    except (OSError, ProtocolError) as error:
        print(f"mindrlhf: rank 0 cannot use the agents of this node ({error})", file=sys.stderr, flush=True)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
