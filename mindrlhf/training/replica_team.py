"""The ranks of a run whose model is sharded, as the loop sees them: one worker for each data-parallel replica."""

from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.config.keys import RunConfig
from mindrlhf.config.training import trains_sharded
from mindrlhf.layout.layout import Layout
from mindrlhf.system.records import merge
from mindrlhf.training.team import Results, Team


def with_replicas(config: RunConfig, team: Team) -> "Team | ReplicaTeam":
    """Return the ranks as the loop sees them: a worker for each rank, or where the model is sharded, each replica."""
    if not trains_sharded(config):
        return team
    return ReplicaTeam(team, Layout.from_config(config.parallel_config, team.world_size))


class ReplicaTeam:
    """Stands for a :class:`mindrlhf.training.team.Team` where rows are shared by replicas of the model, not by ranks.

    All ranks of a replica get the same rows, and only these; rank d of the data axis is in replica d. What a call
    returns for a replica is merged from the results of its ranks, as their fields say
    (:mod:`mindrlhf.system.records`).
    """

    def __init__(self, team: Team, layout: Layout):
        assert team.world_size == layout.world_size, f"{team.world_size} ranks for a layout of {layout.world_size}"
        self._team = team
        self._replica_of = [layout.coordinates(rank).data for rank in range(team.world_size)]
        self._ranks_of = [
            [rank for rank, replica in enumerate(self._replica_of) if replica == number]
            for number in range(self.world_size)
        ]

    @property
    def world_size(self) -> int:
        """Number of replicas that share the rows."""
        return 1 + max(self._replica_of)

    @property
    def num_devices(self) -> int:
        """Number of ranks."""
        return self._team.world_size

    @property
    def ranks(self) -> Team:
        """All ranks, each for itself."""
        return self._team

    @property
    def rank_0(self) -> Any:
        """The worker of rank 0, in this process."""
        return self._team.rank_0

    def call(self, method: str, per_rank: Sequence[Mapping[str, Any]] | None = None, **common: Any) -> Results:
        """Run a method on every rank; see :meth:`mindrlhf.training.team.Team.call`.

        Returns:
            The results by replica.
        """
        own = None if per_rank is None else [per_rank[replica] for replica in self._replica_of]
        results = self._team.call(method, per_rank=own, **common)
        return [merge([results[rank] for rank in ranks]) for ranks in self._ranks_of]

    def close(self) -> None:
        """Tell the other ranks that the run is over."""
        self._team.close()
