"""Packed rows of sequences with images: positions on three axes, and numbers of image rows in the place of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindrlhf.data.packing import PackedRows, Row, TokenSequence
from mindrlhf.images.geometry import VisionGeometry
from mindrlhf.images.pixels import image_digest
from mindrlhf.images.positions import NUM_IDS, multimodal_positions
from mindrlhf.specs import ModelDims


@dataclass(frozen=True)
class ImageTokens:
    """Image tokens of a model.

    Attributes:
        vocab_size: an input of this size or more is the number of an image row.
        image_token: stands for one merged patch in prompts.
        geometry: patches of a token.
    """

    vocab_size: int
    image_token: int
    geometry: VisionGeometry

    @classmethod
    def of(cls, dims: ModelDims) -> "ImageTokens | None":
        """Those of a model; None when it has no vision."""
        return cls(dims.vocab_size, dims.vision.image_token, dims.vision.geometry) if dims.vision else None


def with_images(
    packed: PackedRows, sequences: Sequence[TokenSequence], rows: Sequence[Row], tokens: ImageTokens | None
) -> PackedRows:
    """Return what `fill_rows` made of ``rows`` with images in it; as it is for a model without vision.

    `input_ids` becomes int32 `[rows, length, 4]`: a token, or the vocabulary's size plus the number of an image row;
    then time, row and column. Image rows are numbered through the images of `PackedRows.images`, where each is once,
    whichever samples share it. Image tokens of a response are tokens like others: nobody has seen such an image.
    """
    if tokens is None:
        return packed
    wide = np.zeros((*packed.mask.shape, NUM_IDS), np.int32)
    wide[:, :, 0] = packed.input_ids
    firsts: dict[str, int] = {}
    num_rows = 0
    digests = _Digests()
    for row_index, row in enumerate(rows):
        start = 0
        for sequence in (sequences[item] for item in row.items):
            stop, prompt = start + sequence.num_tokens, sequence.prompt_ids
            grids = [tokens.geometry.token_grid(*pixels.shape[:2]) for pixels in sequence.images]
            wide[row_index, start:stop, 1:] = _positions(sequence, grids, tokens.image_token)
            places = start + np.flatnonzero(prompt == tokens.image_token)
            for pixels, (height, width) in zip(sequence.images, grids):
                own, places = places[: height * width], places[height * width :]
                first = firsts.setdefault(digests.of(pixels), num_rows)
                num_rows = max(num_rows, first + len(own))
                wide[row_index, own, 0] = tokens.vocab_size + first + np.arange(len(own))
            start = stop
    return replace(packed, input_ids=wide, images=tuple(firsts))


def image_table(sequences: Sequence[TokenSequence]) -> dict[str, np.ndarray]:
    """Return the distinct images of sequences by digest."""
    digests = _Digests()
    return {digests.of(pixels): pixels for sequence in sequences for pixels in sequence.images}


class _Digests:
    """Digests of images that may come up many times: the samples of a prompt share the array itself."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[np.ndarray, str]] = {}

    def of(self, pixels: np.ndarray) -> str:
        if id(pixels) not in self._known:
            self._known[id(pixels)] = (pixels, image_digest(pixels))
        return self._known[id(pixels)][1]


def _positions(sequence: TokenSequence, grids: Sequence[tuple[int, int]], image_token: int) -> np.ndarray:
    """Time, row and column of each token, int32 `[tokens, 3]`; the response counts on behind the prompt."""
    positions = multimodal_positions(sequence.prompt_ids, grids, image_token).T
    response = positions.max() + 1 + np.arange(len(sequence.response_ids), dtype=np.int32)
    return np.concatenate([positions, np.repeat(response[:, None], 3, axis=1)])
