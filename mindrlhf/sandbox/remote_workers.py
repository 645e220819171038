"""The workers of a ``WorkerPool`` on another node, as the pool of rank 0 sees them.

On one connection per node, a :class:`mindrlhf.launch.nodes.channel.Channel`, which notices a node that is lost:

    ready {num_workers}, or failed {message, is_user_error}     the node (:mod:`mindrlhf.sandbox.pool_node`), once
    work + items                                                rank 0
    done + results                                              the node, as they are there; or failed {message}

Items and results travel as JSON text in an array of bytes, so that it is written and read once.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.launch.nodes.channel import Channel
from mindrlhf.sandbox.worker_process import Task, batch_of, finish
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

# User code may take two minutes to load (``pool.START_LIMIT_S``).
_READY_LIMIT_S = 150.0


class RemoteWorkers:
    """The workers of another node: one that takes several tasks at a time.

    Args:
        name: for messages.

    Raises:
        UserError, RunFailure: the workers cannot start there.
    """

    suspect = None

    def __init__(self, connection: SignedConnection, name: str):
        self._name = name
        self._connection = connection
        self._channel: Channel | None = None
        self.tasks: dict[int, Task] = {}
        try:
            said, _ = connection.receive(_READY_LIMIT_S)
        except (ConnectionClosed, ProtocolError, TimeoutError) as error:
            raise RunFailure(f"{name} did not start ({error}); see the log of its first rank") from None
        if said["kind"] != "ready":
            raise (UserError if said["is_user_error"] else RunFailure)(f"{name}: {said['message']}")
        self.num_workers = int(said["num_workers"])

    def start(self, tell: Callable[["RemoteWorkers", dict[str, Any]], None]) -> None:
        """From now on have ``tell`` called with this and each message, by threads of the connection."""
        self._channel = Channel(self._connection, lambda message: message["kind"] == "beat" or tell(self, message))

    @property
    def is_ready(self) -> bool:
        return self._channel is not None

    @property
    def load(self) -> float:
        """Tasks that each worker there has to do."""
        return len(self.tasks) / self.num_workers

    def give(self, tasks: Sequence[Task]) -> None:
        """Send tasks; if the node is lost, ``tell`` hears of it."""
        self.tasks |= {task.number: task for task in tasks}
        self._channel.send("work", pack(batch_of(tasks)))

    def take_finished(self, message: dict[str, Any]) -> tuple[list[tuple[int, list[Any]]], list[Task] | None]:
        """Return the results that a message has; and the tasks that are left, if the node is of no further use."""
        try:
            if message["kind"] == "done":
                return finish(self.tasks, unpack(message)), None
            how = message.get("how") or f"have failed: {message['message']}"
        except (KeyError, ValueError) as error:
            how = f"send what are no results ({error!r})"
        self.close()
        line = f"{self._name}: {how}; {len(self.tasks)} items are done elsewhere"
        print(f"mindrlhf: {line}", file=sys.stderr, flush=True)
        return [], list(self.tasks.values())

    def close(self) -> None:
        """End the connection, and with it the workers there."""
        (self._channel or self._connection).close()


def pack(values: Any) -> dict[str, np.ndarray]:
    """Return the array of a message that holds JSON."""
    return {"json": np.frombuffer(json.dumps(values).encode(), np.uint8)}


def unpack(message: dict[str, Any]) -> Any:
    """Return what the array of a message holds."""
    return json.loads(message["arrays"]["json"].tobytes())
