"""Compilations that fail: what the parent says of them. Nothing is compiled here."""

import os
import signal

import pytest

from mindrlhf.dryrun.compile import child
from mindrlhf.dryrun.compile import request as parent
from mindrlhf.dryrun.compile.request import CompileRequest
from mindrlhf.errors import RunFailure

REQUEST = CompileRequest(hf_config={}, parallel={"model_parallel": 2}, rank=3)


def ended_process(end) -> int:
    """Fork a process that calls ``end`` and exits with 0."""
    process = os.fork()
    if not process:
        end()
        os._exit(0)
    return process


@pytest.mark.parametrize(
    ("end", "fails", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), True, "was killed, as when the machine's memory is used up"),
        (lambda: os._exit(1), True, "failed: RuntimeError: parallel init failed"),
        (lambda: None, False, "failed: RuntimeError: parallel init failed"),
    ],
)
def test_how_a_process_ended_is_told(tmp_path, end, fails, message):
    (tmp_path / "log_5").write_text("starting\nRuntimeError: parallel init failed\n")
    running = {ended_process(end): 5}
    assert child._wait_for_one(running, tmp_path) == fails
    assert not running
    with pytest.raises(RunFailure, match=message) as raised:
        parent._read_report(tmp_path, 5, REQUEST)
    assert str(raised.value).startswith("compiling rank 3 of model_parallel=2 failed: ")
