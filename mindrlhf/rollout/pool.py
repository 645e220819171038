"""The servers of a run as one generator, started from the config."""

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mindrlhf
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.errors import RunFailure
from mindrlhf.layout.servers import Places
from mindrlhf.rollout.newcomers import Newcomers, say
from mindrlhf.rollout.nodes import Node, OwnNode
from mindrlhf.rollout.processes.node import NodeServers
from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams, WeightsReplaced
from mindrlhf.rollout.vllm_options import VllmOptions, cpu_cache_gib, devices_of, reserved_bytes
from mindrlhf.sandbox.user_files import find_engine
from mindrlhf.system import heartbeat


class Unfinished:
    """Tracks which samples of some requests are still to come."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self._requests = tuple(requests)
        self._seen: set[tuple[int, int]] = set()

    def takes(self, completion: Completion) -> bool:
        """Note a sample; return whether it is new."""
        key = (completion.request_id, completion.sample_index)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def requests(self) -> list[GenerationRequest]:
        """Return the requests of which samples are missing."""
        return [
            request
            for request in self._requests
            if not all((request.request_id, index) in self._seen for index in range(request.num_samples))
        ]


def merge(streams: Sequence[Iterator[Completion]]) -> Iterator[Completion]:
    """Yield what all streams do, each read by a thread of its own; the first failure ends it."""
    items: queue.SimpleQueue = queue.SimpleQueue()
    stopped = threading.Event()
    end = object()

    def drain(stream: Iterator[Completion]) -> None:
        try:
            for completion in stream:
                items.put(completion)
                if stopped.is_set():
                    stream.close()
                    break
            items.put(end)
        except BaseException as error:
            items.put(error)

    threads = [threading.Thread(target=drain, args=(stream,), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        num_open = len(threads)
        while num_open:
            item = items.get()
            if isinstance(item, BaseException):
                raise item
            if item is end:
                num_open -= 1
            else:
                yield item
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


PYTHON_VARIABLE = "MINDRLHF_ROLLOUT_PYTHON"


def find_rollout_python(configured: str = "") -> str:
    """Return the interpreter of the rollout environment.

    In order: ``configured`` (``rollout.python``), the environment variable MINDRLHF_ROLLOUT_PYTHON, the
    ``.venv-rollout`` that scripts/setup.sh makes in the repository, and this interpreter.
    """
    if configured or os.environ.get(PYTHON_VARIABLE):
        return configured or os.environ[PYTHON_VARIABLE]
    beside = Path(mindrlhf.__file__).resolve().parent.parent / ".venv-rollout" / "bin" / "python"
    return str(beside) if beside.exists() else sys.executable


class ServerPool:
    """All rollout servers of a run as one ``Generator``: prompts are dealt out to them in turn.

    The samples of a request stay on one server, where they share the prompt, and depend on its seed and the weights
    alone, so it does not matter who makes them; their last bits depend on what is computed beside them. A server that
    dies or falls silent is started again, as often as the config allows, and is given its whole share again: that gives
    the samples that it would have given, bit for bit. One on a node that is lost, and may be, is done without: what it
    owes is dealt out to the others. Each server is only ever used by one thread at a time.
    """

    def __init__(self, servers: Sequence[Server], num_restarts: int):
        self.servers = list(servers)
        self._num_restarts = num_restarts
        self._mending = threading.Lock()
        self._newcomers: Newcomers | None = None

    def admit(self, newcomers: Newcomers) -> None:
        """Have nodes for rollout only take part from the next version of the weights on after they have come."""
        self._newcomers = newcomers

    def wait_ready(self) -> None:
        """Block until every server can answer."""
        _on_all(lambda server: server.wait_ready(), self.servers)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield every completion of every server as it finishes, in any order."""
        unfinished = Unfinished(requests)
        while waiting := unfinished.requests():
            servers = self._present()
            shares = [waiting[place :: len(servers)] for place in range(len(servers))]
            streams = [self._samples(server, share, sampling) for server, share in zip(servers, shares) if share]
            for completion in merge(streams):
                heartbeat.tick()
                if unfinished.takes(completion):
                    yield completion
            if left := unfinished.requests():
                say(f"{len(left)} prompts of rollout nodes that are lost are issued again")

    def update_weights(self, version: int) -> None:
        """Have every server load ``version`` from its node's buffer; nodes that have come take part from now on."""
        self._present()
        newcomers = [] if self._newcomers is None else self._newcomers.take(self.servers[0].options)
        self.servers = [*self.servers, *newcomers]
        by_node: dict[Node, list[Server]] = {}
        for server in self.servers:
            by_node.setdefault(server.node, []).append(server)

        def update(node: Node) -> None:
            if node.may_leave:
                try:
                    self._newcomers.send_weights(node, version)
                    for server in by_node[node]:
                        if server in newcomers:
                            server.launch()
                except Exception as error:  # whatever it is, the run does not need this node
                    return node.drop(str(error) or type(error).__name__)
            return self._survive(lambda server: server.update_weights(version), by_node[node])

        _on_all(update, list(by_node))
        for node in dict.fromkeys(server.node for server in newcomers if not server.node.lost):
            count = len(by_node[node])
            servers = f"{count} server{'s' if count > 1 else ''}"
            say(f"{node.name} takes part from version {version} of the weights on, with {servers}")

    def sleep(self) -> None:
        """Give the device memory of the nodes that train back to the trainer; the others keep theirs."""
        self._survive(lambda server: server.sleep(), self._lasting())

    def wake(self) -> None:
        """Take device memory again."""
        self._survive(lambda server: server.wake(), self._lasting())

    def profile(self, step: int) -> None:
        """Have the profilers of all servers record from now on; see :meth:`Server.profile`."""
        for server in self._lasting():
            server.profile(step)

    def cancel(self) -> None:
        """Have ``generate``, in the thread that consumes it, raise ``Cancelled`` within a second, now and later."""
        for server in self.servers:
            server.cancel()

    def close(self) -> None:
        """End the servers of this node, and part from the others, which their nodes end."""
        if self._newcomers is not None:
            self._newcomers.close()
        _on_all(lambda server: server.close(), self.servers)

    def _present(self) -> list[Server]:
        """Part from the servers of nodes for rollout only that are lost; return the others."""
        for server in self.servers:
            if server.node.may_leave and server.node.lost:
                server.close()
        self.servers = [server for server in self.servers if not (server.node.may_leave and server.node.lost)]
        return self.servers

    def _lasting(self) -> list[Server]:
        return [server for server in self.servers if not server.node.may_leave]

    def _samples(
        self, server: Server, requests: Sequence[GenerationRequest], sampling: SamplingParams
    ) -> Iterator[Completion]:
        """Yield what a server samples, from the beginning again after each failure, until it is done or lost."""
        while True:
            try:
                yield from server.generate(requests, sampling)
                return
            except RunFailure as failure:
                if not self._mend(server, failure):
                    return
                if not server.has_weights:
                    raise WeightsReplaced(
                        f"{failure}; the weights it sampled with have been replaced: resume from the last checkpoint"
                    ) from failure

    def _survive(self, action: Callable[[Server], None], servers: Sequence[Server]) -> None:
        """Do ``action`` with servers, with one that has failed again after a restart."""

        def act(server: Server) -> None:
            while True:
                try:
                    return action(server)
                except RunFailure as failure:
                    if not self._mend(server, failure):
                        return None

        _on_all(act, servers)

    def _mend(self, server: Server, failure: RunFailure) -> bool:
        """Start a server that has failed again; return False where the run does without its node.

        Raises:
            RunFailure: the one given, where no restarts are left, or the node is lost with it.
        """
        node = server.node
        with self._mending:
            if node.may_leave and (node.lost or not self._num_restarts):
                node.drop(f"has failed: {failure}", ends=True)
                return False
            if not self._num_restarts or any(each.lost for each in server.nodes):
                raise failure
            self._num_restarts -= 1
            say(f"{failure}; starting it again ({self._num_restarts} restarts left)")
        try:
            server.restart()
        except RunFailure as again:
            return self._mend(server, again)
        return True


