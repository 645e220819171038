"""Faults of every kind, each with the outcome that docs/runs.md promises; what is left behind is counted after each.

Kills of rank 0 and of the launcher while it samples, stopped ranks, SIGTERM and other numbers of ranks are
test_resume_exact.py's.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import sanity_inputs
import small_disks
from fault_jobs import (
    FAULTY_START,
    NUM_STEPS,
    FaultJob,
    FaultProcess,
    assert_same_run,
    check_no_shared_memory_was_left,
    shared_memory,
)
from slow_tests import RUNS_SLOW_TESTS, SLOW

from mindrlhf.checkpoint.manifest import verify
from mindrlhf.data.mindrecord import PromptFile

pytestmark = pytest.mark.timeout(1800)

TIMEOUT_S = 400  # generous: other work may load the machine
# Stages with their first step. Each start of a server costs as much as a short run, so that every day's test has one of
# them, while test_random_kills.py kills at any moment; nightly all.
SERVER_KILLS = (("reshard_to_infer", 3), ("update", 2))[: 2 if RUNS_SLOW_TESTS else 1][::-1]


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


def kill_server(job: FaultJob, num_earlier: int) -> None:
    """Kill the rollout server while rank 0 stands still, and see that this was the reason of a restart."""
    assert job.text().count("starting it again") == num_earlier
    os.kill(job.server_pid(), signal.SIGKILL)


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
        job = start_job(output_dir, "--resume", "auto", **slow)
        job.wait_until(lambda: "mindrlhf: resumed after step" in job.text())
        assert f"mindrlhf: resumed after step {survivor}\n" in job.text()
        for name in ("manifest.json", "model/model.safetensors"):
            warnings = [line for line in job.text().splitlines() if "is skipped" in line and name in line]
            assert len(warnings) == 1, job.text()
        # By then both damaged checkpoints have been written again.
        if RUNS_SLOW_TESTS:
            with job.frozen(lambda: job.is_in("update", survivor + 4)):
                kill_launcher(job)
            job = start_job(output_dir, "--resume", **slow)
        with job.frozen(lambda: job.is_in("rollout", survivor + 4) and bool(job.unfinished())):
            kill_launcher(job)
            assert job.unfinished(), "there was nothing half-written to be killed in"

        job = start_job(output_dir, "--resume", **environment)
        assert job.wait(TIMEOUT_S) == 0, job.text()
        assert job.leftovers() == [] == job.unfinished()
        assert_same_run(output_dir, undisturbed_run(1))
        same = sanity_inputs.run("diff", undisturbed_run(1), output_dir, timeout_s=120)
        verdict, difference = same.stdout.splitlines()
        assert (same.returncode, verdict) == (0, f"the same up to step {NUM_STEPS}"), same.stdout + same.stderr
        assert difference.startswith("  config rollout.env.PYTHONPATH: not set and ")
    times = [value for line in metric_lines(output_dir) for name, value in line.items() if name.startswith("timing/")]
    assert times and all(0 <= value < 3600 for value in times)


CALLS_OF_A_STEP = ("generate", "sleep", "wake", "update_weights")


def disturb_in_place(job: FaultJob) -> int:
    """Faults that a run survives without a restart of any rank; return the pid of rank 0."""
    job.wait_until(lambda: job.is_in("rollout"))
    lead = job.beat().pid
    # A slow rank: it stands still for less than the limit.
    with job.frozen(lambda: job.is_in("update", 1)):
        time.sleep(3)
    job.wait_until(lambda: job.is_in("rollout", 2))
    server = job.server_pid()
    os.kill(server, signal.SIGSTOP)
    job.wait_until(lambda: "starting it again" in job.text())
    # In 'generate', unless that ended before the signal came.
    calls = (f"the rollout server (process {server}) has been stuck for 5 s in '{call}'" for call in CALLS_OF_A_STEP)
    assert any(said in job.text() for said in calls)
    for num_earlier, (stage, first_step) in enumerate(SERVER_KILLS, start=1):
        with job.frozen(lambda stage=stage, step=first_step: job.is_in(stage, step)):
            kill_server(job, num_earlier)
        job.wait_until(lambda count=num_earlier + 1: job.text().count("starting it again") == count)
    job.wait_until(lambda: job.is_in("update", 4))
    if RUNS_SLOW_TESTS:
        with job.frozen(lambda: bool(job.unfinished())):
            kill_server(job, 3)
        job.wait_until(lambda: job.text().count("starting it again") == 4)
        job.wait_until(lambda: job.is_in("update"))
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
    weights = checkpoints[-2] / "model" / "model.safetensors"
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


@SLOW
def test_another_rank_than_rank_0_killed_in_every_stage(start_job, undisturbed_run, tmp_path):
    output_dir = tmp_path / "run"
    job = start_job(output_dir, "--workers", 2, "--max-restarts", 4)
    stages = [lambda stage=stage: job.is_in(stage, 2) for stage in ("rollout", "update", "reshard_to_infer")]
    for num_earlier, is_reached in enumerate([*stages, lambda: job.is_in("rollout", 3) and bool(job.unfinished())]):
        with job.frozen(is_reached):
            job.kill_rank(1)
        job.wait_until(lambda count=num_earlier + 1: f"restart {count} of 4, from the newest" in job.text())
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert job.text().count("rank 1 was killed by SIGKILL") == 4
    assert job.leftovers() == []
    assert_same_run(output_dir, undisturbed_run(2))


NUM_RECORDS = 4_000
NAME = "prompts.mindrecord"


@pytest.fixture(scope="module")
def many_prompts(tmp_path_factory) -> Path:
    """Raw data that takes a moment to encode and to write."""
    path = tmp_path_factory.mktemp("raw") / "many.jsonl"
    lines = (json.dumps({"prompt": f"{number}: " + "#$%&" * 40, "answer": "none"}) for number in range(NUM_RECORDS))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def start_command(tmp_path_factory):
    """Start a command in the background: ``start_command("data", "build", ...)``."""
    commands = []

    def start(*arguments: object) -> FaultProcess:
        commands.append(FaultProcess(tmp_path_factory.mktemp("command"), *arguments))
        return commands[-1]

    yield start
    for command in commands:
        command.clean_up()


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk: ``small_disk("4m")``; skips the test where this user may not."""
    with contextlib.ExitStack() as stack:

        def mount(size: str) -> small_disks.SmallDisk:
            disk = stack.enter_context(small_disks.mounted(tmp_path / "disk", size))
            return disk or pytest.skip("mounting a tmpfs takes root")

        yield mount


