"""Checkpoints on disks of the nodes' own: each node keeps what its ranks hold.

Every rank writes; when all have confirmed, each node marks its part as whole, rank 0's node last: a step that it holds,
all hold. A node that dies in between leaves the others one step ahead at most, which is written again. A part has the
shards of its node's ranks, or an unsharded model whole, and all that is small, so that what another layout needs of a
node's step can be copied to the same path on another.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.background import BackgroundWriter
from mindrlhf.checkpoint.manifest import list_files
from mindrlhf.checkpoint.state import read_state
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.errors import UserError
from mindrlhf.training.checkpoints.parts import SHARDS, part_state
from mindrlhf.training.checkpoints.shards import ShardCheckpoints
from mindrlhf.training.team import Team


class NodeCheckpoints(ShardCheckpoints):
    """The part of rank 0; its own node's part is that of its :class:`CheckpointStore`.

    Args:
        team: all ranks.
        nodes: the ranks of each machine, rank 0's first.
        store: of rank 0's node.
        writer: see :class:`ShardCheckpoints`.
        is_sharded: every rank holds a shard of the model; if not, the first rank of each node writes the whole.
        parallel: `parallel_config` of this run.
    """

    def __init__(
        self,
        team: Team,
        nodes: Sequence[Sequence[int]],
        store: CheckpointStore,
        writer: BackgroundWriter,
        *,
        is_sharded: bool,
        parallel: Mapping[str, Any],
    ):
        super().__init__(team, writer)
        self._ranks = nodes
        self._firsts = [ranks[0] for ranks in nodes]
        self._store = store
        self._is_sharded = is_sharded
        self._parallel = parallel
        directories = [str(store.save_dir) if rank in self._firsts[1:] else "" for rank in range(team.world_size)]
        held = self._workers.keep_part(keep_last=store.keep_last, per_rank=[{"save_dir": path} for path in directories])
        self._held = [store.steps(), *(held[rank].steps for rank in self._firsts[1:])]

    def latest(self) -> Path:
        """Return the newest checkpoint of which every node holds its part whole; damaged ones are warnings.

        Raises:
            UserError: there is none; or it is of another layout, and files have to be copied first: which, and where.
        """
        for step in sorted(set.intersection(*map(set, self._held)), reverse=True):
            states = self._workers.check_part(step=step)
            states = [part_state(self._store.path(step)), *(states[rank] for rank in self._firsts[1:])]
            damages = [f"node {node}: {state.damage}" for node, state in enumerate(states) if state.damage]
            if not damages:
                self._check_shards(self._store.path(step), [set(state.shards) for state in states])
                return self._store.path(step)
            for damage in damages:
                print(f"warning: checkpoint {step} is skipped: {damage}", file=sys.stderr, flush=True)
        held = [f"node {node} has {', '.join(map(str, steps)) or 'none'}" for node, steps in enumerate(self._held)]
        raise UserError(
            f"there is no step of which every node holds its part whole in {self._store.save_dir}: {'; '.join(held)}. "
            "Copy the directory of a step from a node that holds it to the same place on those that lack it"
        )

    def _check_shards(self, directory: Path, held: Sequence[set[str]]) -> None:
        """Compare the ranks whose shards lie on each node with those that its ranks read."""
        everywhere = set.union(*held)
        if not everywhere:
            return
        num_ranks = 1 + max(map(_rank_of, everywhere))
        before = read_state(directory).config.get("parallel_config")
        is_same = before == self._parallel and num_ranks == self._team.world_size
        lines = []
        for node, ranks in enumerate(self._ranks):
            read = {name for name in everywhere if not is_same or _rank_of(name) in ranks}
            for name in sorted(read - held[node]):
                holder = next(other for other, names in enumerate(held) if name in names)
                lines.append(f"copy {directory / name} of node {holder} to the same place on node {node}")
        if lines:
            raise UserError("\n  ".join(["the shards of the checkpoint lie elsewhere than they are read:", *lines]))

    def _begin_ranks(self, directory: Path, part: Mapping[str, Any]) -> None:
        opened = self._workers.open_part(**part)
        paths = [str(directory), *(opened[rank].path for rank in self._firsts[1:])]
        ranks = range(self._team.world_size) if self._is_sharded else self._firsts
        directories = [paths[self._node_of(rank)] if rank in ranks else "" for rank in range(self._team.world_size)]
        self._workers.begin_saving(per_rank=[{"directory": path} for path in directories], copies=True)

    def _own_checksums(self, saved: Sequence[Mapping[str, str]]) -> dict[str, str]:
        return self._by_node(saved)[0]

    def _close_parts(self, directory: Path, saved: Sequence[Mapping[str, str]]) -> None:
        checksums = self._by_node(saved)
        small = {name: path for name, path in list_files(directory).items() if name not in checksums[0]}
        files = {name: path.read_bytes() for name, path in small.items() if not SHARDS.fullmatch(name)}
        self._workers.close_part(
            per_rank=[{"checksums": checksums[self._node_of(rank)]} for rank in range(self._team.world_size)],
            files={name: np.frombuffer(content, np.uint8) for name, content in files.items()},
        )

    def _by_node(self, saved: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        by_node: list[dict[str, str]] = [{} for _ in self._ranks]
        for rank, checksums in enumerate(saved):
            by_node[self._node_of(rank)].update(checksums)
        return by_node

    def _node_of(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self._ranks) if rank in ranks)


def _rank_of(shards: str) -> int:
    return int(shards.rpartition("_")[2])
