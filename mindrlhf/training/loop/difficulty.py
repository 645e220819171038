"""Prompts that rest, since all their samples were right or wrong when they were last drawn."""

import sys
from collections.abc import Mapping, Sequence

import numpy as np

from mindrlhf.data.stream import PromptStream
from mindrlhf.rewards.registry import part_name
from mindrlhf.rollout.samples import Sample, reward_matrix


class DifficultyStream(PromptStream):
    """A stream without end that rests prompts whose pass rate was 0 or 1 when they were last drawn.

    What is left out is decided when an epoch begins, by the rates noted until then: the order depends on what the
    samples were, which a resumed run knows from the state. Where all prompts would rest, none does.

    Args:
        rest_epochs: epochs that such a prompt is left out of; then it is tried again.
    """

    def __init__(self, num_records: int, seed: int, shuffle: bool, rest_epochs: int):
        self._rest_epochs = rest_epochs
        self.rates: dict[int, tuple[float, int]] = {}  # record -> pass rate, and the epoch in which it is back
        self.resting: list[int] = []  # in this epoch
        super().__init__(num_records, seed, shuffle)

    def note(self, indices: Sequence[int], rates: Sequence[float]) -> None:
        """Take in the pass rates of prompts, 0 to 1 each; NaN says nothing."""
        for index, rate in zip(indices, rates):
            if not np.isnan(rate):
                rests = rate in (0.0, 1.0)
                self.rates[index] = float(rate), self.epoch + 1 + self._rest_epochs * rests

    def state(self) -> dict:
        """Return also the rates, and what rests in this epoch."""
        rates = {str(index): list(found) for index, found in self.rates.items()}
        return super().state() | {"rates": rates, "resting": self.resting}

    def restore(self, state: Mapping) -> None:
        """Continue from ``state``; raises as of a :class:`PromptStream`."""
        self.rates = {int(index): (rate, back) for index, (rate, back) in state.get("rates", {}).items()}
        self.resting = list(state.get("resting", []))
        self._order = self._without(super()._epoch_order(state.get("epoch") or 0), self.resting)
        self.epoch = state.get("epoch") if isinstance(state.get("epoch"), int) else 0
        super().restore(state)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        order = super()._epoch_order(epoch)
        resting = sorted(index for index, (_, back) in self.rates.items() if back > epoch)
        self.resting = resting if len(resting) < self.num_records else []
        if self.resting:
            say = f"mindrlhf: {len(self.resting)} of {self.num_records} prompts rest in epoch {epoch + 1}"
            print(say, file=sys.stderr, flush=True)
        return self._without(order, self.resting)

    @staticmethod
    def _without(order: np.ndarray, resting: Sequence[int]) -> np.ndarray:
        return order[~np.isin(order, resting)]


def pass_rates(samples: Sequence[Sample], num_samples: int, verifier: str) -> np.ndarray:
    """Return the mean of what a verifier gave to the samples of each prompt, within 0 and 1; float64 [prompts]."""
    return np.clip(reward_matrix(samples, num_samples, part_name(verifier)), 0.0, 1.0).mean(axis=1)
