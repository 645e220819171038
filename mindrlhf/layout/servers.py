"""Nodes of each rollout server: within one, or over several whole ones."""

from mindrlhf.config.rollout import RolloutSection
from mindrlhf.errors import UserError

Places = list[tuple[int, ...]]  # the nodes of each server, in order; the first owns it


def place_servers(rollout: RolloutSection, num_nodes: int, node_size: int) -> Places:
    """Return the nodes of each server of a run.

    A server of more devices than a node has lies over whole nodes that follow each other. All others lie within a node,
    and every node has equally many, at least one.

    Raises:
        UserError: the numbers do not divide, or there are more servers than nodes for them.
    """
    count, width = rollout.num_replicas, rollout.tensor_parallel
    if not spans_nodes(rollout, num_nodes, node_size):
        if count > num_nodes and count % num_nodes:
            raise UserError(
                f"'rollout.num_replicas' is {count}, which does not divide over {num_nodes} nodes: set it to "
                f"{count // num_nodes * num_nodes}"
            )
        return [(node,) for node in range(num_nodes) for _ in range(max(1, count // num_nodes))]
    if width % node_size:
        raise UserError(
            f"'rollout.tensor_parallel' is {width}, more than the {node_size} devices of a node but no number of whole "
            f"nodes: set it to {width // node_size * node_size}"
        )
    span = width // node_size
    if count * span > num_nodes:
        fix = f"num_replicas to {num_nodes // span}" if span <= num_nodes else f"tensor_parallel to {node_size}"
        raise UserError(
            f"'rollout.num_replicas' {count} x 'rollout.tensor_parallel' {width} takes {count * span} nodes of "
            f"{node_size} devices, and the run has {num_nodes}: set {fix}"
        )
    return [tuple(range(first, first + span)) for first in range(0, count * span, span)]


def spans_nodes(rollout: RolloutSection, num_nodes: int, node_size: int) -> bool:
    """True when a server has more devices than a node; on one machine all its processes lie on it."""
    return num_nodes > 1 and rollout.tensor_parallel > node_size
