"""Rows that the ranks of a replica are given alike: what leaves rank 0, and that each has them bit for bit."""

import contextlib
import hashlib
import json
import os
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.errors import RunFailure
from mindrlhf.layout.layout import Layout
from mindrlhf.system.wire import send_message
from mindrlhf.training import relay as relays
from mindrlhf.training.relay import Relay, lay_out, mapped, route_of
from mindrlhf.training.replica_team import ReplicaTeam
from mindrlhf.training.team import Star, Team, serve

TOKEN = [1, 2, 3, 4]


class Worker:
    """Keeps what it is given."""

    def __init__(self):
        self.taken = []

    def take(self, **arguments) -> None:
        self.taken.append(arguments)


class Counting:
    """A socket that counts what is sent, whoever counts it."""

    def __init__(self, connection, counts, key):
        self._connection, self._counts, self._key = connection, counts, key

    def __getattr__(self, name):
        return getattr(self._connection, name)

    def sendmsg(self, buffers, *rest):
        sent = self._connection.sendmsg(buffers, *rest)
        self._counts[self._key] = self._counts.get(self._key, 0) + sent
        return sent


@contextlib.contextmanager
def ranks_on(machines, monkeypatch, workers=None):
    """Yield the team of ranks that are threads, each on the machine of its letter, their workers and bytes sent.

    Bytes are counted by rank that sent them, over any connection; what lies in memory as ``memory``.
    """
    counts: dict = {}
    workers = workers or [Worker() for _ in machines]

    def relay_of(rank):
        relay = Relay(rank, TOKEN)
        relay.place[0] = machines[rank]
        whole = relay._open
        monkeypatch.setattr(relay, "_open", lambda *place: Counting(whole(*place), counts, rank))
        return relay

    laid = relays.lay_out

    def lay_out(arrays):
        counts.setdefault("memory", []).append(sum(array.nbytes for array in arrays.values()))
        return laid(arrays)

    monkeypatch.setattr(relays, "lay_out", lay_out)
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    all_relays = [relay_of(rank) for rank in range(len(machines))]
    pairs = [socket.socketpair() for _ in machines[1:]]
    star = Star(Counting(pair[0], counts, 0) for pair in pairs)
    star.relay, star.places = all_relays[0], {rank: relay.place for rank, relay in enumerate(all_relays)}
    endings = {}

    def run(rank):
        try:
            serve(workers[rank], pairs[rank - 1][1], all_relays[rank])
        except BaseException as error:
            endings[rank] = error
        finally:
            all_relays[rank].close()
            pairs[rank - 1][1].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, len(machines))]
    for thread in threads:
        thread.start()
    team = Team(workers[0], star)
    team.endings = endings
    try:
        yield team, workers, counts
    finally:
        team.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a rank still serves a closed team"


def rows_of(replica, size=30_000):
    random = np.random.default_rng(replica)
    return {
        "rows": random.integers(0, 1 << 30, (4, size), np.int32),
        "flags": random.random(7) < 0.5,
        "nothing": np.zeros((0, 3), np.float32),
        "names": [f"replica {replica}", None],
    }


def size_of(rows):
    return sum(value.nbytes for value in rows.values() if isinstance(value, np.ndarray))


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert found[name].tobytes() == value.tobytes()
        else:
            assert found[name] == value


@pytest.mark.parametrize(
    ("layout", "machines"),
    [
        (Layout(data_parallel=1, model_parallel=4), "aaaa"),
        (Layout(data_parallel=2, model_parallel=4), "aaaaaaaa"),
        (Layout(data_parallel=2, model_parallel=2, pipeline_stage=2), "aaaabbbb"),  # each replica over two machines
        (Layout(data_parallel=2, model_parallel=4), "aaaabbbb"),
        (Layout(data_parallel=1, model_parallel=8), "abababab"),  # whatever order the scheduler numbers them in
        (Layout(data_parallel=1, model_parallel=4), "abcd"),
        (Layout(data_parallel=4, model_parallel=4), "aabbccddaabbccdd"),
    ],
)
def test_rows_leave_rank_0_once_for_each_replica(layout, machines, monkeypatch):
    with ranks_on(machines, monkeypatch) as (team, workers, counts):
        replicas = ReplicaTeam(team, layout)
        for step in range(3):  # links and memory of one step serve no other
            sent = [rows_of(10 * step + replica) for replica in range(layout.data_parallel)]
            replicas.call("take", per_rank=sent, lr=0.5)
            for rank, worker in enumerate(workers):
                replica = layout.coordinates(rank).data
                same(worker.taken[step], sent[replica] | {"lr": 0.5})
        all_rows = 3 * sum(map(size_of, sent))
        # To other ranks, and into the memory of its machine for the rest of its own replica.
        own = [rank for rank in range(1, len(machines)) if layout.coordinates(rank).data == layout.coordinates(0).data]
        in_memory = 3 * size_of(sent[0]) if any(machines[rank] == machines[0] for rank in own) else 0
        assert counts[0] + in_memory <= 1.1 * all_rows
        # No rank sends more than its replica's rows: to the next machine.
        assert all(number <= 1.1 * 3 * size_of(sent[0]) for rank, number in counts.items() if rank not in (0, "memory"))


