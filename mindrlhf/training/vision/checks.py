"""What models with vision cannot be trained with yet: each refusal is one line, before anything is built."""

from pathlib import Path

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.lora_section import LoraSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.sections import SHARED_PROMPTS, ModelSection, RunSection
from mindrlhf.config.watching_sections import CELL_LEVEL
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.errors import UserError
from mindrlhf.layout.feasibility import is_split
from mindrlhf.specs import find_spec
from mindrlhf.training.vision.image_rows import ImageTokens
from mindrlhf.weights.hf import read_hf_config


def image_tokens(path: str) -> ImageTokens | None:
    """How the model in a directory sees images; None when it does not, or where no config.json is.

    Raises:
        UserError: its config.json is damaged, or of an unknown model.
    """
    if not (Path(path) / "config.json").is_file():
        return None
    hf_config = read_hf_config(path)
    return ImageTokens.of(find_spec(hf_config).dims(hf_config))


def check_vision(config: GrpoConfig) -> None:
    """Refuse what a run of `mindrlhf train` does not do with a model that sees images.

    Raises:
        UserError: naming the key and its fix.
    """
    check_device(config.model, config.run, config.lora)
    if image_tokens(config.model.path) is None:
        return
    refused = {
        "parallel_config that shards the model": (is_split(config.parallel_config), "use data parallelism alone"),
        f"algorithm.advantage={config.algorithm.advantage}": (
            needs_critic(config),
            "it takes a critic, which reads text only: use grpo, say",
        ),
        "reward.model_path": (bool(config.reward.model_path), "a reward model reads text only: use verifiers"),
        f"training.packing={SHARED_PROMPTS}": (
            config.training.packing == SHARED_PROMPTS,
            "positions of images are of whole sequences: use best_fit",
        ),
        "rollout.span_tokens": (config.rollout.span_tokens > 0, "spans carry no images on: set it to 0"),
        "tools.names": (bool(config.tools.names), "conversations are of text only: leave tools out"),
        "tools.environment": (bool(config.tools.environment), "episodes are of text only: leave it out"),
        f"msprobe.level={CELL_LEVEL}": (
            config.msprobe.enabled and config.msprobe.level == CELL_LEVEL,
            "cells of a vision tower are not dumped: set it to debug",
        ),
    }
    for what, (is_asked, fix) in refused.items():
        if is_asked:
            raise UserError(f"the model in {config.model.path} sees images and is not trained with {what} yet: {fix}")


def check_device(model: ModelSection, run: RunSection, lora: LoraSection) -> None:
    """Refuse to train a model that sees images where it has no cells or with adapters, and a tower that is not there.

    Raises:
        UserError: naming the key and its fix.
    """
    if model.train_vision != "none" and image_tokens(model.path) is None:
        raise UserError(
            f"'model.train_vision' is {model.train_vision}, but the model in {model.path} reads text only: leave it out"
        )
    if lora.rank is not None and image_tokens(model.path) is not None:
        raise UserError(f"the model in {model.path} sees images and takes no adapters yet: remove lora.rank")
    if run.device != "cpu" and image_tokens(model.path) is not None:
        raise UserError(
            f"the model in {model.path} sees images and is not trained with run.device={run.device} yet: its cells "
            "exist for the CPU, so set run.device to cpu"
        )


def check_images(path: str, file: PromptFile) -> None:
    """Check that a model sees the images of a prompt file as they were cut for it.

    Raises:
        UserError: it sees none, or cuts them otherwise.
    """
    header = file.header.images
    if header is None:
        return
    expected = image_tokens(path)
    if expected is None:
        raise UserError(f"{file.path} has images, but the model in {path} reads text only: use a model with vision")
    if (header.image_token, header.geometry) != (expected.image_token, expected.geometry):
        raise UserError(
            f"{file.path} has images for another model than that in {path} (image token {header.image_token}, "
            f"{header.geometry}; not {expected.image_token}, {expected.geometry}): build it again with this model's "
            "tokenizer and processor"
        )


def check_text_only(model: ModelSection, command: str) -> None:
    """Refuse a model that sees images where only text is trained.

    Raises:
        UserError: naming the command.
    """
    if model.train_vision != "none" or image_tokens(model.path) is not None:
        raise UserError(
            f"the model in {model.path} sees images, which mindrlhf {command} does not train yet: "
            "use mindrlhf train or sft"
        )
