"""Rollout servers that lie over several nodes, as rank 0 sees them: started once the ranks know each other."""

import secrets

from mindrlhf.errors import RunFailure
from mindrlhf.layout.servers import Places
from mindrlhf.rollout.remote import NodesGenerator, ReplicatedGenerator
from mindrlhf.training.nodes import Nodes, connect_generators
from mindrlhf.training.records import LeaderAddress
from mindrlhf.training.team import Team


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
