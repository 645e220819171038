"""``python -m mindrlhf.rewards.node``: the verifier workers of a node for rank 0 on another; see ``remote``.

Standard input: a line with the settings, then one that says where rank 0 listens. When it ends, this process does.
"""

import contextlib
import json
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.launch.nodes.channel import LOST, Channel
from mindrlhf.rewards.dispatcher import Dispatcher
from mindrlhf.rewards.remote import pack_results, unpack_tasks, with_tuples
from mindrlhf.rewards.selection import Selection
from mindrlhf.system.handshake import SignedConnection, introduce_node
from mindrlhf.system.wire import ProtocolError


def main() -> int:
    """Serve until rank 0, or the rank that started this, has gone."""
    settings = json.loads(sys.stdin.readline())
    dispatcher = Dispatcher(Selection(**with_tuples(settings["selection"])), *settings["limits"], failure_log=None)
    dispatcher.start()
    try:
        if not (line := sys.stdin.readline()):
            return 0
        place = json.loads(line)
        threading.Thread(target=lambda: (sys.stdin.read(), dispatcher.finished.put(None)), daemon=True).start()
        link = introduce_node(place["host"], place["port"], place["token"].encode(), place["node"])
        with contextlib.closing(link):
            return _serve(dispatcher, link)
    except (OSError, ProtocolError) as error:
        print(f"mindrlhf: rank 0 cannot use the verifiers of this node ({error})", file=sys.stderr, flush=True)
        return 1
    finally:
        dispatcher.stop()


def _serve(dispatcher: Dispatcher, link: SignedConnection) -> int:
    try:
        dispatcher.started.result()
    except Exception as error:
        link.send({"kind": "failed", "message": str(error), "is_user_error": isinstance(error, UserError)})
        return 1
    link.send({"kind": "ready", "num_workers": dispatcher.max_workers})

    def hear(message: dict[str, Any]) -> None:
        if message["kind"] == "score":
            dispatcher.add(unpack_tasks(message))
        elif message["kind"] == LOST:
            dispatcher.finished.put(None)

    num_scored = 0
    channel = Channel(link, hear, watches=False)  # rank 0 computes in its own process, and may miss beats
    while True:
        found = [dispatcher.finished.get(), *_waiting(dispatcher.finished)]
        results = [result for batch in found if isinstance(batch, list) for result in batch]
        num_scored += len(results)
        channel.send("scored", pack_results(results), counts=dict(dispatcher.take_counts()))
        for end in found:
            if isinstance(end, BaseException):
                channel.send("failed", message=" ".join(str(end).split()) or type(end).__name__)
            if not isinstance(end, list):
                print(f"mindrlhf: this node has scored {num_scored} samples for the run", file=sys.stderr, flush=True)
                return int(end is not None)


def _waiting(results: queue.SimpleQueue) -> Iterator[Any]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield results.get_nowait()


if __name__ == "__main__":
    sys.exit(main())
