"""What models with vision cannot be trained with yet: each refusal is one line, before anything is built."""

from pathlib import Path

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.msprobe_section import CELL_LEVEL
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.sections import ModelSection
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.errors import UserError
from mindrlhf.layout.feasibility import is_split
from mindrlhf.specs import find_spec
from mindrlhf.weights.hf import read_hf_config


def has_vision(path: str) -> bool:
    """Whether the model in a directory sees images; False where no config.json is.

    Raises:
        UserError: its config.json is damaged, or of an unknown model.
    """
    if not (Path(path) / "config.json").is_file():
        return False
    hf_config = read_hf_config(path)
    return find_spec(hf_config).dims(hf_config).vision is not None


def check_vision(config: GrpoConfig) -> None:
    """Refuse what a run of `mindrlhf train` does not do with a model that sees images.

    Raises:
        UserError: naming the key and its fix.
    """
    if not has_vision(config.model.path):
        return
    refused = {
        "run.device=ascend": (config.run.device != "cpu", "its cells exist for the CPU: set run.device to cpu"),
        "parallel_config that shards the model": (is_split(config.parallel_config), "use data parallelism alone"),
        f"algorithm.advantage={config.algorithm.advantage}": (
            needs_critic(config),
            "it takes a critic, which reads text only: use grpo, say",
        ),
        "reward.model_path": (bool(config.reward.model_path), "a reward model reads text only: use verifiers"),
        "tools.names": (bool(config.tools.names), "conversations are of text only: leave tools out"),
        f"msprobe.level={CELL_LEVEL}": (
            config.msprobe.enabled and config.msprobe.level == CELL_LEVEL,
            "cells of a vision tower are not dumped: set it to debug",
        ),
    }
    for what, (is_asked, fix) in refused.items():
        if is_asked:
            raise UserError(f"the model in {config.model.path} sees images and is not trained with {what} yet: {fix}")


def check_images(path: str, file: PromptFile) -> None:
    """Check that a model sees the images of a prompt file as they were cut for it.

    Raises:
        UserError: it sees none, or cuts them otherwise.
    """
    header = file.header.images
    if header is None:
        return
    if not has_vision(path):
        raise UserError(f"{file.path} has images, but the model in {path} reads text only: use a model with vision")
    hf_config = read_hf_config(path)
    vision = find_spec(hf_config).dims(hf_config).vision
    cut, expected = (header.image_token, header.geometry), (vision.image_token, vision.geometry)
    if cut != expected:
        raise UserError(
            f"{file.path} has images for another model than that in {path} (image token {cut[0]}, {cut[1]}; "
            f"not {expected[0]}, {expected[1]}): build it again with this model's tokenizer and processor"
        )


def check_text_only(model: ModelSection, command: str) -> None:
    """Refuse a model that sees images where only text is trained.

    Raises:
        UserError: naming the command.
    """
    if has_vision(model.path):
        raise UserError(
            f"the model in {model.path} sees images, which mindrlhf {command} does not train yet: use mindrlhf train"
        )
