"""The tutorial's entry point: flags become keys, and mistakes become one line."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from script_files import load_script

from mindrlhf.config.load import load_grpo_config
from mindrlhf.errors import UserError

TUTORIAL = Path(__file__).parents[2] / "examples" / "grpo" / "qwen_grpo_tutorial"
CONFIG = TUTORIAL / "grpo_config.yaml"
TINY = Path(__file__).parents[2] / "model_configs" / "qwen2_5" / "qwen2_5_tiny"


tutorial = load_script("examples/grpo/qwen_grpo_tutorial/main.py")


@pytest.fixture
def model_dirs(tmp_path):
    """Directories with a config.json: an actor, one that equals it in what matters, and one that does not."""
    hf_config = json.loads((TINY / "config.json").read_text())
    changes = {"actor": {}, "same": {"torch_dtype": "float32", "initializer_range": 0.1}, "wide": {"hidden_size": 256}}
    for name, change in changes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(hf_config | change))
    return tmp_path


def _load(model_dirs, *more: str, world_size: int = 8):
    flags = ["--config", str(CONFIG), "--dataset_file", "d.mindrecord", "--tokenizer_dir", "t"]
    flags += ["--actor_checkpoint_path", str(model_dirs / "actor"), "--verifier_function", "accuracy_reward"]
    return tutorial.load_config(tutorial.parse_arguments([*flags, *more]), world_size)


def test_every_flag_reaches_its_key(model_dirs):
    more = ["--verifier_function", "qwen_accuracy_reward,format_reward", "--verifier_weight", "1.0,0.5"]
    config = _load(model_dirs, *more, "--save_checkpoint_dir", "c")
    assert (config.data.train_file, config.data.tokenizer_dir) == ("d.mindrecord", "t")
    assert config.model.path == str(model_dirs / "actor")
    assert config.reward.verifier_function == ("qwen_accuracy_reward", "format_reward")
    assert config.reward.verifier_weight == (1.0, 0.5)
    assert config.checkpoint.save_dir == "c"


@pytest.mark.parametrize("path", ["1e5", "true", "a: b", "# c", "it's", 'a "b"', "naïve 模型", "[x"])
def test_a_path_stays_as_typed(model_dirs, path):
    assert _load(model_dirs, "--dataset_file", path).data.train_file == path


def test_overrides_may_stand_anywhere_and_win(model_dirs):
    config = _load(model_dirs, "data.train_file=other", "--save_checkpoint_dir", "c", "run.max_steps=3")
    assert (config.data.train_file, config.checkpoint.save_dir, config.run.max_steps) == ("other", "c", 3)


def test_reference_is_left_out_with_one_line_when_there_is_no_kl_term(model_dirs, capsys):
    config = _load(model_dirs, "--ref_checkpoint_path", "r")
    assert config.model.reference_path == ""
    assert re.fullmatch(
        r"main\.py: --ref_checkpoint_path r is not loaded: algorithm\.beta is 0.*\n", capsys.readouterr().out
    )


def test_reference_is_used_when_there_is_a_kl_term(model_dirs, capsys):
    config = _load(model_dirs, "--ref_checkpoint_path", "r", "algorithm.beta=0.001")
    assert (config.model.reference_path, config.algorithm.beta) == ("r", 0.001)
    assert capsys.readouterr().out == ""


def test_generator_must_be_the_actors_network(model_dirs):
    _load(model_dirs, "--generate_checkpoint_path", str(model_dirs / "same"))
    with pytest.raises(UserError, match=r"wide has hidden_size=256, the actor in .*actor has 128") as failure:
        _load(model_dirs, "--generate_checkpoint_path", str(model_dirs / "wide"))
    assert "\n" not in str(failure.value)


def test_generator_of_another_architecture_is_refused(model_dirs):
    hf_config = json.loads((TINY / "config.json").read_text())
    hf_config |= {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
    (model_dirs / "qwen3").mkdir()
    (model_dirs / "qwen3" / "config.json").write_text(json.dumps(hf_config))
    with pytest.raises(UserError, match="architecture='Qwen3ForCausalLM', the actor"):
        _load(model_dirs, "--generate_checkpoint_path", str(model_dirs / "qwen3"))


def test_the_config_is_for_eight_devices(model_dirs):
    _load(model_dirs)
    with pytest.raises(UserError, match="'parallel_config.data_parallel' is 8"):
        _load(model_dirs, world_size=4)


def test_the_cpu_overrides_of_the_readme_pass_the_checks():
    block = next(block for block in _bash_blocks(TUTORIAL / "README.md") if "run.device=cpu" in block)
    words = shlex.split(block.replace("\\\n", " ").replace("$MODEL", str(TINY)), comments=True)
    start = next(index for index, word in enumerate(words) if word.endswith("qwen_grpo_tutorial/main.py"))
    arguments = tutorial.parse_arguments([*words[start + 1 :], f"--config={CONFIG}"])
    config = tutorial.load_config(arguments, world_size=2)
    assert (config.run.device, config.model.random_init) == ("cpu", True)


def test_the_config_differs_from_the_models_own_in_no_layout(model_dirs):
    required = ["model.path=m", "data.train_file=d", "data.tokenizer_dir=t", "reward.verifier_function=accuracy_reward"]
    path = TINY.parent / "grpo_qwen2_5_7b_8npu.yaml"
    published = load_grpo_config(path, required, world_size=8)
    config = _load(model_dirs)
    assert config.parallel_config == published.parallel_config
    assert config.rollout == published.rollout


def test_the_shell_script_is_sound_and_passes_every_flag():
    script = TUTORIAL / "run_grpo.sh"
    assert subprocess.run(["bash", "-n", str(script)], timeout=20).returncode == 0
    passed = set(re.findall(r"^  --([a-z_]+) ", script.read_text(), flags=re.MULTILINE))
    assert passed >= {*tutorial.KEY_OF_FLAG, "config", "ref_checkpoint_path", "generate_checkpoint_path"}


def test_the_shell_script_starts_msrun_with_its_variables(tmp_path):
    fake = tmp_path / "msrun"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$MS_NODE_TIMEOUT" "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODEL_DIR": "my model", "NUM_WORKERS": "2"}
    command = ["bash", str(TUTORIAL / "run_grpo.sh"), "run.max_steps=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
    timeout_s, *words = done.stdout.splitlines()
    assert timeout_s == "1800"
    assert words[:2] == ["--worker_num=2", "--local_worker_num=2"]
    assert words[words.index("--actor_checkpoint_path") + 1] == "my model"
    assert words[-2:] == ["run.max_steps=1", "run.output_dir=runs/qwen_grpo_tutorial"]


@pytest.mark.timeout(180)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(TUTORIAL / "main.py"), "--config", str(tmp_path / "absent.yaml")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MS_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 2
    assert done.stderr == f"main.py: error: config file '{tmp_path / 'absent.yaml'}' does not exist\n"


def _bash_blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
