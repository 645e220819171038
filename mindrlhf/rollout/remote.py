"""The rollout servers of other nodes: the first rank of each starts and owns them, and answers for them to rank 0.

One connection per node (:mod:`mindrlhf.system.handshake`), on which rank 0 asks and the other answers:

    generate {sampling} + requests   completions {weights_version} + samples, any number of times; generated
    abort, while it generates        generated
    update_weights {version}, sleep, wake, wait_ready    done

"failed" {message} is the answer when something went wrong there. Restarts of servers stay their node's business.
"""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.replicas import GeneratorPool
from mindrlhf.rollout.types import (
    Completion,
    GenerationRequest,
    Generator,
    SamplingParams,
    pack_completions,
    pack_requests,
    pack_sampling,
    unpack_completions,
    unpack_requests,
    unpack_sampling,
)
from mindrlhf.system import heartbeat
from mindrlhf.system.handshake import CONNECT_TIMEOUT_S, SignedConnection, UnauthenticatedPeer, admit, introduce_node
from mindrlhf.system.wire import ConnectionClosed, ProtocolError

_CONNECT_TIMEOUT_S = CONNECT_TIMEOUT_S
_COMMANDS = ("sleep", "wake", "wait_ready")


class ReplicatedGenerator(Generator, Protocol):
    """The rollout servers of one node: :class:`mindrlhf.rollout.replicas.Replicas`."""

    def wait_ready(self) -> None:
        """Block until every server can answer."""

    def use_weight_buffer(self, buffer_path: str) -> None:
        """Say where ``update_weights`` finds the weight buffer of this node."""


