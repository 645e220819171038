"""Batch arithmetic of a run: from prompts to optimiser updates, each line computed from the ones above it."""

from dataclasses import dataclass

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import UNPACKED, ParallelSection
from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout


@dataclass(frozen=True)
class BatchPlan:
    """Counts of one step; those from ``num_rows_per_update`` on are upper bounds, reached when no two samples share
    a row.

    Attributes:
        num_prompts: prompts sampled per step.
        num_samples: responses sampled per step.
        num_samples_per_replica: the share of one rollout server.
        row_length: tokens of the longest row.
        max_prompt_length: tokens that such a row leaves for the prompt.
        num_samples_per_update: responses of one optimiser update.
        num_rows_per_update: rows they are packed into, at most.
        rows_per_micro_batch: rows of one micro-batch of one data-parallel rank.
        num_micro_batches_per_rank: micro-batches that a data-parallel rank accumulates per update.
        num_pipeline_micro_batches: what a micro-batch is split into, for the stages to work on several at once.
        rows_per_pipeline_micro_batch: rows of one of these.
        num_updates: optimiser updates per step.
        num_tokens_per_update: positions computed per update, over all ranks, padding rows included.
        max_response_tokens: tokens sampled per step, at most.
    """

    num_prompts: int
    num_samples: int
    num_samples_per_replica: int
    row_length: int
    max_prompt_length: int
    num_samples_per_update: int
    num_rows_per_update: int
    rows_per_micro_batch: int
    num_micro_batches_per_rank: int
    num_pipeline_micro_batches: int
    rows_per_pipeline_micro_batch: int
    num_updates: int
    num_tokens_per_update: int
    max_response_tokens: int


