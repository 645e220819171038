"""What an algorithm and its guards keep from step to step, typed, and its form in ``state.json``."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindrlhf.checkpoint.manifest import DamagedDirectory


@dataclass(frozen=True)
class KlState:
    """Of :class:`mindrlhf.algorithms.kl_control.KlController`."""

    coefficient: float


@dataclass(frozen=True)
class GuardsState:
    """Of the guards of a run: one field each."""

    num_skipped: int = 0  # updates in a row
    norms: list[float] = field(default_factory=list)  # gradient norms of the last updates


@dataclass
class LearningState:
    """Of the alarms of a run (:mod:`mindrlhf.training.loop.alarms`), which change it in place."""

    # Steps in a row for which a condition has held, by its name; -1 where it had to from the start, and did not.
    held: dict[str, int] = field(default_factory=dict)
    first_values: dict[str, float] = field(default_factory=dict)  # of each verifier
    raised: dict[str, str] = field(default_factory=dict)  # the text of each alarm whose condition holds


@dataclass(frozen=True)
class SampleTotals:
    """Where the samples of a run have gone."""

    generated: int = 0
    used: int = 0
    dropped: int = 0
    carried: int = 0  # left over for the next step


@dataclass(frozen=True)
class OffPolicyState:
    """Of the steps whose samples were generated off-policy and are not trained on yet, in order: one item for each."""

    versions: list[int]  # of the weights
    num_stale: list[int]  # samples that dynamic sampling had left over before
    num_without_signal: list[int]


@dataclass(frozen=True)
class AsynchronousState:
    """Of groups that are generated without end: see :mod:`mindrlhf.training.loop.sampling.pipelined`."""

    num_rounds: int  # that are done
    version: int  # of the weights that the servers have


@dataclass(frozen=True)
class PairAccuracy:
    """The accuracy on held-out pairs at one step."""

    pairs: str  # digest of the pairs
    step: int
    accuracy: list[float]  # mean, low, high, confidence


@dataclass
class AlgorithmState:
    """All of it; a value is None, and not in the file, until the run has it."""

    trajectory: str | None = None  # fingerprint: "hash" of the last line of trajectory.jsonl
    samples: SampleTotals | None = None
    guards: GuardsState | None = None
    kl: KlState | None = None
    first_evaluation: PairAccuracy | None = None
    last_evaluation: PairAccuracy | None = None
    ahead: OffPolicyState | None = None
    asynchronous: AsynchronousState | None = None
    # Partial rollout with dynamic sampling: groups that took another's place; places without one and their next try.
    num_replaced: int | None = None
    free_places: list[list[int]] | None = None
    learning: LearningState | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], place: str) -> "AlgorithmState":
        """Return what ``to_json`` was called on; ``place`` is where it stands, for errors.

        Raises:
            DamagedDirectory: a key is unknown or missing, or a value is of another kind.
        """
        kinds = typing.get_type_hints(cls)
        if unknown := sorted(values.keys() - kinds.keys()):
            raise DamagedDirectory(f"{place} is damaged: algorithm_state.{unknown[0]} is unknown")
        places = {name: f"{place} is damaged: algorithm_state.{name}" for name in values}
        return cls(**{name: _decode(typing.get_args(kinds[name])[0], values[name], places[name]) for name in values})


def _decode(kind: Any, value: Any, place: str) -> Any:
    if not dataclasses.is_dataclass(kind):
        if not _fits(value, kind):
            raise DamagedDirectory(f"{place} is {value!r}")
        return value
    kinds = typing.get_type_hints(kind)
    if not isinstance(value, dict):
        raise DamagedDirectory(f"{place} is {value!r}")
    if wrong := sorted(value.keys() ^ kinds.keys()):
        raise DamagedDirectory(f"{place}.{wrong[0]} is {'unknown' if wrong[0] in value else 'missing'}")
    return kind(**{name: _decode(kinds[name], value[name], f"{place}.{name}") for name in kinds})


def _fits(value: Any, kind: Any) -> bool:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, arguments[0]) for item in value)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(item, arguments[1]) for item in value.values())
    if kind is int:
        return type(value) is int
    return type(value) in (int, float) if kind is float else isinstance(value, kind)
