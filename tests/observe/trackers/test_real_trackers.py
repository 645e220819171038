"""The trackers themselves, in their offline modes: what they keep on this machine is read back.

Each is tested where its extra is installed: pip install 'mindrlhf[wandb]', and so on.
"""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slow_tests import SLOW

ROOT = Path(__file__).parents[3]
# A run of two processes: the second resumes after step 1, and says step 1 again.
RUN = """
import pathlib, sys, time
from mindrlhf.observe.trackers.background import open_trackers

name, output_dir = sys.argv[1], pathlib.Path(sys.argv[2])
config = {"algorithm": {"beta": 0.04, "name": "grpo"}, "tools": {"names": ["calculator"]}}
options = {"project": "numbers"}
trackers = open_trackers([name], output_dir, config, **options, is_resumed=False)
trackers.write(0, {"eval/accuracy": 0.125})
trackers.write(1, {"reward/mean": 0.25, "loss": float("nan")})
trackers.write_samples(1, ["What is 1+1?\\n--- reward 1\\n2 \\u00e9"])
trackers.close()
trackers = open_trackers([name], output_dir, config, **options, is_resumed=True)
trackers.write(1, {"reward/mean": 0.25})
trackers.write(2, {"reward/mean": 0.5})
report = output_dir / "report.html"
report.write_text("<p>the report</p>")
trackers.complete(report)
trackers.close()
"""
ENVIRONMENT = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "GIT_PYTHON_REFRESH": "quiet"}


def run(name, tmp_path):
    """Return the directory of a run's trackers, after a run that said nothing of a failure."""
    home = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", RUN, name, str(tmp_path / "run")]
    ended = subprocess.run(command, cwd=tmp_path, env=home | ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "mindrlhf: warning" not in ended.stderr
    return tmp_path / "run" / "trackers"


def test_mlflow(tmp_path):
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed")
    directory = run("mlflow", tmp_path)
    with sqlite3.connect(directory / "mlflow.db") as database:
        runs = database.execute("select run_uuid, name, status from runs").fetchall()
        assert [row[1:] for row in runs] == [("run", "FINISHED")], "a resumed run is the same run"
        params = dict(database.execute("select key, value from params"))
        rows = database.execute("select key, step, value, is_nan from metrics order by key, step").fetchall()
    assert params == {"algorithm.beta": "0.04", "algorithm.name": "grpo", "tools.names": '["calculator"]'}
    assert sorted(set(rows)) == [
        ("eval/accuracy", 0, 0.125, 0),
        ("loss", 1, 0.0, 1),
        ("reward/mean", 1, 0.25, 0),
        ("reward/mean", 2, 0.5, 0),
    ]
    files = {path.name: path for path in (directory / "mlflow_artifacts").rglob("*") if path.is_file()}
    assert sorted(files) == ["config.json", "report.html", "step_00000001_1.txt"]
    assert files["step_00000001_1.txt"].read_text(encoding="utf-8") == "What is 1+1?\n--- reward 1\n2 \u00e9"
    assert files["report.html"].read_text() == "<p>the report</p>"


def log_records(path):
    """Return the records of a file in LevelDB's log format (its doc/log_format.md), after a header of seven bytes."""
    data, start, records, fragments = path.read_bytes(), 7, [], b""
    while start + 7 <= len(data):
        left_in_block = 32768 - start % 32768
        if left_in_block < 7:
            start += left_in_block
            continue
        length, kind = int.from_bytes(data[start + 4 : start + 6], "little"), data[start + 6]
        fragments += data[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(fragments)
            fragments = b""
    return records


@SLOW
def test_wandb(tmp_path):
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record

    directory = run("wandb", tmp_path)
    run_id = (directory / "run_id").read_text()
    paths = sorted((directory / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in paths] == [f"run-{run_id}.wandb"] * 2, "a resumed run has the id of the first"
    records = [Record.FromString(record) for path in paths for record in log_records(path)]
    config = {item.key: item.value_json for record in records for item in record.run.config.update}
    assert json.loads(config["algorithm"]) == {"beta": 0.04, "name": "grpo"}
    assert {record.run.project for record in records if record.HasField("run")} == {"numbers"}
    lines = [
        {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert {(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line} == {
        ("1", "0.25"),
        ("2", "0.5"),
    }
    assert [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line] == [("0", "0.125")]
    assert ["NaN" in line["loss"] for line in lines if "loss" in line] == [True]
    (table,) = (directory / "wandb").rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["What is 1+1?\n--- reward 1\n2 \u00e9"]]
    (report,) = (directory / "wandb").rglob("report_*.html")
    assert report.read_text() == "<p>the report</p>"
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1, 0], "broken off, complete"


def test_swanlab(tmp_path):
    pytest.importorskip("swanlab", reason="the extra swanlab is not installed")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    directory = run("swanlab", tmp_path)
    run_id = (directory / "run_id").read_text()
    paths = sorted((directory / "swanlab").glob("run-*/*.swanlab"))
    assert [path.name for path in paths] == [f"run-{run_id}.swanlab"] * 2, "a resumed run has the id of the first"
    records = [Record.FromString(record) for path in paths for record in log_records(path)]
    scalars = {(one.scalar.key, one.scalar.step, one.scalar.value.number) for one in records if one.HasField("scalar")}
    assert scalars == {("eval/accuracy", 0, 0.125), ("reward/mean", 1, 0.25), ("reward/mean", 2, 0.5)}
    (sample,) = (directory / "swanlab").glob("run-*/media/text/*")
    assert sample.read_text(encoding="utf-8") == "What is 1+1?\n--- reward 1\n2 \u00e9"
    (report,) = (directory / "swanlab").rglob("report.html")
    assert report.read_text() == "<p>the report</p>"
    config = yaml.safe_load(min((directory / "swanlab").rglob("config.yaml")).read_text())
    assert config["algorithm"]["value"] == {"beta": 0.04, "name": "grpo"}
