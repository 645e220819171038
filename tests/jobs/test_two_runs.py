"""A run's directory is its own as long as it lives."""

import json
import os
import signal

import sanity_inputs

# It must not end before the others have been refused, however fast its steps are.
RECIPE = {"run__max_steps": 10_000, "training__epochs": 10_000, "checkpoint__every_steps": 1}


def test_a_second_run_in_the_directory_of_a_living_one_is_refused_and_changes_nothing(
    start_job, fault_inputs_dir, tmp_path
):
    output_dir = tmp_path / "run"
    job = start_job(output_dir, **RECIPE)
    job.wait_until(lambda: job.num_steps() >= 2)
    arguments = sanity_inputs.overrides(fault_inputs_dir, output_dir, **RECIPE)
    for command in (("train",), ("train", "--resume"), ("train", "--max-restarts", "2")):
        name, *options = command
        second = sanity_inputs.run(name, "examples/sanity/config.yaml", *arguments, *options, timeout_s=120)
        assert second.returncode == 2, second.stderr
        (line,) = second.stderr.strip().splitlines()
        assert f"process {job.process.pid} on " in line and "belongs to a run that is going on" in line
    elsewhere = [*arguments, f"run.output_dir={tmp_path / 'other'}", f"checkpoint.save_dir={job.save_dir}"]
    second = sanity_inputs.run("train", "examples/sanity/config.yaml", *elsewhere, timeout_s=120)
    assert second.returncode == 2 and f"{job.save_dir} belongs to a run" in second.stderr, second.stderr
    assert not (tmp_path / "other").exists()
    # The first run was not disturbed.
    before = job.num_steps()
    job.wait_until(lambda: job.num_steps() >= before + 2)
    steps = [json.loads(line)["step"] for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps)))
    # A killed one leaves no lock that holds.
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert job.leftovers() == []
    resumed = start_job(output_dir, "--resume", **RECIPE)
    resumed.wait_until(lambda: "resumed after step" in resumed.text() and resumed.is_in("rollout"))
    resumed.process.send_signal(signal.SIGTERM)
    assert resumed.wait(120) == 0, resumed.text()
    assert list(output_dir.rglob(".lock")) == []
