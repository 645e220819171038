"""Runs that are resumed after their data was replaced, or moved."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import sanity_inputs
from fault_jobs import FaultJob
from slow_tests import RUNS_SLOW_TESTS, SLOW

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 400  # generous: other work may load the machine
NUM_STEPS = 100_000  # never reached
TASKS = {"train": "prompts", "sft": "sft", "dpo": "preference", "reward-model": "preference"}
SECTIONS = {
    "sft": {"supervised": {"rows_per_step": 4, "micro_batch_size": 2, "sequence_lengths": [32], "epochs": NUM_STEPS}},
    "dpo": {"preference": {"pairs_per_step": 4, "micro_batch_size": 4, "sequence_lengths": [32], "epochs": NUM_STEPS}},
    "reward-model": {
        "preference": {"pairs_per_step": 4, "micro_batch_size": 4, "sequence_lengths": [32], "epochs": NUM_STEPS}
    },
}


def build(inputs: Path, path: Path, task: str, num_records: int) -> None:
    """Build a data file of so many records; from 0 on, so that more of them are other data under the same name."""
    records = [{"prompt": f"say {i}", "answer": str(i), "good": f"{i}", "bad": f"no {i}"} for i in range(num_records)]
    raw = path.with_suffix(".jsonl")
    raw.write_text("".join(json.dumps(record) + "\n" for record in records))
    fields = {"prompts": "answer=answer", "sft": "response=good", "preference": "response=good,rejected=bad"}[task]
    limit = () if task == "prompts" else ("--max-length", 32)
    finished = sanity_inputs.run(
        *("data", "build", "--task", task, "--input", raw, "--output", path, "--tokenizer", inputs / "model"),
        *("--handler", "map_keys", "--map", f"question=prompt,{fields}", "--template", "plain"),
        *("--max-prompt-length", 16, *limit, "--processes", 1),
        timeout_s=TIMEOUT_S,
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize(
    "command", ["sft", *(pytest.param(name, marks=SLOW) for name in ("train", "dpo", "reward-model"))]
)
def test_replaced_data_is_refused_by_name_and_moved_data_is_not(fault_inputs_dir, tmp_path, command):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    for name in ("train", "eval"):
        build(fault_inputs_dir, here / f"{name}.mindrecord", TASKS[command], 40)
    shutil.copytree(fault_inputs_dir / "model", here / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    jobs = []

    def start(directory: Path, *options: str) -> FaultJob:
        values = {
            "data.train_file": directory / "train.mindrecord",
            "data.eval_file": directory / "eval.mindrecord",
            "data.tokenizer_dir": directory / "tokenizer",
            "run.max_steps": NUM_STEPS,
            "checkpoint.every_steps": 1,
        }
        if command == "train":
            arguments = sanity_inputs.overrides(fault_inputs_dir, tmp_path / "run", training__epochs=NUM_STEPS)
            arguments += [f"{name}={value}" for name, value in values.items()]
            path = "examples/sanity/config.yaml"
        else:
            arguments = [f"run.output_dir={tmp_path / 'run'}", *(f"{name}={value}" for name, value in values.items())]
            model = {"path": str(fault_inputs_dir / "model")}
            path = tmp_path / "config.yaml"  # YAML is a superset of JSON
            path.write_text(json.dumps({"model": model, "observe": {"sinks": []}, **SECTIONS[command]}))
        job_dir = tmp_path / f"job{len(jobs)}"
        job_dir.mkdir()
        jobs.append(FaultJob(job_dir, tmp_path / "run", [*arguments, *options], command=(command, path)))
        return jobs[-1]

    def run_some_steps(job: FaultJob) -> None:
        first = job.num_steps()
        job.wait_until(lambda: job.num_steps() >= first + 2)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(TIMEOUT_S) == 0, job.text()

    try:
        run_some_steps(start(here))
        shutil.copytree(here, elsewhere)
        run_some_steps(start(elsewhere, "--resume"))
        for name in ("eval", "train") if RUNS_SLOW_TESTS else ("train",):
            path = elsewhere / f"{name}.mindrecord"
            build(fault_inputs_dir, path, TASKS[command], 41)
            job = start(elsewhere, "--resume")
            assert job.wait(TIMEOUT_S) == 2, job.text()
            (line,) = [line for line in job.text().splitlines() if "error:" in line]
            assert "cannot resume the checkpoint: " in line
            assert f"data.{name}_file {path} has 41 records, not 40" in line
            assert "Traceback" not in job.text()
    finally:
        for job in jobs:
            job.clean_up()
