"""The background writer: one at a time, errors surface once; copies stay what they were."""

import threading

import numpy as np
import pytest

from mindrlhf.checkpoint.background import BackgroundWriter, CopyBuffers
from mindrlhf.errors import UserError


def test_a_write_goes_on_while_the_caller_works_and_the_next_one_waits_for_it():
    writer, may_end, log = BackgroundWriter(), threading.Event(), []

    def slow():
        may_end.wait(60)
        log.append("first")

    writer.start(slow)
    writer.check()  # does not wait
    assert log == []
    threading.Timer(0.05, may_end.set).start()
    writer.start(lambda: log.append("second"))
    assert log[0] == "first", "the second write began before the first had ended"
    writer.wait()
    assert log == ["first", "second"]


@pytest.mark.parametrize("ask", ["check", "wait", "start"])
def test_an_error_is_raised_by_the_next_call_once(ask):
    writer, log = BackgroundWriter(), []

    def fail():
        raise UserError("the disk is full")

    writer.start(fail)
    writer._thread.join()
    arguments = [lambda: log.append("next")] if ask == "start" else []
    with pytest.raises(UserError, match="disk is full"):
        getattr(writer, ask)(*arguments)
    assert log == []
    writer.check()
    writer.wait()


def test_copies_do_not_follow_the_original_and_reuse_their_memory():
    buffers = CopyBuffers()
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3).T, "b": np.arange(3, dtype=np.uint16)}
    first = dict(buffers.copy("model", weights.items()))
    weights["a"][:] = -1
    np.testing.assert_array_equal(first["a"], np.arange(6).reshape(2, 3).T)
    assert first["a"].flags.c_contiguous and first["b"].dtype == np.uint16
    other = dict(buffers.copy("optimizer", [("a", np.zeros((3, 2), np.float32))]))
    again = dict(buffers.copy("model", weights.items()))
    assert np.shares_memory(again["a"], first["a"]) and not np.shares_memory(other["a"], again["a"])
    assert (again["a"] == -1).all()
    larger = dict(buffers.copy("model", [("a", np.ones(7, np.float32))]))
    np.testing.assert_array_equal(larger["a"], np.ones(7))
