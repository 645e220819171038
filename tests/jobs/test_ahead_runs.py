"""Runs on older samples, generated ahead or in parts: delays change nothing, nor do kills while they are generated."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import sanity_inputs
from fault_jobs import NUM_STEPS, FaultJob, assert_same_run, metrics
from slow_tests import SLOW

pytestmark = pytest.mark.timeout(1800)

TIMEOUT_S = 400  # generous: other work may load the machine
DELAY_S = 1.5  # well below the 5 s after which a server that does nothing is taken for stuck


def delay(job: FaultJob, pid: int) -> None:
    """Stop a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(DELAY_S)
    os.kill(pid, signal.SIGCONT)


def kill_while_samples_are_awaited(job: FaultJob, step: int) -> None:
    """Kill rank 0 when it is done with the update of a step and waits for the next one's samples."""
    job.wait_until(lambda: job.is_in("old_log_p", step))
    server = job.server_pid()
    os.kill(server, signal.SIGSTOP)
    job.wait_until(lambda: job.is_in("rollout_wait", step))
    killed = job.beat().pid
    job.kill_rank(0)
    os.kill(server, signal.SIGCONT)
    job.wait_until(lambda: (beat := job.beat()) is not None and beat.pid != killed)


@pytest.mark.parametrize("ahead", [1, pytest.param(2, marks=SLOW)])
def test_delays_and_kills_while_samples_are_generated_change_nothing(start_job, tmp_path, ahead):
    recipe = {"rollout__off_policy_steps": ahead, "checkpoint__every_steps": 3}
    undisturbed = start_job(tmp_path / "undisturbed", **recipe)
    assert undisturbed.wait(TIMEOUT_S) == 0, undisturbed.text()
    job = start_job(tmp_path / "run", "--max-restarts", 1, **recipe)
    job.wait_until(lambda: job.is_in("update", 2))
    delay(job, job.server_pid())
    job.wait_until(lambda: job.is_in("update", 3))
    delay(job, job.beat().pid)
    kill_while_samples_are_awaited(job, 5)
    if ahead == 1:  # with more the buffer may hold newer weights by then
        job.wait_until(lambda: job.is_in("update", 7))
        os.kill(job.server_pid(), signal.SIGKILL)
        job.wait_until(lambda: "starting it again" in job.text())
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert "resumed after step 3" in job.text() and job.text().count("was killed by SIGKILL") == 1
    assert job.leftovers() == [] == job.unfinished()
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
    staleness = [line["staleness/max"] for line in metrics(tmp_path / "run") if "staleness/max" in line]
    assert staleness == [min(step, ahead) for step in range(9)]


# Works and rests for times that nobody knows before, until it is ended.
LOAD = """
import random, sys, time
while True:
    end = time.monotonic() + random.uniform(0, 1)
    while time.monotonic() < end:
        pass
    time.sleep(random.uniform(0, float(sys.argv[1])))
"""


@contextlib.contextmanager
def load(num_processes: int, longest_rest_s: float):
    """Give the machine work of its own."""
    command = [sys.executable, "-c", LOAD, str(longest_rest_s)]
    processes = [subprocess.Popen(command) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@SLOW
def test_runs_under_different_loads_are_the_same_at_every_step(start_job, tmp_path):
    for name, num_processes, longest_rest_s in (("steady", 6, 0.1), ("changing", 3, 3.0)):
        with load(num_processes, longest_rest_s):
            job = start_job(tmp_path / name, rollout__off_policy_steps=1)
            assert job.wait(TIMEOUT_S) == 0, job.text()
    lines = [sanity_inputs.read_lines(tmp_path / name / "trajectory.jsonl") for name in ("steady", "changing")]
    assert lines[0] == lines[1] and len({line["hash"] for line in lines[0]}) == NUM_STEPS + 1


@SLOW
def test_kills_while_responses_go_on_from_earlier_steps_change_nothing(start_job, tmp_path):
    recipe = {"rollout__segment_tokens": 4, "rollout__in_flight": 2, "checkpoint__every_steps": 3}
    undisturbed = start_job(tmp_path / "undisturbed", **recipe)
    assert undisturbed.wait(TIMEOUT_S) == 0, undisturbed.text()
    job = start_job(tmp_path / "run", "--max-restarts", 1, **recipe)
    with job.frozen(lambda: job.is_in("rollout", 3)):
        os.kill(job.server_pid(), signal.SIGKILL)
    job.wait_until(lambda: "starting it again" in job.text())
    job.wait_until(lambda: job.is_in("rollout", 6))
    killed = job.beat().pid
    job.kill_rank(0)
    job.wait_until(lambda: (beat := job.beat()) is not None and beat.pid != killed)
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert "resumed after step 3" in job.text() and job.leftovers() == [] == job.unfinished()
    assert_same_run(tmp_path / "run", tmp_path / "undisturbed")
    unfinished = [line["segments/unfinished"] for line in metrics(tmp_path / "run") if "segments/unfinished" in line]
    assert max(unfinished) > 0, "responses go on in a later step"


@SLOW
def test_an_asynchronous_run_that_was_killed_is_repeated_from_its_order(start_job, tmp_path):
    recipe = {"rollout__asynchronous": "true", "rollout__off_policy_steps": 2, "rollout__segment_tokens": 4}
    job = start_job(tmp_path / "run", "--max-restarts", 1, checkpoint__every_steps=3, **recipe)
    job.wait_until(lambda: job.is_in("update", 5))
    killed = job.beat().pid
    job.kill_rank(0)
    job.wait_until(lambda: (beat := job.beat()) is not None and beat.pid != killed)
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert "resumed after step 3" in job.text() and job.leftovers() == [] == job.unfinished()
    again = start_job(tmp_path / "again", "--replay-order", tmp_path / "run", checkpoint__every_steps=3, **recipe)
    again.wait_until(lambda: again.is_in("update", 2))
    delay(again, again.server_pid())
    assert again.wait(TIMEOUT_S) == 0, again.text()
    changing = ("segments/unfinished",)  # what is counted at a moment that the clock chooses
    kept = [
        [{name: value for name, value in line.items() if name not in changing} for line in metrics(tmp_path / name)]
        for name in ("run", "again")
    ]
    assert kept[0] == kept[1]
    for name in ("samples.jsonl", "final/model.safetensors", "rollout_order.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
