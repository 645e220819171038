"""What all forms of the vocabulary projection share; without MindSpore."""

from dataclasses import dataclass


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
