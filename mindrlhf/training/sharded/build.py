"""The actor of a run whose model is sharded over the ranks, put together from its config."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from mindrlhf.algorithms.logprobs import PolicyLogProbs
from mindrlhf.algorithms.losses import POLICY_INPUTS
from mindrlhf.algorithms.scores import TokenScores
from mindrlhf.algorithms.value_loss import VALUE_INPUTS
from mindrlhf.config.derived import critic_optimizer, is_base, needs_critic, reference_paths
from mindrlhf.config.memory import MemorySection
from mindrlhf.config.model import ModelSection
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.config.training import SHARED_PROMPTS, ParallelSection, resolve_data_parallel
from mindrlhf.data.packing import PackedRows, padding_rows
from mindrlhf.models.load import has_random_weights
from mindrlhf.shards.sources import ArraySource, RandomSource, open_scorer_source, open_source
from mindrlhf.specs import scorer_config
from mindrlhf.training.distillation.models import as_one
from mindrlhf.training.runtime import Rank, start_parallel
from mindrlhf.training.sharded.adapted import AdaptedShard
from mindrlhf.training.sharded.cells import ParallelUpdate
from mindrlhf.training.sharded.critic import ShardedCritic
from mindrlhf.training.sharded.factory import (
    build_logprobs,
    build_policy,
    build_update,
    build_value_model,
    build_value_update,
)
from mindrlhf.training.sharded.learner import ShardedLearner, UpdateGraph
from mindrlhf.training.sharded.model import ShardedModel
from mindrlhf.training.sharded.offload import OptimizerPlaces
from mindrlhf.training.vision.image_rows import ImageTokens, with_images
from mindrlhf.training.worker.actor import Actor
from mindrlhf.training.worker.critic import NO_TURNS, ActorCritic
from mindrlhf.training.worker.policy_loss import build_policy_loss
from mindrlhf.weights.hf import read_hf_config

_Learner = TypeVar("_Learner", bound=ShardedLearner)
AnyConfig = GrpoConfig | SftConfig | DpoConfig | RewardModelConfig


def build_sharded_actor(config: GrpoConfig, row_lengths: tuple[int, ...], rank: Rank) -> Actor:
    """Build this rank's shards and graphs of the policy, and of the reference and reward models if the run has them.

    From here on MindSpore shards every graph that this process compiles.

    Args:
        config: of the run, checked.
        row_lengths: of the run, ascending.
        rank: this process; communication is up.

    Raises:
        UserError: a model cannot be sharded this way, or its weights do not fit.
    """
    parallel = start_sharding(config, rank)
    shares_prompts = config.training.packing == SHARED_PROMPTS
    options: dict = {"row_length": row_lengths[-1], "temperature": config.rollout.temperature, "memory": config.memory}
    options["shared_prompts"] = shares_prompts
    options["num_image_rows"] = config.training.micro_batch_size * row_lengths[-1]
    policy = build_policy(
        read_hf_config(config.model.path), config.model, parallel, **options, lora=config.lora.options
    )
    update = build_update(policy, lambda given: build_policy_loss(config, given), config.optimizer, parallel)
    shard = shard_of(policy, parallel, rank)
    learner = make_learner(shard, update, config.memory)
    references: dict[str, ShardedModel] = {}
    for path in reference_paths(config):
        if is_base(config, path):
            continue
        frozen = shard_of(build_policy(read_hf_config(path), config.model, parallel, **options), parallel, rank)
        if learner.model.network.images is not None and path == config.model.path:
            frozen.network.images.borrow(learner.model.network.images)
        references[path] = frozen
    source = model_source(config.model, config.model.path, config.run.seed)
    plain = (padding_rows((config.training.micro_batch_size, n), share_prompts=shares_prompts) for n in row_lengths)
    image_tokens = ImageTokens.of(policy.model.dims)
    # Before the policy's graphs, of which MindSpore's strategy file is to be.
    critic = _build_critic(config, row_lengths, parallel, rank) if needs_critic(config) else None
    _compile(learner, references.values(), [with_images(rows, (), (), image_tokens) for rows in plain])
    # Now a parameter has the shape of its shard.
    load_trained(learner.model, source, config)
    for path, frozen in references.items():
        frozen.load(model_source(config.model, path, config.run.seed))
    in_order = [references.get(path) or learner.model.base() for path in reference_paths(config)]
    parts: dict = {"reference": as_one(in_order), "saves_reference": config.algorithm.sync_ref_model}
    if critic is None:
        actor = Actor(learner, **parts)
    else:
        actor = ActorCritic(critic, NO_TURNS, learner=learner, **parts)
    if config.reward.model_path:
        actor.use_reward_model(_build_reward_model(config, row_lengths, parallel, rank))
    return actor


def _build_critic(
    config: GrpoConfig, row_lengths: tuple[int, ...], parallel: ParallelSection, rank: Rank
) -> ShardedCritic:
    path, shares_prompts = config.critic.path, config.training.packing == SHARED_PROMPTS
    scorer = build_value_model(
        scorer_config(read_hf_config(path)),
        config.model,
        parallel,
        row_length=row_lengths[-1],
        memory=config.memory,
        shared_prompts=shares_prompts,
        num_image_rows=config.training.micro_batch_size * row_lengths[-1],
        lora=config.lora.options,
    )
    update = build_value_update(scorer, config.critic.clip_range, critic_optimizer(config), parallel)
    shard = shard_of(scorer, parallel, rank)
    critic = make_learner(shard, update, config.memory, VALUE_INPUTS, ShardedCritic)
    image_tokens = ImageTokens.of(scorer.model.dims)
    for length in row_lengths:
        rows = padding_rows((config.training.micro_batch_size, length), share_prompts=shares_prompts)
        critic.compile(with_images(rows, (), (), image_tokens))
    if has_random_weights(config.model, path):
        source: ArraySource = RandomSource(path, config.run.seed, as_scorer=True)
    else:
        source = open_scorer_source(path)
    # The adapter of lora.path is the policy's.
    load_trained(shard, source, dataclasses.replace(config, lora=dataclasses.replace(config.lora, path="")))
    return critic


def _build_reward_model(
    config: GrpoConfig, row_lengths: tuple[int, ...], parallel: ParallelSection, rank: Rank
) -> ShardedModel:
    path = config.reward.model_path
    scorer = build_value_model(read_hf_config(path), config.model, parallel, row_length=row_lengths[-1])
    model = scorer_shard(scorer, parallel, rank)
    for length in row_lengths:
        model.compile(padding_rows((config.training.micro_batch_size, length)))
    model.load(open_source(path))
    return model


def scorer_shard(scorer: TokenScores, parallel: ParallelSection, rank: Rank) -> ShardedModel:
    """Return this rank's shard of a reward model, and the graph of its scores, which stand after each token."""
    kind = ShardedModel if scorer.model.lora is None else AdaptedShard
    return kind(scorer.model, build_logprobs(scorer, parallel), parallel, rank.index, after_token=True)


