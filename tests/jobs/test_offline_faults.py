"""`mindrlhf sft`, `dpo` and `reward-model` killed and resumed, and runs whose data was replaced or moved meanwhile."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import sanity_inputs
from fault_jobs import FaultJob, metrics
from slow_tests import RUNS_SLOW_TESTS, SLOW

from mindrlhf.errors import STOPPED
from mindrlhf.training.preflight.output import FINAL_NAME

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 400  # generous: other work may load the machine
NUM_STEPS = 120
SUPERVISED = {"rows_per_step": 4, "micro_batch_size": 2, "sequence_lengths": [32]}
PREFERENCE = {"pairs_per_step": 4, "micro_batch_size": 4, "sequence_lengths": [32]}


def sections(kind: str, epochs: int) -> dict:
    """The sections of a run's config that say what it does, "dpo of adapters" included."""
    lora = {"lora": {"rank": 4}} if kind.endswith("of adapters") else {}
    return {"training": {**(SUPERVISED if kind == "sft" else PREFERENCE), "epochs": epochs}, **lora}


@pytest.fixture
def start_command(tmp_path):
    """Start a command on a config: ``start_command(name, config, output_dir, arguments...)``."""
    jobs = []

    def start(name: str, config: dict | str, output_dir: Path, *arguments: object) -> FaultJob:
        path = config
        if isinstance(config, dict):
            path = tmp_path / f"{name}.yaml"  # YAML is a superset of JSON
            path.write_text(json.dumps(config))
        directory = tmp_path / f"job{len(jobs)}"
        directory.mkdir()
        jobs.append(FaultJob(directory, output_dir, list(arguments), command=(name, path)))
        return jobs[-1]

    yield start
    for job in jobs:
        job.clean_up()


@pytest.fixture
def start_offline(pairs_dir, start_command):
    """Start a run: ``start_offline(kind, output_dir, options...)``."""

    def start(kind: str, output_dir: Path, *options: object) -> FaultJob:
        command = kind.partition(" ")[0]
        config = {
            "model": {"path": str(pairs_dir / "model")},
            "data": {
                "train_file": str(pairs_dir / f"{'sft' if command == 'sft' else 'preference'}.mindrecord"),
                "tokenizer_dir": str(pairs_dir / "model"),
            },
            "run": {"output_dir": str(output_dir), "max_steps": NUM_STEPS},
            "optimizer": {"start_lr": 1e-3, "end_lr": 0.0, "lr_schedule": "linear"},
            "checkpoint": {"every_steps": 5},
            "observe": {"sinks": []},
            **sections(kind, epochs=80),
        }
        return start_command(command, config, output_dir, *options)

    return start


# tests/training/test_offline.py resumes all three in one process; nightly the command does, after SIGTERM as well.
KINDS = ["dpo", *(pytest.param(kind, marks=SLOW) for kind in ("sft", "reward-model", "dpo of adapters"))]


@pytest.mark.parametrize("kind", KINDS)
def test_an_ended_and_killed_run_resumes_exactly(start_offline, tmp_path, kind):
    undisturbed, output_dir = tmp_path / "undisturbed", tmp_path / "run"
    if RUNS_SLOW_TESTS:  # by day tests/training/offline/test_offline.py alone compares, in one process
        job = start_offline(kind, undisturbed)
        assert job.wait(TIMEOUT_S) == 0, job.text()

    restart = ("--max-restarts", 1)
    job = start_offline(kind, output_dir, *(restart if kind == "dpo" else ()))
    if kind != "dpo":
        job.wait_until(lambda: job.num_steps() >= 3)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(TIMEOUT_S) == STOPPED, job.text()
        assert "\nmindrlhf: SIGTERM: step " in job.text()
        assert not (output_dir / FINAL_NAME).exists()

        job = start_offline(kind, output_dir)
        assert job.wait(TIMEOUT_S) == 2 and "continue it with --resume" in job.text()

        job = start_offline(kind, output_dir, "--resume", *restart)
    first = job.num_steps()
    with job.frozen(lambda: job.num_steps() >= first + 12):
        killed = job.beat().pid
        job.kill_rank(0)
    with job.frozen(lambda: (beat := job.beat()) and beat.pid != killed and job.num_steps() >= first + 20):
        job.kill_rank(0)
    assert job.wait(TIMEOUT_S) != 0
    assert "restart 1 of 1, from the newest checkpoint" in job.text()
    assert "rank 0 was killed by SIGKILL" in job.text() and f"mindrlhf {kind.partition(' ')[0]} " in job.text()
    advice, report = job.text().rstrip().splitlines()[-2:]
    assert advice.endswith("--resume") and "mindrlhf: report: " in report, job.text()

    job = start_offline(kind, output_dir, "--resume")
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert "mindrlhf: resumed after step " in job.text()
    assert job.leftovers() == [] == job.unfinished()
    assert [line["step"] for line in metrics(output_dir)] == list(range(1, NUM_STEPS + 1))
    files = {path.name: path.read_bytes() for path in (output_dir / FINAL_NAME).iterdir()}
    assert any(name.endswith(".safetensors") for name in files)
    if RUNS_SLOW_TESTS:
        assert metrics(output_dir) == metrics(undisturbed)
        assert files == {path.name: path.read_bytes() for path in (undisturbed / FINAL_NAME).iterdir()}
    assert (output_dir / f"{FINAL_NAME}_adapter").is_dir() == ("adapters" in kind)