def _on_all(action: Callable[[Any], None], targets: Sequence[Any]) -> None:
    """Run ``action`` on all at once; wait for all, then raise the first failure."""
    failures: list[BaseException] = []

    def run(target: Any) -> None:
        try:
            action(target)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def server_options(
    rollout: RolloutSection,
    index: int,
    *,
    model_dir: str,
    max_model_len: int,
    seed: int,
    device: str,
    log_dir: Path,
    load_weights: bool,
    record_routing: bool = False,
    profile_dir: Path | None = None,
    num_nodes: int = 1,
    tokenizer_dir: str = "",
) -> VllmOptions:
    """Return how to start server number ``index`` of a node.

    Args:
        model_dir: Hugging Face directory; without ``load_weights`` only its config.json is read, and weights must be
            put in a buffer first.
        max_model_len: longest prompt and response together, in tokens.
        record_routing: samples bring the experts of their tokens.
        profile_dir: where the servers' profilers write, each into a directory of its own; None leaves them out.
        num_nodes: that a server lies over.
        tokenizer_dir: of the model, where texts may end a response; "" where none does.

    Raises:
        UserError: there are too few devices.
    """
    devices = devices_of(rollout, index, os.environ, num_nodes) if device == "ascend" else {}
    return VllmOptions(
        python=find_rollout_python(rollout.python),
        model_dir=str(Path(model_dir).resolve()),
        log_path=str(log_dir / f"rollout_{index}.log"),
        engine=find_engine(rollout.engine),
        device=device,
        dtype=rollout.dtype,
        load_format="auto" if load_weights else "dummy",
        max_model_len=max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        seed=seed,
        num_threads=rollout.num_threads,
        tensor_parallel_size=rollout.tensor_parallel,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_gib=cpu_cache_gib(rollout, model_dir, max_model_len) if device == "cpu" else None,
        reserved_bytes=reserved_bytes(rollout, model_dir) if device == "ascend" else 0,
        enable_sleep=device == "ascend",
        profile_dir=str((profile_dir / f"rollout_{index}").absolute()) if profile_dir else "",
        engine_args=rollout.engine_args,
        env={**rollout.env, **devices},
        record_routing=record_routing,
        tokenizer_dir=str(Path(tokenizer_dir).resolve()) if tokenizer_dir else "",
    )


