"""The program of a ``WorkerPool`` for rank 0 on another node; see ``remote_workers``.

Standard input: a line with the pool's arguments, then one that says where rank 0 listens. When it ends, this process
does.
"""

import contextlib
import json
import queue
import sys
import threading
from collections.abc import Mapping
from typing import Any

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.sandbox.pool import WorkerPool
from mindrlhf.system.handshake import introduce_node
from mindrlhf.system.rpc import LOST, Link, say_ready
from mindrlhf.system.wire import ProtocolError


def main() -> int:
    """Serve until rank 0, or the rank that started this, has gone."""
    arguments = json.loads(sys.stdin.readline())
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        try:
            pool: WorkerPool | Exception = WorkerPool(deliver=results.put, **arguments)
            stack.callback(pool.close)
        except (UserError, RunFailure) as error:
            pool = error
        if not (line := sys.stdin.readline()):
            return 0
        threading.Thread(target=lambda: (sys.stdin.read(), results.put(None)), daemon=True).start()
        try:
            return _serve(pool, results, json.loads(line))
        except (OSError, ProtocolError) as error:
            print(f"mindrlhf: rank 0 cannot use the workers of this node ({error})", file=sys.stderr, flush=True)
            return 1


def _serve(pool: WorkerPool | Exception, results: queue.SimpleQueue, place: Mapping[str, Any]) -> int:
    link = introduce_node(place["host"], place["port"], place["token"].encode(), place["node"])
    with contextlib.closing(link):
        failure = pool if isinstance(pool, Exception) else None
        say_ready(link, failure, num_workers=None if failure else pool.max_workers)
        if failure is not None:
            return 1

        def hear(message: dict[str, Any]) -> None:
            if message["kind"] == "work":
                pool.submit(message["items"], "work")
            elif message["kind"] == LOST:
                results.put(None)

        num_done = 0
        talk = Link(link, hear, watches=False)  # rank 0 computes in its own process, and may miss beats
        while isinstance(batch := results.get(), list):
            num_done += len(batch)
            talk.send("done", results=batch)
        if batch is not None:
            talk.send("failed", message=" ".join(str(batch).split()) or type(batch).__name__)
        print(f"mindrlhf: this node has done {num_done} items for the run", file=sys.stderr, flush=True)
        return int(batch is not None)
