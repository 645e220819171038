"""Runs of every schedule through faults of every kind, each with the outcome that docs/runs.md promises.

What is left behind is counted after each. ``MINDRLHF_RANDOM_KILLS`` says how many random kills there are, and
``MINDRLHF_RANDOM_KILLS_SEED`` which; what they hit is printed by stage (``pytest -s`` shows it).
"""

import collections
import contextlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import sanity_inputs
import small_disks
from fault_jobs import (
    FAULTY_START,
    KINDS,
    NUM_STEPS,
    FaultJob,
    assert_same_run,
    check_no_shared_memory_was_left,
    last_state,
    metrics,
    shared_memory,
)
from slow_tests import RUNS_SLOW_TESTS, SLOW

from mindrlhf.checkpoint.manifest import verify
from mindrlhf.errors import STOPPED
from mindrlhf.system import heartbeat
from mindrlhf.system.heartbeat import Beat
from mindrlhf.system.processes import descendants, state

pytestmark = pytest.mark.timeout(1800)

TIMEOUT_S = 400  # generous: other work may load the machine


@pytest.fixture(autouse=True)
def no_shared_memory_is_left():
    segments = shared_memory()
    yield
    check_no_shared_memory_was_left(segments)


@pytest.fixture
def jumping_clock(tmp_path) -> dict[str, str]:
    """The environment of processes whose clock jumps by hours; each leaves its pid in MINDRLHF_TEST_CLOCK_DIR."""
    directory = tmp_path / "clock"
    directory.mkdir()
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "mindrlhf").symlink_to(sanity_inputs.REPOSITORY / "mindrlhf")
    return {"PYTHONPATH": f"{FAULTY_START}:{packages}", "MINDRLHF_TEST_CLOCK_DIR": str(directory)}


def kill_launcher(job: FaultJob) -> None:
    """Kill the launcher and see that everything goes with it and that what is on the disk is whole."""
    job.kill()
    assert job.leftovers() == []
    for checkpoint in job.finished():
        verify(checkpoint)


def test_one_run_through_all_faults_ends_like_the_undisturbed(start_job, undisturbed_run, jumping_clock, tmp_path):
    output_dir = tmp_path / "run"
    environment = {"environment": jumping_clock, "rollout__env": f"{{PYTHONPATH: '{jumping_clock['PYTHONPATH']}'}}"}
    with small_disks.mounted(output_dir / "checkpoints", "64m") as disk:
        job = start_job(output_dir, **environment)
        lead = disturb_in_place(job)
        pids = {int(path.name) for path in Path(jumping_clock["MINDRLHF_TEST_CLOCK_DIR"]).iterdir()}
        assert {job.process.pid, lead, job.server_pid()} <= pids, "a process has a good clock"
        fill_disk_in_checkpoint(job, disk)
        survivor = damage_two_newest(job.finished())

        slow = {**environment, "environment": {**jumping_clock, "MINDRLHF_TEST_SLOW_CHECKPOINTS_S": "0.3"}}
        job = start_job(output_dir, "--resume", "auto", "--max-restarts", 1, **slow)
        job.wait_until(lambda: "mindrlhf: resumed after step" in job.text())
        assert f"mindrlhf: resumed after step {survivor}\n" in job.text()
        for name in ("manifest.json", "model/rank_0/checkpoint_0.safetensors"):
            warnings = [line for line in job.text().splitlines() if "is skipped" in line and name in line]
            assert len(warnings) == 1, job.text()
        if RUNS_SLOW_TESTS:  # by day a rank of a DPO is killed and started again (test_offline_faults.py)
            with job.frozen(lambda: job.is_in("update", survivor + 2)):
                job.kill_rank(0)
            job.wait_until(lambda: "restart 1 of 1, from the newest" in job.text())
        # By then both damaged checkpoints have been written again.
        with job.frozen(lambda: job.is_in("rollout", survivor + 4) and bool(job.unfinished())):
            kill_launcher(job)
            assert job.unfinished(), "there was nothing half-written to be killed in"

        job = start_job(output_dir, "--resume", **environment)
        assert job.wait(TIMEOUT_S) == 0, job.text()
        assert job.leftovers() == [] == job.unfinished()
        assert_same_run(output_dir, undisturbed_run(1))
        same = sanity_inputs.run("diff", undisturbed_run(1), output_dir, timeout_s=TIMEOUT_S)
        verdict, difference = same.stdout.splitlines()
        assert verdict == f"the same up to step {NUM_STEPS}"
        assert difference.startswith("  config rollout.env.PYTHONPATH: not set and ")
    times = [value for line in metric_lines(output_dir) for name, value in line.items() if name.startswith("timing/")]
    assert times and all(0 <= value < 3600 for value in times)