def plan_batch(config: GrpoConfig, data_parallel: int) -> BatchPlan:
    """Count a step of ``config`` on ``data_parallel`` replicas of the model.

    Raises:
        UserError: the row length is left to the data, or rows do not divide as :func:`check_rows` has it.
    """
    training, parallel = config.training, config.parallel_config
    if not training.sequence_lengths:
        raise UserError(
            "'training.sequence_lengths' is empty, so the sequence length depends on the data, which a plan does not "
            f"read: set it, for example training.sequence_lengths=[{2 * config.rollout.max_response_length}]"
        )
    check_rows(parallel, (max(training.sequence_lengths),), training.micro_batch_size)
    micro_batch_num = parallel.micro_batch_num
    row_length = max(training.sequence_lengths)
    num_prompts = training.chunk_size * training.num_rollouts
    num_samples = num_prompts * config.algorithm.num_generations
    per_update = -(-num_samples // training.num_minibatches)
    num_micro_batches = -(-per_update // (training.micro_batch_size * data_parallel))
    return BatchPlan(
        num_prompts=num_prompts,
        num_samples=num_samples,
        num_samples_per_replica=-(-num_samples // config.rollout.num_replicas),
        row_length=row_length,
        max_prompt_length=row_length - config.rollout.max_response_length,
        num_samples_per_update=per_update,
        num_rows_per_update=per_update,
        rows_per_micro_batch=training.micro_batch_size,
        num_micro_batches_per_rank=num_micro_batches,
        num_pipeline_micro_batches=micro_batch_num,
        rows_per_pipeline_micro_batch=training.micro_batch_size // micro_batch_num,
        num_updates=training.num_minibatches * training.num_iterations,
        num_tokens_per_update=num_micro_batches * data_parallel * training.micro_batch_size * row_length,
        max_response_tokens=num_samples * config.rollout.max_response_length,
    )


def check_rows(parallel: ParallelSection, row_lengths: tuple[int, ...], micro_batch_size: int) -> None:
    """Check that a micro-batch divides into those of a pipeline, and its rows over the ranks that share a sequence.

    Args:
        micro_batch_size: rows per micro-batch and replica.

    Raises:
        UserError: they do not.
    """
    num_parts = parallel.micro_batch_num
    if micro_batch_size % num_parts:
        raise UserError(
            f"'training.micro_batch_size' is {micro_batch_size}, which does not divide into "
            f"parallel_config.micro_batch_num = {num_parts} equal pipeline micro-batches: set it to "
            f"{-(-micro_batch_size // num_parts) * num_parts}"
        )
    num_ranks = parallel.context_parallel * (parallel.model_parallel if parallel.use_seq_parallel else 1)
    for length in row_lengths:
        if length % num_ranks:
            raise UserError(
                f"'training.sequence_lengths' has {length}, which does not divide over {num_ranks} ranks that share a "
                "sequence (context_parallel, and model_parallel with use_seq_parallel): set it to "
                f"{-(-length // num_ranks) * num_ranks}"
            )


def check_pipeline(layout: Layout, batch: BatchPlan) -> None:
    """Check that the pipeline has a micro-batch for every stage.

    Raises:
        UserError: it has not.
    """
    if batch.num_pipeline_micro_batches < layout.pipeline_stage:
        raise UserError(
            f"'parallel_config.micro_batch_num' is {batch.num_pipeline_micro_batches}, but a pipeline of "
            f"{layout.pipeline_stage} stages needs at least {layout.pipeline_stage}: set it to that, and "
            "training.micro_batch_size to a multiple"
        )


def batch_lines(config: GrpoConfig, batch: BatchPlan, data_parallel: int) -> list[tuple[str, str, str]]:
    """Return (what, value, how it was computed) for each count, in the order in which a step meets them."""
    training, rollout = config.training, config.rollout
    lines = [
        ("prompts per step", f"{batch.num_prompts:,}", f"chunk_size {training.chunk_size} x num_rollouts "
         f"{training.num_rollouts}"),
        ("samples per step", f"{batch.num_samples:,}", f"{batch.num_prompts:,} prompts x num_generations "
         f"{config.algorithm.num_generations}"),
        ("samples per rollout server", f"{batch.num_samples_per_replica:,}", f"{batch.num_samples:,} / num_replicas "
         f"{rollout.num_replicas}"),
        ("response tokens per step, at most", f"{batch.max_response_tokens:,}", f"{batch.num_samples:,} x "
         f"max_response_length {rollout.max_response_length:,}"),
        ("prompt tokens, at most", f"{batch.max_prompt_length:,}", f"sequence length {batch.row_length:,} - "
         f"max_response_length {rollout.max_response_length:,}"),
        ("samples per update", f"{batch.num_samples_per_update:,}", f"{batch.num_samples:,} / num_minibatches "
         f"{training.num_minibatches}"),
        ("packed sequences per update, at most", f"{batch.num_rows_per_update:,}", _row_words(config, batch)),
        ("micro-batches per rank and update", f"{batch.num_micro_batches_per_rank:,}",
         f"{batch.num_rows_per_update:,} sequences / (micro_batch_size {training.micro_batch_size} x data_parallel "
         f"{data_parallel}), "
         "rounded up"),
    ]  # fmt: skip
    if batch.num_pipeline_micro_batches > 1:
        lines.append(
            ("sequences per pipeline micro-batch", f"{batch.rows_per_pipeline_micro_batch:,}",
             f"micro_batch_size {training.micro_batch_size} / micro_batch_num {batch.num_pipeline_micro_batches}")
        )  # fmt: skip
    lines += [
        ("positions per update, at most", f"{batch.num_tokens_per_update:,}",
         f"{batch.num_micro_batches_per_rank:,} x {data_parallel} ranks x {training.micro_batch_size} sequences x "
         f"{batch.row_length:,} tokens"),
        ("updates per step", f"{batch.num_updates:,}", f"num_minibatches {training.num_minibatches} x num_iterations "
         f"{training.num_iterations}"),
    ]  # fmt: skip
    return lines


def _row_words(config: GrpoConfig, batch: BatchPlan) -> str:
    if config.training.packing == UNPACKED:
        return "one sample per sequence (training.packing is none)"
    half = -(-batch.num_samples_per_update // 2)
    return f"one sample per sequence; about {half:,} if samples fill half of one"
