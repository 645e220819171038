"""Which ranks form which communication group, and which nodes it spans."""

from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.layout.layout import Layout
from mindrlhf.layout.parameter import ParameterLayout

# Groups of one kind that are listed in full; of more, the first few stand for all.
MAX_LISTED = 4
MAX_RANKS_LISTED = 8


@dataclass(frozen=True)
class GroupKind:
    """All groups of one kind.

    Attributes:
        name: what their ranks share or exchange.
        purpose: what is communicated in it, in words.
        groups: ranks of each group; every rank is in exactly one.
        max_nodes: most nodes that one of them spans.
    """

    name: str
    purpose: str
    groups: tuple[tuple[int, ...], ...]
    max_nodes: int

    @property
    def size(self) -> int:
        """Ranks of each group."""
        return len(self.groups[0])


_AXES = (
    ("model", "tensor parallel", "activations of every layer"),
    ("context", "context parallel", "keys and values of every layer"),
    ("data", "data parallel", "gradients"),
    ("stage", "pipeline", "activations between stages"),
    ("expert", "expert parallel", "tokens to experts and back"),
)


def plan_groups(layout: Layout, layouts: Sequence[ParameterLayout], node_size: int) -> list[GroupKind]:
    """Return the kinds of groups with more than one rank; nodes hold ``node_size`` consecutive ranks each."""
    kinds = [(name, purpose, layout.groups(axis)) for axis, name, purpose in _AXES]
    for (size, _), sample in sorted(_optimizer_shards(layouts).items()):
        kinds.append((f"optimiser shard of {size}", "weights and gradients", optimizer_groups(layout, sample)))
    return [
        GroupKind(name, purpose, tuple(groups), max(num_nodes(group, node_size) for group in groups))
        for name, purpose, groups in kinds
        if len(groups[0]) > 1
    ]


def num_communicators(layout: Layout, layouts: Sequence[ParameterLayout]) -> int:
    """Return the communication groups that a rank is in: the world, and one of each kind."""
    sizes = (
        layout.model_parallel,
        layout.context_parallel,
        layout.data_parallel,
        layout.pipeline_stage,
        layout.expert_parallel,
    )
    return 1 + sum(size > 1 for size in sizes) + len(_optimizer_shards(layouts))


def _optimizer_shards(layouts: Sequence[ParameterLayout]) -> dict[tuple[int, int], ParameterLayout]:
    """The distinct optimiser shards, as (size, distance of neighbours), each with a parameter that has it."""
    return {
        (one.optimizer_shard_size, one.optimizer_shard_step): one for one in layouts if one.optimizer_shard_size > 1
    }


def optimizer_groups(layout: Layout, parameter: ParameterLayout) -> list[tuple[int, ...]]:
    """Return the ranks that share one repeated shard of ``parameter`` and its optimiser state, in all stages."""
    whole = ParameterLayout(
        parameter.name,
        parameter.shape,
        tuple(range(layout.pipeline_stage)),
        parameter.device_matrix,
        parameter.tensor_map,
    )
    size = parameter.optimizer_shard_size
    groups = []
    for stage in whole.stages:
        repeats: dict[tuple, list[int]] = {}
        for rank in range(stage * whole.stage_size, (stage + 1) * whole.stage_size):
            box = tuple((part.start, part.stop) for part in whole.shard_of(rank))
            repeats.setdefault(box, []).append(rank)
        groups += [
            tuple(ranks[start : start + size]) for ranks in repeats.values() for start in range(0, len(ranks), size)
        ]
    return groups


def num_nodes(ranks: Sequence[int], node_size: int) -> int:
    """Return how many nodes the ranks are on."""
    return len({rank // node_size for rank in ranks})


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in few characters: "0-7", "0, 8, 16 ... 56", "0, 3, 5"."""
    steps = {second - first for first, second in zip(ranks, ranks[1:])}
    if steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(steps) == 1 and len(ranks) > 4:
        return f"{ranks[0]}, {ranks[1]}, {ranks[2]} ... {ranks[-1]}"
    if len(ranks) > MAX_RANKS_LISTED:
        return ", ".join(map(str, ranks[: MAX_RANKS_LISTED - 1])) + f" ... {ranks[-1]}"
    return ", ".join(map(str, ranks))


def describe_groups(kind: GroupKind) -> str:
    """Return the first groups of a kind, and how many more there are."""
    shown = [f"({describe_ranks(group)})" for group in kind.groups[:MAX_LISTED]]
    more = len(kind.groups) - len(shown)
    return " ".join(shown) + (f" and {more} more" if more else "")
