"""Whether a model can be cut by a config, checked before anything is compiled; each refusal names the fix."""

from mindrlhf.algorithms import policy_losses
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError
from mindrlhf.models.spec import ModelDims
from mindrlhf.parallel.layout import Layout, check_divisible
from mindrlhf.parallel.plan_batch import BatchPlan, check_pieces, plan_batch


def check_feasible(config: GrpoConfig, dims: ModelDims, layout: Layout) -> BatchPlan:
    """Check that the training step of ``config`` can be compiled for ``layout``; return its batch arithmetic.

    Raises:
        UserError: heads, layers, vocabulary, rows or experts do not divide; or the loss cannot be split this way.
    """
    check_divisible(dims, layout)
    batch = plan_batch(config, layout.data_parallel)
    check_pieces(layout, batch)
    if dims.tied and layout.pipeline_stage > 1:
        raise UserError(
            f"'parallel_config.pipeline_stage' is {layout.pipeline_stage}, but the model's output layer is its "
            "embedding (tie_word_embeddings), which MindSpore's pipeline cannot share between stages here: set it to 1"
        )
    loss = config.algorithm.loss
    if layout.context_parallel > 1 and policy_losses.traits(loss).ratio == "sequence":
        raise UserError(
            f"'parallel_config.context_parallel' is {layout.context_parallel}, but the loss {loss!r} needs whole "
            "responses, which context parallelism splits: set it to 1, or take a loss of tokens such as 'ppo_clip'"
        )
    interleaves = config.parallel_config.micro_batch_interleave_num
    if batch.rows_per_piece % interleaves:
        raise UserError(
            f"'parallel_config.micro_batch_interleave_num' is {interleaves}, but a piece has {batch.rows_per_piece} "
            f"rows (training.batch_size / micro_batch_num): set training.batch_size to a multiple of "
            f"{interleaves * batch.num_pieces}"
        )
    return batch
