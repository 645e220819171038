"""The models that a run reads, in a table, and the one check of each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mindrlhf.config.derived import names_reference, needs_critic
from mindrlhf.config.memory import MemorySection, check_num_layers
from mindrlhf.config.model import LoraSection
from mindrlhf.config.schema import AnyConfig, DpoConfig, GrpoConfig, RewardModelConfig
from mindrlhf.data.tokenizers import Tokenizer, load_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.specs import find_spec, scorer_config
from mindrlhf.specs.lora import adapters
from mindrlhf.training.preflight.features import model_dims
from mindrlhf.weights.adapters.peft import check_adapter
from mindrlhf.weights.convert import check_checkpoint
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.open import open_tensors

TOKENS, SCORES = "tokens", "scores"


@dataclass(frozen=True)
class Role:
    """A model that a run reads.

    Attributes:
        key: the name of its directory in the config.
        path: the directory.
        name: of the role, in messages.
        gives: what the model in the directory must give, "tokens" or "scores"; "" for either.
        as_scorer: the run takes it in its scoring form.
        lora: of adapters that are trained in its place; None where it has none.
        brings_tokenizer: a tokenizer in the directory must be that of the data.
    """

    key: str
    path: str
    name: str = "model"
    gives: str = TOKENS
    as_scorer: bool = False
    lora: LoraSection | None = None
    brings_tokenizer: bool = False

    @property
    def is_of_actor(self) -> bool:
        """True for the model that is trained and the one that it is compared with: both read all that it reads."""
        return self.key.startswith("model.")


def roles_of(config: AnyConfig) -> Iterator[Role]:
    """Yield the models that a run reads, the one that it trains first."""
    model, is_rl = config.model, isinstance(config, GrpoConfig)
    is_scorer = isinstance(config, RewardModelConfig)
    yield Role("model.path", model.path, gives="" if is_scorer else TOKENS, as_scorer=is_scorer, lora=config.lora)
    if names_reference(config) if is_rl else isinstance(config, DpoConfig) and model.reference_path:
        yield Role("model.reference_path", model.reference_path, "reference model", brings_tokenizer=is_rl)
    if is_rl and needs_critic(config):
        lora = replace(config.lora, path="")  # that adapter is the actor's
        yield Role("critic.path", config.critic.path, "critic", "", as_scorer=True, lora=lora, brings_tokenizer=True)
    if is_rl and config.reward.model_path:
        yield Role("reward.model_path", config.reward.model_path, "reward model", SCORES, brings_tokenizer=True)


def check_role(config: AnyConfig, role: Role, tokenizer: Tokenizer | None) -> None:
    """Check the directory of a model: its kind, its vocabulary, its weights, and the adapters that it is to have.

    Raises:
        UserError: something is wrong with one.
    """
    hf_config = read_hf_config(role.path)
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    if role.gives == SCORES and not spec.is_scorer:
        raise UserError(
            f"'{role.key}' is {role.path}, a {spec.hf_architecture}, which gives tokens, not scores: train one with "
            "mindrlhf reward-model"
        )
    if role.gives == TOKENS and spec.is_scorer:
        raise UserError(f"the model in {role.path} gives scores, not tokens: use a language model")
    if role.brings_tokenizer and tokenizer is not None:
        _check_vocabulary(config, role, tokenizer)
    if tokenizer is not None and tokenizer.vocab_size > dims.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {role.path} has {dims.vocab_size}: "
            "use the model's own tokenizer"
        )
    if not (config.model.random_init and role.path == config.model.path):
        check_checkpoint(open_tensors(role.path), spec, dims)
    if role.lora is not None and role.lora.options is not None:
        _check_lora(config, role, scorer_config(hf_config) if role.as_scorer else hf_config)


def _check_vocabulary(config: GrpoConfig, role: Role, tokenizer: Tokenizer) -> None:
    # Only a directory that brings its tokenizer can tell: models pad their vocabularies to sizes of their own.
    has_tokenizer = Path(role.path, "tokenizer.json").exists()
    if has_tokenizer and load_tokenizer(role.path).fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"'{role.key}' is {role.path}, a model of another vocabulary than data.tokenizer_dir = "
            f"{config.data.tokenizer_dir}: the {role.name} reads the actor's tokens, so use a model with that tokenizer"
        )


def _check_lora(config: AnyConfig, role: Role, hf_config: dict) -> None:
    """Check that a model has the matrices that are to have adapters, and that an adapter to begin with is of it."""
    if config.run.device != "cpu" and config.checkpoint.node_local:
        raise UserError(
            "'checkpoint.node_local' is true, but adapters of sharded models are put together from a directory that "
            "all nodes see: set it to false, or remove lora.rank"
        )
    spec = find_spec(hf_config)
    adapters(spec, spec.dims(hf_config), role.lora.options)
    if role.lora.path:
        check_adapter(role.lora.path, hf_config, role.lora.options)


def check_layers(memory: MemorySection, path: str) -> None:
    """Check that a model has the layers whose activations are computed again."""
    dims = model_dims(path)
    check_num_layers(memory, dims.num_layers, dims.has_dense_mlps)


def check_training_of_actor(config: GrpoConfig, num_steps: int) -> None:
    """Check that the actor is trained at all, and that a reference model that follows it has its shape.

    Raises:
        UserError: one is not so.
    """
    warmup, paths = config.critic.warmup_steps, (config.model.path, config.model.reference_path)
    if needs_critic(config) and 0 < num_steps <= warmup:
        raise UserError(
            f"'critic.warmup_steps' is {warmup}, but the run has {num_steps} steps, so that the actor is never "
            "trained: lower it"
        )
    follows = names_reference(config) and config.algorithm.sync_ref_model
    if follows and model_dims(paths[0]) != model_dims(paths[1]):
        raise UserError(
            f"'algorithm.sync_ref_model' copies the actor into the reference model, but {paths[1]} has another shape "
            f"than {paths[0]}: set it to false, or use a reference of the same shape"
        )
