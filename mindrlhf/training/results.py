"""Records that the workers of ranks return, and how those of a replica become one."""

import numpy as np

from mindrlhf.system.records import last, merge, merged_by, result, union


@result
class ProcessStatistics:
    """Graphs and memory of a rank so far.

    Attributes:
        recompiles: graphs compiled, one for each shape of rows.
        peak_rss_gb: largest resident memory.
    """

    recompiles: int = merged_by(max)
    peak_rss_gb: float = merged_by(max)


@result
class UpdateResult:
    """Result of one optimiser update on a rank.

    Attributes:
        statistics: float64 [statistics of the loss], sums over the rank's tokens, the first the loss; those of all
            ranks add up.
        grad_norm: global norm before clipping, the same on all ranks; not finite says that there was no update.
        process: of the rank.
        logprobs: what a policy said before it, float32 [rows, length] for each micro-batch; empty of other models.
    """

    statistics: np.ndarray = merged_by(last)
    grad_norm: float = merged_by(last)
    process: ProcessStatistics = merged_by(merge)
    logprobs: tuple[np.ndarray, ...] = merged_by(last, default=())

    @property
    def loss(self) -> float:
        return float(self.statistics[0])


@result
class HeldOutLogProbs:
    """The summed log-probability of the response tokens of a rank's share."""

    total: float = merged_by(last)


@result
class Machine:
    """Machine of a rank; see :func:`mindrlhf.system.processes.machine`."""

    name: str = merged_by(last)


@result
class SavingState:
    """State of a rank that writes its part of a checkpoint."""

    is_saving: bool = merged_by(any)


@result
class SavedShards:
    """Checksums of what a rank wrote; see :data:`mindrlhf.checkpoint.state.StateWriter`."""

    checksums: dict[str, str] = merged_by(union)


@result
class NodePart:
    """A node's part of its checkpoints; empty on ranks that are not the first of their node.

    Attributes:
        steps: that have a part there.
        path: at which a part is being written.
        damage: what is wrong with the part of a step, if anything.
        shards: directories of ranks in it.
    """

    steps: tuple[int, ...] = merged_by(last, default=())
    path: str = merged_by(last, default="")
    damage: str = merged_by(last, default="")
    shards: tuple[str, ...] = merged_by(last, default=())
