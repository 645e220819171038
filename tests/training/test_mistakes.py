"""Typical mistakes at the command line and in a config: one line each, which names the mistake and the fix."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.cli import main
from mindrlhf.data.tokenizers import load_tokenizer

# What is typed after `mindrlhf config check CONFIG` for a config that is right, and words of the line that comes.
CONFIG_MISTAKES = [
    ("run.device=gpu", "'run.device' is 'gpu'", "one of cpu, ascend"),
    ("run.devise=cpu", "unknown key 'run.devise'", "did you mean 'run.device'"),
    ("run.max_steps", "section.key=value", "did you mean run.max_steps=VALUE"),
    ("run=3", "'run' must be a section", "not 3"),
    ("model.path=nowhere", "'nowhere' does not exist", "give a Hugging Face model directory"),
    ("model.param_dtype=bfloat16", "'model.param_dtype' is bfloat16", "set float32"),
    ("model.reference_path=r", "'model.reference_path' is set, but read only with algorithm.beta", "remove the key"),
    ("data.train_file=nowhere.mindrecord", "no prompt file at nowhere.mindrecord", "mindrlhf data build"),
    ("data.train_file={inputs}/sft.mindrecord", "built for task 'sft'", "build it again with --task prompts"),
    ("data.train_file={inputs}/foreign.mindrecord", "foreign.mindrecord", "tokenizer"),
    ("data.tokenizer_dir=nowhere", "no tokenizer at nowhere", "expected a directory"),
    ("reward.verifier_function=acuracy_reward", "acuracy_reward", "did you mean accuracy_reward"),
    ("reward.verifier_function=mine.py:reward", "mine.py", "there is no file"),
    ("reward.verifier_weight=1,2", "2 values for 1 verifiers", "give one weight for each"),
    ("reward.model_path={inputs}/model", "gives tokens, not scores", "mindrlhf reward-model"),
    ("reward.options={{nobody.limit:1}}", "'reward.options' names the verifier 'nobody'", "(accuracy_reward)"),
    ("rollout.max_response_length=100000", "max_model_len", "lower the prompt or response length"),
    ("tools.names=abacus tools.max_response_tokens=4", "abacus", "python"),
    ("algorithm.name=gropo", "'algorithm.name' is 'gropo'", "did you mean 'grpo'"),
    ("algorithm.num_generations=1", "'algorithm.num_generations' is 1", "set it to 2 or more"),
    ("algorithm.advantage=gae", "'critic.path' is empty", "set it to a reward model"),
    ("training.beta=0.1", "unknown key 'training.beta'", "did you mean 'algorithm.beta'"),
    ("training.num_minibatches=5", "does not divide the 16 samples", "num_minibatches"),
    ("training.sequence_lengths=[16]", "'training.sequence_lengths' ends at 16", "raise the one or lower the other"),
    ("optimizer.lr_schedule=cosine", "'optimizer.end_lr' is needed", "set it"),
    ("optimizer.lr=1e-6", "unknown key 'optimizer.lr'", "did you mean 'optimizer.start_lr'"),
    ("optimizer.quality=1", "unknown key 'optimizer.quality'", "keys of section 'optimizer'"),
    ("parallel_config.model_parallel=2", "'parallel_config.model_parallel' is 2", "set it to 1"),
    ("parallel_config.data_parallel=2", "1 were started", "start 2 workers"),
    ("profiler.steps=9 run.max_steps=3", "'profiler.steps' has 9, but the run ends after run.max_steps = 3", "earlier"),
    (
        "profiler.steps=1 profiler.tools=vllm rollout.off_policy_steps=1",
        "'profiler.tools' = [\"vllm\"] does not go with 'rollout.off_policy_steps'",
        "remove it",
    ),
]
# The words after `mindrlhf`, and words of the line.
COMMAND_MISTAKES = [
    ("trian c.yaml", "'trian' is not known", "did you mean train?"),
    ("train", "arguments are required: config", "see mindrlhf train --help"),
    ("train nowhere.yaml", "'nowhere.yaml' does not exist", "config file"),
    ("train c.yaml --max_steps 3", "--max_steps", "did you mean run.max_steps=VALUE"),
    ("train c.yaml --max_restarts 2", "--max_restarts", "did you mean --max-restarts?"),
    ("train c.yaml --workers two", "--workers", "invalid int value: 'two'"),
    ("report nowhere", "no run directory nowhere", "that `mindrlhf train` wrote"),
    ("report runs/x run.max_steps=3", "run.max_steps=3", "no config to set keys of"),
    ("train c.yaml --worker_s 2", "unrecognized arguments: --worker_s", "did you mean --workers?"),
    ("train c.yaml --num-workers 2", "--num-workers", "did you mean --workers or reward.num_workers=VALUE (keys of"),
    ("train c.yaml --zzz", "unrecognized arguments: --zzz", "see"),
    ("report run --svgg=x", "--svgg", "did you mean --svg?"),
    ("data build --output x --max-promt-length 9", "--max-promt-length", "did you mean --max-prompt-length?"),
    ("rewards list run.seed=1", "run.seed=1", "this command has no config to set keys of"),
    ("data get a/b c", "c", "quote a text that has spaces"),
    ("config new --model m --npus -1", "--npus is -1", "give 0 or more"),
]


def assert_one_line(errors: str, *words: str) -> None:
    (line,) = errors.splitlines()
    assert line.startswith("mindrlhf") and ": error: " in line
    for word in words:
        assert word in line


@pytest.mark.parametrize(("override", "mistake", "fix"), CONFIG_MISTAKES, ids=lambda text: str(text)[:40])
def test_mistakes_in_a_config(override, mistake, fix, contents, inputs_dir, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(contents["train"]))
    assert main(["config", "check", str(path), *override.format(inputs=inputs_dir).split(" "), "--kind", "train"]) == 2
    assert_one_line(capsys.readouterr().err, mistake, fix)


@pytest.mark.parametrize(("line", "mistake", "fix"), COMMAND_MISTAKES, ids=lambda text: str(text)[:40])
def test_mistakes_at_the_command_line(line, mistake, fix, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(line.split(" "))
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert_one_line(capsys.readouterr().err, mistake, fix)


def test_config_check_prints_json(contents, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(contents["train"]))
    command = ["config", "check", str(path), "--json"]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    memory = found.pop("memory_bytes")
    assert found == {"command": "train", "workers": 1, "mistakes": [], "obstacles": []}
    assert memory["total"] == memory["trainer"] + memory["server"] + memory["shared"] > 2**30
    assert main([*command, "run.device=gpu", "run.sede=3"]) == 2
    assert len(json.loads(capsys.readouterr().out)["mistakes"]) == 2


@pytest.mark.parametrize("task", ["train", "sft", "dpo"])
@pytest.mark.parametrize("has_eval_data", [False, True])
def test_a_new_config_is_right_and_commented(task, has_eval_data, contents, inputs_dir, tmp_path, capsys):
    path, data = tmp_path / "new.yaml", contents[task]["data"]["train_file"]
    eval_data = ["--eval-data", data] if has_eval_data else []
    choices = ["--kind", task, "--model", str(inputs_dir / "model"), "--data", data, *eval_data]
    assert main(["config", "new", *choices, "--output", str(path)]) == 0
    assert "optimizer.start_lr is" in capsys.readouterr().err
    text = path.read_text()
    assert f"mindrlhf {task} {path}" in text and max(map(len, text.splitlines())) <= 140
    keys = [line for line in text.splitlines() if line.startswith("  ") and not line.startswith("  #")]
    assert text.count("# ") >= len(keys) > 8
    overrides = [f"data.tokenizer_dir={inputs_dir / 'tokenizer'}", f"run.output_dir={tmp_path / 'run'}"]
    overrides += ["rollout.python=sh"] if task == "train" else []
    assert main(["config", "check", str(path), *overrides]) == 0
    assert main(["config", "new", *choices, "--output", str(path)]) == 2
    assert "give another --output" in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["PhiForCausalLM"]}, "supported language models are Qwen2ForCausalLM"),
        ({"hidden_act": "gelu"}, "only 'silu' is supported"),
    ],
)
def test_a_new_config_is_refused_for_a_model_that_no_run_can_train(changes, message, inputs_dir, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((inputs_dir / "model" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    assert main(["config", "new", "--model", str(model), "--output", str(tmp_path / "new.yaml")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "new.yaml").exists()


NPUS = [
    (model, npus, lora, has_data)
    for model in ("qwen2_5/qwen2_5_7b", "qwen3/qwen3_8b", "llama3_1/llama3_1_8b")
    for npus in (8, 32)
    for lora in (0, 16)
    for has_data in (False, True)
]
DAILY = [("qwen2_5/qwen2_5_7b", 8, 16, True), ("qwen3/qwen3_8b", 32, 0, False)]


@pytest.mark.parametrize(("model", "npus", "lora", "has_data"), NPUS if RUNS_SLOW_TESTS else DAILY)
def test_a_new_config_for_npus_is_right_and_fits_without_a_hand_between(
    model, npus, lora, has_data, inputs_dir, tmp_path, capsys
):
    directory, path = tmp_path / "model", tmp_path / "npu.yaml"
    directory.mkdir()
    shutil.copy(Path("model_configs", model, "config.json"), directory)
    data = ["--data", str(inputs_dir / "train.mindrecord"), "--eval-data", str(inputs_dir / "long.mindrecord")]
    words = ["--npus", str(npus), "--model", str(directory), "--lora", str(lora), *(data if has_data else [])]
    assert main(["config", "new", *words, "--output", str(path)]) == 0
    head = [line[4:] for line in path.read_text().splitlines() if line.startswith("#   mindrlhf ")]
    check, plan, train = (line.partition("    #")[0].strip() for line in head)
    sizes = "--workers 8" if npus == 8 else "--workers 8 --nodes 4"
    assert train == f"mindrlhf train {path} {sizes}"
    capsys.readouterr()
    assert main(check.split()[1:]) == 0
    assert f"ok for {npus} ranks" in capsys.readouterr().out
    assert main([*plan.split()[1:], "--search"]) == 0
    assert "FITS: " in capsys.readouterr().out
    assert ("eval_file: " in path.read_text()) and (
        has_data == bool(yaml.safe_load(path.read_text())["data"].get("eval_file"))
    )


def test_a_model_that_no_layout_holds_gets_a_warning(tmp_path, capsys):
    words = ["--npus", "1", "--model", "model_configs/llama3_1/llama3_1_70b", "--output", str(tmp_path / "c.yaml")]
    assert main(["config", "new", *words]) == 0
    assert "warning: no layout over 1 NPUs of 64GB holds the model" in capsys.readouterr().err


def test_held_out_data_beside_the_training_data_are_taken(inputs_dir, tmp_path, prompt_writer, capsys):
    tokenizer = load_tokenizer(str(inputs_dir / "tokenizer")).fingerprint
    for name in ("train", "test"):
        prompt_writer(tmp_path / f"{name}.mindrecord", tokenizer, [3, 4])
    words = ["--model", str(inputs_dir / "model"), "--data", str(tmp_path / "train.mindrecord")]
    assert main(["config", "new", *words]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["data"]["eval_file"] == str(tmp_path / "test.mindrecord")
    assert "data.eval_file is" in printed.err
    assert main(["config", "new", "--model", str(tmp_path / "none")]) == 2


def test_files_that_are_not_here_are_no_mistake_of_a_run_prepared_for_npus(contents, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    content = contents["train"]
    content["data"] = {**content["data"], "train_file": "elsewhere.mindrecord"}
    for device, code in (("ascend", 0), ("cpu", 2)):
        path.write_text(yaml.safe_dump({**content, "run": {**content["run"], "device": device}}))
        assert main(["config", "check", str(path)]) == code, device
        assert "no prompt file at elsewhere.mindrecord" in capsys.readouterr().err
        assert main(["train", str(path)]) == 2
