"""Features that do not go with each other, or with a model: refused in one line, by `config check` and at the start."""

import json
from types import SimpleNamespace

import pytest
from tiny_models import tiny_model
from tiny_vl import IMAGE, TinyVl, write_tiny_vl

from mindrlhf.cli import main
from mindrlhf.config.load import load_grpo_config
from mindrlhf.data.pictures.columns import ImageHeader
from mindrlhf.errors import UserError
from mindrlhf.images.geometry import PixelLimits, VisionGeometry
from mindrlhf.training.preflight.features import check_images, check_replay, check_vision, replayed_experts
from mindrlhf.training.routing.rows import ReplayedExperts

SHARDED = ["run.device=ascend", "parallel_config.model_parallel=2"]
PIPELINE = [*SHARDED, "parallel_config.pipeline_stage=2", "parallel_config.micro_batch_num=2"]
HEADER = ImageHeader(1, 1, 1, 4, IMAGE, PixelLimits(), VisionGeometry())
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
MODELS = {
    "dense": tiny_model(**SIZES),
    "experts": tiny_model(
        "qwen3_moe", **SIZES, head_dim=4, num_experts=6, moe_intermediate_size=12, mlp_only_layers=[1]
    ),
}
ASCEND, REPLAY = "run.device=ascend", "training.replay_routing=true"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Configs of models: that sees, and deeply, dense, of experts."""
    directory = tmp_path_factory.mktemp("models")
    write_tiny_vl(directory / "sees")
    write_tiny_vl(directory / "sees_deeply", TinyVl(family="qwen3_vl", vision_depth=3))
    for name, config in MODELS.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
    (directory / "config.yaml").write_text("")
    return directory


def overrides(directory, model: str, *changes) -> list[str]:
    return [
        f"model.path={directory / model}",
        "data.train_file=prompts.mindrecord",
        f"data.tokenizer_dir={directory / 'sees'}",
        "reward.verifier_function=accuracy_reward",
        *changes,
    ]


def config_of(directory, model: str, *changes):
    return load_grpo_config(directory / "config.yaml", overrides(directory, model, *changes), world_size=None)


@pytest.mark.parametrize(
    ("check", "model", "changes", "message"),
    [
        (check_vision, "sees", ["algorithm.name=ppo", "critic.path=critic"], "does not see images as the model"),
        (check_vision, "sees", ["reward.model_path=scorer"], "reward model reads text only"),
        (check_vision, "sees", ["training.packing=shared_prompts"], "image positions are of whole sequences"),
        (check_vision, "sees", ["tools.names=python"], "an image token that the model wrote"),
        (check_vision, "sees", ["tools.environment=lake.py:Lake"], "an image token that the model wrote"),
        (check_vision, "sees", ["rollout.segment_tokens=4"], "an image token that the model wrote"),
        (check_vision, "sees", ["lora.rank=4"], "adapters are of text models"),
        (
            check_vision,
            "sees_deeply",
            PIPELINE,
            "pipeline_stage' = 2 does not go with a vision-language model whose images",
        ),
        (check_replay, "dense", [REPLAY], "has no experts"),
        (check_replay, "experts", [REPLAY, ASCEND, "rollout.stop=[end]"], "ends itself"),
        (check_replay, "experts", [REPLAY, ASCEND, "training.packing=shared_prompts"], "whole sequences"),
        (check_replay, "experts", [REPLAY, "rollout.tensor_parallel=2"], "one process"),
    ],
)
def test_what_does_not_go_together_is_refused(directory, check, model, changes, message):
    with pytest.raises(UserError, match=message) as error:
        check(config_of(directory, model, *changes))
    assert "\n" not in str(error.value)


def test_plain_runs_are_allowed(directory):
    sharded = (SHARDED, PIPELINE, [*SHARDED, "parallel_config.context_parallel=2"])
    for changes in ([], ["algorithm.name=ppo", f"critic.path={directory / 'sees'}"], *sharded):
        check_vision(config_of(directory, "sees", *changes))
    for changes in ([], SHARDED):
        check_vision(config_of(directory, "sees_deeply", *changes))
    others = ("rollout.segment_tokens=4", "tools.names=python", "tools.environment=lake.py:Lake")
    for changes in ([], [ASCEND, "rollout.tensor_parallel=2"], *([one] for one in others)):
        config = config_of(directory, "experts", REPLAY, *changes)
        check_replay(config)
        assert replayed_experts(config) == ReplayedExperts(num_layers=2, num_active=2, num_experts=6)
    off = config_of(directory, "dense")
    check_replay(off)
    assert replayed_experts(off) is None


def test_config_check_refuses_too(directory, capsys):
    def errors(*changes: str) -> str:
        assert main(["config", "check", str(directory / "config.yaml"), *changes]) != 0  # no data is there
        return capsys.readouterr().err

    assert "has no experts" in errors(*overrides(directory, "dense", REPLAY))
    assert "sees images" not in errors(*overrides(directory, "sees"))
    offline = [f"model.path={directory / 'sees'}", "data.train_file=x", f"data.tokenizer_dir={directory / 'sees'}"]
    assert "sees images" not in errors("--kind", "sft", *offline)
    for kind in ("sft", "dpo"):
        assert "such a model sharded yet" in errors("--kind", kind, *offline, *SHARDED)
    assert "adapters are of text models" in errors("--kind", "sft", *offline, "lora.rank=4")
    assert "sees images" not in errors("--kind", "dpo", *offline)
    assert "mindrlhf reward-model does not train yet" in errors("--kind", "reward-model", *offline)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("sees", {"image_token": 3}, "another model"),
        ("sees", {"geometry": VisionGeometry(merge=1)}, "another model"),
        ("sees", {}, None),
        ("dense", {}, "reads text only"),
    ],
)
def test_images_must_be_cut_for_the_model(directory, model, changes, message):
    header = ImageHeader(**{**vars(HEADER), **changes})
    file = SimpleNamespace(path="prompts.mindrecord", header=SimpleNamespace(images=header))
    if message is None:
        check_images(str(directory / model), file)
    else:
        with pytest.raises(UserError, match=message):
            check_images(str(directory / model), file)
