"""A run on several machines: which ranks share one, and the rollout servers on each; rank 0's part."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from mindrlhf.config.reward import RewardSection, ToolSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.helper import NodeHelper
from mindrlhf.layout.servers import Places
from mindrlhf.rewards.pool import RewardPool, pool_arguments, reason_to_stay
from mindrlhf.rewards.selection import Selection
from mindrlhf.rollout.agents.nodes import start_agents
from mindrlhf.rollout.nodes import OtherNode, OwnNode
from mindrlhf.rollout.pool import servers_on
from mindrlhf.rollout.processes.node import NodeServers
from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.types import CompletionSource
from mindrlhf.system.handshake import SignedConnection, accept_nodes
from mindrlhf.system.ports import listen
from mindrlhf.system.rpc import Rpc
from mindrlhf.system.wire import own_host, rank_0_host
from mindrlhf.system.workers import Workers
from mindrlhf.training.results import Machine
from mindrlhf.training.serving import ServingWorker
from mindrlhf.training.team import Team

Nodes = list[list[int]]  # the ranks of each machine, rank 0's first


def find_nodes(team: Team) -> Nodes:
    """Ask the ranks where they are; msrun's numbers do not say which of them share a machine."""
    nodes: dict[str, list[int]] = {}
    found: list[Machine] = _workers(team).machine()
    for rank, machine in enumerate(found):
        nodes.setdefault(machine.name, []).append(rank)
    return list(nodes.values())


def connect_servers(team: Team, nodes: Nodes, own: NodeServers, places: Places, buffer_path: str) -> list[Server]:
    """Return the rollout servers of all nodes, whose ranks have their weight buffers.

    Args:
        own: the servers of rank 0's.
        places: the nodes of each server; the first server's begin with rank 0's.

    Raises:
        RunFailure: the ranks are on other nodes than their launchers said, or a server could not be started.
    """
    if (last := places[-1][-1]) >= len(nodes):
        raise RunFailure(
            f"the rollout servers were laid over nodes up to {last}, but the ranks are on {len(nodes)} machines: start "
            "a launcher on each machine"
        )
    own.buffer_path = buffer_path
    if len(nodes) == 1:
        return servers_on([OwnNode(own)], own.options, places)
    own.own_host = own_host()
    token = secrets.token_hex(16)
    connections = _connect(_workers(team).serve_for_node, range(1, len(nodes)), token)
    # Their ranks compute in the processes that beat, and may miss beats: that they live the launchers watch.
    others = [
        OtherNode(Rpc(connections[node], f"node {node}"), rank_0_host(), token.encode()) for node in sorted(connections)
    ]
    return servers_on([OwnNode(own), *others], own.options, places)


def connect_verifiers(team: Team, nodes: Nodes, rewards: RewardPool | None, reward: RewardSection) -> None:
    """Have the verifier workers of all nodes score samples.

    Raises:
        UserError, RunFailure: they cannot start on one.
    """
    if rewards is None or len(nodes) == 1:
        return
    if reason := reason_to_stay(reward):
        print(f"mindrlhf: verifiers run on node 0 alone: {reason}", flush=True)
        return
    for node, connection in sorted(_connect(_workers(team).verify_for_node, range(1, len(nodes))).items()):
        rewards.admit(connection, f"node {node}")


def start_verifiers(reward: RewardSection, stack: ExitStack) -> NodeHelper | None:
    """Start the verifier workers of this node, which is not rank 0's; ``stack`` ends them."""
    if not reward.verifier_function or reason_to_stay(reward):
        return None
    limits = (reward.num_workers, reward.timeout_s, reward.memory_limit_mib)
    verifiers = NodeHelper("mindrlhf.sandbox.pool_node", pool_arguments(Selection.from_config(reward), *limits))
    stack.callback(verifiers.close)
    return verifiers


def start_helpers(config: GrpoConfig, stack: ExitStack) -> tuple[NodeHelper | None, NodeHelper | None]:
    """Start what works for rank 0 on this node, which is not its: verifiers and agents; ``stack`` ends them."""
    return start_verifiers(config.reward, stack), start_agents(config.tools, stack)


def connect_agents(team: Team, nodes: Nodes, source: CompletionSource, tools: ToolSection) -> None:
    """Have agents, of which ``source`` is where there are any, run on all nodes.

    Raises:
        UserError, RunFailure: they cannot start on one.
    """
    if not tools.agent or len(nodes) == 1:
        return
    for node, connection in sorted(_connect(_workers(team).run_agents_for_node, range(1, len(nodes))).items()):
        source.admit(connection, f"node {node}")


def _workers(team: Team) -> ServingWorker:
    return Workers(team.call)


def _connect(introduce: Callable[..., Any], others: Sequence[int], token: str = "") -> dict[int, SignedConnection]:
    token, host = token or secrets.token_hex(16), rank_0_host()
    with listen(host, backlog=len(others)) as listener:
        introduce(host=host, port=listener.getsockname()[1], token=token)
        return accept_nodes(listener, token.encode(), others)
