"""A run on several machines: which ranks share one, and the rollout servers on each; rank 0's part and a rank's."""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack

from mindrlhf.config.reward import RewardSection, ToolSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import RunFailure
from mindrlhf.launch.nodes.helper import NodeHelper
from mindrlhf.layout.servers import Places
from mindrlhf.rewards.pool import RewardPool, pool_arguments, reason_to_stay
from mindrlhf.rewards.selection import Selection
from mindrlhf.rollout.agents.nodes import start_agents
from mindrlhf.rollout.multi_node.share import NodeShare
from mindrlhf.rollout.remote import NodesGenerator, ReplicatedGenerator, accept_nodes, answer, remotes
from mindrlhf.rollout.types import CompletionSource
from mindrlhf.system.handshake import SignedConnection
from mindrlhf.system.ports import listen
from mindrlhf.system.wire import own_host, rank_0_host
from mindrlhf.training.batch import Machine
from mindrlhf.training.team import Team
from mindrlhf.weights.publish.publisher import PublishingWorker
from mindrlhf.weights.publish.sync import LeaderAddress

Nodes = list[list[int]]  # the ranks of each machine, rank 0's first


class ServingWorker(PublishingWorker):
    """The part of an actor that has the rollout servers of its node; its public methods are called through the team.

    For a server that lies over several nodes, they are called on the first rank of each in the order they stand here.
    """

    node_generator: ReplicatedGenerator | None = None  # the rollout servers that this rank owns
    _share: NodeShare | None = None
    # Of this node, on its first rank, where rank 0 is on another.
    verifiers: NodeHelper | None = None
    agents: NodeHelper | None = None

    def use_generator(self, generator: ReplicatedGenerator) -> None:
        """Take the rollout servers of this node."""
        self.node_generator = generator

    def answer_for_node(self, host: str, port: int, token: str) -> None:
        """On the first rank of another node than rank 0's, let rank 0 use the rollout servers here from now on."""
        if self.node and self.node_generator is not None:
            self.node_generator.use_weight_buffer(self.weight_buffer().path)
            answer(self.node_generator, host, port, token.encode(), self.node)

    def verify_for_node(self, host: str, port: int, token: str) -> None:
        """On the first rank of another node than rank 0's, let rank 0 use the verifier workers here from now on."""
        if self.verifiers is not None:
            self.verifiers.connect(host, port, token, self.node)

    def run_agents_for_node(self, host: str, port: int, token: str) -> None:
        """On the first rank of another node than rank 0's, let rank 0 have agents run here from now on."""
        if self.agents is not None:
            self.agents.connect(host, port, token, self.node)

    def use_share(self, share: NodeShare) -> None:
        """Take what starts this node's share of a server."""
        self._share = share

    def await_parts(self, is_owner: bool) -> LeaderAddress:
        """On a server's first node, listen for its other nodes."""
        return LeaderAddress({str(self.node): list(self._share.open(own_host()))} if is_owner else {})

    def join_server(self, address: list | None, token: str) -> None:
        """On another node of a server, keep its part there; ``address`` is the owner's."""
        if address is not None:
            host, port = address
            path = self.weight_buffer().path
            self._share.join((host, port), token.encode(), self.node, own_host(), path)

    def start_server(self, nodes: list[int] | None, token: str) -> None:
        """On a server's first node, start it in the background; it has parts on ``nodes``."""
        if nodes is not None:
            self.node_generator = self._share.start(token.encode(), nodes, self.weight_buffer().path)


def find_nodes(team: Team) -> Nodes:
    """Ask the ranks where they are; msrun's numbers do not say which of them share a machine."""
    nodes: dict[str, list[int]] = {}
    found: list[Machine] = team.call("machine")
    for rank, machine in enumerate(found):
        nodes.setdefault(machine.name, []).append(rank)
    return list(nodes.values())


def connect_generators(team: Team, others: Sequence[int], own: ReplicatedGenerator) -> NodesGenerator:
    """Return the rollout servers of all nodes.

    Args:
        others: nodes beside rank 0's that own servers.
        own: the servers of rank 0's.
    """
    return NodesGenerator(own, remotes(_connect(team, others, "answer_for_node")))


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
    for node, connection in sorted(_connect(team, range(1, len(nodes)), "verify_for_node").items()):
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
    for node, connection in sorted(_connect(team, range(1, len(nodes)), "run_agents_for_node").items()):
        source.admit(connection, f"node {node}")


def _connect(team: Team, others: Sequence[int], method: str) -> dict[int, SignedConnection]:
    token, host = secrets.token_hex(16), rank_0_host()
    with listen(host, backlog=len(others)) as listener:
        team.call(method, host=host, port=listener.getsockname()[1], token=token)
        return accept_nodes(listener, token.encode(), others)


def start_multi_node(team: Team, nodes: Nodes, places: Places) -> ReplicatedGenerator | NodesGenerator:
    """Start the servers of a run, which lie over several nodes, in the background; every rank has its weight buffer.

    Args:
        places: the nodes of each server; the first server's begin with rank 0's.

    Raises:
        RunFailure: the ranks are on other nodes than their launchers said, or a server could not be started.
    """
    last = places[-1][-1]
    if last >= len(nodes):
        raise RunFailure(
            f"the rollout servers were laid over nodes up to {last}, but the ranks are on {len(nodes)} machines: start "
            "a launcher on each machine"
        )
    first_ranks = [ranks[0] for ranks in nodes]
    owners = {first_ranks[place[0]]: place for place in places}
    members = {first_ranks[node]: place[0] for place in places for node in place[1:]}
    everyone, token = range(team.world_size), secrets.token_hex(16)
    found: list[LeaderAddress] = team.call("await_parts", per_rank=[{"is_owner": rank in owners} for rank in everyone])
    addresses = {int(node): address for one in found for node, address in one.places.items()}
    joining = [{"address": addresses[members[rank]] if rank in members else None} for rank in everyone]
    team.call("join_server", per_rank=joining, token=token)
    starting = [{"nodes": list(owners[rank][1:]) if rank in owners else None} for rank in everyone]
    team.call("start_server", per_rank=starting, token=token)
    own = team.rank_0.node_generator
    others = [place[0] for place in places[1:]]
    return connect_generators(team, others, own) if others else own
