"""The sections `training`, `optimizer` and `parallel_config`: from samples to updates, and over which ranks."""

import math
from dataclasses import dataclass

from mindrlhf.algorithms.optimizers import OPTIMIZERS
from mindrlhf.config.keys import RunConfig, key
from mindrlhf.errors import Rules, UserError

UNPACKED, FIRST_FIT, BEST_FIT, SHARED_PROMPTS = PACKINGS = ("none", "first_fit", "best_fit", "shared_prompts")
BY_LENGTH = (UNPACKED, FIRST_FIT)


@dataclass(frozen=True)
class TrainingSection:
    """Batches and optimiser updates."""

    chunk_size: int = key(8, "prompts sent to the generator at a time", minimum=1)
    num_rollouts: int = key(1, "chunks per step; a step uses chunk_size * num_rollouts prompts", minimum=1)
    epochs: int = key(1, "passes over the training prompts", minimum=1)
    micro_batch_size: int = key(4, "packed sequences per micro-batch and rank", minimum=1)
    sequence_lengths: tuple[int, ...] = key(
        (),
        "lengths that packed sequences may have, in tokens; empty means one that fits the longest sample, with "
        "packing=best_fit two, and with shared_prompts one that fits a prompt with all its responses: see "
        "docs/performance.md",
        minimum=8,
    )
    packing: str = key(
        FIRST_FIT,
        "how samples are packed into sequences: none gives each one of its own; first_fit packs by length alone; "
        "best_fit packs tighter and balances the ranks by work; shared_prompts does so, and samples of one prompt in a "
        "sequence have it once; see docs/performance.md",
        choices=PACKINGS,
    )
    skip_zero_advantages: bool = key(True, "leave samples without a gradient out of updates; see docs/performance.md")
    replay_routing: bool = key(False, "route tokens to experts as the generator did; see docs/algorithms.md")
    num_minibatches: int = key(1, "optimiser updates that one pass over a step's samples is split into", minimum=1)
    num_iterations: int = key(1, "passes over a step's samples", minimum=1)


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW (Loshchilov and Hutter 2019), or Muon for the matrices of the layers; norms and biases are not decayed."""

    type: str = key(
        "adamw",
        "adamw, or muon (Jordan et al. 2024; Liu et al., arXiv:2502.16982): momentum that is orthogonalised for the "
        "matrices of the decoder layers, AdamW for embedding, output layer, norms and biases",
        choices=tuple(OPTIMIZERS),
    )
    start_lr: float = key(1e-6, "learning rate after the warm-up", minimum=0)
    end_lr: float | None = key(None, "learning rate at the last step; null keeps `start_lr`", minimum=0)
    lr_schedule: str = key("constant", "schedule from start_lr to end_lr", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "optimiser updates over which the learning rate rises from 0", minimum=0)
    beta1: float = key(0.9, "decay of the first moment", minimum=0, maximum=0.9999)
    beta2: float = key(0.95, "decay of the second moment", minimum=0, maximum=0.99999)
    epsilon: float = key(1e-8, "added to the root of the second moment", minimum=0, exclusive_minimum=True)
    weight_decay: float = key(0.01, "decoupled weight decay of matrices", minimum=0)
    max_grad_norm: float = key(1.0, "gradients are scaled down to this global norm; 0 means never", minimum=0)

    def learning_rate(self, update: int, num_updates: int) -> float:
        """Return the learning rate of optimiser update ``update`` (from 0) of ``num_updates``.

        A linear warm-up to ``start_lr``, then constant, linear or cosine (Loshchilov and Hutter 2017,
        arXiv:1608.03983, eq. 5 without restarts) down to ``end_lr``, which the last update reaches.
        """
        if update < self.warmup_steps:
            return self.start_lr * (update + 1) / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.start_lr
        span = max(1, num_updates - 1 - self.warmup_steps)
        progress = min(1.0, (update - self.warmup_steps) / span)
        if self.lr_schedule == "cosine":
            progress = (1.0 - math.cos(math.pi * progress)) / 2.0
        return self.start_lr + (self.end_lr - self.start_lr) * progress


@dataclass(frozen=True)
class ParallelSection:
    """Sharding of the model over the ranks, in MindFormers' terms."""

    data_parallel: int = key(0, "data-parallel replicas; 0 means as many as the world size leaves", minimum=0)
    model_parallel: int = key(1, "ranks that share each weight matrix", minimum=1)
    pipeline_stage: int = key(1, "stages that the layers are split into", minimum=1)
    context_parallel: int = key(1, "ranks that share each sequence", minimum=1)
    expert_parallel: int = key(1, "ranks that share the experts", minimum=1)
    use_seq_parallel: bool = key(False, "shard norms and residuals along the sequence over the model_parallel ranks")
    micro_batch_num: int = key(1, "micro-batches in flight in the pipeline", minimum=1)
    vocab_emb_dp: bool = key(True, "keep the embedding whole on each rank instead of sharding its vocabulary")
    enable_parallel_optimizer: bool = key(False, "shard the optimiser state over the data-parallel ranks (ZeRO)")


