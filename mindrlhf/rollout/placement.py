"""Where the rollout servers of a run are: how many on each node, and on which devices of it."""

from collections.abc import Mapping

from mindrlhf.config.sections import RolloutSection
from mindrlhf.errors import UserError

# Of CANN: the devices that a process sees, which it then counts from 0.
DEVICES_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"


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


def devices_of(rollout: RolloutSection, server: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives a server, counted from 0 on its node, Ascend devices that no other has.

    Args:
        environment: of this process. It, or else `rollout.env`, may say which devices of the node are there for
            servers; they are all otherwise.

    Raises:
        UserError: there are too few of them.
    """
    first, size = server * rollout.tensor_parallel, rollout.tensor_parallel
    listed = rollout.env.get(DEVICES_VARIABLE) or environment.get(DEVICES_VARIABLE)
    if not listed:
        return {DEVICES_VARIABLE: ",".join(map(str, range(first, first + size)))}
    devices = [device.strip() for device in listed.split(",")]
    if first + size > len(devices):
        raise UserError(
            f"{DEVICES_VARIABLE} is {listed}, {len(devices)} devices, but server {server} of this node needs "
            f"'rollout.tensor_parallel' = {size} after those before it: name more, or lower rollout.num_replicas"
        )
    return {DEVICES_VARIABLE: ",".join(devices[first : first + size])}
