"""Work and memory of a frozen vision tower, estimated."""

from dataclasses import dataclass

from mindrlhf.dryrun.plan.memory import MemoryInputs


@dataclass(frozen=True)
class VisionPlan:
    """The frozen vision tower, which each image passes once in a step on every rank that has samples of it.

    Attributes:
        num_parameters: of the tower, whole on every rank of the first pipeline stage.
        num_image_tokens: that a prompt may have, if it holds nothing else.
        operations_per_token: of the tower, floating-point, for an image of that many tokens.
        num_passes: of prompts through towers, at most.
        run_bytes: what the widest operator holds for one such image.
    """

    num_parameters: int
    num_image_tokens: int
    operations_per_token: int
    num_passes: int
    run_bytes: int


def plan_vision(inputs: MemoryInputs, num_parameters: int) -> VisionPlan | None:
    """Estimate the work of a vision tower; None for a model of text.

    A patch costs 2 operations per parameter of blocks and patch embedding, and 4 * width * reach in each attention: the
    scores and their product with the values. A token has the patches that are merged into it, and the merger's two
    products.
    """
    config, vision = inputs.config, inputs.dims.vision
    if vision is None:
        return None
    num_tokens = inputs.batch.row_length - config.rollout.max_response_length
    width, per_token = vision.hidden_size, vision.merge_size**2
    block = 4 * width**2 + (2 + vision.is_gated) * width * vision.intermediate_size
    num_full = len(vision.full_attention_blocks)
    window = vision.window_side**2 * per_token
    reach = num_full * num_tokens * per_token + (vision.depth - num_full) * window
    per_patch = 2 * (vision.depth * block + vision.patch_channels * width) + 4 * width * reach
    projection = 2 * vision.merged_size * (vision.merged_size + inputs.dims.hidden_size)
    merger = projection * (1 + len(vision.deepstack_blocks))
    operations = per_token * per_patch + merger
    num_prompts = config.training.chunk_size * config.training.num_rollouts
    passes = num_prompts * min(config.algorithm.num_generations, inputs.layout.data_parallel)
    run_bytes = num_tokens * per_token * (width + 3 * vision.intermediate_size) * inputs.element_bytes
    return VisionPlan(num_parameters, num_tokens, operations, passes, run_bytes)
