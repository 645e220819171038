"""The script of docs/cluster.md under a real Slurm: a job's weights are those of an undisturbed one."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import sanity_inputs
from machine_jobs import RECIPE, TIMEOUT_S
from slow_tests import SLOW
from slurm import Slurm

pytestmark = [SLOW, pytest.mark.timeout(1800)]

REPOSITORY = sanity_inputs.REPOSITORY
SCRIPT = "examples/cluster/slurm.sh"
# Where metrics have as many lines as the file `hold` says, the run waits, so that what befalls it is in time. The score
# is that of the recipe.
VERIFIER = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def lowercase(completion, answer):
    hold, metrics = HERE / "hold", HERE / "run" / "metrics.jsonl"
    while hold.exists() and (metrics.read_text().count("\\n") if metrics.exists() else 0) >= int(hold.read_text()):
        time.sleep(0.05)
    return sum("a" <= letter <= "z" for letter in completion) / max(1, len(completion))
"""
STEPS = {"run__max_steps": 6}


class Job:
    """The script's run on two nodes with a rank each."""

    def __init__(self, slurm: Slurm, directory: Path, sanity_dir: Path, checkpoint_every: int):
        self.slurm, self.directory, self.number = slurm, directory, ""
        (directory / "held.py").write_text(VERIFIER)
        keys = {**RECIPE, **STEPS, "checkpoint__every_steps": checkpoint_every, "reward__timeout_s": 600}
        keys |= {"data__eval_file": sanity_dir / "prompts.mindrecord"}
        keys |= {"reward__verifier_function": f"{directory / 'held.py'}:lowercase"}
        overrides = sanity_inputs.overrides(sanity_dir, directory / "run", **keys)
        self.arguments = ("examples/sanity/config.yaml", *overrides)

    def submit(self, *options: str, changes: tuple[str, ...] = ()) -> None:
        options = ("--parsable", "--chdir", REPOSITORY, f"--output={self.directory / 'job.out'}", *options)
        self.number = self.slurm.call("sbatch", *options, SCRIPT, *self.arguments, "--workers", 1, *changes)

    def text(self) -> str:
        return (self.directory / "job.out").read_text()

    def hold_at(self, num_lines: int) -> None:
        (self.directory / "hold").write_text(str(num_lines))

    def wait_until_held(self) -> None:
        metrics, num_lines = self.directory / "run" / "metrics.jsonl", int((self.directory / "hold").read_text())
        self.slurm.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= num_lines)

    def finish(self) -> None:
        """Have it go on whenever it is queued again, to its end."""
        (self.directory / "hold").unlink()
        while self.slurm.wait_for(self.number, "COMPLETED", "PENDING")["JobState"] == "PENDING":
            self.slurm.go_on(self.number)
            self.slurm.wait_for(self.number, "COMPLETED", "RUNNING")

    def weights(self) -> bytes:
        return (self.directory / "run" / "final" / "model.safetensors").read_bytes()


@pytest.fixture
def start_slurm(tmp_path, sanity_dir):
    """Start a Slurm that tracks processes in one of its ways, and return a job for it."""
    started = []

    def start(tracking: str = "linuxproc", checkpoint_every: int = 1) -> Job:
        environment = {**sanity_inputs.environment(), "PYTHONPATH": str(REPOSITORY)}
        keep = (sanity_dir, REPOSITORY, Path(os.environ["MINDRLHF_TEST_INPUTS"]))
        started.append(Slurm(tmp_path, tracking, environment, keep))
        return Job(started[-1], tmp_path, sanity_dir, checkpoint_every)

    yield start
    for slurm in started:
        slurm.machines.clean_up()


def requeue(job: Job) -> None:
    job.slurm.call("scontrol", "requeue", job.number)


def preempt(job: Job) -> None:
    job.slurm.call("sbatch", "-phigh", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "true")


def let_time_pass(job: Job) -> None:
    """Leave it less time than its signal is before its end: Slurm looks once a minute."""
    hours, minutes, _ = map(int, job.slurm.job(job.number)["RunTime"].split(":"))
    job.slurm.call("scontrol", "update", f"jobid={job.number}", f"TimeLimit={60 * hours + minutes + 2}")


