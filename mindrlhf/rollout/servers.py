"""A rollout server as rank 0 sees it: start it on whatever node, talk to it, notice its death, stop it."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.rollout.nodes import Node, OwnNode
from mindrlhf.rollout.processes.node import NodeServers
from mindrlhf.rollout.processes.server import NodePlace
from mindrlhf.rollout.types import Cancelled, Completion, GenerationRequest, SamplingParams, as_sent, checked
from mindrlhf.rollout.vllm_options import VllmOptions, sees_images
from mindrlhf.system import timeline
from mindrlhf.system.rpc import CallFailed, Lost, Rpc

_STOP_TIMEOUT_S = 10.0
# Beats come from a thread of the server's own, which waits while a kernel is compiled or loaded under Python's lock. A
# node that is cut off is noticed sooner, by its own beats.
SILENCE_LIMIT_S = 60.0
# A part that dies takes the server with it, whose own words say less: this long the part's are waited for.
_PART_WAIT_S = 2.0


class Server:
    """A ``Generator`` (see ``rollout.types``) whose samples come from one server. Not thread-safe.

    ``launch`` returns at once, so that the server loads while the trainer compiles; the first other call waits for it.
    Every call raises ``RunFailure``, naming cause and log, within about a second of the server's death and a minute of
    its last beat; ``restart`` then brings a new one to the same weights.

    Args:
        options: as its node has them.
        nodes: on which it lies; the first has its engine.
        index: its number on each of them.
    """

    def __init__(self, options: VllmOptions, nodes: Sequence[Node], index: int = 0):
        self.options = options
        self.node = nodes[0]
        self.nodes = tuple(nodes)
        self._index = index
        log = Path(options.log_path)
        name = log.stem if log.parent.name == "logs" else f"{log.parent.name}/{log.stem}"
        self._name = f"vLLM {name}" if not self.node.name else f"vLLM {index} of {self.node.name}"
        self._pids: list[int] = []  # of its processes, by node; empty while it does not run
        self._rpc: Rpc | None = None
        self._is_ready = False
        self._is_generating = False
        self._is_cancelled = self._can_cancel = False
        self._ready_end_s = 0.0
        self._weights_version: int | None = None

    @classmethod
    def start(cls, options: VllmOptions, buffer_path: str = "") -> "Server":
        """Start a server of this process's own in the background, which loads weights from that buffer.

        Raises:
            UserError: the interpreter or the model's config.json is missing, or a number is out of range.
        """
        servers = NodeServers([options])
        servers.buffer_path = buffer_path
        server = cls(options, [OwnNode(servers)])
        server.launch()
        return server

    def launch(self) -> None:
        """Start the processes of the server in the background; one that its node has started already is taken."""
        self._ready_end_s = time.monotonic() + self.options.start_timeout_s
        span = None
        try:
            if len(self.nodes) > 1:
                # A port of its own for each start: connections of the last one may not be over yet.
                host, port = self.node.call("address")
                span = NodePlace(len(self.nodes), 0, host, port, "")
            self._pids = [node.call("start", index=self._index, span=span and span.at(number))
                          for number, node in enumerate(self.nodes)]  # fmt: skip
        except (Lost, CallFailed) as failure:
            self._end()
            raise RunFailure(f"the rollout server could not be started: {failure}") from None
        except RunFailure:
            self._end()
            raise

    def wait_ready(self) -> None:
        """Block until the server can answer.

        Raises:
            RunFailure: it died or did not come up within ``start_timeout_s``.
        """
        if not self._is_ready:
            self._guard(self._become_ready)

    def _become_ready(self) -> None:
        connection = self.node.open(self._index, self._check, self.options.start_timeout_s)
        self._rpc = Rpc(connection, "it", check=self._check)
        self._rpc.call("ready")
        self._rpc.watch(SILENCE_LIMIT_S)
        self._is_ready = True
        for node in self.nodes:
            node.call("note", index=self._index)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Start sampling and yield each completion as it finishes, in any order.

        Closing the iterator early aborts the rest.

        Raises:
            UserError: a prompt that is empty or leaves no room for ``max_tokens``, or repeated request ids.
            RunFailure: the server died or could not carry out the request.
        """
        assert not self._is_generating, "generate() while an earlier generate() is being consumed"
        self._check_requests(requests, sampling)
        if not self.has_weights:
            raise RunFailure("the rollout server has no weights yet: update_weights() comes before generate()")
        num_samples = sum(request.num_samples for request in requests)
        span = timeline.span("generate", self._name, samples=num_samples)
        sent = [as_sent(request, sampling) for request in requests]
        batches = self._guard(lambda: self._ask().stream("generate", requests=sent, sampling=sampling))
        self._is_generating = self._can_cancel = True
        return self._completions(batches, num_samples, span)

    def update_weights(self, version: int) -> None:
        """Load ``version`` from the weight buffer of the server's node."""
        path = self._guard(lambda: self.node.call("buffer"))
        assert path, "update_weights() before the node has a weight buffer"
        self._call("update_weights", version=version, buffer_path=path)
        self._weights_version = version

    def sleep(self) -> None:
        self._call("sleep")

    def wake(self) -> None:
        self._call("wake")

    @property
    def has_weights(self) -> bool:
        """True if ``generate`` may be called."""
        return self.options.load_format != "dummy" or self._weights_version is not None

    @property
    def is_running(self) -> bool:
        """True while a server has neither died nor been given up."""
        return bool(self._pids) and not self._ending_of(0)

    def profile(self, step: int) -> None:
        """Have vLLM's profiler record from now on what is done in a step, from 1; 0 ends it and writes the trace."""
        self._call("profile", step=step)

    def record_layers(self, path: str) -> None:
        """Have the next prompt's hidden states behind each layer written to a file; see `mindrlhf.doctor.layers`."""
        self._call("record_layers", path=path)

    def stats(self) -> dict[str, float]:
        """Counters since the start: num_steps, num_samples, num_tokens, generate_s, update_s."""
        return self._call("stats")

    def restart(self) -> None:
        """Replace the server, dead or alive, by a new one with the weights of the last ``update_weights``.

        When the buffer no longer holds that version, ``update_weights`` must come before the next ``generate``.
        """
        self._end()
        self.launch()
        self.wait_ready()
        version, self._weights_version = self._weights_version, None
        if version is not None and self._guard(lambda: self.node.call("holds", version=version)):
            self.update_weights(version)

    def cancel(self) -> None:
        """Have ``generate``, in the thread that consumes it, raise ``Cancelled`` within a second, now and later.

        This alone may be called while another thread uses the generator.
        """
        self._is_cancelled = True

    def close(self) -> None:
        """Part from the server. On this node it ends with everything it started; others end theirs with their ranks.

        Safe to call twice, and after a failure.
        """
        if not self._pids:
            return
        if self.node.name:
            self._hang_up()
            return
        is_idle = self._is_ready and not self._is_generating
        self._hang_up()
        self.node.call("end", index=self._index, wait_s=_STOP_TIMEOUT_S if is_idle else 0.0)
        self._end()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _hang_up(self) -> None:
        if self._rpc is not None:
            self._rpc.close()
        self._rpc = None
        self._is_ready = self._is_generating = False

    def _end(self) -> None:
        """End all processes of the server, on whatever nodes; one that is lost has ended its own."""
        self._hang_up()
        for node in self.nodes:
            with contextlib.suppress(Lost):
                node.call("end", index=self._index)
        self._pids = []

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

    def _completions(
        self, batches: Iterator[list[Completion]], num_samples: int, span: timeline.Span
    ) -> Iterator[Completion]:
        try:
            with contextlib.closing(batches):
                while True:
                    timeline.count("samples to come", num_samples, self._name)
                    if (batch := self._guard(lambda: next(batches, None))) is None:
                        self._is_generating = False
                        return
                    if self._is_cancelled:
                        raise Cancelled
                    if self.node.lost:
                        raise self._given_up(self._ending_of(0))
                    num_samples -= len(batch)
                    yield from (checked(completion, self._name) for completion in batch)
        finally:
            self._is_generating = self._can_cancel = False
            span.end()

    def _call(self, method: str, **arguments: Any) -> Any:
        assert not self._is_generating, f"{method} while generate() is being consumed"
        with timeline.span(method, self._name):
            return self._guard(lambda: self._ask().call(method, **arguments))

    def _ask(self) -> Rpc:
        """Return the connection, for a call."""
        if not self._pids:
            raise RunFailure("the rollout server is closed")
        self.wait_ready()
        self._check()
        return self._rpc

    def _guard(self, action: Callable[[], Any]) -> Any:
        """Do something with the server, and say how that failed."""
        try:
            return action()
        except Lost as lost:
            raise self._failure(lost) from None
        except CallFailed as failed:
            self._is_generating = False
            if how := self._lost_part(_PART_WAIT_S):
                raise self._given_up(how) from None
            server = f"{self._of_node}the rollout server"
            raise RunFailure(f"{server} could not carry out a request: {failed}{self._tail()}") from None

    def _check(self) -> None:
        """Raise what ends a wait for the server, though its connection stays open."""
        if self._is_cancelled and self._can_cancel:
            self._can_cancel = False  # what is said after it brings the two sides back in step
            raise Cancelled
        if how := self._lost_part() or self._ending_of(0):
            raise self._given_up(how)
        if not self._is_ready and time.monotonic() > self._ready_end_s:
            raise self._given_up(f"was not ready within {self.options.start_timeout_s:g} s{self._tail()}")

    @property
    def _of_node(self) -> str:
        return f"{self.node.name}: " if self.node.name else ""

    def _ending_of(self, number: int) -> str:
        """Ending of the process on one of its nodes, as far as it is known here."""
        node = self.nodes[number]
        if node.lost:
            return f"is lost with its node, which {node.lost}"
        status = node.status(self._index)
        return "" if status is None or status.pid != self._pids[number] else status.ending

    def _lost_part(self, wait_s: float = 0.0) -> str:
        """Return which part on a further node has ended and how, waiting for it for so long; empty while all run."""
        end_s = time.monotonic() + wait_s
        while len(self._pids) > 1:
            for number, node in enumerate(self.nodes[1:], start=1):
                if how := self._ending_of(number):
                    return f"has lost its part on {node.name}, which (process {self._pids[number]}) {how}"
            if time.monotonic() >= end_s:
                break
            time.sleep(0.05)
        return ""

    def _tail(self) -> str:
        return self.node.call("log_tail", index=self._index)

    def _failure(self, error: Lost) -> RunFailure:
        """Take down what is left of the server and say how it ended."""
        if not self._pids:
            return RunFailure("the rollout server is closed")
        try:
            how = self.node.call("ending", index=self._index, wait_s=1.0)
            if not how.startswith("was killed"):  # what ends by itself may have lost a part
                how = self._lost_part(_PART_WAIT_S) or how or f"{str(error).removeprefix('it ')}{self._tail()}"
        except Lost:
            how = f"is lost with its node, which {self.node.lost}"
        return self._given_up(how)

    def _given_up(self, how: str) -> RunFailure:
        message = f"{self._of_node}the rollout server (process {self._pids[0]}) {how}"
        self._end()
        return RunFailure(message)
