"""Runs on pretended machines, and the same on one."""

import shlex
import sys
from pathlib import Path

import fault_jobs
import pytest
import sanity_inputs
from machines import Machines

from mindrlhf.system.processes import read_environment

# What a command line of each kind of process holds; the scheduler's is a rank's.
KINDS = {
    "launcher": "-m mindrlhf.cli ",
    "msrun": "/msrun ",
    "rank": "-m mindrlhf.training.main ",
    "rollout server": "-m mindrlhf.rollout.server ",
    "verifier worker": "-m mindrlhf.rewards.worker ",
    "verifiers": "-m mindrlhf.rewards.node",
}
TIMEOUT_S = 400  # generous: other work may load the machine
RECIPE = {
    "run__max_steps": 2,
    "observe__groups_per_step": 16,
    "observe__sinks": "[]",
    "evaluation__every_steps": 2,
    "evaluation__max_prompts": 8,
}


@pytest.fixture
def start_machines(fault_inputs_dir, tmp_path):
    """Start machines: ``start(num_nodes, script, key=value...)``; in the script ``train OPTIONS`` is the run,
    on as many nodes unless SHAPE says otherwise.

    Its output directory is ``run`` in that of the machines, which all see, as they see the directories of ``keep``.
    """
    started = []

    def start(num_nodes: int, run: str = "train", keep: tuple[Path, ...] = (), **changes: object) -> Machines:
        recipe = {**RECIPE, "data__eval_file": fault_inputs_dir / "prompts.mindrecord", **changes}
        directory = tmp_path / f"machines_{len(started)}"
        directory.mkdir()
        words = sanity_inputs.overrides(fault_inputs_dir, directory / "run", **recipe)
        script = f"""
            cd {shlex.quote(str(sanity_inputs.REPOSITORY))}
            export PYTHONPATH=$PWD
            train() {{
                {sys.executable} -m mindrlhf.cli train examples/sanity/config.yaml {shlex.join(words)} \\
                    $SHAPE --master $MASTER_IP:8118 "$@"
            }}
            SHAPE="--nodes {num_nodes} --node-rank $NODE_RANK"
            {run}
        """
        started.append(Machines(directory, script, num_nodes, keep=(fault_inputs_dir, sanity_inputs.REPOSITORY, *keep)))
        return started[-1]

    yield start
    for machines in started:
        machines.clean_up()


def one_machine(fault_inputs_dir: Path, output_dir: Path, num_ranks: int, **changes: object) -> Path:
    """Make the same run on one machine."""
    finished = sanity_inputs.train(
        fault_inputs_dir,
        output_dir,
        "--workers",
        num_ranks,
        timeout_s=TIMEOUT_S,
        **{**RECIPE, "data__eval_file": fault_inputs_dir / "prompts.mindrecord", **changes},
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return output_dir


def assert_same(output_dir: Path, expected: Path) -> None:
    """Check that two runs have the same metrics, samples, course and model, bit for bit."""
    assert fault_jobs.metrics(output_dir) == fault_jobs.metrics(expected)
    for name in ("samples.jsonl", "trajectory.jsonl", "final/model.safetensors"):
        assert (output_dir / name).read_bytes() == (expected / name).read_bytes(), name


def assert_same_but_for_rounding(output_dir: Path, expected: Path, num_steps: int) -> None:
    """Check that two runs have the same samples, rewards, losses, gradients and weights, bit for bit.

    vLLM's kernels round by the number of sequences that they compute at once, so with other servers the log-probs that
    they report may differ in their last bits.
    """
    own, theirs = (
        [
            {name: value for name, value in line.items() if not name.startswith("rollout_")}
            for line in fault_jobs.metrics(run)
        ]
        for run in (output_dir, expected)
    )
    assert own == theirs and len(own) == num_steps + 1
    for line in fault_jobs.metrics(output_dir):
        assert line.get("rollout_diff/max_abs", 0.0) < 1e-5
    own, theirs = (
        [
            (line.get("samples"), line.get("rewards"), line["weights"])
            for line in sanity_inputs.read_lines(run / "trajectory.jsonl")
        ]
        for run in (output_dir, expected)
    )
    assert own == theirs and len(own) == num_steps + 1
    for name in ("samples.jsonl", "final/model.safetensors"):
        assert (output_dir / name).read_bytes() == (expected / name).read_bytes(), name


def num_steps(machines: Machines) -> int:
    """Return how many lines of metrics the run has."""
    metrics = machines.directory / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def find(machines: Machines, node: int, kind: str) -> int:
    """Return the pid of the first process of a kind on a machine: one of KINDS, or "scheduler"."""
    for pid, line in sorted(machines.processes(node).items()):
        if line.startswith("bash ") or ("msrun" in line) != (kind == "msrun"):
            continue
        is_scheduler = read_environment(pid).get("MS_ROLE") == "MS_SCHED"
        if KINDS["rank" if kind == "scheduler" else kind] in line and is_scheduler == (kind == "scheduler"):
            return pid
    raise AssertionError(f"machine {node} has no {kind}: {machines.processes(node)}")
