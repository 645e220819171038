"""The generators of a run: one vLLM server per replica, started from the config."""

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
from mindrlhf.rollout.types import Completion, GenerationRequest, Generator, SamplingParams
from mindrlhf.rollout.vllm import VllmGenerator
from mindrlhf.rollout.vllm_options import VllmOptions, cpu_cache_gib, devices_of, reserved_bytes
from mindrlhf.sandbox.user_files import find_engine
from mindrlhf.system import heartbeat


class WeightsReplaced(RunFailure):
    """A server was started again, and its weights are in the weight buffer no more."""


class GeneratorPool:
    """A ``Generator`` that deals requests out to ``generators`` and merges their streams.

    The samples of one request stay on one replica, where they share the prompt. Each replica is only ever used by
    one thread at a time. The first failure of a replica ends the call with that replica's exception.
    """

    def __init__(self, generators: Sequence[Generator]):
        assert generators, "a pool needs at least one generator"
        self.generators = tuple(generators)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield every completion of every replica as it finishes, in any order."""
        shares = [requests[i :: len(self.generators)] for i in range(len(self.generators))]
        # Started here, so that a bad request raises now and all replicas work before the first is read.
        streams = [generator.generate(share, sampling) for generator, share in zip(self.generators, shares) if share]
        return merge(streams)

    def update_weights(self, version: int) -> None:
        self._on_all(lambda generator: generator.update_weights(version))

    def sleep(self) -> None:
        self._on_all(lambda generator: generator.sleep())

    def wake(self) -> None:
        self._on_all(lambda generator: generator.wake())

    def cancel(self) -> None:
        for generator in self.generators:
            generator.cancel()

    def close(self) -> None:
        self._on_all(lambda generator: generator.close())

    def _on_all(self, action: Callable[[Generator], None]) -> None:
        """Run ``action`` on all replicas at once; wait for all, then raise the first failure."""
        failures: list[BaseException] = []

        def run(generator: Generator) -> None:
            try:
                action(generator)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(generator,)) for generator in self.generators]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


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


class Replicas:
    """All rollout servers of a run as one ``Generator``; those that die or get stuck are replaced as the config allows.

    The samples of a request depend on its seed alone, and their last bits on what is computed beside them: so after a
    restart all requests are issued again, and give the samples they would have given, bit for bit.
    """

    def __init__(self, generators: Sequence[VllmGenerator], num_restarts: int):
        self._generators = tuple(generators)
        self._all: Generator = generators[0] if len(generators) == 1 else GeneratorPool(generators)
        self._num_restarts = num_restarts

    def wait_ready(self) -> None:
        for generator in self._generators:
            generator.wait_ready()

    def use_weight_buffer(self, buffer_path: str) -> None:
        for generator in self._generators:
            generator.use_weight_buffer(buffer_path)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        unfinished = Unfinished(requests)
        while unfinished.requests():
            try:
                for completion in self._all.generate(requests, sampling):
                    heartbeat.tick()
                    if unfinished.takes(completion):
                        yield completion
                return
            except RunFailure as failure:
                self._restart(failure)
                if not all(generator.has_weights for generator in self._generators):
                    raise WeightsReplaced(
                        f"{failure}; the weights it sampled with have been replaced: resume from the last checkpoint"
                    ) from failure

    def update_weights(self, version: int) -> None:
        self._survive(lambda: self._all.update_weights(version))

    def sleep(self) -> None:
        self._survive(self._all.sleep)

    def wake(self) -> None:
        self._survive(self._all.wake)

    def profile(self, step: int) -> None:
        """Have the profilers of all servers record from now on; see :meth:`VllmGenerator.profile`."""
        for generator in self._generators:
            generator.profile(step)

    def cancel(self) -> None:
        self._all.cancel()

    def close(self) -> None:
        for generator in self._generators:
            generator.close()

    def _survive(self, action: Callable[[], None]) -> None:
        """Do ``action``; if a server has died, do it again with new ones."""
        try:
            action()
        except RunFailure as failure:
            self._restart(failure)
            action()

    def _restart(self, failure: RunFailure) -> None:
        if self._num_restarts == 0:
            raise failure
        self._num_restarts -= 1
        print(
            f"mindrlhf: {failure}; starting it again ({self._num_restarts} restarts left)", file=sys.stderr, flush=True
        )
        # A server that failed without dying is not known to be sound: then all are replaced.
        dead = [generator for generator in self._generators if not generator.is_running]
        for generator in dead or self._generators:
            generator.restart()


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
        stall_timeout_s=rollout.stall_timeout_s,
        record_routing=record_routing,
        tokenizer_dir=str(Path(tokenizer_dir).resolve()) if tokenizer_dir else "",
    )


def start_replicas(rollout: RolloutSection, **settings: Any) -> Replicas:
    """Start the servers in the background; ``settings`` are those of :func:`server_options`."""
    generators: list[VllmGenerator] = []
    try:
        for index in range(rollout.num_replicas):
            generators.append(VllmGenerator.start(server_options(rollout, index, **settings)))
    except BaseException:
        for generator in generators:
            generator.close()
        raise
    return Replicas(generators, rollout.restarts)