def build_arguments(raw: Path, output: Path, tokenizer_dir: Path) -> list[object]:
    return [
        *("data", "build", "--input", raw, "--output", output, "--tokenizer", tokenizer_dir),
        *("--handler", "map_keys", "--map", "question=prompt,answer=answer", "--template", "plain"),
        *("--max-prompt-length", 512, "--processes", 2),
    ]


def test_kill_9_of_a_data_build_leaves_nothing_under_the_final_name(
    start_command, many_prompts, fault_inputs_dir, tmp_path
):
    directory = tmp_path / "out"
    directory.mkdir()
    arguments = build_arguments(many_prompts, directory / NAME, fault_inputs_dir / "model")
    build = start_command(*arguments)
    build.wait_until(lambda: any(directory.glob(".mindrecord-*/*")))
    build.kill()
    assert build.leftovers() == []
    assert not list(directory.glob(f"{NAME}*"))
    build = start_command(*arguments)
    assert build.wait(TIMEOUT_S) == 0, build.text()
    assert sorted(path.name for path in directory.iterdir()) == [NAME, f"{NAME}.db"]
    assert len(PromptFile.open(directory / NAME)) == NUM_RECORDS


@pytest.mark.parametrize(
    ("size", "num_files", "words"),
    [
        ("1m", 0, "No free disk"),
        ("10m", 0, "No free disk"),
        ("64m", 5, "Failed to write mindrecord meta files"),  # when the index is written
    ],
)
def test_a_full_disk_ends_a_data_build_and_spares_the_old_file(
    start_command, many_prompts, fault_inputs_dir, small_disk, size, num_files, words
):
    disk = small_disk(size)
    old = {disk.path / name: b"of an earlier build" for name in (NAME, f"{NAME}.db")}
    for path, content in old.items():
        path.write_bytes(content)
    assert disk.allow_files(num_files)
    build = start_command(*build_arguments(many_prompts, disk.path / NAME, fault_inputs_dir / "model"))
    assert build.wait(TIMEOUT_S) == 2, build.text()
    (line,) = [line for line in build.text().splitlines() if line.startswith("mindrlhf data: error: ")]
    assert words in line
    assert "Traceback" not in build.text()
    assert build.leftovers() == []
    assert {path: path.read_bytes() for path in disk.path.iterdir()} == old


def shard_arguments(model: Path, out: Path) -> list[object]:
    return ["weights", "shard", model, "--parallel", "dp=4,opt=4", "--output", out]


def verified(out: Path, model: Path) -> None:
    finished = sanity_inputs.run("weights", "verify", out, "--against", model, timeout_s=TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr


def test_kill_9_of_sharding_is_made_good_by_the_same_command(start_command, fault_inputs_dir, tmp_path):
    out, model = tmp_path / "out", fault_inputs_dir / "model"
    for _ in range(10):
        shard = start_command(*shard_arguments(model, out))
        shard.wait_until(lambda: any(out.glob("rank_*/*")))
        shard.kill()
        if not (out / "sharded.json").exists():
            break
        shutil.rmtree(out)  # it was done before the kill
    else:
        raise AssertionError("the command was never caught at work")
    assert shard.leftovers() == []
    shard = start_command(*shard_arguments(model, out))
    assert shard.wait(TIMEOUT_S) == 0, shard.text()
    assert not list(out.rglob("*.partial"))
    verified(out, model)


def test_a_full_disk_ends_sharding_and_the_same_command_goes_on(start_command, fault_inputs_dir, small_disk):
    disk = small_disk("64m")
    out, model = disk.path / "out", fault_inputs_dir / "model"
    # Three for the directories and the progress, three for each rank that is done: the last of four ranks fails.
    assert disk.allow_files(12)
    shard = start_command(*shard_arguments(model, out))
    assert shard.wait(TIMEOUT_S) == 2, shard.text()
    (line,) = [line for line in shard.text().splitlines() if "error:" in line]
    assert "No space left on device" in line and "run the same command again" in line
    assert "Traceback" not in shard.text()
    assert shard.leftovers() == []
    assert not list(out.rglob("*.partial")) and not (out / "sharded.json").exists()
    assert disk.allow_files(0)
    shard = start_command(*shard_arguments(model, out))
    assert shard.wait(TIMEOUT_S) == 0, shard.text()
    assert "3 ranks are there already" in shard.text()
    verified(out, model)
