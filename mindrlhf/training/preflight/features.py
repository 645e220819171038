"""Checks of features that exclude each other, or do not fit the model or the data.

Each check raises a UserError: one line that names the key and its fix.
"""

from pathlib import Path

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.refusals import DEEP_IMAGES, ELASTIC, IMAGES, REPLAY, SHARDED, SPANNING, refusal_rules
from mindrlhf.config.schema import GrpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from mindrlhf.config.training import is_split, trains_sharded
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.errors import UserError, refuse
from mindrlhf.layout.servers import spans_nodes
from mindrlhf.specs import ModelDims, find_spec, scorer_config
from mindrlhf.training.routing.rows import ReplayedExperts
from mindrlhf.training.vision.image_rows import ImageTokens
from mindrlhf.weights.hf import read_hf_config


def check_vision(config: GrpoConfig) -> None:
    """Refuse what a run of `mindrlhf train` does not do with a vision-language model."""
    path, tokens = config.model.path, image_tokens(config.model.path)
    if tokens is None:
        return
    if needs_critic(config) and image_tokens(config.critic.path) != tokens:
        raise UserError(
            f"'critic.path' is {config.critic.path}, which does not see images as the model in {path} does: start the "
            "critic from that model"
        )
    is_deep = bool(model_dims(path).vision.deepstack_blocks)
    refuse(refusal_rules(config, {IMAGES, DEEP_IMAGES} if is_deep else {IMAGES}))


def check_offline_vision(config: OfflineConfig) -> None:
    """Refuse what training on fixed data does not do with a vision-language model."""
    model, sees = config.model, image_tokens(config.model.path) is not None
    if isinstance(config, RewardModelConfig):
        if sees:
            raise UserError(
                f"the model in {model.path} sees images, which mindrlhf reward-model does not train yet: use mindrlhf "
                "train, sft or dpo"
            )
        return
    refuse(refusal_rules(config, {IMAGES}) if sees else ())
    if sees and trains_sharded(config):
        command = "sft" if isinstance(config, SftConfig) else "dpo"
        raise UserError(
            f"the model in {model.path} sees images, and mindrlhf {command} does not train such a model sharded yet, "
            "as on NPUs: use data parallelism alone, and run.device=cpu"
        )


def check_images(path: str, file: PromptFile) -> None:
    """Check that a model sees the images of a prompt file as they were cut for it."""
    header, expected = file.header.images, image_tokens(path)
    if header is None:
        return
    if expected is None:
        raise UserError(f"{file.path} has images, but the model in {path} reads text only: use a model with vision")
    if (header.image_token, header.geometry) != (expected.image_token, expected.geometry):
        raise UserError(
            f"{file.path} has images for another model than that in {path} (image token {header.image_token}, "
            f"{header.geometry}; not {expected.image_token}, {expected.geometry}): build it again with this model's "
            "tokenizer and processor"
        )


def check_replay(config: GrpoConfig) -> None:
    """Refuse `training.replay_routing` where nothing is routed, or where the choices cannot be had or used."""
    if not config.training.replay_routing:
        return
    refuse(refusal_rules(config, {REPLAY}))
    if config.run.device == "cpu" and config.rollout.tensor_parallel > 1:
        raise UserError("replay_routing: on a CPU one process records experts: set rollout.tensor_parallel to 1")
    if replayed_experts(config) is None:
        raise UserError(
            f"'training.replay_routing' is true, but the model in {config.model.path} has no experts: set it to false"
        )


def check_elastic(config: GrpoConfig, num_ranks: int, num_nodes: int) -> None:
    """Refuse what nodes that come and go do not do."""
    settings = {ELASTIC: True, SHARDED: is_split(config.parallel_config)}
    settings[SPANNING] = spans_nodes(config.rollout, num_nodes, num_ranks // num_nodes)
    refuse(refusal_rules(config, {name for name, is_so in settings.items() if is_so}))


def check_rows_in_window(path: str, row_length: int) -> None:
    """Check that rows are no longer than the sliding window of the model in a directory, if it has one."""
    model_dims(path).check_window(row_length)


def model_dims(path: str, *, as_scorer: bool = False) -> ModelDims:
    """Return the sizes of the model in a directory, or of its scoring form."""
    hf_config = read_hf_config(path)
    hf_config = scorer_config(hf_config) if as_scorer else hf_config
    return find_spec(hf_config).dims(hf_config)


def image_tokens(path: str) -> ImageTokens | None:
    """Return the image tokens of the model in a directory; None when it reads text only, or has no config.json.

    Raises:
        UserError: its config.json is damaged, or of an unknown model.
    """
    return ImageTokens.of(model_dims(path)) if Path(path, "config.json").is_file() else None


def replayed_experts(config: GrpoConfig) -> ReplayedExperts | None:
    """Return how the choices look that a run replays; None when it replays none."""
    return ReplayedExperts.of(model_dims(config.model.path)) if config.training.replay_routing else None
