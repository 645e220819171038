"""What a run must not do that nodes for rollout only may join."""

import json

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import is_split
from mindrlhf.errors import UserError
from mindrlhf.layout.servers import spans_nodes
from mindrlhf.rollout.vllm_options import sees_images


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
