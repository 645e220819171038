"""Checks, before anything is compiled, that a config can shard a model; each refusal names the fix."""

from mindrlhf.algorithms import policy_losses
from mindrlhf.config.derived import correction_weight
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import UserError, refuse
from mindrlhf.layout.batch import BatchPlan, check_pipeline, plan_batch
from mindrlhf.layout.layout import Layout, check_divisible
from mindrlhf.specs import ModelDims


def check_tokens_only(config: GrpoConfig, context_parallel: int) -> None:
    """Check that nothing in the loss spans a response: under context parallelism a rank has parts of each.

    The weights of `algorithm.aggregation` and the KL term are of tokens, whatever the mode.

    Raises:
        UserError: naming the key at fault and what to take instead.
    """
    loss, correction = config.algorithm.loss, config.correction
    spanning = {
        f"'algorithm.loss' is {loss}": (policy_losses.traits(loss).ratio == "sequence", "ppo_clip, say"),
        "'correction.weight' is sequence": (correction_weight(config) == "sequence", "token or none"),
        f"'correction.mask' is {correction.mask}": (correction.mask in ("sequence", "geometric"), "token or none"),
        f"'correction.veto' is {correction.veto:g}": (correction.veto > 0, "0"),
        f"'correction.off_policy_mask' is {correction.off_policy_mask:g}": (correction.off_policy_mask > 0, "0"),
    }
    refuse(
        (
            is_spanning,
            f"'parallel_config.context_parallel' is {context_parallel}, which splits responses, but {what}, which "
            f"needs whole ones: set context_parallel to 1, or the other to {instead}",
        )
        for what, (is_spanning, instead) in spanning.items()
    )


def check_feasible(config: GrpoConfig, dims: ModelDims, layout: Layout) -> BatchPlan:
    """Check that the training step of ``config`` can be compiled for ``layout``; return its batch arithmetic.

    Raises:
        UserError: heads, layers, vocabulary, rows or experts do not divide; or the loss cannot be split this way.
    """
    check_divisible(dims, layout)
    batch = plan_batch(config, layout.data_parallel)
    dims.check_window(batch.row_length)
    check_pipeline(layout, batch)
    check_model(dims, layout)
    if layout.context_parallel > 1:
        check_tokens_only(config, layout.context_parallel)
    return batch


def check_model(dims: ModelDims, layout: Layout) -> None:
    """Check that a model can be sharded.

    Raises:
        UserError: heads, layers, vocabulary or experts do not divide, a pipeline would share the embedding, or rows
            would be cut whose state goes from token to token.
    """
    check_divisible(dims, layout)
    if dims.linear and layout.context_parallel > 1:
        raise UserError(
            f"'parallel_config.context_parallel' is {layout.context_parallel}, but the model has layers of linear "
            "attention (Qwen3.5), whose state a rank would have to wait for: set it to 1, and raise model_parallel"
        )
    if dims.tied and layout.pipeline_stage > 1:
        raise UserError(
            f"'parallel_config.pipeline_stage' is {layout.pipeline_stage}, but the model's output layer is its "
            "embedding (tie_word_embeddings), which MindSpore's pipeline cannot share between stages here: set it to 1"
        )


def can_compile(num_ranks: int) -> bool:
    """True when MindSpore shards graphs for this many ranks (`CheckDeviceConfig` of its device manager)."""
    return num_ranks in (1, 2, 4) or num_ranks % 8 == 0


def check_num_ranks(num_ranks: int) -> None:
    """Check that MindSpore shards graphs for this many ranks.

    Raises:
        UserError: it does not.
    """
    if not can_compile(num_ranks):
        choice = next((number for number in (2, 4) if num_ranks < number), -(-num_ranks // 8) * 8)
        raise UserError(
            f"the run has {num_ranks} ranks, but MindSpore shards models over 1, 2, 4 or a multiple of 8: use {choice}"
        )


def check_rollout(rollout: RolloutSection, dims: ModelDims, world_size: int) -> None:
    """Check that the servers use exactly the devices that there are.

    Raises:
        UserError: they do not, or the heads do not divide.
    """
    devices = rollout.num_replicas * rollout.tensor_parallel
    if devices != world_size:
        fix = (
            f"set num_replicas to {world_size // rollout.tensor_parallel}"
            if world_size % rollout.tensor_parallel == 0
            else f"set tensor_parallel to a divisor of {world_size}"
        )
        raise UserError(
            f"'rollout.num_replicas' {rollout.num_replicas} x 'rollout.tensor_parallel' {rollout.tensor_parallel} "
            f"uses {devices} devices of {world_size}: {fix}"
        )
    if dims.num_heads % rollout.tensor_parallel:
        choices = [size for size in range(1, dims.num_heads + 1) if dims.num_heads % size == world_size % size == 0]
        raise UserError(
            f"'rollout.tensor_parallel' is {rollout.tensor_parallel}, which does not divide the model's "
            f"{dims.num_heads} query heads: set it to one of {', '.join(map(str, choices))}"
        )
