"""Every way of sampling, through what disturbs its server and its launcher: the same run, bit for bit.

The server's products are rounded by their number of rows, as they are on many processors, so that a sample which is
computed beside others, or from another part of its prefix, shows in the fingerprint.
"""

import contextlib
import os
import random
import signal
import threading
import time
from functools import partial

import pytest
import sanity_inputs
from fault_jobs import FAULTY_START, FaultJob
from slow_tests import SLOW

from mindrlhf.system.processes import state

pytestmark = pytest.mark.timeout(1800)

TIMEOUT_S = 500  # generous: other work may load the machine
NUM_STEPS = 4
SCHEDULES = {
    "in step": {},
    "ahead": {"rollout__off_policy_steps": 1},
    "segments": {"rollout__segment_tokens": 4, "rollout__in_flight": 2},
    "asynchronous": {"rollout__asynchronous": "true", "rollout__off_policy_steps": 2, "rollout__segment_tokens": 4},
}
# More restarts than anything below takes: a server that finds its weights replaced ends the run, which is then resumed.
RESTARTS = ("--max-restarts", 20)


@pytest.fixture(scope="module")
def start(start_job, tmp_path_factory):
    """Start a run of a schedule: ``start(name, schedule, seed, options...)``."""
    directory = tmp_path_factory.mktemp("schedules")
    (directory / "mindrlhf").symlink_to(sanity_inputs.REPOSITORY / "mindrlhf")
    paths = f"{FAULTY_START}:{sanity_inputs.REPOSITORY / 'tests' / 'helpers'}:{directory}"

    def start_run(name: str, schedule: str, seed: int, *options: object, **changes: object) -> FaultJob:
        # Prefixes over two blocks of the cache, of prompts that differ.
        recipe = {"run__max_steps": NUM_STEPS, "run__seed": seed, "rollout__restarts": 20, "evaluation__every_steps": 0}
        recipe |= {"rollout__max_response_length": 48, "rollout__env": f"{{PYTHONPATH: '{paths}'}}"}
        environment = {"MINDRLHF_TEST_ROUND_BY_ROWS": "1"}
        recipe |= SCHEDULES[schedule] | changes
        output_dir = directory / f"{schedule} {seed} {name}".replace(" ", "_")
        return start_job(output_dir, *RESTARTS, *options, environment=environment, **recipe)

    return start_run


@pytest.fixture(scope="module")
def undisturbed(start):
    """Return the fingerprint of an undisturbed run, and the options of one that is to be equal."""
    found: dict[tuple[str, int], tuple[dict, tuple]] = {}

    def find(schedule: str, seed: int) -> tuple[dict, tuple]:
        if (schedule, seed) not in found:
            job = start("undisturbed", schedule, seed)
            # The clock decides one thing of an asynchronous run, which the others repeat.
            replay = ("--replay-order", job.output_dir) if schedule == "asynchronous" else ()
            found[schedule, seed] = ended(job), replay
        return found[schedule, seed]

    return find


def fingerprint(job: FaultJob) -> dict:
    lines = sanity_inputs.read_lines(job.output_dir / "trajectory.jsonl")
    assert len({line["hash"] for line in lines}) == NUM_STEPS + 1
    return lines[-1]


def ended(job: FaultJob) -> dict:
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert job.leftovers() == [] == job.unfinished()
    return fingerprint(job)


@contextlib.contextmanager
def slowed(job: FaultJob, source: random.Random):
    """Stop the server for random times, each shorter than the time after which it counts as stuck."""
    is_over = threading.Event()

    def slow() -> None:
        while not is_over.wait(source.uniform(0, 0.3)):
            with contextlib.suppress(ValueError, ProcessLookupError):  # it is being started, or has gone
                pid = job.server_pid()
                os.kill(pid, signal.SIGSTOP)
                time.sleep(source.choice((0.02, 0.1, 0.5, 2.0)))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def step_of(job: FaultJob) -> int:
    """Return the step that the living rank 0 is in, from 1; 0 where there is none."""
    beat = job.beat()
    words = beat.activity.split(":")[0] if beat and state(beat.pid) not in ("", "Z", "X") else ""
    return int(words.removeprefix("step ")) if words.startswith("step ") else 0


def wait_for_step(job: FaultJob, step: int, source: random.Random) -> bool:
    """Wait for a moment of a step; return whether the run came so far."""
    while job.process.poll() is None and step_of(job) < step:
        time.sleep(0.01)
    time.sleep(source.uniform(0, 0.3))
    return job.process.poll() is None


def kill_server_at_each_step(job: FaultJob, source: random.Random) -> int:
    num_kills = 0
    for step in range(1, NUM_STEPS + 1):
        if wait_for_step(job, step, source):
            with contextlib.suppress(ValueError, ProcessLookupError):  # none is up at the moment
                os.kill(job.server_pid(), signal.SIGKILL)
                num_kills += 1
    return num_kills


def kill_launcher_at_each_step(start_run, source: random.Random) -> FaultJob:
    """Kill the launcher in each step, and go on from what is on the disk; return the last of the runs."""
    job = start_run()
    for step in range(1, NUM_STEPS + 1):
        if wait_for_step(job, step, source):
            job.kill()
            assert [left for left in job.leftovers() if "mindrlhf-server-" not in left] == []
            job = start_run(*["--resume"] * bool(job.finished()))
    return job


def disturbed(how: str, start_run, source: random.Random) -> FaultJob:
    """Return a run that was disturbed, which may go on."""
    if how == "launcher killed":
        return kill_launcher_at_each_step(start_run, source)
    job = start_run()
    if how == "server slowed":
        with slowed(job, source):
            job.process.wait(TIMEOUT_S)
    elif how == "server killed":
        assert kill_server_at_each_step(job, source) >= NUM_STEPS // 2
    return job


@SLOW
@pytest.mark.parametrize("how", ["nothing", "server slowed", "server killed", "launcher killed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_the_same_whatever_becomes_of_its_server_and_its_launcher(start, undisturbed, seed, schedule, how):
    expected, replay = undisturbed(schedule, seed)
    start_run = partial(start, how, schedule, seed, *replay)
    assert ended(disturbed(how, start_run, random.Random(seed))) == expected


@pytest.mark.parametrize("schedule", [pytest.param(name, marks=() if name == "ahead" else SLOW) for name in SCHEDULES])
def test_a_stopped_server_is_replaced_before_the_launcher_ends_the_run(start, undisturbed, schedule):
    """The limit of the server is longer than the one by which a launcher would take a run without servers for hung."""
    expected, replay = undisturbed(schedule, 0)
    job = start("stopped", schedule, 0, *replay, rollout__stall_timeout_s=10)
    job.wait_until(lambda: step_of(job) >= 3)
    os.kill(job.server_pid(), signal.SIGSTOP)
    job.wait_until(lambda: "has been stuck for 10 s" in job.text())
    assert ended(job) == expected
    assert "waits: no process of the run has done anything" not in job.text()
