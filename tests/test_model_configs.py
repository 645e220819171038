"""Every file in model_configs: it passes the config checks, is complete, and is one recipe with the others."""

import dataclasses
import math
import re
from functools import cache
from pathlib import Path

import pytest

from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.parse import read_yaml
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec
from mindrlhf.weights.hf import read_hf_config

ROOT = Path(__file__).parents[1] / "model_configs"
RUN_FILES = sorted(ROOT.glob("*/*.yaml"))
MODEL_DIRS = sorted(path.parent for path in ROOT.glob("*/*/config.json"))
# What every user adds; the README of model_configs names these keys.
USERS_KEYS = {
    "model.path": "model",
    "data.train_file": "prompts.mindrecord",
    "data.tokenizer_dir": "tokenizer",
    "reward.verifier_function": "accuracy_reward",
}
# Totals of the published checkpoints (sum over the tensors of their safetensors files).
PUBLISHED_PARAMETERS = {
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_32b": 32_763_876_352,
    "qwen3_8b": 8_190_735_360,
    "llama3_1_8b": 8_030_261_248,
}
# Run files of those that need more than 16 NPUs are in examples/grpo.
LARGE_PARAMETERS = {
    "qwen2_5_7b_128k": 7_615_616_512,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b_a3b": 30_532_122_624,
    "llama3_1_70b": 70_553_706_496,
    # By hand, of the sizes alone, without the multi-token prediction module.
    "glm4_9b": 9_400_279_040,
    "qwen3_5_9b": 8_953_803_264,
    "gemma3_1b": 999_885_952,
    "glm4_5_air": 106_852_251_264,
    "glm4_5": 352_797_829_024,
    "deepseek_v3_671b": 671_026_419_200,  # without the multi-token prediction module
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen2_5_vl_32b": 33_452_718_336,
}
DEVICE_BYTES = 64 * 10**9
BFLOAT16_BYTES = 2


def _name(path: Path) -> str:
    return path.name


def _model_and_world_size(path: Path) -> tuple[str, int]:
    match = re.fullmatch(r"(?:grpo|predict)_(\w+)_(\d+)npu", path.stem)
    assert match, f"{path.name} is not called grpo|predict_MODEL_Nnpu.yaml"
    return match[1], int(match[2])


@cache
def _load(path: Path) -> GrpoConfig:
    overrides = [f"{key}={value}" for key, value in USERS_KEYS.items()]
    return load_grpo_config(path, overrides, world_size=_model_and_world_size(path)[1])


def _num_parameters(model_dir: Path) -> int:
    hf_config = read_hf_config(model_dir)
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    return sum(math.prod(rule.mf_shape(dims)) for rule in spec.rules(dims))


@pytest.mark.parametrize("model_dir", MODEL_DIRS, ids=_name)
def test_parameter_count_is_the_published_one(model_dir):
    if model_dir.name == "qwen2_5_tiny":
        # 151,936 x 128 for the tied embedding, by hand; the rest is four layers and a norm.
        layer = 2 * (128 * 128 + 64 * 128) + (128 + 2 * 64) + 3 * 128 * 512 + 2 * 128
        expected = 151_936 * 128 + 4 * layer + 128
    else:
        expected = (PUBLISHED_PARAMETERS | LARGE_PARAMETERS)[model_dir.name]
    assert _num_parameters(model_dir) == expected


@pytest.mark.parametrize("path", RUN_FILES, ids=_name)
def test_run_file_passes_the_checks_and_uses_all_devices(path):
    """That its layout divides the model, and that it fits, tests/dryrun/plan/test_plan_start.py looks after."""
    config = _load(path)
    model, world_size = _model_and_world_size(path)
    assert config.run.device == "ascend" and (path.parent / model / "config.json").is_file()
    assert config.rollout.num_replicas * config.rollout.tensor_parallel == world_size
    if path.name.startswith("grpo"):
        assert config.run.output_dir == f"runs/{path.stem}"
        # A sample fits a row, and at least as much room is left for the prompt as the longest of GSM8K needs.
        assert config.training.sequence_lengths[-1] - config.rollout.max_response_length >= 512


@pytest.mark.parametrize("path", [path for path in RUN_FILES if path.name.startswith("predict")], ids=_name)
def test_predict_file_has_only_what_sampling_reads(path):
    content = read_yaml(path)
    assert set(content) == {"run", "rollout"}
    assert set(content["run"]) == {"device"}
    rollout = _load(path).rollout
    model_dir = path.parent / _model_and_world_size(path)[0]
    hf_config = read_hf_config(model_dir)
    dims, num_parameters = find_spec(hf_config).dims(hf_config), _num_parameters(model_dir)
    for part in (dims.num_heads, dims.num_kv_heads, dims.vocab_size, dims.intermediate_size):
        assert part % rollout.tensor_parallel == 0
    weight_bytes = BFLOAT16_BYTES * num_parameters / rollout.tensor_parallel
    assert weight_bytes < rollout.gpu_memory_utilization * DEVICE_BYTES / 2
    # `mindrlhf eval` starts no trainer ranks: the same file must pass the checks for one process.
    load_grpo_config(path, [f"{key}={value}" for key, value in USERS_KEYS.items()])


@pytest.mark.parametrize("path", RUN_FILES, ids=_name)
def test_only_the_users_keys_are_missing(path):
    given = {f"{section}.{key}" for section, keys in read_yaml(path).items() for key in keys}
    required = {
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(GrpoConfig)
        for field in dataclasses.fields(section.metadata["section"])
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    # The reward is the user's too, but no key of it is required alone: a reward model may take the verifier's place.
    assert not [key for key in given if key.startswith("reward.")]
    assert required - given == set(USERS_KEYS) - {"reward.verifier_function"}
    without_reward = [f"{key}={value}" for key, value in USERS_KEYS.items() if not key.startswith("reward.")]
    if "training" in read_yaml(path):
        with pytest.raises(UserError, match=r"reward\.verifier_function"):
            load_grpo_config(path, without_reward, world_size=_model_and_world_size(path)[1])


# What depends on the size of the model, on its layout, or on how long its answers are; the rest is one recipe.
SIZE_KEYS = {
    "rollout.num_replicas", "rollout.tensor_parallel", "rollout.gpu_memory_utilization", "rollout.max_num_seqs",
    "rollout.max_response_length", "training.micro_batch_size", "training.sequence_lengths", "training.chunk_size",
    "model.recompute", "run.output_dir",
    "algorithm.beta",  # 0 where a reference model does not fit beside the largest
}  # fmt: skip


@pytest.mark.parametrize("kind", ["grpo_text", "grpo_vision", "predict"])
def test_files_of_a_kind_differ_in_what_depends_on_the_size_alone(kind):
    paths = [path for path in RUN_FILES if path.name.startswith(kind.partition("_")[0])]
    if kind != "predict":
        paths = [path for path in paths if ("_vl_" in path.name) == (kind == "grpo_vision")]
    assert len(paths) > 2
    values: dict[str, set[str]] = {}
    for path in paths:
        for section, keys in dataclasses.asdict(_load(path)).items():
            for name, value in keys.items():
                values.setdefault(f"{section}.{name}", set()).add(str(value))
    differing = {key for key, found in values.items() if len(found) > 1 and not key.startswith("parallel_config.")}
    assert differing <= SIZE_KEYS
