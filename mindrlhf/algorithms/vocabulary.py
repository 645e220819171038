"""The vocabulary projection, log-softmax and entropy in one pass over tiles, with its gradient: NumPy.

The CPU stand-in of a fused linear cross-entropy kernel. A tile of logits fits the cache and is thrown away
at once, so neither the logits nor the probabilities of a batch are ever materialised; the backward pass
computes the tiles again from the saved log-normaliser. Only positions whose mask is not 0 are computed.
"""

from dataclasses import dataclass

import numpy as np

# Tile of logits: 512 x 1024 float32 = 2 MiB, about a core's share of cache.
TOKEN_TILE = 512
VOCABULARY_TILE = 1024


@dataclass(frozen=True)
class HeadTile:
    """Of how many logits a rank on Ascend has the memory at a time.

    Attributes:
        positions: of its micro-batch; 0 means all.
        words: of its part of the vocabulary; 0 means all.
    """

    positions: int = 0
    words: int = 0

    def __bool__(self) -> bool:
        """Whether the projection is made in tiles at all."""
        return bool(self.positions or self.words)


WHOLE_HEAD = HeadTile()


def forward(
    hidden: np.ndarray, weight: np.ndarray, labels: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute log p(label), the entropy of p and the log-normaliser, p = softmax(hidden @ weight.T).

    Args:
        hidden: float32 [tokens, width]; a temperature is applied to it beforehand.
        weight: float32 [vocabulary, width].
        labels: int32 [tokens].
        mask: float32 [tokens]; 0 skips a position.

    Returns:
        float32 [tokens] each: log-probability, entropy (nats), log-normaliser; 0 at skipped positions.
    """
    outputs = tuple(np.zeros(len(labels), np.float32) for _ in range(3))
    active = np.flatnonzero(mask)
    for start in range(0, len(active), TOKEN_TILE):
        rows = active[start : start + TOKEN_TILE]
        for output, values in zip(outputs, _forward_tile(hidden[rows], weight, labels[rows])):
            output[rows] = values
    return outputs


def _forward_tile(
    hidden: np.ndarray, weight: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    num_tokens, vocabulary = len(hidden), len(weight)
    # Running maximum, sum of exp(z - maximum) and sum of z exp(z - maximum) over the tiles seen so far
    # (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3).
    maximum = np.full(num_tokens, -np.inf, np.float32)
    normaliser = np.zeros(num_tokens, np.float64)
    weighted = np.zeros(num_tokens, np.float64)
    label_logits = np.einsum("th,th->t", hidden, weight[labels])
    logits = np.empty((num_tokens, min(VOCABULARY_TILE, vocabulary)), np.float32)
    powers = np.empty_like(logits)
    for start in range(0, vocabulary, VOCABULARY_TILE):
        tile = weight[start : start + VOCABULARY_TILE]
        z, e = logits[:, : len(tile)], powers[:, : len(tile)]
        np.matmul(hidden, tile.T, out=z)
        new_maximum = np.maximum(maximum, z.max(axis=1))
        rescale = np.exp(maximum - new_maximum)
        np.exp(np.subtract(z, new_maximum[:, None], out=e), out=e)
        normaliser = normaliser * rescale + e.sum(axis=1)
        weighted = weighted * rescale + np.einsum("tv,tv->t", e, z)
        maximum = new_maximum
    log_normaliser = maximum + np.log(normaliser)
    return label_logits - log_normaliser, log_normaliser - weighted / normaliser, log_normaliser


def backward(
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray,
    entropy: np.ndarray,
    log_normaliser: np.ndarray,
    grad_logprobs: np.ndarray,
    grad_entropy: np.ndarray,
    grad_weight: np.ndarray | None,
) -> np.ndarray:
    """Return the gradient of :func:`forward` with respect to ``hidden``; add that of ``weight`` to ``grad_weight``.

    With z the logits and p their softmax: d log p(label) / dz = onehot(label) - p, and
    d entropy / dz = -p (log p + entropy).

    Args:
        entropy, log_normaliser: what :func:`forward` returned.
        grad_logprobs, grad_entropy: float32 [tokens], the gradients of the loss.
        grad_weight: float32 [vocabulary, width], changed in place; None for a weight that is not trained.

    Returns:
        float32 [tokens, width].
    """
    grad_hidden = np.zeros_like(hidden)
    active = np.flatnonzero((mask != 0) & ((grad_logprobs != 0) | (grad_entropy != 0)))
    for start in range(0, len(active), TOKEN_TILE):
        rows = active[start : start + TOKEN_TILE]
        grad_hidden[rows] = _backward_tile(
            hidden[rows],
            weight,
            labels[rows],
            entropy[rows],
            log_normaliser[rows],
            grad_logprobs[rows],
            grad_entropy[rows],
            grad_weight,
        )
    return grad_hidden


def _backward_tile(
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    entropy: np.ndarray,
    log_normaliser: np.ndarray,
    grad_logprobs: np.ndarray,
    grad_entropy: np.ndarray,
    grad_weight: np.ndarray | None,
) -> np.ndarray:
    """Add to ``grad_weight`` in place and return the gradient of ``hidden`` for one tile of tokens."""
    grad_hidden = np.zeros_like(hidden)
    with_entropy = bool(grad_entropy.any())
    # Without entropy the gradient of a row of logits is -grad_logprobs * p but for its label. That factor is applied
    # to the narrow matrices, not to the tile.
    row_scale = np.ones((len(hidden), 1), np.float32) if with_entropy else -grad_logprobs[:, None]
    scaled_hidden = hidden * row_scale
    logits = np.empty((len(hidden), min(VOCABULARY_TILE, len(weight))), np.float32)
    for start in range(0, len(weight), VOCABULARY_TILE):
        tile = weight[start : start + VOCABULARY_TILE]
        z = logits[:, : len(tile)]
        np.subtract(np.matmul(hidden, tile.T, out=z), log_normaliser[:, None], out=z)
        if with_entropy:
            scale = -grad_logprobs[:, None] - grad_entropy[:, None] * (z + entropy[:, None])
            np.multiply(np.exp(z, out=z), scale, out=z)
        else:
            np.exp(z, out=z)
        grad_hidden += z @ tile
        if grad_weight is not None:
            grad_weight[start : start + len(tile)] += z.T @ scaled_hidden
    grad_hidden *= row_scale
    grad_hidden += grad_logprobs[:, None] * weight[labels]
    if grad_weight is not None:
        np.add.at(grad_weight, labels, grad_logprobs[:, None] * hidden)
    return grad_hidden