def disturb_in_place(job: FaultJob) -> int:
    """Faults that a run survives without a restart of any rank; return the pid of rank 0."""
    job.wait_until(lambda: job.is_in("rollout"))
    lead = job.beat().pid
    # A slow rank: it stands still for less than the limit.
    with job.frozen(lambda: job.is_in("update", 1)):
        time.sleep(3)
    job.wait_until(lambda: job.is_in("rollout", 2))
    server = job.server_pid()
    os.kill(server, signal.SIGKILL)
    job.wait_until(lambda: "starting it again" in job.text())
    assert f"the rollout server (process {server}) was killed by signal 9" in job.text()
    if RUNS_SLOW_TESTS:  # by day the servers of unit tests are stopped
        with job.frozen(lambda: job.is_in("reshard_to_infer", 3)):
            assert job.text().count("starting it again") == 1
            os.kill(job.server_pid(), signal.SIGSTOP)
        job.wait_until(lambda: job.text().count("starting it again") == 2)
    job.wait_until(lambda: job.is_in("update", 4))
    assert job.beat().pid == lead, "a rank was started again"
    assert "has been stopped for" not in job.text()
    return lead


def fill_disk_in_checkpoint(job: FaultJob, disk: small_disks.SmallDisk | None) -> None:
    """Let the disk be full in the middle of a checkpoint: the run ends with one line and no checkpoint is harmed."""
    if disk is None:
        # Where nothing can be mounted, a limit on the size of files stands for the full disk.
        limit = next(job.finished()[-1].rglob("model.safetensors")).stat().st_size - 1
        resource.prlimit(job.beat().pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    else:
        per_checkpoint = 1 + sum(1 for _ in job.finished()[-1].rglob("*"))
        # Room for as many as are kept and for the beginning of one more.
        limit = 1 + 3 * per_checkpoint + 4
        job.wait_until(lambda: len(job.finished()) == 3 and disk.allow_files(limit))
    assert job.wait(TIMEOUT_S) == 2, job.text()
    (line,) = [line for line in job.text().splitlines() if "error:" in line]
    assert " cannot be written (" in line and "make room, or set checkpoint.save_dir to another disk" in line
    assert "Traceback" not in job.text()
    assert job.leftovers() == [] == job.unfinished()
    assert len(job.finished()) == 3
    for checkpoint in job.finished():
        verify(checkpoint)
    assert disk is None or disk.allow_files(0)


def damage_two_newest(checkpoints: list[Path]) -> int:
    """Cut off the newest's manifest, turn a bit of the next one's weights; return the step of the last good one."""
    manifest = checkpoints[-1] / "manifest.json"
    os.truncate(manifest, manifest.stat().st_size // 2)
    weights = checkpoints[-2] / "model" / "rank_0" / "checkpoint_0.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    return int(checkpoints[-3].name.removeprefix("step_"))


def metric_lines(output_dir: Path) -> list[dict]:
    return sanity_inputs.read_lines(output_dir / "metrics.jsonl")


VERIFIER = """
import time
from pathlib import Path

def reward(completion, answer):
    for path in Path({directory!r}).glob("*"):
        path.unlink()
        if path.name == "hang":
            time.sleep(1e6)
        return float("nan")
    return len(completion) / 100
"""


@SLOW
def test_a_verifier_that_hangs_and_a_launcher_that_is_killed_while_weights_move(start_job, tmp_path):
    """The limit of 9 s is longer than that of a run in which nothing happens, which must not be taken for hung."""
    (tmp_path / "faults").mkdir()
    verifier = tmp_path / "verifier.py"
    verifier.write_text(VERIFIER.format(directory=str(tmp_path / "faults")))
    job = start_job(
        tmp_path / "run",
        reward__verifier_function=f"{verifier}:reward",
        reward__timeout_s=9,
        reward__failure_value=-0.5,
        evaluation__every_steps=0,
    )
    job.wait_until(lambda: job.is_in("update"))
    step = job.num_steps()
    for name in ("hang", "nan"):
        (tmp_path / "faults" / name).touch()
    job.wait_until(lambda: job.num_steps() >= step + 3)
    with job.frozen(lambda: job.is_in("reshard_to_infer")):
        kill_launcher(job)
    assert sum(line.get("reward/failures", 0) for line in metric_lines(job.output_dir)) == 2
    failures = sanity_inputs.read_lines(job.output_dir / "reward_failures.jsonl")
    assert sorted(failure["reason"] for failure in failures) == ["returned nan, which is no finite number", "timeout"]
    samples = sanity_inputs.read_lines(job.output_dir / "samples.jsonl")
    assert sorted(sample["reward"] for sample in samples)[:3] == [-0.5, -0.5, pytest.approx(0, abs=0.2)]
    assert len(samples) == 16 * len({sample["step"] for sample in samples}), "a sample was lost"


ENDLESS = {"run__max_steps": 100_000, "training__epochs": 100_000}


@SLOW
@pytest.mark.parametrize("victim", ["rank", "rollout server"])
def test_kill_9_ends_a_run_that_nothing_restarts(start_job, tmp_path, victim):
    job = start_job(tmp_path / "run", "--workers", 2, **ENDLESS, rollout__restarts=0)
    job.wait_until(lambda: job.num_steps() >= 2)
    if victim == "rank":
        said, log = "rank 1 was killed by SIGKILL", "worker_1.log"
        job.kill_rank(1)
    else:
        server = job.server_pid()
        said, log = f"the rollout server (process {server}) was killed by signal 9 (SIGKILL)", "rollout_0.log"
        os.kill(server, signal.SIGKILL)
    assert job.wait(TIMEOUT_S) != 0
    assert said in job.text() and str(job.output_dir / "logs" / log) in job.text() and "Traceback" not in job.text()
    assert job.leftovers() == []


def kill_at(job: FaultJob, is_reached: Callable[[], bool], victim: int) -> str:
    """Kill a rank at a moment of rank 0, wait for the restart, and return the last words of rank 0."""
    with job.frozen(is_reached):
        lead = job.beat()
        job.kill_rank(victim)
        job.wait_until(lambda: (beat := job.beat()) is not None and beat.pid != lead.pid)
    logs = max((job.output_dir / "logs").glob("attempt_*"), key=lambda path: int(path.name.split("_")[1]))
    return json.loads((logs / "heartbeat_0.json").read_text())["activity"]


@SLOW
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_whose_last_rank_is_killed_everywhere_ends_like_the_undisturbed(
    start_job, undisturbed_run, tmp_path, world_size
):
    output_dir, victim = tmp_path / "run", world_size - 1
    job = start_job(output_dir, "--workers", world_size, "--max-restarts", 12)
    for stage, first_step in (("rollout", 2), ("update", 3), ("reshard_to_infer", 4), ("evaluation", 4)):
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
    kill_at(job, lambda: bool(job.unfinished()), victim)
    # A process that does not die, but stops; then the launcher itself, which nobody restarts.
    with job.frozen(lambda: job.is_in("rollout")):
        stopped = job.beat()
        job.kill_rank(victim, signal.SIGSTOP)
        if victim == 0:
            job.wait_until(lambda: "rank 0 has been stopped for" in job.text())
    job.wait_until(lambda: f"rank {victim} has been stopped for" in job.text())
    job.wait_until(lambda: (beat := job.beat()) is not None and beat.pid != stopped.pid)
    job.kill()
    assert job.leftovers() == []
    assert job.text().count(f"rank {victim} was killed by SIGKILL") >= 5
    resumed = start_job(output_dir, "--workers", world_size, "--resume", "auto")
    assert resumed.wait(TIMEOUT_S) == 0, resumed.text()
    assert resumed.leftovers() == [] == resumed.unfinished()
    assert_same_run(output_dir, undisturbed_run(world_size))


IN_BUCKETS = {"rollout__weight_buffer_gib": 2 * 512 * 64 * 4 / 2**30}  # twice the sanity model's largest tensor


@SLOW
def test_a_run_goes_on_with_other_numbers_of_ranks(start_job, undisturbed_run, tmp_path):
    output_dir = tmp_path / "run"
    job = start_job(output_dir, "--workers", 2, environment={"PYTHONPATH": str(FAULTY_START)})
    job.wait_until(lambda: job.is_in("update", 3))
    # Not killed: it leaves by sys.exit, as a library might in its name.
    job.kill_rank(1, signal.SIGRTMIN)
    assert job.wait(TIMEOUT_S) == 7, job.text()
    assert "rank 1 ended with exit code 7 at " in job.text()
    assert job.leftovers() == []
    # The weights now reach the server in buckets, too.
    job = start_job(output_dir, "--resume", **IN_BUCKETS)
    # The evaluation before the first step has a line of its own.
    job.wait_until(lambda: job.num_steps() >= 5)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(TIMEOUT_S) == STOPPED, job.text()
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
    for line, expected in zip(changed[1:], plain[1:]):
        assert line["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
        assert (line["reward/mean"], line["lr"]) == (expected["reward/mean"], expected["lr"])


# By what its launcher has said, and by what rank 0 does; it may have come farther when the signal does.
STAGES = ("", "starting", "loading MindSpore", heartbeat.JOINING, heartbeat.JOINED, "reading the data")
STAGES += ("waiting for vLLM", "compiling the training graphs", "loading the weights into vLLM", "step 1: evaluation")
MOMENTS = [pytest.param("mindrlhf: checking", 0), pytest.param("mindrlhf: starting 2 ranks", 0, marks=SLOW)]
MOMENTS += [pytest.param("", number, marks=SLOW) for number in range(1, len(STAGES))]


@pytest.mark.parametrize(("said", "stage"), MOMENTS)
def test_sigterm_before_training_ends_a_run_as_not_done(start_job, tmp_path, said, stage):
    job = start_job(tmp_path / "run", "--workers", 2, "--resume", "auto")
    job.wait_until(lambda: said in job.text() and ((job.beat() or Beat(0, 0, "")).activity not in STAGES[:stage]))
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(TIMEOUT_S) == STOPPED, job.text()
    assert "Traceback" not in job.text() and not (job.output_dir / "final").exists()
    assert job.leftovers() == []


@SLOW
def test_runs_of_one_seed_are_the_same_and_another_seed_is_named(start_job, undisturbed_run, tmp_path):
    expected, other, strange = undisturbed_run(1), tmp_path / "other", tmp_path / "strange"
    job = start_job(other)
    assert job.wait(TIMEOUT_S) == 0, job.text()
    same = sanity_inputs.run("diff", expected, other, timeout_s=TIMEOUT_S)
    assert same.stdout == f"the same up to step {NUM_STEPS}\n"
    # Said without the command: everything written is the same, byte for byte.
    assert_same_run(other, expected)
    lines = sanity_inputs.read_lines(expected / "trajectory.jsonl")
    assert [line["step"] for line in lines] == list(range(NUM_STEPS + 1))
    assert len({line["weights"] for line in lines}) == NUM_STEPS + 1, "every step changes the weights"
    trained = metric_lines(expected)
    assert [line["loss"] for line in trained if line["step"]] == [line["loss"] for line in lines[1:]]
    assert {line["guard/skipped_updates"] for line in trained if line["step"]} == {0}

    job = start_job(strange, run__seed=2)
    assert job.wait(TIMEOUT_S) == 0, job.text()
    different = sanity_inputs.run("diff", expected, strange, timeout_s=TIMEOUT_S, code=1)
    first, *details = different.stdout.splitlines()
    # Both begin with the same weights; the seed shuffles the prompts.
    assert first == "step 1: prompts differ first"
    assert any(line.startswith("  sample 1 of step 1, ") for line in details)
    assert any("checkpoints/step_00000007/model, " in line and "differ by up to" in line for line in details)
    assert "  config run.seed: 0 and 2" in details


@SLOW
def test_a_second_run_in_the_directory_of_a_living_one_is_refused_and_changes_nothing(start_job, sanity_dir, tmp_path):
    output_dir = tmp_path / "run"
    job = start_job(output_dir, **ENDLESS)
    job.wait_until(lambda: job.num_steps() >= 2)
    arguments = sanity_inputs.overrides(sanity_dir, output_dir, **ENDLESS)
    wanted = {"timeout_s": TIMEOUT_S, "code": 2}
    for options in ((), ("--resume",), ("--max-restarts", "2")):
        second = sanity_inputs.run("train", "examples/sanity/config.yaml", *arguments, *options, **wanted)
        (line,) = second.stderr.strip().splitlines()
        assert f"process {job.process.pid} on " in line and "belongs to a run that is going on" in line
    elsewhere = [*arguments, f"run.output_dir={tmp_path / 'other'}", f"checkpoint.save_dir={job.save_dir}"]
    second = sanity_inputs.run("train", "examples/sanity/config.yaml", *elsewhere, **wanted)
    assert f"{job.save_dir} belongs to a run" in second.stderr, second.stderr
    assert not (tmp_path / "other").exists()
    # The first run was not disturbed.
    before = job.num_steps()
    job.wait_until(lambda: job.num_steps() >= before + 2)
    steps = [json.loads(line)["step"] for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps)))
    # A killed one leaves no lock that holds.
    kill_launcher(job)
    resumed = start_job(output_dir, "--resume", **ENDLESS)
    resumed.wait_until(lambda: "resumed after step" in resumed.text() and resumed.is_in("rollout"))
    for pid in (resumed.process.pid, *(status.pid for status in descendants(resumed.process.pid))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)  # to all processes of a job, as some schedulers send it
    assert resumed.wait(TIMEOUT_S) == STOPPED, resumed.text()
    assert list(output_dir.rglob(".lock")) == []


# Every way of sampling, through what disturbs its ranks, its server and its launcher: the same run, bit for bit. The
# server's products are rounded by their number of rows, as they are on many processors, so that a sample which is
# computed beside others, or from another part of its prefix, shows in the fingerprint.
SCHEDULES = {
    "in step": {},
    "ahead": {"rollout__off_policy_steps": 1},
    "two ahead": {"rollout__off_policy_steps": 2},
    "segments": {"rollout__segment_tokens": 4, "rollout__in_flight": 2},
    "asynchronous": {"rollout__asynchronous": "true", "rollout__off_policy_steps": 2, "rollout__segment_tokens": 4},
}
SHORT = 4  # steps of such a run
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
        recipe = {"run__max_steps": SHORT, "run__seed": seed, "rollout__restarts": 20, "evaluation__every_steps": 0}
        recipe |= {"rollout__max_response_length": 48, "rollout__env": f"{{PYTHONPATH: '{paths}'}}"}
        environment = {"MINDRLHF_TEST_ROUND_BY_ROWS": "1"}
        recipe |= SCHEDULES[schedule] | changes
        output_dir = directory / f"{schedule} {seed} {name}".replace(" ", "_")
        return start_job(output_dir, *RESTARTS, *options, environment=environment, **recipe)

    return start_run


@pytest.fixture(scope="module")
def expected_of(start):
    """Return the fingerprint of an undisturbed run, and the options of one that is to be equal."""
    made: dict[tuple[str, int], tuple[dict, tuple]] = {}

    def find(schedule: str, seed: int) -> tuple[dict, tuple]:
        if (schedule, seed) not in made:
            job = start("undisturbed", schedule, seed)
            made[schedule, seed] = ended(job), replay_of(job, schedule)
        return made[schedule, seed]

    return find


def replay_of(job: FaultJob, schedule: str) -> tuple:
    """The clock decides one thing of an asynchronous run, which others repeat."""
    return ("--replay-order", job.output_dir) if schedule == "asynchronous" else ()


def ended(job: FaultJob) -> dict:
    """Wait for the end of a run, and return its fingerprint."""
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert job.leftovers() == [] == job.unfinished()
    lines = sanity_inputs.read_lines(job.output_dir / "trajectory.jsonl")
    assert len({line["hash"] for line in lines}) == SHORT + 1 == len(metrics(job.output_dir))
    return lines[-1]


def slow_server_down(job: FaultJob, source: random.Random) -> None:
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
        job.process.wait(TIMEOUT_S)
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


def kill_at_each_step(job: FaultJob, source: random.Random, find_pid: Callable[[FaultJob], int]) -> None:
    num_kills = 0
    for step in range(1, SHORT + 1):
        if wait_for_step(job, step, source):
            with contextlib.suppress(ValueError, ProcessLookupError):  # none is up at the moment
                os.kill(find_pid(job), signal.SIGKILL)
                num_kills += 1
    assert num_kills >= SHORT // 2


def kill_launcher_at_each_step(job: FaultJob, source: random.Random, start_run) -> FaultJob:
    """Kill the launcher in each step, and go on from what is on the disk; return the last of the runs."""
    for step in range(1, SHORT + 1):
        if wait_for_step(job, step, source):
            job.kill()
            assert [left for left in job.leftovers() if "mindrlhf-server-" not in left] == []
            job = start_run(*["--resume"] * bool(job.finished()))
    return job


def stop_server(job: FaultJob) -> None:
    job.wait_until(lambda: step_of(job) >= 3)
    os.kill(job.server_pid(), signal.SIGSTOP)
    job.wait_until(lambda: "has not been heard of for" in job.text())


DISTURBANCES = ("nothing", "server slowed", "server killed", "server stopped", "rank killed", "launcher killed")


@SLOW
@pytest.mark.parametrize("how", DISTURBANCES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(2))
def test_a_run_is_the_same_whatever_disturbs_it(start, expected_of, seed, schedule, how):
    expected, replay = expected_of(schedule, seed)
    start_run, source = partial(start, how, schedule, seed, *replay), random.Random(seed)
    job = start_run()
    if how == "server slowed":
        slow_server_down(job, source)
    elif how == "server killed":
        kill_at_each_step(job, source, FaultJob.server_pid)
    elif how == "server stopped":
        stop_server(job)
    elif how == "rank killed":
        kill_at_each_step(job, source, lambda job: job.beat().pid)
    elif how == "launcher killed":
        job = kill_launcher_at_each_step(job, source, start_run)
    assert ended(job) == expected


@SLOW
def test_an_asynchronous_run_that_was_killed_is_repeated_from_its_order(start):
    job = start("killed", "asynchronous", 0)
    kill_at_each_step(job, random.Random(0), lambda job: job.beat().pid)
    expected = ended(job)
    again = start("again", "asynchronous", 0, *replay_of(job, "asynchronous"))
    assert ended(again) == expected
    for name in ("samples.jsonl", "final/model.safetensors", "rollout_order.jsonl"):
        assert (again.output_dir / name).read_bytes() == (job.output_dir / name).read_bytes(), name


NUM_KILLS = int(os.environ.get("MINDRLHF_RANDOM_KILLS", 200))
SEED = int(os.environ.get("MINDRLHF_RANDOM_KILLS_SEED", 0))
# How often each kind is hit. Starting a server costs most, and it begins anew with its rank and with its launcher.
WEIGHTS = {"verifier worker": 7, "rank": 6, "launcher": 4, "rollout server": 3}


def pids_of(job: FaultJob) -> dict[str, list[int]]:
    """Return the living processes of a run by kind."""
    pids = collections.defaultdict(list)
    for pid, words in job.running().items():
        for kind in WEIGHTS:
            if KINDS[kind] in words:
                pids[kind].append(pid)
    return pids


def wait_for_a_moment(job: FaultJob, rng: random.Random) -> bool:
    """Wait until a random point within one of the next steps; False when the run ended before."""
    ahead, lead, first = rng.randrange(3), None, 0
    while job.process.poll() is None:
        if step := step_of(job):
            if (pid := job.beat().pid) != lead:
                lead, first = pid, step
            if step >= first + ahead:
                time.sleep(rng.random() * 0.4)  # about the time of a step
                return job.process.poll() is None
        time.sleep(0.01)  # looking costs processor time
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


def disturb(start_job, output_dir, rng: random.Random, num_kills: int) -> collections.Counter:
    """Kill processes of one run until it is through, at most ``num_kills``; return what was hit."""
    hits: collections.Counter = collections.Counter()
    options = ["--max-restarts", 100]
    job = start_job(output_dir, *options)
    while wait_for_a_moment(job, rng) and hits.total() < num_kills:
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


@SLOW
@pytest.mark.timeout(60 * NUM_KILLS + 900)
def test_runs_with_random_kills_end_like_the_undisturbed_one(start_job, undisturbed_run, tmp_path):
    rng, hits, num_runs = random.Random(SEED), collections.Counter(), 0
    while hits.total() < NUM_KILLS:
        output_dir = tmp_path / f"run_{num_runs}"
        hits += disturb(start_job, output_dir, rng, NUM_KILLS - hits.total())
        assert_same_run(output_dir, undisturbed_run(1))
        num_runs += 1
        print(f"{hits.total()} kills in {num_runs} equal runs of {NUM_STEPS} steps, seed {SEED}", file=sys.stderr)
        for (kind, stage), count in sorted(hits.items()):
            print(f"{count:5d}  {kind} in {stage}", file=sys.stderr)
    assert len({kind for kind, _ in hits}) == len(WEIGHTS) or NUM_KILLS < 40, "a kind of process was never hit"
