"""Processes of a run are killed at random moments, over and over; each run ends like one that nobody disturbed.

``MINDRLHF_RANDOM_KILLS`` says how many kills, ``MINDRLHF_RANDOM_KILLS_SEED`` which. After each run that ended like
the undisturbed one, what was hit so far is printed by stage (``pytest -s`` shows it).
"""

import collections
import contextlib
import dataclasses
import os
import random
import signal
import sys
import time

import pytest
from fault_jobs import NUM_STEPS, FaultJob, assert_same_run
from slow_tests import RUNS_SLOW_TESTS

NUM_KILLS = int(os.environ.get("MINDRLHF_RANDOM_KILLS", 2000 if RUNS_SLOW_TESTS else 5))
SEED = int(os.environ.get("MINDRLHF_RANDOM_KILLS_SEED", 0))
WORLD_SIZE = 1
TIMEOUT_S = 400
# What a command line of each kind of process holds.
KINDS = {
    "rank": "-m mindrlhf.training.main ",
    "rollout server": "-m mindrlhf.rollout.server ",
    "verifier worker": "-m mindrlhf.rewards.worker ",
    "launcher": "-m mindrlhf.cli ",
}
# How often each kind is hit. Starting a server costs most, and it begins anew with its rank and with its launcher.
WEIGHTS = {"verifier worker": 7, "rank": 6, "launcher": 4, "rollout server": 3}

pytestmark = pytest.mark.timeout(60 * NUM_KILLS + 900)


def pids_of(job: FaultJob) -> dict[str, list[int]]:
    """Return the living processes of a run by kind."""
    found = collections.defaultdict(list)
    for pid, words in job.running().items():
        for kind, part in KINDS.items():
            if part in words:
                found[kind].append(pid)
    return found


@dataclasses.dataclass
class Pace:
    """How long steps take on this machine just now, so that kills are spread over the whole of one."""

    step_s: float = 0.4
    _seen: tuple[int, int] | None = None  # pid and step
    _since_s: float = 0.0

    def see(self, pid: int, step: int) -> None:
        if self._seen == (pid, step):
            return
        now_s = time.monotonic()
        if self._seen == (pid, step - 1):
            # One step in which a server started again says nothing about the others: runs would end unhurt.
            self.step_s = min(now_s - self._since_s, 2 * self.step_s)
        self._seen, self._since_s = (pid, step), now_s


def wait_for_a_moment(job: FaultJob, rng: random.Random, pace: Pace) -> bool:
    """Wait until a random point within one of the next steps; False when the run ended before."""
    ahead, lead = rng.randrange(3), None
    deadline = time.monotonic() + TIMEOUT_S
    first = None
    while job.process.poll() is None:
        assert time.monotonic() < deadline, job.text()
        beat = job.beat()
        if beat is not None and beat.activity.startswith("step "):
            step = int(beat.activity.split(":")[0].removeprefix("step "))
            if beat.pid != lead:
                lead, first = beat.pid, step
            pace.see(beat.pid, step)
            if step >= first + ahead:
                time.sleep(rng.random() * pace.step_s)
                return job.process.poll() is None
        time.sleep(0.01)  # a step takes 40 times as long, and looking costs processor time
    return False


def kill_one(job: FaultJob, rng: random.Random) -> tuple[str, str] | None:
    """Kill a process of a random kind; return the kind and what rank 0 was doing, None when nothing was hit."""
    beat, processes = job.beat(), pids_of(job)
    kinds = [kind for kind in WEIGHTS if processes[kind]]
    if beat is None or not kinds:
        return None
    [kind] = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(processes[kind]), signal.SIGKILL)
        return kind, beat.activity.rpartition(": ")[2]
    return None


def disturb(start_job, output_dir, rng: random.Random, num_kills: int, pace: Pace) -> collections.Counter:
    """Kill processes of one run until it is through, at most ``num_kills``; return what was hit."""
    hits: collections.Counter = collections.Counter()
    options = ["--workers", WORLD_SIZE, "--max-restarts", 100]
    job = start_job(output_dir, *options)
    while wait_for_a_moment(job, rng, pace) and hits.total() < num_kills:
        if (hit := kill_one(job, rng)) is None:
            continue
        hits[hit] += 1
        if hit[0] == "launcher":
            job.process.wait()
            # A server that was killed just before cannot tidy up, and nor can those who would have done it then: what
            # may remain until the next start is its directory of temporary files. No process does.
            assert [left for left in job.leftovers() if "mindrlhf-server-" not in left] == []
            if (output_dir / "final").exists():  # it had nothing left to do
                return hits
            job = start_job(output_dir, *options, *["--resume"] * bool(job.finished()))
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert job.leftovers() == [] == job.unfinished()
    return hits


def test_runs_with_random_kills_end_like_the_undisturbed_one(start_job, undisturbed_run, tmp_path):
    rng, hits, num_runs, pace = random.Random(SEED), collections.Counter(), 0, Pace()
    undisturbed = undisturbed_run(WORLD_SIZE)
    while hits.total() < NUM_KILLS:
        output_dir = tmp_path / f"run_{num_runs}"
        hits += disturb(start_job, output_dir, rng, NUM_KILLS - hits.total(), pace)
        assert_same_run(output_dir, undisturbed)
        num_runs += 1
        print(f"{hits.total()} kills in {num_runs} equal runs of {NUM_STEPS} steps, seed {SEED}", file=sys.stderr)
        for (kind, stage), count in sorted(hits.items()):
            print(f"{count:5d}  {kind} in {stage}", file=sys.stderr)
    assert len({kind for kind, _ in hits}) == len(KINDS) or NUM_KILLS < 40, "a kind of process was never hit"