def lose_node(job: Job) -> None:
    job.slurm.lose_power(2)
    job.slurm.wait_for(job.number, "PENDING")
    (job.directory / "power").touch()


# Slurm's tracking of processes, options of sbatch, steps from one checkpoint to the next, lines of metrics at which the
# run is held, what befalls it there, and after which step the next attempt goes on: 0 is one that begins anew.
CASES: dict[str, tuple[str, tuple[str, ...], int, int, Callable[[Job], None], int]] = {
    "requeue before a checkpoint": ("linuxproc", (), 100, 1, requeue, 0),
    "requeue": ("linuxproc", (), 100, 3, requeue, 2),
    "requeue, the task is signalled": ("pgid", (), 100, 3, requeue, 2),
    "time is up": ("linuxproc", ("--signal=TERM@60",), 100, 3, let_time_pass, 2),
    "time is up, the task is signalled": ("pgid", ("--signal=TERM@60",), 100, 3, let_time_pass, 2),
    "preempted": ("linuxproc", (), 100, 3, preempt, 2),
    "preempted with grace": ("linuxproc", ("-pgrace",), 100, 3, preempt, 2),
    "a node dies": ("linuxproc", (), 1, 3, lose_node, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_job_goes_on_to_the_weights_of_the_undisturbed(start_slurm, one_machine, name):
    tracking, options, checkpoint_every, held_at, befall, step = CASES[name]
    job = start_slurm(tracking, checkpoint_every)
    job.hold_at(held_at)
    job.submit(*options)
    job.wait_until_held()
    befall(job)
    job.slurm.wait_for(job.number, "PENDING")
    first = job.text()
    job.finish()
    resumed = re.findall(r"resumed after step (\d+)", job.text().removeprefix(first))
    assert job.slurm.job(job.number)["Restarts"] == "1" and int((*resumed, 0)[0]) == step, job.text()
    assert job.weights() == (one_machine(2, **STEPS) / "final" / "model.safetensors").read_bytes()


def test_a_killed_launcher_or_a_mistake_ends_the_job_on_both_nodes(start_slurm, one_machine):
    job = start_slurm()
    job.hold_at(3)
    job.submit()
    job.wait_until_held()
    subprocess.run(job.slurm.on(2, "pkill", "-9", "-f", "bin/mindrlhf train"), check=True, timeout=TIMEOUT_S)
    state = job.slurm.wait_for(job.number, "FAILED")
    assert state["ExitCode"] in ("1:0", f"{128 + signal.SIGKILL}:0"), state
    assert "node 1 (node2, 10.77.0.3) has closed the connection" in job.text()
    assert "nothing starts it again" in job.text() and "to resume" in job.text(), job.text()
    # Node 0 alone compares a run with its checkpoint.
    job.submit(changes=("algorithm.num_generations=2",))
    assert job.slurm.wait_for(job.number, "FAILED")["ExitCode"] == "2:0", job.text()
    assert "the nodes cannot train together:\n  node 0: cannot resume the checkpoint: algorithm.num_g" in job.text()
    job.submit()
    job.finish()
    assert job.weights() == (one_machine(2, **STEPS) / "final" / "model.safetensors").read_bytes()


def test_an_array_of_two_on_one_node(start_slurm, one_machine):
    job = start_slurm()
    train = (".venv/bin/mindrlhf train", *job.arguments, "--nodes auto", f"run.output_dir={job.directory}/array_%a")
    options = ("--array=1-2", "-N1", "-n1", "-c1", "-wnode1", f"--output={job.directory}/array_%a.out", "--parsable")
    line = " ".join(("srun", *train)).replace("%a", "$SLURM_ARRAY_TASK_ID")
    number = job.slurm.call("sbatch", *options, "--chdir", REPOSITORY, "--wrap", line)
    for part in (1, 2):
        job.slurm.wait_for(f"{number}_{part}", "COMPLETED")
        weights = (job.directory / f"array_{part}" / "final" / "model.safetensors").read_bytes()
        assert weights == (one_machine(1, **STEPS) / "final" / "model.safetensors").read_bytes()
