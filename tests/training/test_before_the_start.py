"""What is known before a run starts is said before it starts: what its checkpoint remembers, and room for the next."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import yaml
from preflight_cases import changed

from mindrlhf.checkpoint import store as store_module
from mindrlhf.checkpoint.state import RunState, pack_state, write_state
from mindrlhf.cli import build_parser, main
from mindrlhf.commands.train import _advice, _again, _check_spares
from mindrlhf.config.load import load_config
from mindrlhf.config.parse import write_config
from mindrlhf.config.reward import RewardSection
from mindrlhf.data.fingerprint import data_fingerprint
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import STOPPED
from mindrlhf.launch.nodes.place import Place
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.training.preflight.facts import checkpoint_bytes
from mindrlhf.weights.open import open_tensors


@pytest.fixture
def started(monkeypatch) -> list:
    """Have nothing started, and list what would have been."""
    starts: list = []
    monkeypatch.setattr("mindrlhf.launch.launch.launch", lambda *words, **_: starts.append(words) or 0)
    return starts


@pytest.fixture
def begun(contents, inputs_dir, tmp_path):
    """The config of a run that has a checkpoint, as a file; its data are copies that may be replaced."""
    content = contents["train"]
    (tmp_path / "own").mkdir()
    for ending in ("", ".db"):
        shutil.copy(inputs_dir / f"train.mindrecord{ending}", tmp_path / "own" / f"train.mindrecord{ending}")
    content["data"] = {**content["data"], "train_file": str(tmp_path / "own" / "train.mindrecord")}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    config = load_config("train", path)
    directory = tmp_path / "run" / "checkpoints" / "step_00000002"
    directory.mkdir(parents=True)
    plain = json.loads(json.dumps(asdict(config)))
    state = RunState(2, 3, 0, {}, plain, data=data_fingerprint(vars(config.data)))
    write_state(directory, pack_state(state))
    return path


def test_a_run_that_is_as_it_was_goes_on(begun, started):
    assert main(["train", str(begun), "--resume", "run.max_steps=9"]) == STOPPED, "no model is exported"
    assert len(started) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data.train_file=no/such.mindrecord", "no prompt file at no/such.mindrecord"),
        ("training.chunksize=4", "did you mean 'training.chunk_size'"),
        ("--workers 2 parallel_config.data_parallel=3", "set data_parallel to 2"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_started(words, message, begun, started, capsys):
    assert main(["train", str(begun), "--resume", *words.split()]) == 2 and not started
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mindrlhf train: error:") and message in line


def test_auto_goes_on_where_a_checkpoint_is_and_begins_where_none_is(begun, started, tmp_path):
    main(["train", str(begun), "--resume", "auto"])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    main(["train", str(begun), "--resume", "auto"])
    assert ["--resume" in words[0] for words in started] == [True, False]


@pytest.mark.parametrize("resume", [["--resume"], ["--resume", "auto"]])
def test_a_finished_run_is_complete_until_it_is_to_train_longer(resume, begun, started, tmp_path, capsys):
    final = tmp_path / "run" / "final"
    final.mkdir()
    (final / "model.safetensors").write_text("first")
    write_config(load_config("train", begun), tmp_path / "run")
    assert main(["train", str(begun), *resume]) == 0 and not started
    assert "the run is complete; to train longer: --resume run.max_steps=N" in capsys.readouterr().out
    assert main(["train", str(begun)]) == 2 and not started
    assert main(["train", str(begun), *resume, "run.max_steps=9"]) == STOPPED and len(started) == 1
    assert not final.exists() and (tmp_path / "run" / "final_1" / "model.safetensors").read_text() == "first"


def test_files_beside_the_users_data_shadow_nothing_and_loopback_goes_through_no_proxy(begun, tmp_path, monkeypatch):
    for name in ("random", "copy", "tokenize"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working directory')")
    (tmp_path / "helper.py").write_text("score = 0.25")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "reward.py").write_text("import helper\ndef judge(completion, answer):\n    return 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "example.org")
    ranks = []
    monkeypatch.setattr("mindrlhf.launch.launch.launch", lambda command, *_, **__: ranks.append(command) or 0)
    main(["train", str(begun), "--resume"])
    ended = subprocess.run([sys.executable, *ranks[0][:3], "--help"], capture_output=True, text=True)
    assert ended.returncode == 0 and "--resume" in ended.stdout, ended.stderr
    assert os.environ["no_proxy"] == "example.org,127.0.0.1,localhost,::1"
    section = RewardSection(verifier_function=("mine/reward.py:judge",))
    RewardPool(Selection.from_config(section)).close()  # its worker has loaded the function, and that its helper


def test_only_a_run_that_exported_its_model_has_ended_well(begun, tmp_path, monkeypatch):
    monkeypatch.setattr("mindrlhf.launch.launch.launch", lambda *_, **__: (tmp_path / "run" / "final").mkdir() or 0)
    assert main(["train", str(begun), "--resume"]) == 0


def test_a_run_that_ends_before_max_steps_says_so_before(begun, started, capsys):
    main(["train", str(begun), "--resume", "run.max_steps=90"])  # 3 epochs of 5 prompts in steps of 2
    said = "run.max_steps is 90, but with training.epochs=3 the data are used up after step 8: raise training.epochs"
    assert f"mindrlhf: {said} to about 34" in capsys.readouterr().out
    main(["config", "check", str(begun), "run.max_steps=90"])
    assert said in capsys.readouterr().out
    main(["train", str(begun), "--resume", "run.max_steps=2"])
    assert "run.max_steps" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.num_generations=4", "algorithm.num_generations was 8 and is now 4"),
        ("run.seed=3", "run.seed was 0 and is now 3"),
        ("rollout.temperature=0.5", "rollout.temperature was 1.0 and is now 0.5"),
    ],
)
def test_a_changed_key_is_refused_before_anything_starts(override, message, begun, started, capsys):
    assert main(["train", str(begun), override, "--resume"]) == 2
    err = capsys.readouterr().err
    assert message in err and "--resume" not in err
    assert started == []


def test_replaced_data_are_refused_before_anything_starts(begun, inputs_dir, tmp_path, prompt_writer, started, capsys):
    path = tmp_path / "own" / "train.mindrecord"
    for name in (path, f"{path}.db"):
        os.remove(name)
    prompt_writer(path, load_tokenizer(str(inputs_dir / "tokenizer")).fingerprint, [3, 4])
    assert main(["train", str(begun), "--resume"]) == 2
    assert "has 2 records, not 5" in capsys.readouterr().err
    assert started == []


def test_a_damaged_checkpoint_is_left_to_the_run_which_takes_the_one_before(begun, started):
    newer = begun.parent / "run" / "checkpoints" / "step_00000004"
    newer.mkdir()
    (newer / "state.json").write_text("{")
    assert main(["train", str(begun), "--resume"]) == STOPPED
    assert main(["train", str(begun), "--resume", "run.seed=3"]) == 2


def with_room(monkeypatch, free_bytes: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free_bytes)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize("task", ["train", "sft", "dpo"])
def test_too_little_room_for_a_checkpoint_is_told_before_anything_starts(
    task, contents, tmp_path, started, monkeypatch, capsys
):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(contents[task]))
    size_bytes = checkpoint_bytes(load_config(task, path))
    with_room(monkeypatch, size_bytes - 1)
    assert main([task, str(path)]) == 2
    message = f"a checkpoint needs {size_bytes} bytes"
    assert message in capsys.readouterr().err
    assert main(["config", "check", str(path), "--kind", task]) == 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with_room(monkeypatch, size_bytes)
    assert main([task, str(path)]) == STOPPED
    assert "3 stand side by side" in capsys.readouterr().out
    with_room(monkeypatch, 3 * size_bytes)
    assert main([task, str(path)]) == STOPPED
    assert "side by side" not in capsys.readouterr().out
    assert len(started) == 2


def test_a_checkpoint_takes_weights_and_two_moments_of_what_is_trained(config, inputs_dir):
    tensors = open_tensors(inputs_dir / "model")
    count = sum(int(np.prod(tensors.info(name).shape)) for name in tensors.names())
    assert checkpoint_bytes(config) == count * (4 + 2 * 4)
    followed = changed(config, "algorithm", beta=0.1, sync_ref_model=True)
    assert checkpoint_bytes(followed) == count * (4 + 2 * 4 + 4)
    assert 0 < checkpoint_bytes(changed(config, "lora", rank=2)) < count * 4


@pytest.mark.parametrize(
    ("typed", "path", "program"),
    [
        (".venv/bin/mindrlhf", "", ".venv/bin/mindrlhf"),  # by a script, in whose caller's shell nothing is activated
        (".venv/bin/mindrlhf", "bin", "mindrlhf"),
        ("mindrlhf/__main__.py", "", "mindrlhf"),
    ],
)
def test_the_line_that_starts_a_run_again_can_be_typed(typed, path, program, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mindrlhf").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / path) if path else "")
    monkeypatch.setattr(sys, "argv", [typed])
    words = ["train", "c.yaml", "--workers", "2", "--nodes", "2", "--spares", "1", "--max-restarts", "3"]
    arguments = build_parser().parse_args([*words, "--node-rank", "0", "--master", "10.0.0.1:8118"])
    assert _again(arguments, ["run.seed=3"], None) == f"{program} train c.yaml run.seed=3 --workers 2 --max-restarts 3"
    _check_spares(arguments)
    again = shlex.split(_again(arguments, [], Place(0, 2, "10.0.0.1", 8118, 1)))
    _check_spares(build_parser().parse_args(again[1:]))


def test_advice_never_repeats_what_was_just_refused(tmp_path):
    again, checkpoint = "mindrlhf train c.yaml run.seed=3", tmp_path / "step_00000012"
    assert again in _advice(None, again)
    assert f"step 12 is saved; to resume from {checkpoint}: {again} --resume" == _advice(checkpoint, again)
    for begun_with in (None, checkpoint):
        refused = _advice(begun_with, again, is_mistake=True, begun_with=begun_with)
        assert again not in refused and "fix the error above" in refused
    later = _advice(checkpoint, again, is_mistake=True, begun_with=None)
    assert later.startswith("step 12 is saved; fix the error above; then, to resume") and again in later


def test_config_check_says_what_will_happen(contents, inputs_dir, tmp_path, capsys):
    content = contents["train"]
    content["data"] = {**content["data"], "eval_file": str(inputs_dir / "long.mindrecord")}
    content |= {"evaluation": {"every_steps": 2, "num_samples": 3}, "checkpoint": {"every_steps": 3}}
    content["training"] |= {"num_minibatches": 2}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    words = ["config", "check", str(path), "rollout.temperature=1"]
    assert main(words) == 0
    told = capsys.readouterr().out.splitlines()
    # 5 prompts three times, two a step.
    assert "8 steps of 2 prompts, 16 samples and 2 updates: 3.2 epochs of 5 prompts" in told
    assert "5 evaluations on 2 held-out prompts, 3 samples each" in told  # 0, 2, 4, 6 and 8
    assert any(line.startswith("2 checkpoints of ") and line.endswith(" each; the last 2 stay") for line in told)
    assert not any("min, by" in line for line in told)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n}, "timing/all": {n}.5}}\n' for n in (29, 30, 90))
    )
    assert main(words) == 0
    assert "about 4 min, by the 30.50 s a step of the last run there" in capsys.readouterr().out.splitlines()
