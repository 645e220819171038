"""How many of a run's rollout servers each node has."""

from mindrlhf.config.sections import RolloutSection
from mindrlhf.errors import UserError


def servers_on_node(rollout: RolloutSection, num_nodes: int) -> int:
    """Return how many of the run's servers each node has: they are dealt out evenly, and every node has one.

    Raises:
        UserError: they cannot be.
    """
    count = rollout.num_replicas
    if count > num_nodes and count % num_nodes:
        raise UserError(
            f"'rollout.num_replicas' is {count}, which is no multiple of the {num_nodes} nodes: set it to "
            f"{count // num_nodes * num_nodes} or {(count // num_nodes + 1) * num_nodes}"
        )
    return max(1, count // num_nodes)
