"""The actor of a run whose model is cut over the ranks, put together from its config."""

import dataclasses
from pathlib import Path

from mindrlhf.config.derived import resolve_data_parallel
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.sections import ModelSection, ParallelSection
from mindrlhf.shards.sources import ArraySource, RandomSource, open_source
from mindrlhf.training.runtime import Rank, start_parallel
from mindrlhf.training.sharded.actor import ParallelActor
from mindrlhf.training.sharded.factory import build_policy, build_update
from mindrlhf.training.sharded.learner import ParallelLearner, SlicedModel
from mindrlhf.training.worker.policy_loss import build_policy_loss
from mindrlhf.weights.hf import read_hf_config


def build_parallel_actor(config: GrpoConfig, row_lengths: tuple[int, ...], rank: Rank) -> ParallelActor:
    """Build this rank's slices and graphs of the policy, and of the reference model if the run has one.

    From here on MindSpore cuts every graph that this process compiles.

    Args:
        config: of the run, checked.
        row_lengths: of the run, ascending.
        rank: this process; communication is up.

    Raises:
        UserError: a model cannot be cut this way, or its weights do not fit.
    """
    parallel = resolve_layout(config.parallel_config, rank.world_size)
    strategy_dir = Path(config.run.output_dir) / "logs" / "strategy"
    strategy_dir.mkdir(parents=True, exist_ok=True)
    start_parallel(parallel, rank, strategy_dir / f"strategy_rank_{rank.index}.ckpt")
    options = {"row_length": row_lengths[-1], "temperature": config.rollout.temperature}
    policy = build_policy(read_hf_config(config.model.path), config.model, parallel, **options)
    update = build_update(policy, lambda given: build_policy_loss(config, given), config.optimizer, parallel)
    learner = ParallelLearner(SlicedModel(policy, parallel, rank.index), update)
    reference = reference_source = None
    if config.algorithm.beta > 0:
        path = config.model.reference_path or config.model.path
        reference_source = _source(config.model, path, config.run.seed)
        cell = build_policy(read_hf_config(path), config.model, parallel, **options)
        reference = SlicedModel(cell, parallel, rank.index)
    actor = ParallelActor(learner, reference, saves_reference=config.algorithm.sync_ref_model)
    source = _source(config.model, config.model.path, config.run.seed)
    actor.prepare(row_lengths, config.training.batch_size, source, reference_source)
    return actor


def resolve_layout(parallel: ParallelSection, world_size: int) -> ParallelSection:
    """Return `parallel_config` with `data_parallel` filled in."""
    return dataclasses.replace(parallel, data_parallel=resolve_data_parallel(parallel, world_size))


def _source(model: ModelSection, path: str, seed: int) -> ArraySource:
    if model.random_init and path == model.path:
        return RandomSource(path, seed)
    return open_source(path)