def resolve_data_parallel(parallel: ParallelSection, world_size: int) -> int:
    """Return data_parallel, filled from the world size when it is 0.

    Raises:
        UserError: the layout does not use exactly ``world_size`` ranks.
    """
    fixed = parallel.model_parallel * parallel.pipeline_stage * parallel.context_parallel
    parts = "model_parallel * pipeline_stage * context_parallel"
    if world_size % fixed:
        raise UserError(
            f"{world_size} ranks do not divide by {parts} = {fixed}: start {-(-world_size // fixed) * fixed} workers "
            "or change 'parallel_config'"
        )
    if parallel.data_parallel and parallel.data_parallel * fixed != world_size:
        raise UserError(
            f"'parallel_config.data_parallel' is {parallel.data_parallel}, which with {parts} = {fixed} makes "
            f"{parallel.data_parallel * fixed} ranks, but {world_size} were started: set data_parallel to "
            f"{world_size // fixed}, or start {parallel.data_parallel * fixed} workers"
        )
    return world_size // fixed


def is_split(parallel: ParallelSection) -> bool:
    """Return whether the model's state is sharded, so that no rank holds all of it."""
    sizes = (parallel.model_parallel, parallel.pipeline_stage, parallel.context_parallel, parallel.expert_parallel)
    return max(sizes) > 1 or parallel.enable_parallel_optimizer


def trains_sharded(config: RunConfig) -> bool:
    """Return whether a run trains in semi-auto-parallel graphs: always on NPUs, with a sharded model on CPUs."""
    return config.run.device != "cpu" or is_split(config.parallel_config)


def parallel_rules(parallel: ParallelSection) -> Rules:
    yield parallel.use_seq_parallel and parallel.model_parallel == 1, (
        "'parallel_config.use_seq_parallel' shards over model_parallel ranks, which is 1: set it to false"
    )
    yield (stages := parallel.pipeline_stage) > 1 and parallel.micro_batch_num < stages, (
        f"'parallel_config.micro_batch_num' is {parallel.micro_batch_num}, but a pipeline of {stages} stages needs at "
        f"least {stages}"
    )


def cpu_rules(config: RunConfig) -> Rules:
    """Float32 kernels, and layouts that a CPU has."""
    if config.run.device != "cpu":
        return
    for name in ("param_dtype", "compute_dtype"):
        dtype = getattr(config.model, name)
        yield dtype != "float32", (
            f"'model.{name}' is {dtype}, but run.device=cpu has float32 kernels only: set float32"
        )
    parallel, kinds = config.parallel_config, ("model", "context", "expert")
    for name in (*(f"{kind}_parallel" for kind in kinds), "pipeline_stage"):
        yield getattr(parallel, name) != 1, (
            f"'parallel_config.{name}' is {getattr(parallel, name)}, but run.device=cpu trains in data parallel only: "
            "set it to 1"
        )
    yield parallel.enable_parallel_optimizer, (
        "'parallel_config.enable_parallel_optimizer' needs run.device=ascend: set it to false"
    )


def batch_rules(config: RunConfig) -> Rules:
    training, longest = config.training, max(config.training.sequence_lengths, default=0)
    num_samples = training.chunk_size * training.num_rollouts * config.algorithm.num_generations
    yield num_samples % training.num_minibatches, (
        f"'training.num_minibatches' is {training.num_minibatches}, which does not divide the {num_samples} samples of "
        "a step (chunk_size * num_rollouts * num_generations)"
    )
    yield 0 < longest <= config.rollout.max_response_length, (
        f"'training.sequence_lengths' ends at {longest}, which leaves no tokens for a prompt beside "
        f"rollout.max_response_length = {config.rollout.max_response_length}: raise the one or lower the other"
    )


def optimizer_rules(optimizer: OptimizerSection) -> Rules:
    decays, end_lr = optimizer.lr_schedule != "constant", optimizer.end_lr
    yield decays and end_lr is None, (
        f"'optimizer.end_lr' is needed with lr_schedule={optimizer.lr_schedule}: set it (0 is usual)"
    )
    yield not decays and end_lr not in (None, optimizer.start_lr), (
        f"'optimizer.end_lr' is {end_lr or 0:g}, but lr_schedule=constant never reaches it: set lr_schedule to linear "
        "or cosine"
    )
