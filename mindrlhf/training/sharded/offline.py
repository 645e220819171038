"""Fine-tuning, preference learning and reward models whose model is sharded over the ranks: a rank's worker."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.algorithms.losses import COEFFICIENT_INPUTS
from mindrlhf.checkpoint.state import StateWriter
from mindrlhf.config.derived import reference_is_base
from mindrlhf.config.schema import DpoConfig, RewardModelConfig, SftConfig
from mindrlhf.data.packing import padding_rows
from mindrlhf.shards.sources import RandomSource, open_scorer_source
from mindrlhf.specs import scorer_config
from mindrlhf.training.batch import Batch, HeldOutLogProbs, UpdateResult
from mindrlhf.training.checkpoints.shards import SavesState
from mindrlhf.training.runtime import Rank
from mindrlhf.training.sharded.build import (
    load_trained,
    make_learner,
    model_source,
    scorer_shard,
    shard_of,
    start_sharding,
)
from mindrlhf.training.sharded.factory import (
    build_coefficient_update,
    build_policy,
    build_supervised_update,
    build_value_model,
)
from mindrlhf.training.sharded.learner import ShardedLearner
from mindrlhf.training.sharded.model import ShardedModel
from mindrlhf.training.worker.cells import check_finite
from mindrlhf.weights.hf import read_hf_config
from mindrlhf.weights.publish.publisher import PublishingWorker


class ShardedOffline(SavesState, PublishingWorker):
    """What a rank does in training on fixed data; its public methods are called through the team.

    They are those of the learners of whole models (:mod:`mindrlhf.training.offline`), and, as the model is whole in the
    weight buffer alone, those that publish it.

    Args:
        learner: trains the model.
        reference: the reference model, None when the run has no such model in memory.
    """

    def __init__(self, learner: ShardedLearner, reference: ShardedModel | None = None):
        SavesState.__init__(self)
        PublishingWorker.__init__(self, learner.model)
        self.learner = learner
        self._reference = reference

    def update(self, batch: Batch, lr: float) -> UpdateResult:
        """Make one optimiser update; see :meth:`ShardedLearner.update` for the statistics."""
        # The host divides the coefficients of pairs itself.
        num_tokens = 1 if self.learner.graph.token_inputs else batch.num_tokens
        done = self.learner.update(replace(batch, num_tokens=num_tokens), lr, 0.0)
        return UpdateResult(done.statistics, check_finite(done.grad_norm), self.learner.process_statistics())

    def evaluate(self, batch: Batch) -> HeldOutLogProbs:
        """Return the summed log-probability of the response tokens of this rank's replica."""
        return HeldOutLogProbs(sum(float(self.model.logprobs(rows).sum()) for rows in batch.micro_batches))

    def measure(self, batch: Batch, name: str) -> list[np.ndarray]:
        """Return the outputs, float32 [rows, length], of the "policy" or the "reference" for each micro-batch."""
        model = self.model if name == "policy" else self._reference
        return [model.logprobs(rows) for rows in batch.micro_batches]

    def drop_reference(self) -> None:
        """Free the reference model."""
        self._reference = None

    def export(self, directory: Path, tokenizer_dir: Any, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
        """Write the weights as a Hugging Face directory, on rank 0; see :meth:`RankModel.export`."""
        self.model.export(directory, tokenizer_dir, tensors)

    def state_size_bytes(self) -> int:
        """Return the size of a checkpoint of all ranks, in bytes."""
        return self.learner.state_size_bytes()

    def state_writer(self, hold: Callable) -> StateWriter:
        """See :meth:`SavesState.state_writer`."""
        return self.learner.state_writer(hold)

    def restore(self, directory: str) -> None:
        """Load what ranks have saved, whatever the layout of their run."""
        self.learner.restore(directory)


def build_sharded_supervised(config: SftConfig, row_lengths: tuple[int, ...], rank: Rank) -> ShardedOffline:
    """Build this rank's shard and graphs for supervised fine-tuning.

    Raises:
        UserError: the model cannot be sharded this way, or its weights do not fit.
    """
    parallel = start_sharding(config, rank)
    options: dict = {"row_length": row_lengths[-1], "temperature": 1.0, "memory": config.memory}
    policy = build_policy(
        read_hf_config(config.model.path), config.model, parallel, **options, lora=config.lora.options
    )
    update = build_supervised_update(policy, config.optimizer, parallel)
    learner = make_learner(shard_of(policy, parallel, rank), update, config.memory, ())
    _compile(learner, None, config.supervised.micro_batch_size, row_lengths)
    load_trained(learner.model, model_source(config.model, config.model.path, config.run.seed), config)
    return ShardedOffline(learner)


def build_sharded_preference(
    config: DpoConfig | RewardModelConfig, row_lengths: tuple[int, ...], rank: Rank
) -> ShardedOffline:
    """Build this rank's shards and graphs for learning from pairs; errors as for :func:`build_sharded_supervised`."""
    parallel, model = start_sharding(config, rank), config.model
    hf_config, length = read_hf_config(model.path), row_lengths[-1]
    reference = None
    if isinstance(config, RewardModelConfig):
        options: dict = {"row_length": length, "memory": config.memory, "lora": config.lora.options}
        scorer = build_value_model(scorer_config(hf_config), model, parallel, **options)
        shard = scorer_shard(scorer, parallel, rank)
        update = build_coefficient_update(scorer, config.optimizer, parallel)
    else:
        options = {"row_length": length, "temperature": 1.0, "memory": config.memory}
        policy = build_policy(hf_config, model, parallel, **options, lora=config.lora.options)
        shard, update = shard_of(policy, parallel, rank), build_coefficient_update(policy, config.optimizer, parallel)
        if reference_is_base(config):
            reference = shard.base()
        elif model.reference_path or config.dpo.reference == "live":
            path = model.reference_path or model.path
            reference = shard_of(build_policy(read_hf_config(path), model, parallel, **options), parallel, rank)
    learner = make_learner(shard, update, config.memory, COEFFICIENT_INPUTS)
    _compile(learner, reference, config.preference.micro_batch_size, row_lengths)
    if not isinstance(config, RewardModelConfig):
        source = model_source(model, model.path, config.run.seed)
    elif model.random_init:
        source = RandomSource(model.path, config.run.seed, as_scorer=True)
    else:
        source = open_scorer_source(model.path)
    load_trained(shard, source, config)
    if reference is not None and reference.cell is not shard.cell:
        reference.load(model_source(model, model.reference_path or model.path, config.run.seed))
    return ShardedOffline(learner, reference)


def _compile(
    learner: ShardedLearner, reference: ShardedModel | None, micro_batch_size: int, row_lengths: tuple[int, ...]
) -> None:
    for length in row_lengths:
        rows = padding_rows((micro_batch_size, length))
        learner.model.compile(rows)
        if reference is not None and reference.cell is not learner.model.cell:
            reference.compile(rows)
        # Last, so that MindSpore's strategy file is that of the update, which has the optimiser's state.
        learner.compile(rows)
