"""``python -m mindrlhf.sandbox.pool_node``: a ``WorkerPool`` for rank 0 on another node; see ``remote_workers``.

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
from mindrlhf.launch.nodes.channel import LOST, Channel
from mindrlhf.sandbox.pool import WorkerPool
from mindrlhf.sandbox.remote_workers import pack, unpack
from mindrlhf.system.handshake import introduce_node
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
        if isinstance(pool, Exception):
            link.send({"kind": "failed", "message": str(pool), "is_user_error": isinstance(pool, UserError)})
            return 1
        link.send({"kind": "ready", "num_workers": pool.max_workers})

        def hear(message: dict[str, Any]) -> None:
            if message["kind"] == "work":
                num_chars = message["arrays"]["json"].size // len(items := unpack(message))
                pool.submit(((*item, num_chars) for item in items), "work")
            elif message["kind"] == LOST:
                results.put(None)

        num_done = 0
        channel = Channel(link, hear, watches=False)  # rank 0 computes in its own process, and may miss beats
        while isinstance(batch := results.get(), list):
            num_done += len(batch)
            channel.send("done", pack(batch))
        if batch is not None:
            channel.send("failed", message=" ".join(str(batch).split()) or type(batch).__name__)
        print(f"mindrlhf: this node has done {num_done} items for the run", file=sys.stderr, flush=True)
        return int(batch is not None)


if __name__ == "__main__":
    sys.exit(main())
