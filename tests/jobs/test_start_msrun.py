"""Starts that are disturbed: ranks that do not come, strangers at MindSpore's scheduler, signals that nobody hears."""

import os
import signal
import socket
import threading
import time

import pytest
from launch_jobs import Job
from slow_tests import SLOW

from mindrlhf.errors import STOPPED
from mindrlhf.system.heartbeat import JOINING, heartbeat_path, read_beat
from mindrlhf.system.ports import find_free_port

pytestmark = pytest.mark.timeout(600)

TIMEOUT_S = 300  # generous: other work may load the machine
SIGNALS = (int(signal.SIGTERM), int(signal.SIGUSR1))
# A rank as mindrlhf.training.main and runtime make it, without a model.
MEETING_WORKER = """
import signal, sys
from mindrlhf.system import heartbeat
from mindrlhf.system.processes import die_with_launcher
die_with_launcher()
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: sys.exit(128 + number))
heartbeat.start()
from mindrlhf.models.context import import_mindspore
ms = import_mindspore()
from mindspore.communication import get_rank, init
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device("CPU")
heartbeat.enter(heartbeat.JOINING)
init()
heartbeat.enter(heartbeat.JOINED)
print("rank", get_rank(), "has met the others", flush=True)
"""
# Rank 1, or every rank, stays on the way; no MindSpore, to be quick. A rank that has met the others stays for longer
# than a busy machine keeps the launcher from looking: one that came and went unseen would not count.
LATE_WORKER = """
import os, pathlib, time
from mindrlhf.system import heartbeat
from mindrlhf.system.processes import die_with_launcher
if os.environ["MS_ROLE"] == "MS_SCHED":
    time.sleep(600)
die_with_launcher()
heartbeat.start()
if os.environ["RANK_ID"] in {joining}:
    heartbeat.enter(heartbeat.JOINING)
here = pathlib.Path(__file__).parent
if not (here / "logs" / "attempt_1").exists():
    time.sleep(600)
heartbeat.enter(heartbeat.JOINED)
print("rank", os.environ["RANK_ID"], "has met the others", flush=True)
time.sleep(10)
"""
# Holds the interpreter's lock, as MindSpore does while it joins or compiles: no Python code handles a signal.
DEAF_WORKER = """
import ctypes, os, time
from mindrlhf.system import heartbeat
from mindrlhf.system.processes import die_with_launcher
if os.environ["MS_ROLE"] == "MS_SCHED":
    time.sleep(600)
import signal, sys
die_with_launcher()
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, lambda number, _: sys.exit(128 + number))
    signal.siginterrupt(number, False)  # the call below is not broken off either
heartbeat.start()
heartbeat.enter("step 7: update")
reader, writer = os.pipe()
ctypes.PyDLL(None).read(reader, ctypes.create_string_buffer(1), 1)
"""


# Ranks as training makes them: rank 0 saves at the end of its step, in which it needs the other.
SAVING_WORKER = """
import os, pathlib, sys, time
if os.environ["MS_ROLE"] == "MS_SCHED":
    time.sleep(600)
from mindrlhf.system import heartbeat
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.main import guarded
here = pathlib.Path(__file__).parent
def work():
    requests = SaveRequests()
    if os.environ["RANK_ID"] == "0":
        requests.listen()
        heartbeat.takes_requests()
    heartbeat.enter("step 7: update")
    while not (requests.stop or (here / "saved").exists()):
        time.sleep(0.02)
    time.sleep(3)
    (here / "saved").touch()
sys.exit(guarded("worker", work))
"""


def wait_for_activity(job: Job, rank: int, activity: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (beat := read_beat(heartbeat_path(job.dir / "logs", rank))) is None or beat.activity != activity:
        assert job.launcher.poll() is None and time.monotonic() < deadline, job.errors()
        time.sleep(0.05)


def test_a_port_that_somebody_else_has_costs_one_start_and_not_the_run(start):
    with socket.create_server(("127.0.0.1", 0)) as squatter:  # takes connections and says nothing
        port = squatter.getsockname()[1]
        job = start(MEETING_WORKER, master_port=port, start_timeout_s=TIMEOUT_S)
        assert job.wait(TIMEOUT_S) == 0, job.errors()
    assert "rank 0 has met the others" in job.output()
    assert "the scheduler ended with exit code 1 before the ranks had found each other" in job.errors()
    assert "starting the ranks once more, on another port; logs of the first start: " in job.errors()
    assert "occupied" in (job.dir / "logs" / "attempt_1" / "scheduler.log").read_text()
    assert job.running() == []


def visit(port: int, is_over: threading.Event, message: bytes, counts: list[int]) -> None:
    """Connect to the port again and again, say something or nothing, and keep half of the connections."""
    kept = []
    while not is_over.wait(0.01):
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=1)
            connection.sendall(message)
        except OSError:
            continue
        counts.append(1)
        if len(counts) % 2:
            kept.append(connection)
        else:
            connection.close()
        del kept[:-200]


