"""Rows that the ranks of a replica share: rank 0 sends them once, and each rank has them bit for bit."""

import contextlib
import json
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.layout.layout import Layout
from mindrlhf.training import broadcast, team
from mindrlhf.training.replica_team import ReplicaTeam


class Worker:
    """Keeps what it is given."""

    def __init__(self):
        self.taken = []

    def take(self, **arguments) -> None:
        self.taken.append(arguments)


class Counting(socket.socket):
    """A socket that counts the bytes sent."""

    sent = 0

    def sendmsg(self, *arguments):
        number = super().sendmsg(*arguments)
        self.sent += number
        return number


class Shared:
    """Stands for the collective: the first of the ranks gives its arrays, the others wait for them."""

    def __init__(self):
        self.changed, self.given, self.calls = threading.Condition(), {}, []

    def __call__(self, ranks, layout, arrays):
        with self.changed:
            self.calls.append(tuple(ranks))
            if arrays:
                assert layout == [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
                self.given[tuple(ranks)] = arrays
                self.changed.notify_all()
            assert self.changed.wait_for(lambda: tuple(ranks) in self.given, timeout=60)
            return {name: array.copy() for name, array in self.given[tuple(ranks)].items()}


@contextlib.contextmanager
def ranks_of(num_ranks, monkeypatch):
    """Yield a team whose other ranks are threads, its workers, the stand-in for the collective, rank 0's sockets."""
    shared = Shared()
    monkeypatch.setattr(team, "_share", shared)
    workers = [Worker() for _ in range(num_ranks)]
    pairs = [socket.socketpair() for _ in workers[1:]]
    ours = [Counting(fileno=one.detach()) for one, _ in pairs]
    threads = [
        threading.Thread(target=team.serve, args=(worker, theirs), daemon=True)
        for worker, (_, theirs) in zip(workers[1:], pairs)
    ]
    for thread in threads:
        thread.start()
    ranks = team.Team(workers[0], ours)
    yield ranks, workers, shared, ours
    ranks.close()
    for thread in threads:
        thread.join(timeout=60)


@pytest.mark.parametrize(("data", "model"), [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_rows_leave_rank_0_once_for_each_replica(data, model, monkeypatch):
    layout = Layout(data_parallel=data, model_parallel=model)
    rows = [np.random.default_rng(number).integers(0, 99, (3, 30_000), np.int32) for number in range(data)]
    with ranks_of(data * model, monkeypatch) as (ranks, workers, shared, connections):
        ReplicaTeam(ranks, layout).call("take", per_rank=[{"rows": rows[replica]} for replica in range(data)], step=3)
        num_sent = sum(one.sent for one in connections)
        for rank, worker in enumerate(workers):
            (taken,) = worker.taken
            assert taken["step"] == 3
            np.testing.assert_array_equal(taken["rows"], rows[layout.coordinates(rank).data], strict=True)
    # A message for one other rank is sent, not broadcast: with two ranks, that of rank 0's replica.
    assert len(set(shared.calls)) == {1: 0, 2: data - 1}.get(model, data)
    assert num_sent <= (data - 1 + (model == 2)) * rows[0].nbytes + 2000 * data * model


def test_what_is_small_or_for_all_goes_to_each_rank(monkeypatch):
    with ranks_of(4, monkeypatch) as (ranks, workers, shared, _):
        replicas = ReplicaTeam(ranks, Layout(data_parallel=1, model_parallel=4))
        replicas.call("take", per_rank=[{"rows": np.arange(100)}])
        replicas.call("take", rows=np.arange(100_000))
        assert [len(worker.taken) for worker in workers] == [2] * 4 and shared.calls == []


DTYPES = st.sampled_from(["?", "<i1", "<i4", "<i8", "<u2", "<f2", "<f4", "<f8"])
SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)


@settings(max_examples=60)
@given(st.lists(st.tuples(DTYPES, SHAPES), max_size=6))
def test_any_arrays_travel_in_buckets_bit_for_bit(kinds):
    rng = np.random.default_rng(0)
    arrays = {
        f"{number}": rng.integers(0, 2, shape).astype(dtype) * np.array(1.5).astype(dtype)
        for number, (dtype, shape) in enumerate(kinds)
    }
    layout = json.loads(json.dumps([[name, array.dtype.str, array.shape] for name, array in arrays.items()]))
    buckets = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast, "SHARED_WORDS", 64)
        patch.setattr(broadcast, "open_broadcast", lambda ranks, root, num_words: lambda w: buckets.append(w.copy()))
        broadcast.broadcast_arrays((2, 3), layout, arrays)
        assert all(bucket.shape == (64,) and bucket.dtype == np.int32 for bucket in buckets)
        received = iter(buckets)
        patch.setattr(broadcast, "open_broadcast", lambda ranks, root, num_words: lambda words: next(received))
        found = broadcast.broadcast_arrays((2, 3), layout, None)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
        found[name][...] = 0  # what a rank does to it is its own affair
