"""What all forms of the vocabulary projection share; without MindSpore."""

from dataclasses import dataclass

import numpy as np

# The least probability that all tokens but some have together. It is 1 - sum, a difference that is exact where it is
# small (Sterbenz), of a sum that has an error of some 1e-7, as the normaliser adds up float32 numbers: below ten times
# as much it is rounding, or below 0, and its logarithm noise. It counts as this much then, and has no gradient.
LEAST_REST = 1e-6


@dataclass(frozen=True)
class HeadTile:
    """Of how many logits a rank on Ascend has the memory at a time.

    Attributes:
        positions: of its micro-batch; 0 means all.
        vocabulary: tokens of its part of the vocabulary; 0 means all.
    """

    positions: int = 0
    vocabulary: int = 0

    def __bool__(self) -> bool:
        """Whether the projection is made in tiles at all."""
        return bool(self.positions or self.vocabulary)


WHOLE_HEAD = HeadTile()


def likeliest_first(token_ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order tokens [..., k] that are in the order of their numbers by log-probability, equal ones as they are.

    The log-probabilities are [..., k + 1]; the last, of all others, stays where it is.
    """
    order = np.argsort(-logprobs[..., :-1], axis=-1, kind="stable")
    ordered = np.take_along_axis(logprobs, order, -1)
    return np.take_along_axis(token_ids, order, -1), np.concatenate([ordered, logprobs[..., -1:]], axis=-1)
