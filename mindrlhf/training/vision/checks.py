"""What models with vision cannot be trained with yet: each refusal is one line, before anything is built."""

from pathlib import Path

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.model import LoraSection, ModelSection
from mindrlhf.config.run import RunSection
from mindrlhf.config.schema import DpoConfig, GrpoConfig, SftConfig
from mindrlhf.config.training import SHARED_PROMPTS, is_split
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.errors import UserError
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
    stages = config.parallel_config.pipeline_stage
    refused = {
        f"parallel_config.pipeline_stage={stages}": (
            stages > 1 and _is_deep(config.model.path),
            "its images go to several layers: set it to 1",
        ),
        "reward.model_path": (bool(config.reward.model_path), "a reward model reads text only: use verifiers"),
        f"training.packing={SHARED_PROMPTS}": (
            config.training.packing == SHARED_PROMPTS,
            "positions of images are of whole sequences: use best_fit",
        ),
        "rollout.span_tokens": (config.rollout.span_tokens > 0, "spans carry no images on: set it to 0"),
        "tools.names": (bool(config.tools.names), "conversations are of text only: leave tools out"),
        "tools.environment": (bool(config.tools.environment), "episodes are of text only: leave it out"),
    }
    if needs_critic(config) and image_tokens(config.critic.path) != image_tokens(config.model.path):
        raise UserError(
            f"'critic.path' is {config.critic.path}, which does not see images as the model in {config.model.path} "
            "does: start the critic from that model"
        )
    for what, (is_asked, fix) in refused.items():
        if is_asked:
            raise UserError(f"the model in {config.model.path} sees images and is not trained with {what} yet: {fix}")


def check_offline(config: SftConfig | DpoConfig, command: str) -> None:
    """Refuse what `mindrlhf sft` or `dpo` does not do with a model that sees images.

    Raises:
        UserError: naming the key and its fix.
    """
    check_device(config.model, config.run, config.lora)
    if image_tokens(config.model.path) is not None and is_split(config.parallel_config):
        raise UserError(
            f"the model in {config.model.path} sees images, and mindrlhf {command} does not train such a model sharded "
            "yet: use data parallelism alone"
        )


def check_device(model: ModelSection, run: RunSection, lora: LoraSection) -> None:
    """Refuse adapters for a model that sees images, a tower trained where it has no such cells, or that is not there.

    Raises:
        UserError: naming the key and its fix.
    """
    if model.train_vision != "none" and image_tokens(model.path) is None:
        raise UserError(
            f"'model.train_vision' is {model.train_vision}, but the model in {model.path} reads text only: leave it out"
        )
    if lora.rank is not None and image_tokens(model.path) is not None:
        raise UserError(f"the model in {model.path} sees images and takes no adapters yet: remove lora.rank")
    if run.device != "cpu" and model.train_vision != "none":
        raise UserError(
            f"'model.train_vision' is {model.train_vision}, but with run.device={run.device} the vision tower "
            "is frozen so far: set it to none, or run.device to cpu"
        )


def _is_deep(path: str) -> bool:
    hf_config = read_hf_config(path)
    return bool(find_spec(hf_config).dims(hf_config).vision.deepstack_blocks)


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


def check_text_only(model: ModelSection) -> None:
    """Refuse a model that sees images as a reward model.

    Raises:
        UserError: naming the command.
    """
    if model.train_vision != "none" or image_tokens(model.path) is not None:
        raise UserError(
            f"the model in {model.path} sees images, which mindrlhf reward-model does not train yet: "
            "use mindrlhf train, sft or dpo"
        )