def start_sharding(config: AnyConfig, rank: Rank) -> ParallelSection:
    """Have MindSpore shard the graphs of a run from now on; return its layout with `data_parallel` filled in."""
    parallel = resolve_layout(config.parallel_config, rank.world_size)
    strategy_dir = Path(config.run.output_dir) / "logs" / "strategy"
    strategy_dir.mkdir(parents=True, exist_ok=True)
    start_parallel(parallel, rank, strategy_dir / f"strategy_rank_{rank.index}.ckpt")
    return parallel


def shard_of(policy: PolicyLogProbs, parallel: ParallelSection, rank: Rank) -> ShardedModel:
    """Return this rank's shard of a model, with adapters or without, and the graph of its log-probabilities."""
    kind = ShardedModel if policy.model.lora is None else AdaptedShard
    return kind(policy.model, build_logprobs(policy, parallel), parallel, rank.index)


def make_learner(
    shard: ShardedModel,
    update: ParallelUpdate,
    memory: MemorySection,
    token_inputs: tuple[str, ...] = POLICY_INPUTS,
    kind: type[_Learner] = ShardedLearner,
) -> _Learner:
    """Return what trains a shard by the graph of ``update``, its optimiser's state where the section wants it."""
    held = {one.name for one in shard.held}
    return kind(shard, UpdateGraph.of(update, memory, token_inputs), OptimizerPlaces(update, held, memory))


def load_trained(model: ShardedModel, source: ArraySource, config: AnyConfig) -> None:
    """Load the model that a run trains, and what its adapters begin with."""
    model.load(source)
    if isinstance(model, AdaptedShard):
        model.begin(config.run.seed, config.lora.path)


def _compile(learner: ShardedLearner, references: Iterable[ShardedModel], shapes: Sequence[PackedRows]) -> None:
    for rows in shapes:
        for name, model in (("old_logprobs", learner.model), *(("reference_logprobs", one) for one in references)):
            learner.count_compile(name, rows)
            model.compile(rows)
        # Last, so that MindSpore's strategy file is that of the update, which has the optimiser's state.
        learner.compile(rows)


def resolve_layout(parallel: ParallelSection, world_size: int) -> ParallelSection:
    """Return `parallel_config` with `data_parallel` filled in."""
    return dataclasses.replace(parallel, data_parallel=resolve_data_parallel(parallel, world_size))


def model_source(model: ModelSection, path: str, seed: int) -> ArraySource:
    """Return where the weights of a model come from."""
    if has_random_weights(model, path):
        return RandomSource(path, seed)
    return open_source(path)
