"""The ranks of a run whose model is cut, as the loop sees them: one worker for each data-parallel copy of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.layout.layout import Layout
from mindrlhf.training.team import Team, Values

_CHECKSUM_MODULUS = 2**64  # of the weight board


class ReplicaTeam:
    """Stands for a :class:`mindrlhf.training.team.Team` where rows are shared by copies of the model, not by ranks.

    All ranks of a copy get the same rows, and only these; rank d of the data axis is in copy d. What a call returns for
    a copy is the answer of its last rank, which is in the last pipeline stage, where log-probabilities and losses are;
    but what ranks wrote to the weight board or a checkpoint is put together, and memory is the largest.

    Args:
        team: all ranks.
        layout: of the model.
    """

    def __init__(self, team: Team, layout: Layout):
        assert team.world_size == layout.world_size, f"{team.world_size} ranks for a layout of {layout.world_size}"
        self._team = team
        self._copy_of = [layout.coordinates(rank).data for rank in range(team.world_size)]
        self._ranks_of = [
            [rank for rank, copy in enumerate(self._copy_of) if copy == number] for number in range(self.world_size)
        ]

    @property
    def world_size(self) -> int:
        """Number of copies that share the rows."""
        return 1 + max(self._copy_of)

    @property
    def num_devices(self) -> int:
        """Number of ranks."""
        return self._team.world_size

    @property
    def lead(self) -> Any:
        """The worker of rank 0, in this process."""
        return self._team.lead

    def call(self, method: str, per_rank: Sequence[Mapping[str, Any]] | None = None, **common: Any) -> list[Values]:
        """Run a method on every rank; see :meth:`mindrlhf.training.team.Team.call`.

        Args:
            method: of the worker.
            per_rank: arguments of their own for each copy.
            common: arguments that all ranks get.

        Returns:
            The results by copy.
        """
        own = None if per_rank is None else [per_rank[copy] for copy in self._copy_of]
        results = self._team.call(method, per_rank=own, **common)
        return [_merge([results[rank] for rank in ranks]) for ranks in self._ranks_of]

    def close(self) -> None:
        """Tell the other ranks that the run is over."""
        self._team.close()


def _merge(results: Sequence[Values]) -> Values:
    merged = dict(results[-1])
    if "contribution" in merged:
        merged["contribution"] = _merge_contributions([result["contribution"] for result in results])
    if "checksums" in merged:
        merged["checksums"] = {name: value for result in results for name, value in result["checksums"].items()}
    for name in ("memory/peak_rss_gb", "recompiles", "is_saving"):
        if name in merged:
            merged[name] = max(result[name] for result in results)
    return merged


def _merge_contributions(contributions: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Add up what ranks wrote; see :meth:`mindrlhf.weights.board.WeightBoard.contribution`."""
    merged: dict[str, dict[str, Any]] = {}
    for contribution in contributions:
        for name, part in contribution.items():
            entry = merged.setdefault(name, {"regions": [], "checksum": 0})
            entry["regions"] = [*entry["regions"], *part["regions"]]
            entry["checksum"] = (entry["checksum"] + part["checksum"]) % _CHECKSUM_MODULUS
    return merged
