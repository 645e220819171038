"""A run that is killed again and again ends as one that was never killed, bit for bit; also on other ranks."""

import json
import os
import signal
from collections.abc import Callable

import pytest
from fault_jobs import FAULTY_START, NUM_STEPS, FaultJob, assert_same_run, last_state, metrics
from slow_tests import RUNS_SLOW_TESTS, SLOW

pytestmark = pytest.mark.timeout(1800)

IN_BUCKETS = {"rollout__weight_buffer_gib": 2 * 512 * 64 * 4 / 2**30}  # twice the sanity model's largest tensor
TIMEOUT_S = 400  # generous: other work may load the machine


def kill_at(job: FaultJob, is_reached: Callable[[], bool], victim: int) -> str:
    """Kill a rank at a moment of rank 0, wait for the restart, and return the last words of rank 0."""
    with job.frozen(is_reached):
        lead = job.beat()
        job.kill_rank(victim)
        job.wait_until(lambda: (beat := job.beat()) is not None and beat.pid != lead.pid)
    logs = max((job.output_dir / "logs").glob("attempt_*"), key=lambda path: int(path.name.split("_")[1]))
    return json.loads((logs / "heartbeat_0.json").read_text())["activity"]


# There are seven starts: nightly. test_fault_matrix.py and test_random_kills.py kill a run every day.
@SLOW
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_killed_everywhere_ends_like_one_that_was_never_killed(start_job, undisturbed_run, tmp_path, world_size):
    output_dir = tmp_path / "run"
    job = start_job(output_dir, "--workers", world_size, "--max-restarts", 12)
    other = world_size - 1
    plan = (("rollout", 2, 0), ("update", 3, other), ("reshard_to_infer", 4, 0), ("evaluation", 4, other))
    for stage, first_step, victim in plan:
        words = kill_at(job, lambda stage=stage, step=first_step: job.is_in(stage, step), victim)
        assert words.endswith(stage), words
    # The server alone: the ranks live on.
    job.wait_until(lambda: job.is_in("rollout", 5))
    lead = job.beat()
    os.kill(job.server_pid(), signal.SIGKILL)
    job.wait_until(lambda: "starting it again" in job.text())
    job.wait_until(lambda: job.is_in("update", 5))
    assert job.beat().pid == lead.pid
    # In the middle of a checkpoint; what is left of it goes with the restart.
    kill_at(job, lambda: bool(job.unfinished()), 0)
    # A process that does not die, but stops; then the launcher itself, which nobody restarts.
    with job.frozen(lambda: job.is_in("rollout")):
        stopped = job.beat()
        job.kill_rank(other, signal.SIGSTOP)
        if other == 0:
            job.wait_until(lambda: "rank 0 has been stopped for" in job.text())
    job.wait_until(lambda: f"rank {other} has been stopped for" in job.text())
    job.wait_until(lambda: (beat := job.beat()) is not None and beat.pid != stopped.pid)
    job.kill()
    assert job.leftovers() == []
    assert job.text().count("was killed by SIGKILL") >= 5
    resumed = start_job(output_dir, "--workers", world_size, "--resume", "auto")
    assert resumed.wait(TIMEOUT_S) == 0, resumed.text()
    assert resumed.leftovers() == [] == resumed.unfinished()

    assert_same_run(output_dir, undisturbed_run(world_size))


def test_a_run_goes_on_with_other_numbers_of_ranks(start_job, undisturbed_run, tmp_path):
    output_dir = tmp_path / "run"
    job = start_job(output_dir, "--workers", 2, environment={"PYTHONPATH": str(FAULTY_START)})
    job.wait_until(lambda: job.is_in("update", 3))
    # Not killed: it leaves by sys.exit, as a library might in its name.
    job.kill_rank(1, signal.SIGRTMIN)
    assert job.wait(60) == 7, job.text()
    assert "rank 1 ended with exit code 7 at " in job.text()
    assert job.leftovers() == []
    # The weights now reach the server in buckets, too.
    job = start_job(output_dir, "--resume", **IN_BUCKETS)
    if RUNS_SLOW_TESTS:  # every day a run goes on after SIGTERM in test_two_runs.py, on other ranks here
        # The evaluation before the first step has a line of its own.
        job.wait_until(lambda: job.num_steps() >= 5)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0, job.text()
        assert "\nmindrlhf: SIGTERM: step " in job.text()
        assert job.leftovers() == []
        job = start_job(output_dir, "--workers", 4, "--resume")
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert job.leftovers() == []
    undisturbed = undisturbed_run(1)
    assert (output_dir / "samples.jsonl").read_text() == (undisturbed / "samples.jsonl").read_text()
    assert last_state(output_dir)["prompt_stream"] == last_state(undisturbed)["prompt_stream"]
    changed, plain = metrics(output_dir), metrics(undisturbed)
    assert [line["step"] for line in changed] == list(range(NUM_STEPS + 1))
    for one, other in zip(changed[1:], plain[1:]):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        assert (one["reward/mean"], one["lr"]) == (other["reward/mean"], other["lr"])
