"""Rollout servers of other nodes: requests there, completions back, aborts, failures, ends."""

import dataclasses
import socket
import threading
import time

import numpy as np
import pytest

from mindrlhf.errors import RunFailure
from mindrlhf.rollout.remote import NodesGenerator, accept_nodes, answer, remotes
from mindrlhf.rollout.types import (
    Completion,
    GenerationRequest,
    SamplingParams,
    pack_completions,
    pack_requests,
    pack_sampling,
    unpack_completions,
    unpack_requests,
    unpack_sampling,
)

pytestmark = pytest.mark.timeout(180)

TOKEN = b"a token of this start"
SAMPLING = SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, stop_token_ids=(1, 2))


def requests_of(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(index, tuple(range(index + 1)), 2, seed=2**62 + index) for index in range(count)]


def completion_of(request: GenerationRequest, index: int, version: int) -> Completion:
    """What a server would sample: it depends on the request alone."""
    random = np.random.default_rng([request.seed, index])
    length = int(random.integers(1, request.max_tokens + 1))
    return Completion(
        request_id=request.request_id,
        sample_index=index,
        token_ids=random.integers(0, 100, length).astype(np.int32),
        logprobs=random.standard_normal(length).astype(np.float32),
        finish_reason=("stop", "length")[index],
        weights_version=version,
    )


class Servers:
    """The servers of one node."""

    def __init__(self, name: str, journal: list):
        self.name = name
        self.journal = journal
        self.version = 0
        self.delay_s = 0.0

    def wait_ready(self) -> None:
        self.journal.append((self.name, "wait_ready"))

    def use_weight_buffer(self, buffer_path: str) -> None:
        raise AssertionError("a node sees to its own buffer")

    def generate(self, requests, sampling):
        assert sampling == SAMPLING
        self.journal.append((self.name, "generate", [request.request_id for request in requests]))
        done = 0
        try:
            for request in requests:
                for index in range(request.num_samples):
                    time.sleep(self.delay_s)
                    yield completion_of(request if request.max_tokens else limited(request), index, self.version)
                    done += 1
        finally:
            self.journal.append((self.name, "done", done))

    def update_weights(self, version: int) -> None:
        if version == 13:
            raise RunFailure("no such version\nin the buffer")
        self.version = version

    def sleep(self) -> None:
        self.journal.append((self.name, "sleep"))

    def wake(self) -> None:
        self.journal.append((self.name, "wake"))

    def close(self) -> None:
        self.journal.append((self.name, "close"))


def limited(request: GenerationRequest) -> GenerationRequest:
    return GenerationRequest(request.request_id, request.prompt_ids, request.num_samples, request.seed, 7)


@pytest.fixture
def nodes():
    """The generator of three nodes, the servers of each, and what they did."""
    journal: list = []
    servers = [Servers(f"node {index}", journal) for index in range(3)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        for node in (2, 1):
            answer(servers[node], host, port, TOKEN, node)
        generator = NodesGenerator(servers[0], remotes(accept_nodes(listener, TOKEN, [1, 2])))
    yield generator, servers, journal
    generator.close()


def test_messages_come_back_as_they_were():
    requests = requests_of(3)
    assert unpack_sampling(pack_sampling(SAMPLING)) == SAMPLING
    assert unpack_requests(pack_requests(requests, SAMPLING)) == [limited(request) for request in requests]
    completions = [completion_of(limited(request), index, 4) for request in requests for index in range(2)]
    found = list(unpack_completions({"weights_version": 4}, pack_completions(completions), "server 1"))
    assert_same(found, completions)
    assert all(one.experts is None for one in found)


def test_experts_come_back_in_their_own_dtype():
    for dtype in (np.uint8, np.uint16):
        completions = [
            dataclasses.replace(
                completion_of(limited(request), 0, 4),
                experts=np.arange(6 * length, dtype=dtype).reshape(length, 3, 2) + request.request_id,
            )
            for length, request in zip((3, 1, 5), requests_of(3))
        ]
        found = list(unpack_completions({"weights_version": 4}, pack_completions(completions), "server 1"))
        for one, other in zip(found, completions, strict=True):
            assert one.experts.dtype == dtype
            np.testing.assert_array_equal(one.experts, other.experts)


def assert_same(found, expected) -> None:
    def key(one):
        return one.request_id, one.sample_index

    found, expected = sorted(found, key=key), sorted(expected, key=key)
    assert [key(one) for one in found] == [key(one) for one in expected]
    for one, other in zip(found, expected):
        assert (one.finish_reason, one.weights_version) == (other.finish_reason, other.weights_version)
        for name in ("token_ids", "logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype


def test_prompts_are_dealt_out_to_the_nodes_and_all_samples_come_back(nodes):
    generator, _, journal = nodes
    generator.wait_ready()
    generator.update_weights(5)
    requests = requests_of(7)
    found = list(generator.generate(requests, SAMPLING))
    assert_same(found, [completion_of(limited(request), index, 5) for request in requests for index in range(2)])
    dealt = {name: ids for name, kind, *rest in journal if kind == "generate" for ids in rest}
    assert dealt == {"node 0": [0, 3, 6], "node 1": [1, 4], "node 2": [2, 5]}
    assert {name for name, kind, *_ in journal if kind == "wait_ready"} == {"node 0", "node 1", "node 2"}


def test_all_nodes_sleep_and_wake(nodes):
    generator, _, journal = nodes
    generator.sleep()
    generator.wake()
    expected = [(f"node {node}", kind) for kind in ("sleep", "wake") for node in range(3)]
    assert sorted(journal) == sorted(expected)


def test_a_generation_that_nobody_reads_to_its_end_is_aborted_and_the_next_one_is_whole(nodes):
    generator, servers, journal = nodes
    for one in servers:
        one.delay_s = 0.1
    stream = generator.generate(requests_of(300), SAMPLING)
    next(stream)
    stream.close()
    ended = {entry[0]: entry[2] for entry in journal if entry[1] == "done"}
    assert ended.keys() == {"node 0", "node 1", "node 2"} and all(done < 100 for done in ended.values()), ended
    for one in servers:
        one.delay_s = 0.0
    requests = requests_of(4)
    found = list(generator.generate(requests, SAMPLING))
    assert_same(found, [completion_of(limited(request), index, 0) for request in requests for index in range(2)])


def test_what_fails_on_a_node_is_named_with_it_and_the_conversation_goes_on(nodes):
    generator, _, _ = nodes
    with pytest.raises(RunFailure, match=r"^node \d: no such version in the buffer$"):
        generator.generators[1].update_weights(13)
    generator.generators[1].update_weights(3)


def test_a_node_that_has_gone_is_named(nodes):
    generator, servers, _ = nodes
    servers[1].delay_s = 0.05
    stream = generator.generators[1].generate(requests_of(100), SAMPLING)
    next(stream)
    generator.generators[1]._connection.close()
    with pytest.raises(RunFailure, match="the first rank of node 1, which answers for its rollout servers, died"):
        list(stream)


def test_strangers_are_not_taken_for_nodes():
    journal: list = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        stranger = socket.create_connection((host, port))
        stranger.sendall(b"let me in, I am node 1" * 10)
        answer(Servers("stranger", journal), host, port, b"another token", 1)
        threading.Timer(0.2, answer, (Servers("node 1", journal), host, port, TOKEN, 1)).start()
        (remote,) = remotes(accept_nodes(listener, TOKEN, [1]))
    remote.wait_ready()
    assert journal == [("node 1", "wait_ready")]
    remote.close()
    stranger.close()
