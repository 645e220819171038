"""The trainer's side of a vLLM rollout server: start it, talk to it, notice its death, stop it."""

import contextlib
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.processes.liveness import StallWatch
from mindrlhf.rollout.processes.server import NodePlace, ServerProcess
from mindrlhf.rollout.types import (
    Cancelled,
    Completion,
    GenerationRequest,
    SamplingParams,
    pack_requests,
    pack_sampling,
    unpack_completions,
)
from mindrlhf.rollout.vllm_options import VllmOptions, check_options, sees_images
from mindrlhf.system import timeline
from mindrlhf.system.wire import ConnectionClosed, ProtocolError, receive_message, send_message
from mindrlhf.weights.publish.buffer import WeightBuffer, WeightBufferError

_LIVENESS_POLL_S = 0.5
_STOP_TIMEOUT_S = 10.0
# A part that dies takes the server with it, whose own words say less: this long the part's are waited for.
_PART_WAIT_S = 2.0


class Parts(Protocol):
    """The processes of a server on further nodes (:class:`mindrlhf.rollout.multi_node.parts.ServerParts`)."""

    def start(self) -> NodePlace:
        """Start them, and return the place of the process here."""

    def note_shared_memory(self) -> None:
        """Remember what they talk through, now that all are up."""

    def failure(self, wait_s: float = 0.0) -> str:
        """Return which of them has ended and how, waiting for it for so long; empty while all run."""

    def stop(self) -> None:
        """End those that run."""


