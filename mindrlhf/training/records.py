"""The records that rank 0 and the ranks exchange, and how the results of a replica's ranks become one.

Where a model is sharded, several ranks compute one replica's result, and most hold only a part of it: each field of
a result says which of the ranks' values counts, or how they are put together.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mindrlhf.data.packing import PackedRows
from mindrlhf.system.messages import record

_RULE = "merged by"
_CHECKSUM_MODULUS = 2**64  # of the weight board

Result = TypeVar("Result")
Contribution = dict[str, dict[str, Any]]  # see :meth:`mindrlhf.weights.publish.buffer.WeightBoard.contribution`

record(PackedRows)


def merged_by(rule: Any, **options: Any) -> Any:
    """Return a dataclass field whose values ``rule`` merges: a function of the list of the ranks' values."""
    return dataclasses.field(metadata={_RULE: rule}, **options)


def result(cls: type) -> type:
    """Make a class a frozen dataclass that a rank may return.

    Raises:
        TypeError: a field does not say how it is merged.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    for one in dataclasses.fields(cls):
        if _RULE not in one.metadata:
            raise TypeError(
                f"{cls.__name__}.{one.name} does not say how the results of a replica's ranks are merged: give it "
                "merged_by(...)"
            )
    return record(cls)


def merge(results: Sequence[Result]) -> Result:
    """Return the result of a replica from those of its ranks, in order; None if they returned nothing."""
    kinds = {type(one) for one in results}
    assert len(kinds) == 1, f"the ranks of a replica returned different things: {sorted(map(str, kinds))}"
    first = results[0]
    if first is None:
        return None
    values = {
        one.name: one.metadata[_RULE]([getattr(each, one.name) for each in results])
        for one in dataclasses.fields(first)
    }
    return type(first)(**values)


def last(values: Sequence[Any]) -> Any:
    """Take the value of the last rank: in the last pipeline stage, where log-probabilities and losses are."""
    return values[-1]


def union(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put together what the ranks have by different names."""
    return {name: value for part in values for name, value in part.items()}


def join(values: Sequence[Mapping[str, list]]) -> dict[str, list]:
    """Put the lists together that the ranks have by the same names."""
    joined: dict[str, list] = {}
    for part in values:
        for name, entries in part.items():
            joined.setdefault(name, []).extend(entries)
    return joined


def add_contributions(values: Sequence[Contribution]) -> Contribution:
    """Add up what ranks wrote to a weight board."""
    total: Contribution = {}
    for contribution in values:
        for name, written in contribution.items():
            entry = total.setdefault(name, {"regions": [], "sums": [], "checksum": 0})
            entry["regions"] = [*entry["regions"], *written["regions"]]
            entry["sums"] = [*entry["sums"], *written["sums"]]
            entry["checksum"] = (entry["checksum"] + written["checksum"]) % _CHECKSUM_MODULUS
    return total


@result
class Share:
    """A rank's share of the rows of one optimiser update.

    Attributes:
        micro_batches: in the order in which the rank computes them.
        num_tokens: generated tokens of the whole update, over all ranks, which the loss divides by.
    """

    micro_batches: tuple[PackedRows, ...] = merged_by(last)
    num_tokens: int = merged_by(last)


@result
class TokenArrays:
    """One value for each position of a share: log-probabilities, values, scores, advantages.

    Attributes:
        arrays: float32 [rows, length] for each micro-batch.
    """

    arrays: tuple[np.ndarray, ...] = merged_by(last)


@result
class ProcessStatistics:
    """What a rank has used so far.

    Attributes:
        recompiles: graphs compiled, one for each shape of rows.
        peak_rss_gb: largest resident memory.
    """

    recompiles: int = merged_by(max)
    peak_rss_gb: float = merged_by(max)


@result
class UpdateResult:
    """What one optimiser update gave on a rank.

    Attributes:
        statistics: float64 [statistics of the loss], sums over the rank's tokens, the first the loss; those of all
            ranks add up.
        grad_norm: global norm before clipping, the same on all ranks; not finite says that there was no update.
        process: of the rank.
    """

    statistics: np.ndarray = merged_by(last)
    grad_norm: float = merged_by(last)
    process: ProcessStatistics = merged_by(merge)


@result
class PolicyUpdateResult(UpdateResult):
    """That of a policy, with the log-probabilities that the update began with.

    Attributes:
        logprobs: float32 [rows, length] for each micro-batch.
    """

    logprobs: tuple[np.ndarray, ...] = merged_by(last)


@result
class HeldOutLogProbs:
    """The summed log-probability of the response tokens of a rank's share."""

    total: float = merged_by(last)


def add_by_node(values: Sequence[Mapping[str, Contribution]]) -> dict[str, Contribution]:
    """Add up what ranks wrote to the boards of several nodes, by node."""
    nodes = dict.fromkeys(node for value in values for node in value)
    return {node: add_contributions([value[node] for value in values if node in value]) for node in nodes}


@result
class Published:
    """What a rank wrote to the weight board of its node, for the seal.

    Attributes:
        contribution: to that of rank 0's node.
        elsewhere: to those of other nodes, by node.
    """

    contribution: Contribution = merged_by(add_contributions)
    elsewhere: dict[str, Contribution] = merged_by(add_by_node, default_factory=dict)


@result
class LeaderAddress:
    """Where the first rank of a node waits for those of the others: host and port by node; empty on other ranks."""

    places: dict[str, Any] = merged_by(union)


@result
class Received:
    """What crossed between nodes' boards: by node, lists of name, region and sum of the bits in memory there.

    Attributes:
        regions: what came to the node; where several of its ranks got parts of a region, their sums add up.
        sent: what it was the first to send, where that is less than what a rank wrote.
    """

    regions: dict[str, Any] = merged_by(join)
    sent: dict[str, Any] = merged_by(union, default_factory=dict)


@result
class ServerNeeds:
    """What the workers of a rollout server read on one of its nodes: by node, boxes by tensor, None for all of it."""

    needs: dict[str, Any] = merged_by(union)


@result
class Machine:
    """Which machine a rank is on; see :func:`mindrlhf.system.processes.machine`."""

    name: str = merged_by(last)


@result
class BoardPath:
    """Where the ranks of a node find its weight board; empty where a rank made none."""

    path: str = merged_by(last)


@result
class SavingState:
    """Whether a rank is still writing its part of a checkpoint."""

    is_saving: bool = merged_by(any)


@result
class SavedShards:
    """Checksums of what a rank wrote; see :data:`mindrlhf.checkpoint.state.StateWriter`."""

    checksums: dict[str, str] = merged_by(union)


@result
class HeldSteps:
    """The steps of which a node holds a part of its own."""

    steps: Any = merged_by(last)


@result
class PartPath:
    """Where a node writes its part of a checkpoint; empty on ranks that are not its first."""

    path: str = merged_by(last)


@result
class PartState:
    """A node's part of a checkpoint: what is wrong with it, if anything, and the directories of ranks in it."""

    damage: str = merged_by(last)
    shards: Any = merged_by(last)
