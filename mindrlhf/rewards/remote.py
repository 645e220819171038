"""Verifier workers of other nodes: the process that has them there, and how the pool of rank 0 uses them.

On one connection per node, a :class:`mindrlhf.launch.nodes.channel.Channel`, which notices a node that is lost:

    ready {num_workers}, or failed {message, is_user_error}     the node, once
    score + samples                                             rank 0
    scored {counts} + results                                   the node, as they are there; or failed {message}

Samples and results travel as JSON text in an array of bytes, so that it is written and read once.
"""

import contextlib
import ipaddress
import json
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.launch.nodes.channel import LOST, Channel
from mindrlhf.launch.nodes.helper import NodeHelper
from mindrlhf.rewards.registry import Reads
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput, RewardResult, Task
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

if TYPE_CHECKING:
    from mindrlhf.config.reward import RewardSection

# Verifiers may take two minutes to load (``dispatcher.START_LIMIT_S``).
_READY_LIMIT_S = 150.0


class RemoteWorkers:
    """The workers of another node, as the dispatcher sees them: one that takes several tasks at a time.

    Args:
        name: of the node, for messages.
        reads: of all verifiers together.

    Raises:
        UserError, RunFailure: the workers cannot start there.
    """

    suspect = None

    def __init__(self, connection: SignedConnection, name: str, reads: Reads):
        self.name = name
        self._connection = connection
        self._channel: Channel | None = None
        self.tasks: dict[int, Task] = {}
        self._reads = reads
        try:
            said, _ = connection.receive(_READY_LIMIT_S)
        except (ConnectionClosed, ProtocolError, TimeoutError) as error:
            line = f"the verifiers of {name} did not start ({error}); see the log of its first rank"
            raise RunFailure(line) from None
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
        self.tasks |= {task.sequence: task for task in tasks}
        samples = [[task.sequence, task.skipped, *task.read_by(self._reads)] for task in tasks]
        self._channel.send("score", _pack(samples))

    def take_finished(self, message: dict[str, Any], counts: Counter[str]) -> list[tuple[Task, RewardResult]]:
        """Return the tasks that a message finishes; what judges took is added to ``counts``.

        Raises:
            RunFailure: the node is of no further use.
        """
        if message["kind"] in (LOST, "failed"):
            raise RunFailure(message.get("how") or f"have failed: {message['message']}")
        try:
            results = [
                (self.tasks[sequence], RewardResult(self.tasks[sequence].sample.index, *values))
                for sequence, *values in _unpack(message)
            ]
            counts.update(message["counts"])
        except (KeyError, TypeError, ValueError) as error:
            raise RunFailure(f"send what are no results ({error!r})") from None
        for task, _ in results:
            del self.tasks[task.sequence]
        return results

    def close(self) -> None:
        """End the connection, and with it the workers there."""
        (self._channel or self._connection).close()


class RemoteNodes:
    """The workers of all other nodes; ``admit`` and ``close`` may be called by any thread.

    Args:
        wake: called when there is news.

    Attributes:
        present: nodes that are not lost.
        reads: of all verifiers together, once they are known.
    """

    def __init__(self, wake: Callable[[], None]):
        self.present: list[RemoteWorkers] = []
        self.reads = Reads()
        self._news: deque[tuple[RemoteWorkers, dict[str, Any]]] = deque()
        self._wake = wake
        self._telling = threading.Lock()  # nobody may be woken once this is closed
        self._is_closed = False

    @property
    def num_workers(self) -> int:
        """Of all of them together."""
        return sum(remote.num_workers for remote in self.present)

    def admit(self, connection: SignedConnection, name: str) -> None:
        """Have the workers of a node take part, once they are ready; see :class:`RemoteWorkers`."""
        remote = RemoteWorkers(connection, name, self.reads)
        self.present.append(remote)  # before the connection can be lost: nobody else would be told
        remote.start(self._hear)
        self._wake()

    def take_news(self) -> tuple[list[tuple[Task, RewardResult]], list[Task], Counter[str]]:
        """Return what has been finished, the tasks of nodes that are lost, and what judges took."""
        finished, lost, counts = [], [], Counter()
        while self._news:
            remote, message = self._news.popleft()
            if remote not in self.present:
                continue
            try:
                finished += remote.take_finished(message, counts)
            except RunFailure as failure:
                self.present.remove(remote)
                remote.close()
                lost += remote.tasks.values()
                line = f"the verifiers of {remote.name}: {failure}; {len(remote.tasks)} samples are scored elsewhere"
                print(f"mindrlhf: {line}", file=sys.stderr, flush=True)
        return finished, lost, counts

    def close(self) -> None:
        """End all connections."""
        with self._telling:
            self._is_closed = True
        for remote in self.present:
            remote.close()

    def _hear(self, remote: RemoteWorkers, message: dict[str, Any]) -> None:
        with self._telling:
            if not self._is_closed:
                self._news.append((remote, message))
                self._wake()


class NodeVerifiers(NodeHelper):
    """The process that has the verifier workers of this node (:mod:`mindrlhf.rewards.node`), for rank 0 to use.

    It loads the verifiers at once.
    """

    def __init__(self, reward: "RewardSection"):
        limits = [reward.num_workers, reward.timeout_s, reward.failure_value, reward.memory_limit_mib << 20]
        super().__init__(
            "mindrlhf.rewards.node", {"selection": asdict(Selection.from_config(reward)), "limits": limits}
        )


def reason_to_stay(reward: "RewardSection") -> str:
    """Return why verifiers run on node 0 alone, empty where they run on every node."""
    for option, text in reward.options.items():
        with contextlib.suppress(ValueError):
            host = urlsplit(text).hostname or ""
            if host == "localhost" or (host and ipaddress.ip_address(host).is_loopback):
                return f"reward.options has {option}: {text}, which each node would look for on itself"
    return ""


def start_verifiers(reward: "RewardSection", stack: contextlib.ExitStack) -> NodeVerifiers | None:
    """Start those of this node, which is not rank 0's; ``stack`` ends them."""
    if not reward.verifier_function or reason_to_stay(reward):
        return None
    verifiers = NodeVerifiers(reward)
    stack.callback(verifiers.close)
    return verifiers


def unpack_tasks(message: dict[str, Any]) -> list[Task]:
    """Return the tasks of a message of rank 0, whose samples are named by their sequence."""
    return [
        Task(sequence, RewardInput(sequence, completion, answer, **with_tuples(context), extra=extra), skipped)
        for sequence, skipped, completion, answer, context, extra in _unpack(message)
    ]


def pack_results(results: Sequence[tuple[int, RewardResult]]) -> dict[str, np.ndarray]:
    """Return the array of a message that tells results by sequence."""
    return _pack([[sequence, one.parts, one.total, one.failures, one.steps, one.unscored] for sequence, one in results])


def with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with tuples in the place of lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _pack(values: Any) -> dict[str, np.ndarray]:
    return {"json": np.frombuffer(json.dumps(values).encode(), np.uint8)}


def _unpack(message: dict[str, Any]) -> Any:
    return json.loads(message["arrays"]["json"].tobytes())
