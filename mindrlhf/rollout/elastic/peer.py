"""A node for rollout only, as rank 0 sees it: a generator that may be lost at any time.

On one connection (:class:`mindrlhf.launch.nodes.channel.Channel`) rank 0 asks and the node answers:

    buffer + infos                   buffer {host, port}, where the node waits for weights
    weights {version} + checksums    weights, when the servers there have loaded them
    generate {sampling} + requests   completions {weights_version} + samples, any number of times; generated
    abort, while it generates        generated

"failed" {message} and "leaving" may come at any time, and end it. Weights come by the transport of
:mod:`mindrlhf.weights.publish.tcp`.
"""

import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.channel import LOST, Channel
from mindrlhf.rollout.types import (
    Completion,
    GenerationRequest,
    SamplingParams,
    pack_requests,
    pack_sampling,
    unpack_completions,
)
from mindrlhf.system import heartbeat
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.slices import whole_slice
from mindrlhf.weights.publish.sync import Sums, Transfer, plan_sync
from mindrlhf.weights.publish.tcp import TcpTransport
from mindrlhf.weights.tensors import TensorInfo

LEAD, NODE = 0, 1  # the ends of the sync
LEAVING, FAILED = "leaving", "failed"
# After any of these messages nothing more comes; what is said of the node.
_ENDS = {LOST: "{how}", LEAVING: "leaves", FAILED: "has failed: {message}"}


def whole_tensors(infos: Sequence[TensorInfo], checksums: Sequence[int]) -> Sums:
    """Return the sums of one that has written every tensor whole."""
    named = zip(infos, map(int, checksums), strict=True)
    return {(info.name, whole_slice(info.shape)): checksum for info, checksum in named}


def transfers_of(infos: Sequence[TensorInfo]) -> list[Transfer]:
    """Return the transfers in which all tensors go from rank 0 to a node."""
    return plan_sync([whole_tensors(infos, [0] * len(infos)), {}], infos)


def pack_infos(infos: Sequence[TensorInfo]) -> dict[str, np.ndarray]:
    """Return the array of a message that says which tensors a buffer holds."""
    text = json.dumps([[info.name, info.dtype, list(info.shape)] for info in infos])
    return {"infos": np.frombuffer(text.encode(), np.uint8)}


def unpack_infos(array: np.ndarray) -> tuple[TensorInfo, ...]:
    """Return what :func:`pack_infos` was given."""
    return tuple(TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(array.tobytes()))


class Peer:
    """One such node. Not thread-safe; every call raises ``RunFailure`` when the node is lost or fails.

    Args:
        connection: authenticated.
        host: its name.
        num_servers: that it has.
        key: of the listener.
        say_lost: called, once, by any thread, when the node is lost or leaves.
    """

    def __init__(
        self,
        connection: SignedConnection,
        host: str,
        num_servers: int,
        key: bytes,
        say_lost: Callable[["Peer", str], None],
    ) -> None:
        self.name = f"{host}, {connection.peer}"
        self.num_servers = num_servers
        self.is_lost = False
        self._key = key
        self._say_lost = say_lost
        self._losing = threading.Lock()
        self._is_generating = False
        self._transport: TcpTransport | None = None
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_built = threading.Event()
        self._channel = Channel(connection, self._hear)
        self._is_built.set()

    def update_weights(self, version: int, buffer: WeightBuffer) -> None:
        """Have the servers there load ``version``, which ``buffer`` holds."""
        if self._transport is None:
            self._channel.send("buffer", pack_infos(buffer.infos))
            reply = self._receive("buffer")
            self._transport = TcpTransport(buffer, LEAD, None)
            address = (str(reply["host"]), int(reply["port"]))
            self._transport.connect(transfers_of(buffer.infos), {NODE: address}, self._key)
        self._channel.send("weights", {"checksums": buffer.checksums(version)}, version=version)
        self._transport.sync(version)
        self._receive("weights")

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Start sampling and yield each completion as it finishes; closing the iterator early aborts the rest."""
        self._is_generating = True
        self._channel.send("generate", pack_requests(requests, sampling), sampling=pack_sampling(sampling))
        return self._completions(sum(request.num_samples for request in requests))

    def drop(self, how: str) -> None:
        """End the conversation: the node is lost, for this reason."""
        with self._losing:
            was_lost, self.is_lost = self.is_lost, True
        if not was_lost:
            self._say_lost(self, how)
        self.close()

    def close(self) -> None:
        """End the conversation without a word."""
        self.is_lost = True
        self._channel.close()
        if self._transport is not None:
            self._transport.close()  # also for a thread that waits in a sync
        self._inbox.put({"kind": LOST, "how": "was given up"})

    def _completions(self, num_samples: int) -> Iterator[Completion]:
        try:
            while True:
                message = self._receive("completions", "generated")
                if message["kind"] == "generated":
                    self._is_generating = False
                    if num_samples:
                        raise RunFailure(f"has not sent {num_samples} samples that it was asked for")
                    return
                heartbeat.tick()
                for completion in unpack_completions(message, message["arrays"], f"a server of {self.name}"):
                    num_samples -= 1
                    yield completion
        finally:
            if self._is_generating and not self.is_lost:
                self._channel.send("abort")
                while self._receive("completions", "generated")["kind"] != "generated":
                    pass
            self._is_generating = False

    def _receive(self, *kinds: str) -> dict[str, Any]:
        message = self._inbox.get()
        if message["kind"] in _ENDS:
            self._inbox.put(message)  # for later calls
            raise RunFailure(_ENDS[message["kind"]].format(**message))
        if message["kind"] not in kinds:
            raise RunFailure(f"answers with '{message['kind']}' where {' or '.join(kinds)} was due")
        return message

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "beat":
            return
        self._is_built.wait()
        self._inbox.put(message)
        if message["kind"] in _ENDS:
            self.drop(_ENDS[message["kind"]].format(**message))
