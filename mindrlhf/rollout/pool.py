"""Several generators as one: rollout replicas that share the work of each batch."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

from mindrlhf.rollout.types import Completion, GenerationRequest, Generator, SamplingParams


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
    """Which samples of some requests are still to come, whoever makes them."""

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
