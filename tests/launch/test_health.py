"""What counts as a hang, on processes of the test's own and a clock that the test moves."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mindrlhf.launch.health import HealthMonitor
from mindrlhf.system import heartbeat, processes
from mindrlhf.system.heartbeat import DIRECTORY_VARIABLE, heartbeat_path, read_beat

RANK = """
import sys, time
from mindrlhf.system import heartbeat
heartbeat.start()
heartbeat.enter(sys.argv[1])
while sys.argv[2] == "busy":
    pass
time.sleep(600)
"""


class Clock:
    def __init__(self, monkeypatch):
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def start(tmp_path):
    """Start a rank that says what it does: ``start("step 1: update", "busy")``."""
    started = []

    def start_rank(activity, kind="idle", rank=0):
        environment = {**os.environ, DIRECTORY_VARIABLE: str(tmp_path), "RANK_ID": str(rank)}
        argv = [sys.executable, "-c", RANK, activity, kind]
        process = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE)
        started.append(process)
        path, deadline = heartbeat_path(tmp_path, rank), time.perf_counter() + 30
        while (beat := read_beat(path)) is None or beat.pid != process.pid or beat.activity != activity:
            assert time.perf_counter() < deadline
            time.sleep(0.01)
        return process

    yield start_rank
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def watch(monitor, clock, ranks, seconds):
    """Check once a second of the moved clock; return the first finding and when it came."""
    for second in range(seconds + 1):
        if (found := monitor.find_hang(ranks)) is not None:
            return found, second
        clock.now_s += 1.0
    return None, seconds


def test_a_stopped_rank_is_found_within_ten_seconds(start, clock, tmp_path):
    ranks = {"rank 0": start("step 1: update", "busy").pid, "rank 1": start("update", "busy", rank=1).pid}
    monitor = HealthMonitor(tmp_path, 0)
    assert watch(monitor, clock, ranks, 30) == (None, 30)
    os.kill(ranks["rank 1"], signal.SIGSTOP)
    while processes.state(ranks["rank 1"]) != "T":
        time.sleep(0.01)
    (name, how), after_s = watch(monitor, clock, ranks, 30)
    assert (name, how) == ("rank 1", "has been stopped for 8 s") and after_s <= 10
    os.kill(ranks["rank 1"], signal.SIGCONT)
    assert watch(monitor, clock, ranks, 3)[0] is None


def test_time_in_which_the_launcher_did_not_run_either_is_no_hang(start, clock, tmp_path):
    """As on a machine that was suspended, or so overloaded that nobody ran; afterwards hangs are found as before."""
    ranks = {"rank 0": start("step 3: update").pid}
    monitor = HealthMonitor(tmp_path, 20.0)
    assert watch(monitor, clock, ranks, 3)[0] is None
    clock.now_s += 3600.0
    assert monitor.find_hang(ranks) is None
    found, after_s = watch(monitor, clock, ranks, 30)
    assert "has made no progress for 21 s" in found[1] and 14 <= after_s <= 18


def test_the_limit_of_the_user_holds_everywhere(start, clock, tmp_path):
    ranks = {"rank 0": start("step 3: rollout", "busy").pid}
    found, after_s = watch(HealthMonitor(tmp_path, 20.0), clock, ranks, 60)
    assert found == ("rank 0", "has made no progress for 21 s (run.hang_timeout_s is 20)") and after_s == 21


def test_a_heartbeat_of_another_process_says_nothing(start, clock, tmp_path):
    process = start("step 1: update")
    monitor = HealthMonitor(tmp_path, 1.0)
    assert monitor.listening_pid("rank 0", {"rank 0": process.pid + 1}) is None
    assert watch(monitor, clock, {"rank 0": os.getpid()}, 30)[0] is None
    assert monitor.listening_pid("rank 0", {"rank 0": process.pid}) == process.pid
    assert monitor.activities() == {"rank 0": "step 1: update"}


def test_the_signal_has_a_rank_write_the_stacks_of_all_its_threads(start):
    process = start("step 1: update")
    process.send_signal(heartbeat.DUMP_SIGNAL)
    lines = []
    while "Current thread" not in "".join(lines) or "<module>" not in lines[-1]:
        lines.append(process.stderr.readline().decode())
    assert process.poll() is None


def test_without_a_launcher_nothing_beats(tmp_path, monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    heartbeat.start()
    heartbeat.enter("anything")
    heartbeat.tick()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": 1, "num_ticks": 2, "activity": "", "more": 3}'])
def test_half_a_heartbeat_is_none(tmp_path, text):
    path = tmp_path / "heartbeat_0.json"
    path.write_text(text)
    assert read_beat(path) is None
    assert read_beat(tmp_path / "missing") is None