def own_servers(rollout: RolloutSection, *, starts: bool = True, **settings: Any) -> NodeServers:
    """Return the servers of this node, started in the background if ``starts``.

    ``settings`` are those of :func:`server_options`.
    """
    servers = NodeServers([server_options(rollout, index, **settings) for index in range(rollout.num_replicas)])
    try:
        for index in range(rollout.num_replicas if starts else 0):
            servers.start(index)
    except BaseException:
        servers.close()
        raise
    return servers


def servers_on(nodes: Sequence[Node], options: Sequence[VllmOptions], places: Places) -> list[Server]:
    """Return servers in the order in which prompts are dealt out; what their nodes have not started yet is now."""
    servers: dict[tuple[int, int], Server] = {}
    for place in places:
        index = sum(first == place[0] for _, first in servers)
        servers[index, place[0]] = Server(options[index], [nodes[node] for node in place], index)
    ordered = [servers[key] for key in sorted(servers)]
    for server in ordered:
        server.launch()
    return ordered


def start_pool(rollout: RolloutSection, buffer_path: str = "", **settings: Any) -> ServerPool:
    """Start servers of this node in the background; ``settings`` are those of :func:`server_options`."""
    own = own_servers(rollout, **settings)
    own.buffer_path = buffer_path
    return ServerPool(servers_on([OwnNode(own)], own.options, [(0,)] * rollout.num_replicas), rollout.restarts)
