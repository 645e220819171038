"""Where routing replay is refused: in one line, by `config check` and at the start of a run."""

import json

import pytest

from mindrlhf.cli import main
from mindrlhf.config.load import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.training.preflight.features import check_replay, replayed_experts
from mindrlhf.training.routing.rows import ReplayedExperts

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DENSE = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
EXPERTS = {
    **SIZES,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [1],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("replay")
    for name, config in (("dense", DENSE), ("experts", EXPERTS)):
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
    (directory / "config.yaml").write_text("")
    return directory


def overrides(directory, model: str, *changes) -> list[str]:
    return [
        f"model.path={directory / model}",
        "data.train_file=prompts.mindrecord",
        f"data.tokenizer_dir={directory}",
        "reward.verifier_function=accuracy_reward",
        "training.replay_routing=true",
        *changes,
    ]


def config_of(directory, model: str, *changes):
    return load_grpo_config(directory / "config.yaml", overrides(directory, model, *changes), world_size=None)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("dense", [], "has no experts"),
        ("experts", ["run.device=ascend", "rollout.stop=[end]"], "ends itself"),
        ("experts", ["run.device=ascend", "training.packing=shared_prompts"], "whole sequences"),
        ("experts", ["rollout.tensor_parallel=2"], "one process"),
    ],
)
def test_what_replay_does_not_do_is_refused(directory, model, changes, message):
    with pytest.raises(UserError, match=message) as error:
        check_replay(config_of(directory, model, *changes))
    assert "\n" not in str(error.value)


def test_a_model_with_experts_is_allowed(directory):
    config = config_of(directory, "experts")
    check_replay(config)
    assert replayed_experts(config) == ReplayedExperts(num_layers=2, num_active=2, num_experts=6)
    check_replay(config_of(directory, "experts", "run.device=ascend", "rollout.tensor_parallel=2"))
    for changes in (["rollout.segment_tokens=4"], ["tools.names=python"], ["tools.environment=lake.py:Lake"]):
        check_replay(config_of(directory, "experts", *changes))
    off = config_of(directory, "dense", "training.replay_routing=false")
    check_replay(off)
    assert replayed_experts(off) is None


def test_config_check_refuses_too(directory, capsys):
    assert main(["config", "check", str(directory / "config.yaml"), *overrides(directory, "dense")]) != 0
    assert "has no experts" in capsys.readouterr().err