class VllmGenerator:
    """A ``Generator`` (see ``rollout.types``) whose samples come from a vLLM process. Not thread-safe.

    ``start`` returns at once, so that the server loads while the trainer compiles; the first other call waits for it.
    Every call raises ``RunFailure``, naming cause and log, within about a second of the server's death and
    ``stall_timeout_s`` after it got stuck; ``restart`` then brings a new one to the same weights.

    Args:
        parts: of a server over several nodes, those on the others; None for a server within one.
    """

    def __init__(self, options: VllmOptions, parts: Parts | None = None):
        check_options(options)
        self.options = options
        self._parts = parts
        log = Path(options.log_path)
        self._name = "vLLM " + (log.stem if log.parent.name == "logs" else f"{log.parent.name}/{log.stem}")
        self._process: ServerProcess | None = None
        self._connection: socket.socket | None = None
        self._is_ready = False
        self._is_generating = False
        self._is_cancelled = False
        self._asked = ""  # what it was last told to do
        self._buffer_path: str | None = None
        self._weights_version: int | None = None

    @classmethod
    def start(cls, options: VllmOptions, parts: Parts | None = None) -> "VllmGenerator":
        """Start a server in the background.

        Raises:
            UserError: the interpreter or the model's config.json is missing, or a number is out of range.
        """
        generator = cls(options, parts)
        generator._launch()
        return generator

    def wait_ready(self) -> None:
        """Block until the server can answer.

        Raises:
            RunFailure: it died or did not come up within ``start_timeout_s``.
        """
        if self._is_ready:
            return
        header, _ = self._receive(self.options.start_timeout_s)
        assert header["kind"] == "ready", f"the rollout server greets with '{header['kind']}'"
        self._is_ready = True
        self._process.note_shared_memory()
        if self._parts is not None:
            self._parts.note_shared_memory()

    def use_weight_buffer(self, buffer_path: str) -> None:
        """Say where ``update_weights`` finds the weight buffer (``WeightBuffer.path``)."""
        self._buffer_path = buffer_path

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Start sampling and yield each completion as it finishes, in any order.

        Closing the iterator early aborts the rest.

        Raises:
            UserError: a prompt that is empty or leaves no room for ``max_tokens``, or repeated request ids.
            RunFailure: the server died or could not carry out the request.
        """
        assert not self._is_generating, "generate() while an earlier generate() is being consumed"
        self._check_requests(requests, sampling)
        self._check_weights()
        self.wait_ready()
        self._is_generating = True
        num_samples = sum(request.num_samples for request in requests)
        span = timeline.span("generate", self._name, samples=num_samples)
        header = {"kind": "generate", "sampling": pack_sampling(sampling)}
        self._send(header, pack_requests(requests, sampling))
        return self._completions(num_samples, span)

    def update_weights(self, version: int) -> None:
        assert self._buffer_path is not None, "update_weights() before use_weight_buffer()"
        self._call({"kind": "update_weights", "version": version, "buffer_path": self._buffer_path})
        self._weights_version = version

    def sleep(self) -> None:
        self._call({"kind": "sleep"})

    def wake(self) -> None:
        self._call({"kind": "wake"})

    @property
    def has_weights(self) -> bool:
        """True if ``generate`` may be called."""
        return self.options.load_format != "dummy" or self._weights_version is not None

    @property
    def is_running(self) -> bool:
        """True while a server has neither died nor been given up."""
        return self._process is not None and self._process.poll() is None

    def profile(self, step: int) -> None:
        """Have vLLM's profiler record from now on what is done in a step, from 1; 0 ends it and writes the trace."""
        self._call({"kind": "profile", "step": step})

    def ping(self) -> None:
        """Return when the server answers."""
        self._call({"kind": "ping"})

    def stats(self) -> dict[str, float]:
        """Counters since the start: num_steps, num_samples, num_tokens, generate_s, update_s."""
        return self._call({"kind": "stats"})["stats"]

    def restart(self) -> None:
        """Replace the server, dead or alive, by a new one with the weights of the last ``update_weights``.

        When the buffer no longer holds that version, ``update_weights`` must come before the next ``generate``.
        """
        self.close()
        self._launch()
        self.wait_ready()
        version, self._weights_version = self._weights_version, None
        if version is not None and not self._buffer_has_moved_on(version):
            self.update_weights(version)

    def _buffer_has_moved_on(self, version: int) -> bool:
        try:
            with WeightBuffer.attach(self._buffer_path) as buffer:
                return buffer.version != version or buffer.num_buckets > 1
        except WeightBufferError:
            return False  # the server's own attempt will say what is wrong with it

    def cancel(self) -> None:
        """Have ``generate``, in the thread that consumes it, raise ``Cancelled`` within a second, now and later.

        This alone may be called while another thread uses the generator.
        """
        self._is_cancelled = True

    def close(self) -> None:
        """Stop the server and everything it started. Safe to call twice, and after a failure."""
        if self._process is None:
            return
        if self._is_ready and not self._is_generating:
            with contextlib.suppress(ConnectionClosed, TimeoutError, ProtocolError):
                send_message(self._connection, {"kind": "shutdown"}, timeout_s=1)
                receive_message(self._connection, timeout_s=1)
        self._connection.close()
        if self._is_ready and not self._is_generating:
            self._process.wait(_STOP_TIMEOUT_S)
        self._process.end()
        if self._parts is not None:
            self._parts.stop()
        self._process = self._connection = None
        self._is_ready = self._is_generating = False

    def __enter__(self) -> "VllmGenerator":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _launch(self) -> None:
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                span = None if self._parts is None else self._parts.start()
                descriptor = theirs.fileno()
                self._process = ServerProcess(self.options, ["--socket-fd", str(descriptor)], [descriptor], span)
        except RunFailure:
            self._connection.close()
            if self._parts is not None:
                self._parts.stop()
            raise

    def _check_requests(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> None:
        if len({request.request_id for request in requests}) != len(requests):
            raise UserError("two generation requests have the same request_id; number them apart")
        if any(request.images for request in requests) and not sees_images(self.options.model_dir):
            raise UserError(
                f"prompts have images, and the model in {self.options.model_dir} sees none: use another one"
            )
        for request in requests:
            max_tokens = request.token_limit(sampling)
            longest = self.options.max_model_len - max_tokens
            if not 0 < len(request.prompt_ids) <= longest:
                raise UserError(
                    f"prompt of request {request.request_id} has {len(request.prompt_ids)} tokens; max_model_len "
                    f"{self.options.max_model_len} less max_tokens {max_tokens} leaves 1 to {longest}"
                )

    def _check_weights(self) -> None:
        if not self.has_weights:
            raise RunFailure("the rollout server has no weights yet: update_weights() comes before generate()")

    def _completions(self, num_samples: int, span: timeline.Span) -> Iterator[Completion]:
        try:
            while True:
                timeline.count("samples to come", num_samples, self._name)
                header, arrays = self._receive(is_cancellable=True)
                if header["kind"] == "generated":
                    self._is_generating = False
                    return
                if self._is_cancelled:
                    raise Cancelled
                num_samples -= len(arrays["request_ids"])
                yield from unpack_completions(header, arrays, self._name)
        finally:
            if self._is_generating and self._process is not None:
                self._abort()
            span.end()

    def _abort(self) -> None:
        """Bring the conversation back in step after a generation that nobody reads to its end."""
        with contextlib.suppress(RunFailure):  # what ends the consumer matters more than what ends the server
            self._send({"kind": "abort"})
            while self._receive()[0]["kind"] != "generated":
                pass
            self._is_generating = False

    def _call(self, header: dict[str, Any]) -> dict[str, Any]:
        assert not self._is_generating, f"{header['kind']} while generate() is being consumed"
        self.wait_ready()
        with timeline.span(header["kind"], self._name):
            self._send(header)
            return self._receive()[0]

    def _send(self, header: dict[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        self._asked = header["kind"]
        if how := self._lost_part():
            raise self._given_up(how)
        try:
            send_message(self._connection, header, arrays)
        except ConnectionClosed:
            raise self._failure() from None

    def _receive(
        self, timeout_s: float | None = None, *, is_cancellable: bool = False
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """The next message. A dead server is noticed by the closed connection, or by its exit if that stays open."""
        if self._process is None:
            raise RunFailure("the rollout server is closed")
        end = None if timeout_s is None else time.monotonic() + timeout_s
        # While it starts it may wait for a slow disk for long, without using processor time.
        stall = StallWatch(self._process.pid, self.options.stall_timeout_s) if timeout_s is None else None
        while not select.select([self._connection], [], [], _LIVENESS_POLL_S)[0]:
            if is_cancellable and self._is_cancelled:
                raise Cancelled
            if self._process.poll() is not None:
                raise self._failure()
            if how := self._lost_part():
                raise self._given_up(how)
            if end is not None and time.monotonic() > end:
                raise self._given_up(f"was not ready within {timeout_s:g} s")
            if stall is not None and stall.is_stalled():
                raise self._given_up(f"has been stuck for {self.options.stall_timeout_s:g} s in '{self._asked}'")
        try:
            header, arrays = receive_message(self._connection)
        except (ConnectionClosed, ProtocolError) as error:
            raise self._failure(error) from None
        if header["kind"] == "failed":
            self._is_generating = False
            if how := self._lost_part(_PART_WAIT_S):
                raise self._given_up(how)
            tail = self._process.log_tail()
            raise RunFailure(f"the rollout server could not carry out a request: {header['message']}{tail}")
        return header, arrays

    def _failure(self, error: Exception | None = None) -> RunFailure:
        """Take down what is left of the server and say how it ended."""
        self._process.wait(1.0)
        how = self._process.ending() or f"stopped talking ({error})"
        was_killed = (self._process.poll() or 0) < 0  # what ends by itself may have lost a part
        return self._given_up(how if was_killed else self._lost_part(_PART_WAIT_S) or how)

    def _given_up(self, how: str) -> RunFailure:
        message = f"the rollout server (process {self._process.pid}) {how}{self._process.log_tail()}"
        self._is_ready = False  # it would not answer a shutdown either
        self.close()
        return RunFailure(message)

    def _lost_part(self, wait_s: float = 0.0) -> str:
        return "" if self._parts is None else self._parts.failure(wait_s)