def test_each_rank_may_change_what_it_was_given(monkeypatch):
    class Changing(Worker):
        def take(self, rows, **others):
            super().take(rows=rows.copy())
            rows += 1  # the next one must not see it

    workers = [Changing() for _ in range(4)]
    with ranks_on("aaab", monkeypatch, workers) as (team, _, _):
        sent = rows_of(1)
        original = sent["rows"].copy()
        team.call("take", per_rank=[sent] * 4)
        for worker in workers:
            np.testing.assert_array_equal(worker.taken[0]["rows"], original)


def test_what_is_small_or_for_one_other_rank_goes_straight(monkeypatch):
    with ranks_on("aaaa", monkeypatch) as (team, workers, counts):
        team.call("take", rows=np.arange(100))
        replicas = ReplicaTeam(team, Layout(data_parallel=2, model_parallel=2))
        replicas.call("take", per_rank=[rows_of(0), rows_of(1)])
        for rank, worker in enumerate(workers):
            np.testing.assert_array_equal(worker.taken[0]["rows"], np.arange(100))
            same(worker.taken[1], rows_of(rank // 2))
    assert len(counts["memory"]) == 1  # of ranks 2 and 3; rank 1 is the only one beside rank 0 that needs its rows


@pytest.mark.parametrize("machines", ["aaaa", "abcd"])
@pytest.mark.parametrize("dead", [1, 2, 3])
def test_a_rank_that_dies_while_it_reads_is_named(machines, dead, monkeypatch):
    """The one that is to read, or to pass on, is gone before it has done either."""
    with ranks_on(machines, monkeypatch) as (team, workers, _):
        team.call("take", per_rank=[rows_of(0)] * 4)
        whole = Relay.take

        def take(self, header, arrays, star):
            if self._rank == dead:
                star.close()  # what the kernel does for a process that is killed
                self.close()
                raise SystemExit
            return whole(self, header, arrays, star)

        monkeypatch.setattr(Relay, "take", take)
        with pytest.raises(RunFailure, match=rf"rank {dead} died .*worker_{dead}\.log"):
            team.call("take", per_rank=[rows_of(1)] * 4)
    assert set(team.endings) >= {dead}


def test_a_rank_that_waits_for_rows_notices_the_end_of_rank_0():
    ours, theirs = socket.socketpair()
    relay = Relay(3, TOKEN)
    send_message(ours, {"method": "take", "route": {"before": 2, "after": None}})
    ours.close()
    with pytest.raises(RunFailure, match=r"rank 2 passed nothing on \(rank 0 ended the call\)"):
        serve(Worker(), theirs, relay)
    relay.close()
    theirs.close()


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, {"rank": 1}, {"rank": 1, "token": [0] * 4}])
def test_a_stranger_passes_nothing_on(hello, monkeypatch):
    monkeypatch.setattr(relays, "_HELLO_TIMEOUT_S", 0.2)
    monkeypatch.setattr(relays, "_TIMEOUT_S", 1.0)
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    relay, (ours, theirs) = Relay(2, TOKEN), socket.socketpair()
    with socket.create_connection(tuple(relay.place[1:3])) as stranger, ours, theirs:
        stranger.sendall(hello) if isinstance(hello, bytes) else send_message(stranger, hello)
        with pytest.raises(RunFailure, match="no connection in 1 s"):
            relay.take({"route": {"before": 1, "after": None}}, {}, theirs)
    relay.close()


def test_no_descriptor_and_no_link_is_left_for_a_step(monkeypatch):
    def held():
        return len(os.listdir("/proc/self/fd"))

    with ranks_on("aaabbb", monkeypatch) as (team, workers, _):
        for number in range(12):
            team.call("take", per_rank=[rows_of(number)] * 6)
            for worker in workers:
                worker.taken.clear()
            if number == 1:
                before = held()
        assert held() == before


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24), st.data())
def test_a_route_crosses_to_each_machine_once(machines, data):
    ranks = data.draw(st.lists(st.sampled_from(range(len(machines))), unique=True, min_size=1).map(sorted))
    route = route_of(ranks, {rank: [machine] for rank, machine in enumerate(machines)})
    assert sorted(route) == ranks and route[0] == ranks[0]
    crossings = sum(machines[one] != machines[other] for one, other in zip(route, route[1:]))
    assert crossings == len({machines[rank] for rank in ranks}) - 1


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from(["|b1", "|u1", "<i4", "<i8", "<f2", "<f4", "<f8"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(DTYPES, SHAPES), max_size=8))
def test_any_arrays_lie_in_memory_bit_for_bit(kinds):
    random = np.random.default_rng(len(kinds))
    arrays = {}
    for number, (dtype, shape) in enumerate(kinds):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[f"a{number}"] = np.frombuffer(random.bytes(size) if size else b"", dtype).reshape(shape)
    descriptor, layout = lay_out(arrays)
    found = mapped(descriptor, json.loads(json.dumps(layout)))
    os.close(descriptor)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert hashlib.sha256(found[name].tobytes()).digest() == hashlib.sha256(array.tobytes()).digest()
        assert found[name].flags.writeable
