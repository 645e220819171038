"""Which features do not go together, with each other or with the model and the data: one line for each refusal."""

import json

from mindrlhf.config.derived import needs_critic, reference_paths
from mindrlhf.config.model import LoraSection, ModelSection
from mindrlhf.config.observe import CELL_LEVEL
from mindrlhf.config.run import RunSection
from mindrlhf.config.schema import DpoConfig, GrpoConfig, SftConfig
from mindrlhf.config.training import SHARED_PROMPTS, is_split
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.errors import UserError
from mindrlhf.layout.servers import spans_nodes
from mindrlhf.rollout.vllm_options import sees_images
from mindrlhf.specs import find_spec
from mindrlhf.training.routing.rows import replayed_experts
from mindrlhf.training.vision.image_rows import image_tokens
from mindrlhf.weights.hf import read_hf_config

_MOST_LISTED = 5


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


def check_replay(config: GrpoConfig) -> None:
    """Refuse `training.replay_routing` where nothing is routed, or where the choices cannot be had or used.

    Raises:
        UserError: naming the key and its fix.
    """
    if not config.training.replay_routing:
        return
    refused = {
        f"run.device={config.run.device}": (config.run.device != "cpu", "MindFormers' routers for Ascend take none"),
        f"rollout.tensor_parallel={config.rollout.tensor_parallel}": (
            config.rollout.tensor_parallel > 1,
            "experts are recorded in a server of one process",
        ),
        f"rollout.draft_tokens={config.rollout.draft_tokens}": (
            config.rollout.draft_tokens > 0,
            "experts of tokens that are only guessed would be recorded",
        ),
        "rollout.span_tokens": (config.rollout.span_tokens > 0, "a response of several spans has several routings"),
        "tools.names": (bool(config.tools.names), "conversations carry no routing on"),
        f"msprobe.level={CELL_LEVEL}": (
            config.msprobe.enabled and config.msprobe.level == CELL_LEVEL,
            "single cells are run without it",
        ),
    }
    for what, (is_asked, why) in refused.items():
        if is_asked:
            raise UserError(f"'training.replay_routing' is true, but not with {what}: {why}; set it to false")
    if replayed_experts(config) is None:
        raise UserError(
            f"'training.replay_routing' is true, but the model in {config.model.path} has no experts: set it to false"
        )


def check_sources(config: GrpoConfig, file: PromptFile) -> None:
    """Check that every prompt of the training file has a teacher, and every teacher prompts.

    Raises:
        UserError: naming the source and the fix.
    """
    teachers = config.distillation.teachers
    if not teachers:
        return
    sources = file.sources()
    has = f"{file.path} has {_listed(sources)}"
    if unused := sorted(teachers.keys() - sources):
        raise UserError(
            f"'distillation.teachers' names the source {unused[0]!r}, but {has}: write it as it is there, or remove it"
        )
    alone = [source for source in sources if source not in teachers]
    if alone and not config.model.reference_path:
        raise UserError(
            f"'distillation.teachers' has no teacher for {_listed(alone)} of {file.path}: add one, or set "
            "model.reference_path to a teacher for all other sources"
        )


def check_num_words(config: GrpoConfig) -> None:
    """Check that student and teachers have words beyond those of `algorithm.distill_top_k`.

    Raises:
        UserError: one has not.
    """
    k = config.algorithm.distill_top_k
    for path in (config.model.path, *reference_paths(config)) if k else ():
        hf_config = read_hf_config(path)
        vocab_size = find_spec(hf_config).dims(hf_config).vocab_size
        if k >= vocab_size:
            raise UserError(
                f"'algorithm.distill_top_k' is {k}, but the model in {path} has {vocab_size} words, of which at least "
                f"one must be left that is not among the likeliest: set it to {vocab_size - 1} or less (64 is plenty)"
            )


def _listed(sources: list[str]) -> str:
    shown = ", ".join(repr(source) for source in sources[:_MOST_LISTED])
    rest = len(sources) - _MOST_LISTED
    return f"the sources {shown}" + (f" and {rest} more" if rest > 0 else "")


def check_elastic(config: GrpoConfig, num_ranks: int, num_nodes: int) -> None:
    """Refuse what has not been shown to give the same samples on nodes that come and go.

    Args:
        num_ranks: of the nodes that train.
        num_nodes: machines that they are on, in equal parts.

    Raises:
        UserError: naming the key.
    """
    rollout = config.rollout
    unsupported = {
        "rollout.ahead": (rollout.ahead, 0),
        "rollout.asynchronous": (rollout.asynchronous, False),
        "rollout.board_gib": (rollout.board_gib, 0.0),
        "rollout.span_tokens": (rollout.span_tokens, 0),
        "tools.names": (list(config.tools.names), []),
        "tools.environment": (config.tools.environment, ""),
        "training.replay_routing": (config.training.replay_routing, False),
        "lora.rank": (config.lora.rank, None),
    }
    for key, (value, needed) in unsupported.items():
        if value != needed:
            raise UserError(
                f"'{key}' is {value}, but with --elastic it has to be {json.dumps(needed)}: set it so, or leave out "
                "--elastic"
            )
    if spans_nodes(rollout, num_nodes, num_ranks // num_nodes):
        raise UserError(
            f"'rollout.tensor_parallel' is {rollout.tensor_parallel}, so that servers lie over several nodes of "
            f"{num_ranks // num_nodes} ranks, but with --elastic each lies within one: set it to "
            f"{num_ranks // num_nodes}, or leave out --elastic"
        )
    if is_split(config.parallel_config):
        raise UserError("the model is cut over ranks, but --elastic is for whole models: leave out --elastic")
    if sees_images(config.model.path):
        raise UserError(f"the model in {config.model.path} sees images, but --elastic is for text: leave it out")
