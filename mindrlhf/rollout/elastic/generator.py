"""The rollout servers of the nodes that train and of those that come and go, as one generator."""

import threading
from collections.abc import Iterator, Sequence

from mindrlhf.rollout.elastic.listener import Listener, say
from mindrlhf.rollout.elastic.peer import Peer
from mindrlhf.rollout.remote import ReplicatedGenerator
from mindrlhf.rollout.replicas import Unfinished, merge
from mindrlhf.rollout.types import Completion, GenerationRequest, SamplingParams
from mindrlhf.weights.publish.buffer import WeightBuffer


class ElasticGenerator:
    """A ``Generator``: prompts are dealt out to all servers in turn, and those of a node that is lost once more.

    The samples of a request depend on its seed and the weights alone, so it does not matter who makes them. Nodes that
    have come take part from the next ``update_weights`` on.

    Args:
        own: the servers of the nodes that train; their failure is the run's.
        num_own_servers: how many they are.
        listener: where the others come in.
        buffer: of rank 0, whole whenever a version is committed.
    """

    def __init__(
        self, own: ReplicatedGenerator, num_own_servers: int, listener: Listener, buffer: WeightBuffer
    ) -> None:
        self._own = own
        self._num_own_servers = num_own_servers
        self._listener = listener
        self._buffer = buffer
        self._peers: list[Peer] = []

    def wait_ready(self) -> None:
        """Block until every server of the nodes that train can answer."""
        self._own.wait_ready()

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield every completion as it finishes, in any order."""
        unfinished = Unfinished(requests)
        while waiting := unfinished.requests():
            peers = self._present()
            turns = [self._own] * self._num_own_servers
            turns += [peer for peer in peers for _ in range(peer.num_servers)]
            shares = {source: [] for source in (self._own, *peers)}
            for position, request in enumerate(waiting):
                shares[turns[position % len(turns)]].append(request)
            streams = [
                source.generate(share, sampling) if source is self._own else _while_it_lasts(source, share, sampling)
                for source, share in shares.items()
                if share
            ]
            for completion in merge(streams):
                if unfinished.takes(completion):
                    yield completion
            if left := unfinished.requests():
                say(f"{len(left)} prompts of rollout nodes that are lost are issued again")

    def update_weights(self, version: int) -> None:
        """Have every server load ``version`` from its node's buffer; nodes that have come take part from now on."""
        newcomers = self._listener.take_newcomers()
        peers = [*self._present(), *newcomers]
        threads = [threading.Thread(target=self._update, args=(peer, version)) for peer in peers]
        for thread in threads:
            thread.start()
        try:
            self._own.update_weights(version)
        finally:
            for thread in threads:
                thread.join()
        self._peers = [peer for peer in peers if not peer.is_lost]
        for peer in self._peers:
            if peer in newcomers:
                servers = f"{peer.num_servers} server{'s' if peer.num_servers > 1 else ''}"
                say(f"rollout node {peer.name} takes part from version {version} of the weights on, with {servers}")

    def sleep(self) -> None:
        """Give the device memory of the nodes that train back to the trainer; the others keep theirs."""
        self._own.sleep()

    def wake(self) -> None:
        """Take device memory again."""
        self._own.wake()

    def cancel(self) -> None:
        """Have ``generate``, in the thread that consumes it, raise ``Cancelled`` within a second, now and later."""
        self._own.cancel()

    def close(self) -> None:
        """End the conversations with the nodes that come and go; who started the other servers stops them."""
        self._listener.close()
        for peer in self._peers:
            peer.close()

    def _present(self) -> list[Peer]:
        return [peer for peer in self._peers if not peer.is_lost]

    def _update(self, peer: Peer, version: int) -> None:
        try:
            peer.update_weights(version, self._buffer)
        except Exception as error:  # whatever it is, the run does not need this node
            peer.drop(str(error) or type(error).__name__)


def _while_it_lasts(
    peer: Peer, requests: Sequence[GenerationRequest], sampling: SamplingParams
) -> Iterator[Completion]:
    """Yield what a node samples until it is done or lost."""
    try:
        yield from peer.generate(requests, sampling)
    except Exception as error:  # whatever it is, the run does not need this node
        peer.drop(str(error) or type(error).__name__)
