"""State of an algorithm and its guards from step to step."""

from dataclasses import dataclass, field

from mindrlhf.system.records import record


@record
@dataclass(frozen=True)
class KlState:
    """Of :class:`mindrlhf.algorithms.kl_control.KlController`."""

    coefficient: float


@record
@dataclass(frozen=True)
class GuardsState:
    """Of the guards of a run: one field each."""

    num_skipped: int = 0  # updates in a row
    norms: list[float] = field(default_factory=list)  # gradient norms of the last updates


@record
@dataclass
class LearningState:
    """Of the alarms of a run (:mod:`mindrlhf.training.loop.alarms`), which change it in place."""

    # Steps in a row for which a condition has held, by its name; -1 where it had to from the start, and did not.
    held: dict[str, int] = field(default_factory=dict)
    first_values: dict[str, float] = field(default_factory=dict)  # of each verifier
    raised: dict[str, str] = field(default_factory=dict)  # the text of each alarm whose condition holds


@record
@dataclass(frozen=True)
class SampleTotals:
    """Counts of the samples of a run."""

    generated: int = 0
    used: int = 0
    dropped: int = 0
    carried: int = 0  # left over for the next step


@record
@dataclass(frozen=True)
class AsynchronousState:
    """Of groups that are generated without end: see :mod:`mindrlhf.training.loop.sampling.pipelined`."""

    num_rounds: int  # that are done
    version: int  # of the weights that the servers have


@record
@dataclass(frozen=True)
class PairAccuracy:
    """The accuracy on held-out pairs at one step."""

    pairs: str  # digest of the pairs
    step: int
    accuracy: list[float]  # mean, low, high


@record
@dataclass
class AlgorithmState:
    """All of it; a value is None until the run has it."""

    trajectory: str | None = None  # fingerprint: "hash" of the last line of trajectory.jsonl
    samples: SampleTotals | None = None
    guards: GuardsState | None = None
    kl: KlState | None = None
    first_evaluation: PairAccuracy | None = None
    last_evaluation: PairAccuracy | None = None
    asynchronous: AsynchronousState | None = None
    # Partial rollout with dynamic sampling: groups that took another's place; places without one and their next try.
    num_replaced: int | None = None
    free_places: list[list[int]] | None = None
    learning: LearningState | None = None
