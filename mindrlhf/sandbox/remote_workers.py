"""The workers of a ``WorkerPool`` on another node, as the pool of rank 0 sees them.

On one connection per node, a :class:`mindrlhf.system.rpc.Link`, which notices a node that is lost:

    ready {num_workers}     the node (:mod:`mindrlhf.sandbox.pool_node`), once
    work {items}            rank 0
    done {results}          the node, as they are there; or failed {message}
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from mindrlhf.sandbox.worker_process import Task, batch_of, finish
from mindrlhf.system.rpc import Connection, Link, await_ready

# User code may take two minutes to load (``pool.START_LIMIT_S``).
_READY_LIMIT_S = 150.0


class RemoteWorkers:
    """The workers of another node: one that takes several tasks at a time.

    Raises:
        UserError, RunFailure: the workers cannot start there.
    """

    suspect = None

    def __init__(self, connection: Connection, name: str):
        self._name = name
        self._connection = connection
        self._link: Link | None = None
        self.tasks: dict[int, Task] = {}
        self.num_workers = int(await_ready(connection, name, _READY_LIMIT_S)["num_workers"])

    def start(self, tell: Callable[["RemoteWorkers", dict[str, Any]], None]) -> None:
        """From now on have ``tell`` called with this and each message, by threads of the connection."""
        self._link = Link(self._connection, lambda message: tell(self, message))

    @property
    def is_ready(self) -> bool:
        return self._link is not None

    @property
    def load(self) -> float:
        """Tasks that each worker there has to do."""
        return len(self.tasks) / self.num_workers

    def give(self, tasks: Sequence[Task]) -> None:
        """Send tasks; if the node is lost, ``tell`` hears of it."""
        self.tasks |= {task.number: task for task in tasks}
        self._link.send("work", items=[[*told, task.num_chars] for told, task in zip(batch_of(tasks), tasks)])

    def take_finished(self, message: dict[str, Any]) -> tuple[list[tuple[int, list[Any]]], list[Task] | None]:
        """Return the results that a message has; and the tasks that are left, if the node is of no further use."""
        try:
            if message["kind"] == "done":
                return finish(self.tasks, message["results"]), None
            how = message.get("how") or f"have failed: {message['message']}"
        except (KeyError, ValueError) as error:
            how = f"send what are no results ({error!r})"
        self.close()
        line = f"{self._name}: {how}; {len(self.tasks)} items are done elsewhere"
        print(f"mindrlhf: {line}", file=sys.stderr, flush=True)
        return [], list(self.tasks.values())

    def close(self) -> None:
        (self._link or self._connection).close()
