"""Positions of tokens and of image tokens: time, row and column (mRoPE, Qwen2-VL, arXiv 2409.12191, section 2.1)."""

from collections.abc import Sequence

import numpy as np

# What describes a token of a packed row: itself; and time, row and column of its position.
NUM_IDS = 4


def image_starts(tokens: np.ndarray, image_grids: Sequence[tuple[int, int]], image_token: int) -> list[int]:
    """Return where the tokens of each image start, in order.

    Args:
        tokens: int ``[length]``, with ``rows * columns`` copies of ``image_token`` for each image.
        image_grids: rows and columns of tokens of each image (``VisionGeometry.token_grid``).

    Raises:
        ValueError: the image tokens are not those of the images.
    """
    places = np.flatnonzero(np.asarray(tokens) == image_token)
    starts, used = [], 0
    for rows, columns in image_grids:
        own = places[used : used + rows * columns]
        if len(own) < rows * columns or own[-1] - own[0] != rows * columns - 1:
            raise ValueError(
                f"image {len(starts) + 1} of {rows} x {columns} tokens finds no run of as many in the prompt"
            )
        starts.append(int(own[0]))
        used += len(own)
    if used < len(places):
        raise ValueError(f"the prompt has {len(places)} image tokens, its {len(starts)} images have {used}")
    return starts


def multimodal_positions(tokens: np.ndarray, image_grids: Sequence[tuple[int, int]], image_token: int) -> np.ndarray:
    """Return time, row and column of each token, int32 ``[3, length]``, counted from 0.

    Text counts on all three at once. The tokens of an image have one time; their rows and columns start there, and text
    behind it goes on after the largest of the three. The next token's position is the largest one and 1, on all axes.

    Args:
        tokens, image_grids, image_token: see ``image_starts``, which raises ValueError when they do not fit.
    """
    positions = np.empty((3, len(tokens)), np.int32)
    end, following = 0, 0  # of what is done: place in the sequence, and the next position
    for start, (rows, columns) in zip(image_starts(tokens, image_grids, image_token), image_grids):
        positions[:, end:start] = following + np.arange(start - end)
        following += start - end
        end = start + rows * columns
        positions[:, start:end] = following + np.indices((1, rows, columns)).reshape(3, -1)
        following += max(rows, columns)
    positions[:, end:] = following + np.arange(len(tokens) - end)
    return positions
