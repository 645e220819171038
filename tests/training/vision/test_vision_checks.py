"""What VLMs are not trained with yet: refused in one line, by `config check` and at the start of a run."""

from types import SimpleNamespace

import pytest
from tiny_vl import IMAGE, TinyVl, write_tiny_vl

from mindrlhf.cli import main
from mindrlhf.config.load import load_grpo_config
from mindrlhf.data.pictures.columns import ImageHeader
from mindrlhf.errors import UserError
from mindrlhf.images.geometry import PixelLimits, VisionGeometry
from mindrlhf.training.preflight.features import check_images, check_vision

SHARDED = ["run.device=ascend", "parallel_config.model_parallel=2"]
PIPELINE = [*SHARDED, "parallel_config.pipeline_stage=2", "parallel_config.micro_batch_num=2"]
HEADER = ImageHeader(1, 1, 1, 4, IMAGE, PixelLimits(), VisionGeometry())


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vision")
    write_tiny_vl(directory / "model")
    (directory / "config.yaml").write_text("")
    return directory


def overrides(directory, *changes) -> list[str]:
    return [
        f"model.path={directory / 'model'}",
        "data.train_file=prompts.mindrecord",
        f"data.tokenizer_dir={directory / 'model'}",
        "reward.verifier_function=accuracy_reward",
        *changes,
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["algorithm.name=ppo", "critic.path=critic"], "does not see images as the model"),
        (["reward.model_path=scorer"], "reward model reads text only"),
        (["training.packing=shared_prompts"], "image positions are of whole sequences"),
        (["tools.names=python"], "an image token that the model wrote"),
        (["tools.environment=lake.py:Lake"], "an image token that the model wrote"),
        (["rollout.segment_tokens=4"], "an image token that the model wrote"),
        (["lora.rank=4"], "adapters are of text models"),
    ],
)
def test_what_a_run_does_not_do_is_refused(directory, changes, message):
    config = load_grpo_config(directory / "config.yaml", overrides(directory, *changes), world_size=None)
    with pytest.raises(UserError, match=message) as error:
        check_vision(config)
    assert "\n" not in str(error.value)


def test_a_plain_run_is_allowed(directory):
    check_vision(load_grpo_config(directory / "config.yaml", overrides(directory)))
    check_vision(
        load_grpo_config(
            directory / "config.yaml", overrides(directory, "algorithm.name=ppo", f"critic.path={directory / 'model'}")
        )
    )
    for layout in (SHARDED, PIPELINE, [*SHARDED, "parallel_config.context_parallel=2"]):
        check_vision(load_grpo_config(directory / "config.yaml", overrides(directory, *layout), world_size=None))


def test_rows_for_several_layers_are_refused_in_pipelines(directory, tmp_path):
    model = write_tiny_vl(tmp_path / "model", TinyVl(family="qwen3_vl", vision_depth=3))

    def config(*changes):
        values = overrides(directory, f"model.path={model}", *changes)
        return load_grpo_config(directory / "config.yaml", values, world_size=None)

    with pytest.raises(UserError, match="pipeline_stage' = 2 does not go with a vision-language model whose images"):
        check_vision(config(*PIPELINE))
    for changes in ((), SHARDED):
        check_vision(config(*changes))


def test_config_check_refuses_too(directory, capsys):
    command = ["config", "check", str(directory / "config.yaml")]

    def errors(*changes: str) -> str:
        assert main([*command, *changes]) != 0  # no data is there
        return capsys.readouterr().err

    assert "sees images" not in errors(*overrides(directory))
    offline = [f"model.path={directory / 'model'}", "data.train_file=x", f"data.tokenizer_dir={directory / 'model'}"]
    assert "sees images" not in errors("--kind", "sft", *offline)
    for kind in ("sft", "dpo"):
        assert "such a model sharded yet" in errors("--kind", kind, *offline, *SHARDED)
    assert "adapters are of text models" in errors("--kind", "sft", *offline, "lora.rank=4")
    assert "sees images" not in errors("--kind", "dpo", *offline)
    assert "mindrlhf reward-model does not train yet" in errors("--kind", "reward-model", *offline)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"image_token": 3}, "another model"), ({"geometry": VisionGeometry(merge=1)}, "another model"), ({}, None)],
)
def test_images_must_be_cut_for_the_model(directory, changes, message):
    header = ImageHeader(**{**vars(HEADER), **changes})
    file = SimpleNamespace(path="prompts.mindrecord", header=SimpleNamespace(images=header))
    if message is None:
        check_images(str(directory / "model"), file)
    else:
        with pytest.raises(UserError, match=message):
            check_images(str(directory / "model"), file)


def test_a_model_of_text_is_shown_no_images(directory):
    file = SimpleNamespace(path="prompts.mindrecord", header=SimpleNamespace(images=HEADER))
    with pytest.raises(UserError, match="reads text only"):
        check_images(str(directory), file)
