"""The records that rank 0 and the ranks exchange, but for those of publishing: :mod:`mindrlhf.weights.publish`."""

from typing import Any

import numpy as np

from mindrlhf.data.packing import PackedRows
from mindrlhf.system.messages import last, merge, merged_by, record, result, union

record(PackedRows)


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


@result
class Machine:
    """Which machine a rank is on; see :func:`mindrlhf.system.processes.machine`."""

    name: str = merged_by(last)


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
