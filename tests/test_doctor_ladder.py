"""The ladder of `doctor --device`: what a rung finds wrong, where it stops, and what its report says."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mindrlhf.cli import main
from mindrlhf.doctor import ladder, rungs, toy
from mindrlhf.doctor.ladder import choose_rungs, climb
from mindrlhf.doctor.rungs import RUNGS, Ground, RungFailed
from mindrlhf.errors import UserError

ALL = ["environment", "graph", "collectives", "server", "sleep", "hand-over", "train", "same-numbers", "speed"]


@pytest.fixture
def ground(tmp_path):
    return Ground(str(tmp_path), "cpu", 2, sys.executable)


@pytest.mark.parametrize(
    "text, chosen",
    [
        ("", ALL),
        ("1,4-6", ["environment", "server", "sleep", "hand-over"]),
        ("train , graph", ["graph", "train"]),
        ("9", ["speed"]),
    ],
)
def test_rungs_are_chosen_by_number_or_name_and_keep_their_order(text, chosen):
    assert choose_rungs(text) == chosen


@pytest.mark.parametrize("text", ["0", "10", "2-12", "6-4", "trains", "-1", "1--2"])
def test_a_rung_that_is_not_there_is_named(text):
    with pytest.raises(UserError, match=r"no rung .* 1 to 9: environment, graph"):
        choose_rungs(text)


# In the place of a rung's process.
SAYS = {
    "graph": 'print(\'mindrlhf-rung:\' + \'{"found": {"largest error": "1e-7"}}\')',
    "collectives": 'print(\'mindrlhf-rung:\' + \'{"found": {"skipped": "one device has none"}}\')',
    "server": 'print(\'mindrlhf-rung:\' + \'{"cause": "a <b> is wrong", "fix": "send the log"}\')',
    "sleep": "raise SystemExit('never reached')",
}


def climb_with(monkeypatch, ground, says, names=ALL):
    run = ladder.subprocess.run

    def process(command, **options):
        return run([sys.executable, "-c", says[command[3]]], **options)

    monkeypatch.setattr(ladder.subprocess, "run", process)
    shown = []
    return climb(ground, names, shown.append), "\n".join(shown)


def test_the_first_rung_that_breaks_ends_the_climb_and_stands_in_the_report(monkeypatch, ground):
    climbed, shown = climb_with(monkeypatch, ground, SAYS, ["graph", "collectives", "server", "sleep"])
    assert [(one.number, one.name, one.status) for one in climbed] == [
        (2, "graph", "ok"),
        (3, "collectives", "skipped"),
        (4, "server", "failed"),
    ]
    assert "cause: a <b> is wrong" in shown and "fix: send the log" in shown and "largest error: 1e-7" in shown
    written = json.loads(Path(ground.directory, "doctor.json").read_text(encoding="utf-8"))
    assert [one["status"] for one in written["rungs"]] == ["ok", "skipped", "failed"]
    assert written["rungs"][-1]["cause"] == "a <b> is wrong"


@pytest.mark.parametrize(
    "says, cause",
    [
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import time; print('begun', flush=True); time.sleep(60)", "no end within 2 s"),
    ],
)
def test_a_rung_that_dies_or_hangs_is_a_failure_with_its_log(monkeypatch, ground, says, cause):
    monkeypatch.setattr(ladder, "RUNG_TIMEOUT_S", 2.0 if "2 s" in cause else 60.0)
    (climbed,), _ = climb_with(monkeypatch, ground, {"graph": says}, ["graph"])
    assert climbed.status == "failed" and cause in climbed.cause and "2_graph.log" in climbed.fix
    assert Path(ground.directory, "2_graph.log").exists()


def test_every_rung_is_explained_by_its_first_line():
    assert list(RUNGS) == ALL
    assert all(rung.__doc__.splitlines()[0].endswith(".") for rung in RUNGS.values())


def write_metrics(directory: Path, *lines: dict) -> None:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("diff, is_sound", [(1e-6, True), (0.01, False), (float("nan"), False)])
def test_servers_that_differ_from_ranks_break_the_training_rung(monkeypatch, ground, diff, is_sound):
    monkeypatch.setattr(rungs, "_run", lambda *given: None)
    log = "mindrlhf: asleep: GiB free on each NPU: 60.10 of 64.00, 59.50 of 64.00\n"
    step = {"rollout_diff/mean_abs": diff, "grad_norm": 2.0}
    write_metrics(Path(ground.directory, "train"), {"rollout_diff/mean_abs": 0.0, "grad_norm": 1.5}, step)
    logs = Path(ground.directory, "train", "logs")
    logs.mkdir()
    (logs / "rollout_0.log").write_text(log)
    if not is_sound:
        with pytest.raises(RungFailed, match="differ by"):
            rungs.train(ground)
        return
    found = rungs.train(ground)
    assert found["GiB free at hand-overs, rollout_0"] == ["asleep 59.50"]  # the fullest of both NPUs
    assert found["grad_norm"] == ["1.500", "2.000"]


@pytest.mark.parametrize("loss, is_sound", [(6.509, True), (6.5091, False), (float("nan"), False)])
def test_losses_that_are_not_those_of_one_cpu_break_the_rung(monkeypatch, ground, loss, is_sound):
    monkeypatch.setattr(rungs, "_run", lambda *given: None)
    write_metrics(Path(ground.directory, "sft_cpu_2"), {"loss": loss})
    write_metrics(Path(ground.directory, "sft_cpu_1"), {"loss": 6.509})
    if is_sound:
        assert rungs.same_numbers(ground)["largest gap"] == "0.0e+00"
    else:
        with pytest.raises(RungFailed, match="losses are"):
            rungs.same_numbers(ground)


def test_a_sleeping_server_that_keeps_more_each_time_breaks_the_rung(monkeypatch, ground):
    class Server:
        generator = type("Generator", (), {"sleep": lambda self: None, "wake": lambda self: None})()
        free = [60.0, 59.9, 59.8, 59.7]

        def __init__(self, *given):
            """It holds nothing."""

        def __enter__(self):
            return self

        def __exit__(self, *error):
            """Nothing to end."""

        def publish(self, version):
            """Nothing moves."""

        def memory(self):
            return [(state, [free]) for free in self.free for state in ("awake", "asleep")]

    monkeypatch.setattr(rungs, "_Server", Server)
    on_npu = dataclasses.replace(ground, device="ascend")
    with pytest.raises(RungFailed, match="0.30 GiB more"):
        rungs.sleep(on_npu)
    Server.free = [60.0, 59.98, 59.99, 59.98]
    assert rungs.sleep(on_npu)["kept"] == "0.02 GiB"
    assert "skipped" in rungs.sleep(ground)


def test_both_runs_of_fine_tuning_have_the_same_rows_whatever_the_devices(tmp_path):
    for num_devices in (1, 2, 8, 16, 24):
        alone = toy.supervised_config(tmp_path, tmp_path / "a", "cpu", num_devices)["training"]
        assert alone["rows_per_step"] % (alone["micro_batch_size"] * num_devices) == 0
        directory = tmp_path / str(num_devices)
        directory.mkdir()
        toy.write_inputs(directory, num_devices)
        records = (directory / "prompts.jsonl").read_text().splitlines()
        assert len(records) == 2 * 2 * alone["rows_per_step"]  # two of 32 tokens to a row of 64, for two steps


def test_versions_of_the_toys_weights_differ(tmp_path):
    for seed in (0, 1):
        toy.write_weights("experts", seed, tmp_path / str(seed))
    files = [(tmp_path / str(seed) / "model.safetensors").read_bytes() for seed in (0, 1)]
    assert len(files[0]) == len(files[1]) and files[0] != files[1]
    assert np.frombuffer(files[0][-4096:], np.float32).std() > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device"], "no NPU on this machine"),
        (["--device", "cpu", "--rungs", "0"], "no rung '0'"),
        (["--device", "cpu", "--output", "there"], "is there already"),
    ],
)
def test_what_cannot_be_tried_is_one_line(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINDRLHF_ROLLOUT_PYTHON", sys.executable)
    (tmp_path / "there").mkdir()
    assert main(["doctor", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
