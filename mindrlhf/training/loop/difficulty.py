"""The order of prompts by how hard they are: what teaches nothing rests, the first epoch may go by a column."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import UserError
from mindrlhf.rewards.registry import part_name
from mindrlhf.rollout.samples import Sample, reward_matrix
from mindrlhf.training.preflight.features import check_curriculum


@dataclass(frozen=True)
class Rest:
    """Which prompts rest, by the pass rate of the samples that were drawn of them last."""

    epochs: int  # so many; then they are tried again. 0: none rests
    easy: float = 1.0  # from this rate on
    hopeless: float = 0.0  # up to this rate


class DifficultyStream(PromptStream):
    """A stream without end that rests prompts which teach nothing, and may order the first epoch by a column.

    What is left out is decided when an epoch begins, by the rates noted until then: the order depends on what the
    samples were, which a resumed run knows from the state. Where all prompts would rest, none does.

    Args:
        rest: which prompts rest.
        levels: float [num_records], ascending in the first epoch, equal ones shuffled; None shuffles that too.
    """

    def __init__(self, num_records: int, seed: int, shuffle: bool, rest: Rest, levels: np.ndarray | None = None):
        self._rest, self._levels = rest, levels
        self.rates: dict[int, tuple[float, int]] = {}  # record -> pass rate, and the epoch in which it is back
        self.resting: list[int] = []  # in this epoch
        super().__init__(num_records, seed, shuffle)

    def note(self, indices: Sequence[int], rates: Sequence[float]) -> None:
        """Take in the pass rates of prompts, 0 to 1 each; NaN says nothing."""
        for index, rate in zip(indices, rates):
            if not np.isnan(rate):
                rests = bool(rate >= self._rest.easy or rate <= self._rest.hopeless)
                self.rates[index] = float(rate), self.epoch + 1 + self._rest.epochs * rests

    def state(self) -> dict:
        """Return also the rates, and what rests in this epoch."""
        rates = {str(index): list(found) for index, found in self.rates.items()}
        return super().state() | {"rates": rates, "resting": self.resting, "by_level": self._levels is not None}

    def restore(self, state: Mapping) -> None:
        """Continue from ``state``.

        Raises:
            UserError: as of a :class:`PromptStream`, or it is of a run with another order.
        """
        if state.get("by_level", False) != (self._levels is not None):
            raise UserError("cannot resume the data order: 'algorithm.curriculum' was set or removed: set it back")
        self.rates = {int(index): (rate, back) for index, (rate, back) in state.get("rates", {}).items()}
        self.resting = list(state.get("resting", []))
        self._order = self._without(super()._epoch_order(state.get("epoch") or 0), self.resting)
        if state.get("epoch") == 0 and self._levels is not None:
            self._order = self._by_level(self._order)
        self.epoch = state.get("epoch") if isinstance(state.get("epoch"), int) else 0
        super().restore(state)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        order = super()._epoch_order(epoch)
        resting = sorted(index for index, (_, back) in self.rates.items() if back > epoch)
        self.resting = resting if len(resting) < self.num_records else []
        if self.resting:
            say = f"mindrlhf: {len(self.resting)} of {self.num_records} prompts rest in epoch {epoch + 1}"
            print(say, file=sys.stderr, flush=True)
        if epoch == 0 and self._levels is not None:
            return self._by_level(order)
        return self._without(order, self.resting)

    def _by_level(self, order: np.ndarray) -> np.ndarray:
        return order[np.argsort(self._levels[order], kind="stable")]

    @staticmethod
    def _without(order: np.ndarray, resting: Sequence[int]) -> np.ndarray:
        return order[~np.isin(order, resting)]


def read_levels(prompts: PromptFile, column: str) -> np.ndarray:
    """Return a column of numbers, float64 [records].

    Raises:
        UserError: the prompts do not keep it, or one has no number there.
    """
    check_curriculum(column, prompts)
    values = [prompt.extra[column] for prompt in prompts.read(range(len(prompts)))]
    for number, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            raise UserError(
                f"'algorithm.curriculum' is {column}, but record {number} of {prompts.path} has {value!r:.60} there: "
                "give every record a number"
            )
    return np.array(values, np.float64)


def pass_rates(samples: Sequence[Sample], num_samples: int, verifier: str) -> np.ndarray:
    """Return the mean of what a verifier gave to the samples of each prompt, within 0 and 1; float64 [prompts]."""
    return np.clip(reward_matrix(samples, num_samples, part_name(verifier)), 0.0, 1.0).mean(axis=1)


def difficulty_stream(config: GrpoConfig, prompts: PromptFile) -> DifficultyStream:
    """Return the order that the section `algorithm` asks for.

    Raises:
        UserError: see ``read_levels``.
    """
    algorithm = config.algorithm
    levels = read_levels(prompts, algorithm.curriculum) if algorithm.curriculum else None
    rest = Rest(algorithm.rest_epochs, algorithm.rest_easy, algorithm.rest_hopeless)
    return DifficultyStream(len(prompts), config.run.seed, config.data.shuffle, rest, levels)
