"""A run on several machines, as rank 0 sees it: which ranks share one, and a board and rollout servers on each."""

import secrets
import socket
from collections.abc import Sequence

from mindrlhf.config.sections import COLLECTIVES, TCP
from mindrlhf.errors import RunFailure
from mindrlhf.layout.servers import Places
from mindrlhf.rollout.remote import NodesGenerator, ReplicatedGenerator, accept_nodes, remotes
from mindrlhf.system.wire import family_of
from mindrlhf.training.records import LeaderAddress, Machine, ServerNeeds
from mindrlhf.training.team import Team, rank_0_host
from mindrlhf.weights.publish.needs import merge_needs
from mindrlhf.weights.publish.sync import Needs

Nodes = list[list[int]]  # the ranks of each machine, rank 0's first


def find_nodes(team: Team) -> Nodes:
    """Ask the ranks where they are; msrun's numbers do not say which of them share a machine."""
    nodes: dict[str, list[int]] = {}
    found: list[Machine] = team.call("machine")
    for rank, machine in enumerate(found):
        nodes.setdefault(machine.name, []).append(rank)
    return list(nodes.values())


def attach_boards(
    team: Team, nodes: Nodes, path: str, dtype: str | None = None, bucket_bytes: int = 0, carrier: str = TCP
) -> None:
    """Give every rank the board of its node.

    Args:
        path: of the board that rank 0 has made; the first ranks of other nodes make theirs now.
        dtype, bucket_bytes: that rank 0 has made it with.
        carrier: `rollout.weights_carrier`.
    """
    firsts = {ranks[0] for ranks in nodes[1:]}
    wanted = [
        {"is_wanted": rank in firsts, "dtype": dtype, "bucket_bytes": bucket_bytes} for rank in range(team.world_size)
    ]
    opened = team.call("open_board", per_rank=wanted)
    arguments: list[dict] = [{} for _ in range(team.world_size)]
    for node, ranks in enumerate(nodes):
        own = {"path": opened[ranks[0]].path if node else path, "node": node, "ranks": ranks}
        for rank in ranks:
            arguments[rank] = {**own, "rank": rank, "nodes": nodes} if carrier == COLLECTIVES else own
    team.call("attach_board", per_rank=arguments)


def connect_generators(team: Team, others: Sequence[int], own: ReplicatedGenerator) -> NodesGenerator:
    """Return the rollout servers of all nodes.

    Args:
        others: nodes beside rank 0's that own servers.
        own: the servers of rank 0's.
    """
    token, host = secrets.token_hex(16), rank_0_host()
    with socket.create_server((host, 0), family=family_of(host), backlog=len(others)) as listener:
        team.call("answer_for_node", host=host, port=listener.getsockname()[1], token=token)
        return NodesGenerator(own, remotes(accept_nodes(listener, token.encode(), others)))


def find_needs(team: Team, nodes: Nodes, places: Places) -> list[Needs]:
    """Return by node what of the boards' tensors the servers there read, and have the nodes know it.

    All servers span nodes, and are ready.
    """
    needs: list[Needs] = [{} for _ in nodes]
    owners, size = {str(place[0]): place for place in places}, len(places[0])
    for part in range(size):
        found: list[ServerNeeds] = team.call("find_needs", part=part, num_nodes=size)
        for node, read in ((node, read) for one in found for node, read in one.needs.items()):
            needs[owners[node][part]] = merge_needs([read])
    first_ranks = {ranks[0]: node for node, ranks in enumerate(nodes)}
    own = [needs[first_ranks[rank]] if rank in first_ranks else None for rank in range(team.world_size)]
    team.call("take_needs", per_rank=[{"needs": one} for one in own])
    return needs


def start_spanning(team: Team, nodes: Nodes, places: Places) -> ReplicatedGenerator | NodesGenerator:
    """Start the servers of a run in the background; every rank has the board of its node.

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
