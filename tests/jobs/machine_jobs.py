"""Runs on pretended machines, and the same on one."""

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import fault_jobs
import pytest
import sanity_inputs
import xxhash
from fault_jobs import KINDS
from machines import Machines

from mindrlhf.system.processes import read_environment

TIMEOUT_S = 400  # generous: other work may load the machine
RECIPE = {
    "run__max_steps": 2,
    "observe__groups_per_step": 16,
    "observe__sinks": "[]",
    "evaluation__every_steps": 2,
    "evaluation__max_prompts": 8,
}
# Of the run of two ranks, each with a server, on one machine or two, which is made once a day: on one it is recorded
# and traced, which must not change it.
SHARED = {"rollout__num_replicas": 2}
PROFILER = {"profiler__steps": "[2]", "profiler__tools": "mindspore,vllm"}
# The machine lives on after the run, so that what the run has left is seen.
SCRIPT = """
cd {repository}
export PYTHONPATH=$PWD
train() {{ {python} -m mindrlhf.cli {command} $SHAPE --master $MASTER_IP:8118 "$@"; }}
SHAPE="--nodes {num_nodes} --node-rank $NODE_RANK"
{run}
code=$?
echo THE END
until [ -e {directory}/go ]; do sleep 0.1; done
exit $code
"""


@pytest.fixture
def start_machines(sanity_dir, tmp_path):
    """Start machines: ``start(num_nodes, script, key=value...)``; in the script ``train OPTIONS`` is the run,
    on as many nodes unless SHAPE says otherwise; ``command`` is another than that of the sanity recipe.

    Its output directory is ``run`` in that of the machines, which all see, as they see the directories of ``keep``.
    """
    started = []

    def start(
        num_nodes: int,
        run: str = "train",
        keep: tuple[Path, ...] = (),
        command: Sequence[object] = (),
        **changes: object,
    ) -> Machines:
        directory = tmp_path / f"machines_{len(started)}"
        directory.mkdir()
        recipe = {**RECIPE, "data__eval_file": sanity_dir / "prompts.mindrecord", **changes}
        sanity = ("train", "examples/sanity/config.yaml")
        sanity += (*sanity_inputs.overrides(sanity_dir, directory / "run", **recipe),)
        words = (*command, f"run.output_dir={directory / 'run'}") if command else sanity
        script = SCRIPT.format(
            repository=shlex.quote(str(sanity_inputs.REPOSITORY)),
            python=sys.executable,
            command=shlex.join(map(str, words)),
            num_nodes=num_nodes,
            run=run,
            directory=directory,
        )
        started.append(Machines(directory, script, num_nodes, keep=(sanity_dir, sanity_inputs.REPOSITORY, *keep)))
        return started[-1]

    yield start
    for machines in started:
        machines.clean_up()


def finish(machines: Machines, lost: Sequence[int] = ()) -> list[int | None]:
    """Wait until the run has ended on all machines but the lost, and nothing of it is left; return the exit codes."""
    nodes = [node for node in range(machines.num_nodes) if node not in lost]
    machines.wait_for(lambda: all("THE END" in machines.text(node) for node in nodes), TIMEOUT_S)
    parts = [part for kind, part in KINDS.items() if kind != "launcher"]

    def is_left(line: str) -> bool:
        return not line.startswith("bash ") and any(part in line for part in parts)

    machines.wait_for(lambda: not any(is_left(line) for node in nodes for line in machines.processes(node).values()))
    (machines.directory / "go").touch()
    return machines.wait(TIMEOUT_S)


@pytest.fixture(scope="session")
def one_machine(sanity_dir) -> Callable[..., Path]:
    """Return the output directory of the same run on one machine: ``one_machine(num_ranks, key=value...)``.

    Beside it lies what it has printed.
    """

    def find(num_ranks: int, **changes: object) -> Path:
        recipe = {**RECIPE, "data__eval_file": sanity_dir / "prompts.mindrecord", **changes}
        recipe.pop("checkpoint__every_steps", None)  # which changes nothing
        key = xxhash.xxh3_64_hexdigest(repr((num_ranks, sorted(recipe.items()))).encode())

        def run(directory: Path) -> None:
            words = (sanity_dir, directory / "run", "--workers", num_ranks)
            finished = sanity_inputs.train(*words, timeout_s=TIMEOUT_S, **recipe)
            (directory / "stdout").write_text(finished.stdout)

        return sanity_inputs.made_once(f"one_machine_{key}", run) / "run"

    return find


def assert_same(output_dir: Path, expected: Path) -> None:
    """Check that two runs have the same metrics, samples, course and model, bit for bit."""
    assert fault_jobs.metrics(output_dir) == fault_jobs.metrics(expected)
    for name in ("samples.jsonl", "trajectory.jsonl", "final/model.safetensors"):
        assert (output_dir / name).read_bytes() == (expected / name).read_bytes(), name


def assert_same_but_for_rounding(output_dir: Path, expected: Path) -> None:
    """Check that two runs have the same samples, rewards, losses, gradients and weights, bit for bit.

    vLLM's kernels round by the number of sequences that they compute at once, so with other servers the log-probs that
    they report may differ in their last bits.
    """

    def rounded(run: Path) -> list:
        lines = sanity_inputs.read_lines(run / "trajectory.jsonl")
        course = [(line.get("samples"), line.get("rewards"), line["weights"]) for line in lines]
        return [course] + [
            {name: value for name, value in line.items() if not name.startswith("rollout_")}
            for line in fault_jobs.metrics(run)
        ]

    assert rounded(output_dir) == rounded(expected)
    for line in fault_jobs.metrics(output_dir):
        assert line.get("rollout_diff/max_abs", 0.0) < 1e-5
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
