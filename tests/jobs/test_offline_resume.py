"""`mindrlhf sft`, `dpo` and `reward-model`, ended and killed, resume and end like the run that nobody disturbed."""

import json
import signal

import pytest
import sanity_inputs
from fault_jobs import FaultJob, metrics
from slow_tests import RUNS_SLOW_TESTS, SLOW

from mindrlhf.training.preflight.output import FINAL_NAME

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 300
NUM_STEPS = 300
# Of a run's keys: enough steps, of some hundredths of a second, to be caught among them on a busy machine.
SECTIONS = {
    "sft": {"supervised": {"rows_per_step": 4, "micro_batch_size": 2, "sequence_lengths": [32], "epochs": 80}},
    "dpo": {"preference": {"pairs_per_step": 4, "micro_batch_size": 4, "sequence_lengths": [32], "epochs": 40}},
    "reward-model": {
        "preference": {"pairs_per_step": 4, "micro_batch_size": 4, "sequence_lengths": [32], "epochs": 40}
    },
}
SECTIONS["dpo of adapters"] = {**SECTIONS["dpo"], "lora": {"rank": 4}}


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory, rollout_python):
    """A model, and the same pairs as records to imitate and as preferences."""
    directory = tmp_path_factory.mktemp("inputs")
    sanity_inputs.make(directory)
    sanity_inputs.make_pairs(directory)
    return directory


@pytest.fixture
def start_job(inputs_dir, tmp_path):
    """Start a run: ``start_job(kind, output_dir, options...)``."""
    jobs = []

    def start(kind, output_dir, *options):
        command = kind.partition(" ")[0]
        train_file = inputs_dir / f"{'sft' if command == 'sft' else 'preference'}.mindrecord"
        config = {
            "model": {"path": str(inputs_dir / "model")},
            "data": {"train_file": str(train_file), "tokenizer_dir": str(inputs_dir / "model")},
            "run": {"output_dir": str(output_dir), "max_steps": NUM_STEPS},
            "optimizer": {"start_lr": 1e-3, "end_lr": 0.0, "lr_schedule": "linear"},
            "checkpoint": {"every_steps": 5},
            "observe": {"sinks": []},
            **SECTIONS[kind],
        }
        path = tmp_path / f"{command}.yaml"  # YAML is a superset of JSON
        path.write_text(json.dumps(config))
        directory = tmp_path / f"job{len(jobs)}"
        directory.mkdir()
        jobs.append(FaultJob(directory, output_dir, list(options), command=(command, path)))
        return jobs[-1]

    yield start
    for job in jobs:
        job.clean_up()


# tests/training/test_offline.py resumes all three in one process; nightly they go through the command as well.
@pytest.mark.parametrize("kind", ["dpo", *(pytest.param(kind, marks=SLOW) for kind in SECTIONS if kind != "dpo")])
def test_an_ended_and_killed_run_resumes_exactly(start_job, tmp_path, kind):
    undisturbed, output_dir = tmp_path / "undisturbed", tmp_path / "run"
    job = start_job(kind, undisturbed)
    assert job.wait(TIMEOUT_S) == 0, job.text()

    job = start_job(kind, output_dir)
    if RUNS_SLOW_TESTS:  # SIGTERM every day in test_replaced_data.py
        job.wait_until(lambda: job.num_steps() >= 3)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(TIMEOUT_S) == 0, job.text()
        assert "\nmindrlhf: SIGTERM: step " in job.text()
        assert not (output_dir / FINAL_NAME).exists()

        job = start_job(kind, output_dir)
        assert job.wait(TIMEOUT_S) == 2 and "continue it with --resume" in job.text()

        job = start_job(kind, output_dir, "--resume")
    first = job.num_steps()
    job.wait_until(lambda: job.num_steps() >= first + 12)
    job.kill_rank(0)
    assert job.wait(TIMEOUT_S) != 0
    assert "rank 0 was killed by SIGKILL" in job.text() and f"mindrlhf {kind.partition(' ')[0]} " in job.text()
    advice, report = job.text().rstrip().splitlines()[-2:]
    assert advice.endswith("--resume") and "mindrlhf: report: " in report, job.text()

    job = start_job(kind, output_dir, "--resume")
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert "mindrlhf: resumed after step " in job.text()
    assert job.leftovers() == [] == job.unfinished()
    assert metrics(output_dir) == metrics(undisturbed)
    assert metrics(output_dir)[-1]["step"] == NUM_STEPS
    files, expected = (
        {path.name: path.read_bytes() for path in (run / FINAL_NAME).iterdir()} for run in (output_dir, undisturbed)
    )
    assert any(name.endswith(".safetensors") for name in files)
    assert files == expected
    assert (output_dir / f"{FINAL_NAME}_adapter").is_dir() == ("adapters" in kind)


@SLOW
def test_a_failed_run_is_started_again(start_job, tmp_path):
    job = start_job("dpo", tmp_path / "run", "--max-restarts", 1)
    job.wait_until(lambda: job.num_steps() >= 7)
    job.kill_rank(0)
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert "restart 1 of 1, from the newest checkpoint" in job.text()
    assert metrics(tmp_path / "run")[-1]["step"] == NUM_STEPS
