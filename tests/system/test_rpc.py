"""Calls over a connection: results, streams, failures, aborts, and every way in which the other side is lost."""

import contextlib
import socket
import threading
import time

import numpy as np
import pytest

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system import rpc as rpc_module
from mindrlhf.system.handshake import admit, introduce
from mindrlhf.system.records import decode, encode
from mindrlhf.system.rpc import CallFailed, Lost, Pair, Rpc
from mindrlhf.system.wire import send_message

pytestmark = pytest.mark.timeout(120)
LIMIT_S = 60


class Target:
    """What one side serves."""

    def __init__(self):
        self.rpc = None
        self.num_made = 0
        self.is_closed = threading.Event()
        self.goes_on = threading.Event()
        self.is_waiting = threading.Event()

    def add(self, left, right):
        return left + right

    def fail(self, error):
        raise {"user": UserError, "run": RunFailure, "bug": KeyError}[error](f"no {error}")

    def count(self, limit):
        try:
            for number in range(limit):
                self.num_made += 1
                yield number
        finally:
            self.is_closed.set()

    def work(self):
        """Yield nothing until it is interrupted."""
        yield "begun"
        while not self.rpc.is_interrupted:
            self.goes_on.wait(0.01)

    def wait(self):
        self.is_waiting.set()
        self.goes_on.wait(LIMIT_S)

    def _hidden(self):
        return 1


class Sides:
    """Both ends of a connection, one of which serves."""

    def __init__(self, ours, theirs, **options):
        self.target = Target()
        self.lost = []
        self.is_lost = threading.Event()
        self.theirs = self.target.rpc = Rpc(theirs, "the caller", tell=lambda: {"load": 3})
        self.thread = threading.Thread(target=self.theirs.serve, args=(self.target,))
        self.thread.start()
        self.ours = Rpc(ours, "the server", on_lost=self.note, **options)

    def note(self, how):
        self.lost.append(how)
        self.is_lost.set()

    def close(self):
        self.target.goes_on.set()
        self.ours.close()
        self.theirs.close()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


def pair():
    left, right = socket.socketpair()
    return Pair(left), Pair(right)


def greeted():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    admitted = []
    thread = threading.Thread(target=lambda: admitted.append(admit(server, b"secret")))
    thread.start()
    introduced = introduce(client, b"secret")
    thread.join(LIMIT_S)
    return introduced, admitted[0]


@pytest.fixture(params=[pair, greeted])
def sides(request):
    sides = Sides(*request.param())
    yield sides
    sides.close()


def test_results_come_back(sides):
    np.testing.assert_array_equal(sides.ours.call("add", left=np.arange(3), right=np.ones(3, int)), [1, 2, 3])
    assert sides.ours.call("add", left="a", right="b") == "ab"


def test_failures_are_those_of_the_other_side_and_the_talk_goes_on(sides, capsys):
    for error, kind, message in (
        ("user", UserError, "no user"),
        ("run", CallFailed, "no run"),
        ("bug", CallFailed, "KeyError: 'no bug'"),
    ):
        with pytest.raises(kind) as caught:
            sides.ours.call("fail", error=error)
        assert str(caught.value) == message
    assert capsys.readouterr().err.count("Traceback") == 1, "of what nobody has foreseen"
    for method in ("_hidden", "nothing"):
        with pytest.raises(CallFailed):
            sides.ours.call(method)
    assert sides.ours.call("add", left=1, right=1) == 2


def test_a_stream_comes_whole_or_is_aborted_and_the_next_call_is_in_step(sides):
    assert list(sides.ours.stream("count", limit=5)) == [0, 1, 2, 3, 4]
    sides.target.is_closed.clear()
    with contextlib.closing(sides.ours.stream("count", limit=1_000_000)) as items:
        assert next(items) == 0
    assert sides.target.is_closed.wait(LIMIT_S) and sides.target.num_made < 1_000_000
    with contextlib.closing(sides.ours.stream("work")) as items:
        assert next(items) == "begun"
    assert sides.ours.call("add", left=1, right=2) == 3
    assert list(sides.ours.stream("count", limit=2)) == [0, 1]


def test_an_abort_that_crosses_the_end_means_nothing(sides):
    items = sides.ours.stream("count", limit=1)
    assert next(items) == 0
    items.close()
    assert sides.ours.call("add", left=1, right=2) == 3


def test_who_is_gone_is_named_by_every_call(sides):
    caller = threading.Thread(target=lambda: sides.target.is_waiting.wait(LIMIT_S) and sides.theirs.close())
    caller.start()
    for _ in range(2):
        with pytest.raises(Lost, match="^the server has closed the connection: it has ended, or was killed$"):
            sides.ours.call("wait")
    assert sides.lost == ["has closed the connection: it has ended, or was killed"]
    caller.join()


def test_who_leaves_says_why(sides):
    thread = threading.Thread(target=sides.theirs.leave, args=("leaves", LIMIT_S))
    thread.start()
    assert sides.is_lost.wait(LIMIT_S)
    with pytest.raises(Lost, match="^the server leaves$"):
        sides.ours.call("add", left=1, right=2)
    assert (sides.ours.farewell, sides.theirs.farewell) == ("leaves", "")
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the other side has closed"


def test_who_is_dropped_may_hear_why(sides):
    sides.ours.drop("is too slow", tells=True)
    sides.thread.join(LIMIT_S)
    assert sides.theirs.farewell == "is too slow" and sides.lost == ["is too slow"]


def test_beats_tell_of_the_other_side(sides):
    while not sides.ours.num_beats:
        assert not sides.ours.lost
        time.sleep(0.01)
    assert sides.ours.told == {"load": 3}


def test_what_ends_a_wait_is_raised_by_the_check():
    def check():
        if sides.target.is_waiting.is_set():
            raise RunFailure("given up")

    sides = Sides(*pair(), check=check)
    with pytest.raises(RunFailure, match="given up"):
        sides.ours.call("wait")
    sides.close()


def test_who_falls_silent_is_lost(monkeypatch):
    monkeypatch.setattr(rpc_module, "SILENCE_LIMIT_S", 0.5)
    monkeypatch.setattr(rpc_module, "BEAT_INTERVAL_S", 0.1)
    ours, theirs = pair()
    rpc = Rpc(ours, "node 3", watches=True)
    with pytest.raises(Lost, match=r"^node 3 has not been heard of for \d+ s: it is stopped, cut off, or has no power"):
        rpc.call("add", left=1, right=2)
    theirs.close()


def test_nonsense_ends_the_connection():
    left, right = socket.socketpair()
    rpc = Rpc(Pair(left), "a stranger")
    send_message(right, {"kind": "result", "values": {"value": {"$record": ["Nobody", {}]}}})
    with pytest.raises(Lost, match="^a stranger sends what nobody can read"):
        rpc.call("add", left=1, right=2)
    right.close()


def test_many_whole_numbers_travel_as_an_array():
    values = {"ids": list(range(-50, 50)), "large": [2**63] * 100, "mixed": [1.0, *range(99)], "flags": [True] * 100}
    encoded, arrays = encode(values)
    assert [array.dtype for array in arrays.values()] == [np.int64]
    decoded = decode(encoded, arrays)
    assert decoded == values and all(type(one) is type(other) for name in values
                                     for one, other in zip(decoded[name], values[name]))  # fmt: skip
