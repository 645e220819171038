"""Rank 0's calls over socket pairs, with the other ranks as threads."""

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import threading
from typing import Any

import numpy as np
import pytest

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system.records import record
from mindrlhf.system.wire import send_message
from mindrlhf.training.team import Team, serve


@record
@dataclasses.dataclass(frozen=True)
class Scaled:
    scaled: np.ndarray
    rank: int
    nested: dict[str, Any]


@record
@dataclasses.dataclass(frozen=True)
class Greeting:
    hello: int


class Worker:
    """One rank: says who it is, computes, and fails when asked to."""

    def __init__(self, rank: int):
        self.rank = rank
        self.calls = []

    def scale(self, values: np.ndarray, factor: float) -> Scaled:
        self.calls.append("scale")
        return Scaled(values * factor, self.rank, {"seen": [len(values), None, "text"]})

    def note(self, **arguments) -> None:
        self.calls.append(arguments)

    def fail(self, rank: int, kind: str) -> None:
        if rank == self.rank:
            raise {"user": UserError, "run": RunFailure, "other": KeyError}[kind](f"rank {rank}\nfails")


@contextlib.contextmanager
def team_of(num_ranks: int):
    """Yield a team, its workers and what ended each served rank; all threads have ended afterwards."""
    workers = [Worker(rank) for rank in range(num_ranks)]
    pairs = [socket.socketpair() for _ in range(num_ranks - 1)]
    endings: dict[int, BaseException | None] = {}

    def run(rank: int, connection: socket.socket) -> None:
        try:
            serve(workers[rank], connection)
            endings[rank] = None
        except BaseException as error:
            endings[rank] = error
            connection.close()

    threads = [threading.Thread(target=run, args=(rank, pair[1])) for rank, pair in enumerate(pairs, start=1)]
    for thread in threads:
        thread.start()
    team = Team(workers[0], [pair[0] for pair in pairs])
    try:
        yield team, workers, endings
    finally:
        team.close()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a rank still serves a closed team"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_come_back_by_rank_with_arguments_of_their_own(num_ranks):
    with team_of(num_ranks) as (team, _, endings):
        assert team.world_size == num_ranks
        shares = [{"values": np.arange(rank + 2, dtype=np.float32)} for rank in range(num_ranks)]
        results = team.call("scale", per_rank=shares, factor=2.5)
        assert [result.rank for result in results] == list(range(num_ranks))
        for rank, result in enumerate(results):
            assert result.scaled.dtype == np.float32
            np.testing.assert_array_equal(result.scaled, 2.5 * np.arange(rank + 2))
            assert result.nested == {"seen": [rank + 2, None, "text"]}
    assert endings == dict.fromkeys(range(1, num_ranks))


def test_arguments_of_all_kinds_arrive_as_they_were_sent():
    sent = {
        "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "empty": np.zeros((0, 4), np.float64),
        "flags": np.array([True, False]),
        "turned": np.arange(6.0).reshape(2, 3).T,
        "number": 3,
        "ratio": 0.1,
        "name": "old_logprobs",
        "nothing": None,
    }
    with team_of(2) as (team, workers, _):
        assert team.call("note", **sent) == [None, None]
        for worker in workers:
            (received,) = worker.calls
            assert received.keys() == sent.keys()
            for name, value in sent.items():
                if isinstance(value, np.ndarray):
                    assert received[name].dtype == value.dtype
                    np.testing.assert_array_equal(received[name], value)
                else:
                    assert received[name] == value
        received = workers[1].calls[0]["ids"]
        received += 1  # a rank may change what it was given
        assert sent["ids"][0, 0] == 0


@pytest.mark.parametrize(("kind", "error"), [("user", UserError), ("run", RunFailure), ("other", RunFailure)])
def test_the_failure_of_a_rank_is_raised_in_one_line_that_names_it(kind, error):
    with team_of(3) as (team, _, endings):
        with pytest.raises(error, match=r"^rank 2: .*rank 2.*fails.*$") as caught:
            team.call("fail", rank=2, kind=kind)
        assert "\n" not in str(caught.value)
    # The rank that failed ends by its own exception, for its log; the other one was told that the run is over.
    assert type(endings[2]) is {"user": UserError, "run": RunFailure, "other": KeyError}[kind]
    assert endings[1] is None


def test_the_failure_of_rank_0_is_its_own():
    with team_of(2) as (team, _, endings):
        with pytest.raises(KeyError):
            team.call("fail", rank=0, kind="other")
    # The other rank either read that or found nobody to answer.
    assert endings[1] is None or isinstance(endings[1], RunFailure)


def test_a_rank_0_that_vanishes_ends_the_others_with_a_run_failure():
    ours, theirs = socket.socketpair()
    ours.close()
    with pytest.raises(RunFailure, match=r"rank 0 died .*worker_0\.log"):
        serve(Worker(1), theirs)
    theirs.close()


@pytest.mark.parametrize("outcome", ["result", "error"])
def test_a_rank_0_that_vanishes_during_a_call_does_not_hide_what_happened(outcome):
    ours, theirs = socket.socketpair()

    class Orphan:
        def work(self):
            ours.close()
            if outcome == "error":
                raise UserError("the actual mistake")
            return Greeting(8)

    send_message(ours, {"method": "work", "values": {}})
    expected = {"result": (RunFailure, r"rank 0 died"), "error": (UserError, "the actual mistake")}[outcome]
    with pytest.raises(expected[0], match=expected[1]):
        serve(Orphan(), theirs)
    theirs.close()


def test_a_killed_rank_is_named_with_its_log():
    program = textwrap.dedent(
        """
        import dataclasses, socket, sys, time
        from mindrlhf.system.records import record
        from mindrlhf.training.team import serve
        @record
        @dataclasses.dataclass(frozen=True)
        class Greeting:
            hello: int
        class Worker:
            def sleep(self): time.sleep(600)
            def greet(self): return Greeting(1)
        serve(Worker(), socket.socket(fileno=int(sys.argv[1])))
        """
    )
    near, killed = socket.socketpair(), socket.socketpair()

    class Lead:
        def greet(self):
            return Greeting(0)

        def sleep(self):
            process.kill()

    thread = threading.Thread(target=lambda: serve(Worker(1), near[1]))
    thread.start()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(killed[1].fileno())]
    with subprocess.Popen(command, pass_fds=[killed[1].fileno()], env=environment) as process:
        killed[1].close()
        team = Team(Lead(), [killed[0]])
        try:
            assert team.call("greet") == [Greeting(0), Greeting(1)]
            with pytest.raises(RunFailure, match=r"rank 1 died .*worker_1\.log"):
                team.call("sleep")
            with pytest.raises(RunFailure, match=r"rank 1 died .*worker_1\.log"):
                Team(Lead(), [killed[0]]).call("greet")
        finally:
            process.kill()
            team.close()
            Team(None, [near[0]]).close()
            thread.join(timeout=60)