ENDLESS = 100_000
TASKS = {"train": "prompts", "sft": "sft", "dpo": "preference", "reward-model": "preference"}
FIELDS = {"prompts": "answer=answer", "sft": "response=good", "preference": "response=good,rejected=bad"}


def build(inputs: Path, path: Path, task: str, num_records: int) -> None:
    """Build a data file of so many records; from 0 on, so that more of them are other data under the same name."""
    records = [{"prompt": f"say {i}", "answer": str(i), "good": f"{i}", "bad": f"no {i}"} for i in range(num_records)]
    raw = path.with_suffix(".jsonl")
    raw.write_text("".join(json.dumps(record) + "\n" for record in records))
    limit = () if task == "prompts" else ("--max-length", 32)
    sanity_inputs.run(
        *("data", "build", "--task", task, "--input", raw, "--output", path, "--tokenizer", inputs / "model"),
        *("--handler", "map_keys", "--map", f"question=prompt,{FIELDS[task]}", "--template", "plain"),
        *("--max-prompt-length", 16, *limit, "--processes", 1),
        timeout_s=TIMEOUT_S,
    )


@SLOW
@pytest.mark.parametrize("command", TASKS)
def test_replaced_data_is_refused_by_name_and_moved_data_is_not(sanity_dir, start_command, tmp_path, command):
    here, elsewhere, output_dir = tmp_path / "here", tmp_path / "elsewhere", tmp_path / "run"
    here.mkdir()
    for name in ("train", "eval"):
        build(sanity_dir, here / f"{name}.mindrecord", TASKS[command], 40)
    shutil.copytree(sanity_dir / "model", here / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))

    def start(directory: Path, *options: str) -> FaultJob:
        words = [f"data.{name}_file={directory / name}.mindrecord" for name in ("train", "eval")]
        words += [f"data.tokenizer_dir={directory / 'tokenizer'}", f"run.max_steps={ENDLESS}"]
        words += ["checkpoint.every_steps=1", *options]
        if command == "train":
            recipe = sanity_inputs.overrides(sanity_dir, output_dir, training__epochs=ENDLESS)
            return start_command(command, "examples/sanity/config.yaml", output_dir, *recipe, *words)
        model = {"path": str(sanity_dir / "model")}
        config = {"model": model, "observe": {"sinks": []}, **sections(command, epochs=ENDLESS)}
        return start_command(command, config, output_dir, f"run.output_dir={output_dir}", *words)

    def run_some_steps(job: FaultJob) -> None:
        first = job.num_steps()
        job.wait_until(lambda: job.num_steps() >= first + 2)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(TIMEOUT_S) == STOPPED, job.text()

    run_some_steps(start(here))
    shutil.copytree(here, elsewhere)
    run_some_steps(start(elsewhere, "--resume"))
    for name in ("eval", "train"):
        path = elsewhere / f"{name}.mindrecord"
        build(sanity_dir, path, TASKS[command], 41)
        job = start(elsewhere, "--resume")
        assert job.wait(TIMEOUT_S) == 2, job.text()
        (line,) = [line for line in job.text().splitlines() if "error:" in line]
        assert "cannot resume the checkpoint: " in line
        assert f"data.{name}_file {path} has 41 records, not 40" in line
        assert "Traceback" not in job.text()
