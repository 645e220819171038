"""Bytes that one weight transfer moves, against the fewest that any transfer could."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.dryrun.plan.parameters import ELEMENT_BYTES, count_parameters
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.parameter import ParameterLayout


@dataclass(frozen=True)
class TransferStep:
    """One leg of the way from the trainer to the generators, in bytes over the whole cluster.

    Attributes:
        name: from where to where.
        moved: bytes that the weight board moves.
        bound: bytes that must move, whatever the method: each needed element once per place that lacks it, in the
            rollout's dtype.
    """

    name: str
    moved: int
    bound: int


@dataclass(frozen=True)
class TransferPlan:
    """The weight transfer of one step.

    Attributes:
        board_bytes: host memory of the board on each node.
        num_nodes: nodes, each with a board.
        steps: the legs.
    """

    board_bytes: int
    num_nodes: int
    steps: tuple[TransferStep, ...]


def plan_transfer(
    config: GrpoConfig,
    layout: Layout,
    layouts: Sequence[ParameterLayout],
    *,
    rollout_rank_bytes: int,
    node_size: int,
) -> TransferPlan:
    """Count the bytes of a weight transfer.

    The trainer's ranks write their shards to the board of their node in the parameters' dtype; what no rank of a node
    holds comes from other nodes; each generator process casts its shards and copies them to its device.

    Args:
        rollout_rank_bytes: weights of one generator device, in the rollout's dtype.
    """
    num_nodes = -(-layout.world_size // node_size)
    num_elements = count_parameters(layouts)
    param_bytes, rollout_bytes = ELEMENT_BYTES[config.model.param_dtype], ELEMENT_BYTES[config.rollout.dtype]
    local = [_elements_on_node(layouts, layout, node, node_size) for node in range(num_nodes)]
    missing = sum(num_elements - held for held in local)
    # A generator that spans nodes needs only the shards of its local devices on each of them.
    needed_on_node = min(num_elements * rollout_bytes, rollout_rank_bytes * min(node_size, layout.world_size))
    missing_bound = sum(max(0, needed_on_node - held * rollout_bytes) for held in local)
    to_devices = rollout_rank_bytes * layout.world_size
    steps = [
        TransferStep("trainer devices to boards", sum(local) * param_bytes, num_elements * rollout_bytes),
        TransferStep("between nodes", missing * param_bytes, missing_bound),
        TransferStep("boards to generator devices", to_devices, to_devices),
    ]
    return TransferPlan(num_elements * param_bytes, num_nodes, tuple(steps))


def _elements_on_node(layouts: Sequence[ParameterLayout], layout: Layout, node: int, node_size: int) -> int:
    """Elements of the whole model of which some rank of the node holds a shard."""
    ranks = range(node * node_size, min((node + 1) * node_size, layout.world_size))
    # Layers are alike: what a node holds of a parameter depends on these only, not on its name.
    seen: dict[tuple, int] = {}
    total = 0
    for one in layouts:
        key = (one.shape, one.stages, one.device_matrix, one.tensor_map, one.optimizer_shard_size)
        if key not in seen:
            holders = [rank for rank in ranks if rank // one.stage_size in one.stages]
            boxes = {tuple((part.start, part.stop) for part in one.shard_of(rank)) for rank in holders}
            seen[key] = len(boxes) * math.prod(one.shard_shape)
        total += seen[key]
    return total
