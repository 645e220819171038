"""The servers of a node for rollout only, for rank 0 of the run; :mod:`mindrlhf.rollout.elastic.peer` asks."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.channel import LOST, Channel
from mindrlhf.launch.nodes.rollout_nodes import ListenerAddress
from mindrlhf.rollout.elastic.listener import say
from mindrlhf.rollout.elastic.peer import FAILED, LEAVING, NODE, transfers_of, unpack_infos, whole_tensors
from mindrlhf.rollout.remote import ReplicatedGenerator
from mindrlhf.rollout.types import Cancelled, pack_completions, unpack_requests, unpack_sampling
from mindrlhf.system.handshake import SignedConnection, introduce
from mindrlhf.system.wire import ProtocolError
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.sync import written_of
from mindrlhf.weights.publish.tcp import TcpTransport

_CONNECT_TIMEOUT_S = 5.0
_RETRY_INTERVAL_S = 0.5
_POLL_INTERVAL_S = 0.1
_GOODBYE_LIMIT_S = 2.0


def serve(
    generator: ReplicatedGenerator, num_servers: int, address: ListenerAddress, ending: Callable[[], object | None]
) -> None:
    """Answer for the servers of this node, whenever rank 0 listens, until ``ending`` says something.

    Raises:
        RunFailure: the servers have failed for good.
    """
    service = _Service(generator, num_servers, address)
    thread = threading.Thread(target=service.work, daemon=True)
    thread.start()
    while thread.is_alive() and ending() is None:
        thread.join(_POLL_INTERVAL_S)
    service.leave()
    thread.join(_GOODBYE_LIMIT_S)
    if service.failure is not None:
        raise service.failure


class _Service:
    """Serve the servers from a thread; another calls ``leave``."""

    def __init__(self, generator: ReplicatedGenerator, num_servers: int, address: ListenerAddress) -> None:
        self.failure: Exception | None = None
        self._generator = generator
        self._num_servers = num_servers
        self._address = address
        self._key = bytes.fromhex(address.key)
        self._is_over = False
        self._link: _Link | None = None

    def work(self) -> None:
        """Wait for the servers, and serve rank 0 as often as it can be reached; note what failed here."""
        try:
            self._generator.wait_ready()
            say("the servers of this node are ready")
            while not self._is_over:
                if (link := self._connect()) is None:
                    time.sleep(_RETRY_INTERVAL_S)
                    continue
                self._link = link
                if self._is_over:  # since before the link was there to be told
                    link.close()
                with contextlib.closing(_Answering(self._generator, link, self._key)) as answering:
                    try:
                        answering.run()
                    finally:
                        say(f"this node has made {answering.num_samples} samples for the run")
        except Exception as error:
            if not self._is_over:
                self.failure = error

    def leave(self) -> None:
        """Tell rank 0 that this node leaves, at once; what its servers owe is for others to do."""
        self._is_over = True
        if (link := self._link) is not None:
            link.channel.send(LEAVING)
            link.is_gone.wait(_GOODBYE_LIMIT_S)  # what is closed here first, as by the other thread, may be lost
            link.close()
        self._generator.cancel()

    def _connect(self) -> "_Link | None":
        try:
            connection = socket.create_connection((self._address.host, self._address.port), timeout=_CONNECT_TIMEOUT_S)
            connection.settimeout(None)
            signed = introduce(connection, self._key)
            signed.send({"host": socket.gethostname(), "num_servers": self._num_servers})
        except (OSError, ProtocolError):  # rank 0 does not listen yet, or no more
            return None
        return _Link(signed, connection.getsockname()[0])


class _Link:
    """The connection to rank 0.

    Attributes:
        host: the address by which this node reaches it.
        messages: that came; the last is "lost".
        is_gone: set with that.
    """

    def __init__(self, signed: SignedConnection, host: str) -> None:
        self.host = host
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.is_gone = threading.Event()
        # Rank 0 compiles and computes in its own process, and may miss beats; that it lives the launchers watch.
        self.channel = Channel(signed, self._hear, watches=False)

    def close(self) -> None:
        """End it without a word to the other side."""
        self.channel.close()
        self._hear({"kind": LOST})

    def _hear(self, message: dict[str, Any]) -> None:
        if message["kind"] == "beat":
            return
        self.messages.put(message)
        if message["kind"] == LOST:
            self.is_gone.set()


class _Answering:
    """Does what rank 0 asks on one connection.

    Attributes:
        num_samples: that it has sent.
    """

    def __init__(self, generator: ReplicatedGenerator, link: _Link, key: bytes) -> None:
        self.num_samples = 0
        self._generator = generator
        self._link = link
        self._channel = link.channel
        self._key = key
        self._buffer: WeightBuffer | None = None
        self._transport: TcpTransport | None = None

    def run(self) -> None:
        """Answer until the connection ends.

        Raises:
            RunFailure: the servers failed.
        """
        while (message := self._link.messages.get())["kind"] != LOST:
            try:
                if message["kind"] == "buffer":
                    self._make_buffer(message)
                elif message["kind"] == "weights":
                    if not self._take_weights(message):
                        return
                elif message["kind"] == "generate":
                    self._generate(message)
                elif message["kind"] != "abort":  # which crossed the end of what it was to abort
                    raise RunFailure(f"unknown message '{message['kind']}'")
            except Cancelled:
                return
            except Exception as error:
                self._channel.send(FAILED, message=" ".join(str(error).split()) or type(error).__name__)
                raise

    def close(self) -> None:
        """End the connection."""
        self._link.close()
        if self._transport is not None:
            self._transport.close()
        if self._buffer is not None:
            self._buffer.close()

    def _make_buffer(self, message: Mapping[str, Any]) -> None:
        infos = unpack_infos(message["arrays"]["infos"])
        self._buffer = WeightBuffer.create(infos)
        self._transport = TcpTransport(self._buffer, NODE, self._link.host)
        host, port = self._transport.address
        self._channel.send("buffer", host=host, port=port)
        self._transport.connect(transfers_of(infos), {}, self._key)
        self._generator.use_weight_buffer(self._buffer.path)

    def _take_weights(self, message: Mapping[str, Any]) -> bool:
        """Receive a version and have the servers load it; return False where the connection has failed meanwhile."""
        version, infos = int(message["version"]), self._buffer.infos
        expected = whole_tensors(infos, message["arrays"]["checksums"])
        self._buffer.begin(version)
        try:
            self._transport.sync(version)
        except RunFailure as failure:
            say(f"{failure}; connecting to rank 0 again")
            return False
        self._buffer.commit(written_of(expected))
        self._generator.update_weights(version)
        self._channel.send("weights")
        return True

    def _generate(self, message: Mapping[str, Any]) -> None:
        requests, sampling = unpack_requests(message["arrays"]), unpack_sampling(message["sampling"])
        with contextlib.closing(self._generator.generate(requests, sampling)) as completions:
            for completion in completions:
                packed = pack_completions([completion])
                self._channel.send("completions", packed, weights_version=completion.weights_version)
                self.num_samples += 1
                if not self._link.messages.empty():  # only "abort" may come now, or the end
                    if (following := self._link.messages.get())["kind"] == LOST:
                        self._link.messages.put(following)
                    break
        self._channel.send("generated")
