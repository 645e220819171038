"""Idle or starved: on numbers recorded on a machine with two cores and six busy processes beside."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mindrlhf.system.idle import Activity, IdleWatch

LIMIT_S, IDLE_CPU_S = 8.0, 0.08
# (processor time, a thread is runnable), once a second.
# A loop of the lowest priority (SCHED_IDLE), which the others left next to nothing.
STARVED = [(0.01, True)] * 12 + [(0.02, True), (0.03, True)]
# Six threads that sleep and wake five times a second.
ASLEEP = [(0.03, False)] * 2 + [(0.03, True)] + [(0.03, False)] * 11


def first_verdict(looks, limit_s=LIMIT_S, start_s=100.0):
    """Return the number of seconds after which the watch finds the processes idle; None when it does not."""
    watch = IdleWatch()
    for second, look in enumerate(looks):
        if watch.has_idled(Activity(*look), start_s + second, limit_s, IDLE_CPU_S):
            assert watch.idle_s(start_s + second) >= limit_s
            return second
    return None


def test_a_process_that_waits_for_a_processor_is_not_idle():
    assert first_verdict(STARVED) is None
    assert first_verdict(STARVED * 20) is None


def test_a_process_that_sleeps_is_idle_on_a_busy_machine_too():
    assert first_verdict(ASLEEP) == 8
    assert first_verdict(ASLEEP, limit_s=3.0) == 3
    assert first_verdict([(0.03, second % 3 == 0) for second in range(20)]) == 8


def test_one_that_falls_asleep_after_it_was_starved_is_found_within_two_limits():
    assert 8 < first_verdict([(0.01, True)] * 14 + [(0.01, False)] * 20) <= 14 + 16


def test_processor_time_counts_and_so_does_a_wait_for_a_disk():
    working = [(0.1 * second, False) for second in range(30)]
    assert first_verdict(working) is None
    assert first_verdict(working + [(2.9, False)] * 9) == 29 + 8
    assert first_verdict([(0.01 * second, False) for second in range(30)]) == 8, "0.07 s in the whole limit is no work"
    assert first_verdict([(5.0, False), (1.0, False)] * 20) is None, "processes that end take their time with them"
    assert first_verdict([(0.0, False, True)] * 30) is None


@pytest.fixture
def start():
    started = []

    def start_process(code):
        process = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE)
        started.append(process)
        process.stdout.readline()
        return process

    yield start_process
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_the_kernel_says_of_processes(start):
    busy, asleep = start("while True: pass"), start("import time; time.sleep(600)")
    # A thread beside a main thread that waits.
    threaded = start("import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()")
    while Activity.of([busy.pid]).cpu_time_s < 0.2 or not Activity.of([threaded.pid]).is_runnable:
        time.sleep(0.01)
    while Activity.of([asleep.pid]).is_runnable:
        time.sleep(0.01)
    assert Activity.of([busy.pid, asleep.pid]).is_runnable
    assert not Activity.of([asleep.pid]).waits_for_disk
    busy.send_signal(signal.SIGSTOP)
    while Activity.of([busy.pid]).is_runnable:
        time.sleep(0.01)
    assert Activity.of([busy.pid, asleep.pid]).cpu_time_s >= 0.2
    gone = start("")
    gone.wait()
    assert Activity.of([gone.pid]) == Activity(0.0) == Activity.of([])
    assert Activity.of([os.getpid()]).is_runnable