class RemoteGenerator:
    """The servers of another node, as rank 0 sees them: a ``Generator``. Not thread-safe.

    Every call raises ``RunFailure``, naming the node, when it fails or cannot be reached.
    """

    def __init__(self, connection: SignedConnection, node: int):
        self._connection = connection
        self._node = node
        self._is_generating = False

    def wait_ready(self) -> None:
        """Block until every server there can answer."""
        self._call("wait_ready")

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Start sampling and yield each completion as it finishes; closing the iterator early aborts the rest."""
        self._is_generating = True
        self._send({"kind": "generate", "sampling": pack_sampling(sampling)}, pack_requests(requests, sampling))
        return self._completions()

    def update_weights(self, version: int) -> None:
        """Have the servers load ``version`` from the buffer of their node."""
        self._call("update_weights", version=version)

    def sleep(self) -> None:
        """Give the device memory there back to the trainer."""
        self._call("sleep")

    def wake(self) -> None:
        """Take device memory there again."""
        self._call("wake")

    def close(self) -> None:
        """End the conversation; the servers end with the ranks of their node."""
        self._connection.close()

    def _completions(self) -> Iterator[Completion]:
        try:
            while True:
                header, arrays = self._receive()
                if header["kind"] == "generated":
                    self._is_generating = False
                    return
                heartbeat.tick()
                yield from unpack_completions(header, arrays, f"a server of node {self._node}")
        finally:
            if self._is_generating:
                with contextlib.suppress(RunFailure):  # what ends the consumer matters more
                    self._send({"kind": "abort"})
                    while self._receive()[0]["kind"] != "generated":
                        pass
                self._is_generating = False

    def _call(self, kind: str, **fields: Any) -> None:
        assert not self._is_generating, f"{kind} while generate() is being consumed"
        self._send({"kind": kind, **fields})
        self._receive()

    def _send(self, header: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> None:
        try:
            self._connection.send(header, arrays)
        except ConnectionClosed as error:
            raise self._gone(error) from None

    def _receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            header, arrays = self._connection.receive()
        except (ConnectionClosed, ProtocolError) as error:
            raise self._gone(error) from None
        if header["kind"] == "failed":
            self._is_generating = False
            raise RunFailure(f"node {self._node}: {header['message']}")
        return header, arrays

    def _gone(self, error: Exception) -> RunFailure:
        self._is_generating = False
        return RunFailure(f"the first rank of node {self._node}, which answers for its rollout servers, died ({error})")


class NodesGenerator(GeneratorPool):
    """The servers of all nodes as one ``Generator``: prompts are dealt out to the nodes in turn."""

    def __init__(self, own: ReplicatedGenerator, others: Sequence[RemoteGenerator]):
        super().__init__([own, *others])

    def wait_ready(self) -> None:
        """Block until every server of every node can answer."""
        self._on_all(lambda generator: generator.wait_ready())


def accept_nodes(listener: socket.socket, token: bytes, nodes: Collection[int]) -> dict[int, SignedConnection]:
    """Take the connections of the first ranks of other nodes.

    Args:
        token: that ``introduce_node`` was given there.
        nodes: their numbers.

    Raises:
        RunFailure: one did not connect in time.
    """
    end_s = time.monotonic() + _CONNECT_TIMEOUT_S  # for all of them: unauthenticated peers may come without end
    found: dict[int, SignedConnection] = {}
    while missing := sorted(set(nodes) - found.keys()):
        listener.settimeout(max(0.001, end_s - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            raise RunFailure(f"the first rank of node {missing[0]} did not connect; see its log") from None
        connection.settimeout(None)
        with contextlib.suppress(UnauthenticatedPeer):
            signed = admit(connection, token)
            found[int(signed.receive()[0]["node"])] = signed
    return found


def remotes(connections: Mapping[int, SignedConnection]) -> list[RemoteGenerator]:
    """Return the servers of other nodes, in their order, by the connections of :func:`accept_nodes`."""
    return [RemoteGenerator(connection, node) for node, connection in sorted(connections.items())]


def answer(generator: ReplicatedGenerator, host: str, port: int, token: bytes, node: int) -> None:
    """Connect to rank 0, which accepts when all have been asked to, and answer for the servers of this node.

    That is done by a thread, until rank 0 ends the conversation.
    """

    def run() -> None:
        try:
            signed = introduce_node(host, port, token, node)
        except (OSError, ProtocolError) as error:
            print(f"warning: rank 0 cannot be reached at {host}:{port} ({error})", file=sys.stderr, flush=True)
            return
        # When rank 0 has gone, the rank itself notices and ends.
        with contextlib.suppress(ConnectionClosed, ProtocolError):
            _answer(generator, signed)

    threading.Thread(target=run, daemon=True).start()


def _answer(generator: ReplicatedGenerator, signed: SignedConnection) -> None:
    while True:
        header, arrays = signed.receive()
        if header["kind"] == "abort":  # it crossed the end of what it was to abort, which it takes for its answer
            continue
        try:
            if header["kind"] == "generate":
                sampling = unpack_sampling(header["sampling"])
                _generate(generator, signed, unpack_requests(arrays), sampling)
                signed.send({"kind": "generated"})
                continue
            if header["kind"] == "update_weights":
                generator.update_weights(header["version"])
            elif header["kind"] in _COMMANDS:
                getattr(generator, header["kind"])()
            else:
                raise ValueError(f"unknown message '{header['kind']}'")
            signed.send({"kind": "done"})
        except (ConnectionClosed, ProtocolError):
            raise
        except Exception as error:
            signed.send({"kind": "failed", "message": " ".join(str(error).split()) or type(error).__name__})


def _generate(
    generator: ReplicatedGenerator,
    signed: SignedConnection,
    requests: list[GenerationRequest],
    sampling: SamplingParams,
) -> None:
    completions = generator.generate(requests, sampling)
    with contextlib.closing(completions):
        for completion in completions:
            header = {"kind": "completions", "weights_version": completion.weights_version}
            signed.send(header, pack_completions([completion]))
            if signed.has_news():  # only "abort" may come now, or the end
                signed.receive()
                return