@SLOW
def test_strangers_at_the_scheduler_do_not_keep_the_ranks_from_each_other(start):
    port, is_over = find_free_port(), threading.Event()
    messages = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, os.urandom(1 << 16))
    counts = [[] for _ in messages]
    strangers = [
        threading.Thread(target=visit, args=(port, is_over, *arguments)) for arguments in zip(messages, counts)
    ]
    for stranger in strangers:
        stranger.start()
    try:
        job = start(MEETING_WORKER, master_port=port, start_timeout_s=TIMEOUT_S)
        assert job.wait(TIMEOUT_S) == 0, job.errors()
    finally:
        is_over.set()
        for stranger in strangers:
            stranger.join()
    assert min(map(len, counts)) > 0, "a stranger never got through"
    assert "rank 0 has met the others" in job.output()
    assert job.running() == []


@SLOW
def test_a_start_that_takes_too_long_says_who_waits_for_whom(start):
    job = start(LATE_WORKER.format(joining=["0"]), start_timeout_s=45)
    assert job.wait(TIMEOUT_S) == 1
    first, *rest = job.errors().splitlines()
    assert first.startswith(
        "mindrlhf: rank 1 has not begun to join: rank 0 waits for rank 1 (run.start_timeout_s is 45) at "
    )
    assert str(job.dir / "logs" / "worker_1.log") in first
    assert f"  rank 0 was in: {JOINING}" in rest and "  rank 1 was in: starting" in rest
    assert "once more" not in job.errors(), "another port brings no rank that is missing"
    assert job.running() == []


@SLOW
def test_ranks_that_wait_for_nothing_but_the_scheduler_are_started_once_more(start):
    job = start(LATE_WORKER.format(joining=["0", "1"]), start_timeout_s=45)
    assert job.wait(TIMEOUT_S) == 0, job.errors()
    assert (
        "the scheduler has not brought the ranks together: rank 0 and rank 1 wait for it at 127.0.0.1:" in job.errors()
    )
    assert job.output() == "rank 0 has met the others\n"
    assert job.running() == []


@SLOW
def test_sigterm_ends_a_start_in_which_mindspore_waits_for_a_rank(start):
    missing_rank = MEETING_WORKER.replace(
        "ms = import_mindspore()\n",
        "import os, time\nif os.environ.get('RANK_ID') == '1':\n    time.sleep(600)\nms = import_mindspore()\n",
    )
    job = start(missing_rank, rank_0_signals=SIGNALS)
    wait_for_activity(job, 0, JOINING)
    job.launcher.send_signal(signal.SIGTERM)
    assert job.wait(TIMEOUT_S) == STOPPED
    assert job.running() == []


def test_sigterm_to_all_processes_of_a_job_saves_as_one_to_the_launcher_does(start):
    job = start(SAVING_WORKER, rank_0_signals=SIGNALS)
    for rank in range(2):
        wait_for_activity(job, rank, "step 7: update")
    for pid in job.running():
        os.kill(pid, signal.SIGTERM)
    job.launcher.send_signal(signal.SIGTERM)  # once more: to the job as well as to its step
    assert job.wait(60) == 0 and (job.dir / "saved").exists(), job.errors()
    assert job.errors() == "" and job.running() == []


def test_sigterm_ends_a_run_that_hears_no_signal_before_its_first_step_is_done(start):
    job = start(DEAF_WORKER, rank_0_signals=SIGNALS)
    wait_for_activity(job, 0, "step 7: update")
    wait_for_activity(job, 1, "step 7: update")
    job.launcher.send_signal(signal.SIGTERM)
    assert job.wait(TIMEOUT_S) == STOPPED
    assert "SIGTERM received: stopping all processes" in job.errors()
    assert job.running() == []
