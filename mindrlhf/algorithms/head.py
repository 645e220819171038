"""Tile size of the vocabulary projection; without MindSpore."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadTile:
    """Logits that a rank on Ascend computes at a time.

    Attributes:
        positions: of its micro-batch; 0 means all.
        vocabulary: tokens of its part of the vocabulary; 0 means all.
    """

    positions: int = 0
    vocabulary: int = 0

    def __bool__(self) -> bool:
        """Return whether the projection is made in tiles at all."""
        return bool(self.positions or self.vocabulary)


WHOLE_HEAD = HeadTile()
