"""Token sampling on a CPU: one uniform number per row in place of noise over the whole vocabulary.

vLLM 0.32 draws one noise value per row and vocabulary entry, takes log-softmax for the log-probabilities and another
pass to rank the chosen token. With 152k entries that costs several times the model itself. Here one softmax serves
both, the token is found by inverting its cumulative distribution, and its log-probability is the logarithm of an entry.
"""

import numpy as np

_BLOCK, _SMALL_BLOCK = 256, 64
_SMALL_VOCABULARY = 2048


def sample_rows(probs: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Invert the cumulative distribution of each row.

    The vocabulary is summed in blocks (a running sum over all of it would cost more than the softmax); the block is
    found first and the token within it second, both in float64.

    Args:
        probs: float32 [rows, vocab], contiguous; rows need not sum to one exactly.
        draws: float64 [rows] in [0, 1).

    Returns:
        Token ids int64 [rows], never one of probability zero, and their log-probabilities float32 [rows].
    """
    num_rows, vocab_size = probs.shape
    block = _SMALL_BLOCK if vocab_size <= _SMALL_VOCABULARY else _BLOCK
    num_blocks = vocab_size // block
    split = num_blocks * block
    block_sums = probs[:, :split].reshape(num_rows, num_blocks, block).sum(-1).astype(np.float64)
    if split < vocab_size:
        block_sums = np.concatenate([block_sums, probs[:, split:].sum(1, dtype=np.float64, keepdims=True)], axis=1)
    rows = np.arange(num_rows)
    block_ends = np.cumsum(block_sums, axis=1)
    targets = draws * block_ends[:, -1]
    blocks = _first_above(block_ends, targets)
    targets -= block_ends[rows, blocks] - block_sums[rows, blocks]
    if split == vocab_size:
        inside = probs.reshape(-1, block)[rows * num_blocks + blocks]
    else:
        inside = np.zeros((num_rows, block), np.float32)
        in_last = blocks == num_blocks
        others = np.flatnonzero(~in_last)
        inside[in_last, : vocab_size - split] = probs[in_last, split:]
        inside[others] = probs[:, :split].reshape(num_rows, num_blocks, block)[others, blocks[others]]
    token_ids = blocks * block + _first_above(np.cumsum(inside, axis=1, dtype=np.float64), targets)
    return token_ids, np.log(probs[rows, token_ids])


def _first_above(ends: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Per row of ``ends`` (non-decreasing) the first index whose value is above the target.

    Rounding may put a target at or above the last end: the first index that reaches the last end is taken then, since
    those after it add nothing.
    """
    above = ends > np.minimum(targets, np.nextafter(ends[:, -1], 0.0))[:, None]
    return above.argmax(axis=1)
