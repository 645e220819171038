"""The vocabulary projection, log-softmax and entropy with their gradient: NumPy.

The CPU stand-in of a fused linear cross-entropy kernel. Logits are computed for a tile of tokens at a time, in one
piece of memory, where they become powers exp(logit - maximum) block by block, while a block is in the cache. Where one
tile has all tokens, its powers are still there in the backward pass; otherwise the logits are computed again. Only
positions whose mask is not 0 are computed.
"""

from collections.abc import Iterator

import numpy as np

# The logits that are in memory at a time, and those that stay in the cache between one operation and the next.
MAX_TILE_BYTES = 384 << 20
BLOCK_BYTES = 2 << 20


class LogSoftmax:
    """Log p(label) and the entropy of p, p = softmax(hidden @ weight.T), of one micro-batch after the other."""

    def __init__(self) -> None:
        # Kept from micro-batch to micro-batch: new memory would be filled with zeros by the system first.
        self._memory = np.empty(0, np.float32)
        self._forget()

    def _forget(self) -> None:
        self._active = np.zeros(0, np.int64)  # positions whose powers are in the memory
        self._powers, self._maxima = self._memory[:0].reshape(0, 0), np.zeros(0, np.float32)

    def forward(
        self, hidden: np.ndarray, weight: np.ndarray, labels: np.ndarray, mask: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Compute log p(label), the entropy of p and the log-normaliser.

        Args:
            hidden: float32 [tokens, width]; a temperature is applied to it beforehand.
            weight: float32 [vocabulary, width].
            labels: int32 [tokens].
            mask: float32 [tokens]; 0 skips a position.

        Returns:
            float32 [tokens] each: log-probability, entropy (nats), log-normaliser; 0 at skipped positions.
        """
        self._forget()
        outputs = [np.zeros(len(labels), np.float32) for _ in range(3)]
        active = np.flatnonzero(mask)
        for rows in _tiles(active, weight):
            logits = self._logits(hidden[rows], weight)
            maxima, sums = logits.max(axis=1), np.empty((2, len(rows)))
            for block in _blocks(logits):
                z = logits[block].copy()
                e = np.exp(np.subtract(z, maxima[block, None], out=logits[block]), out=logits[block])
                sums[0, block], sums[1, block] = e.sum(axis=1), np.einsum("tv,tv->t", e, z)
            log_normaliser = maxima + np.log(sums[0])
            label_logits = np.einsum("th,th->t", hidden[rows], weight[labels[rows]])
            values = (label_logits - log_normaliser, log_normaliser - sums[1] / sums[0], log_normaliser)
            for output, computed in zip(outputs, values, strict=True):
                output[rows] = computed
            if len(rows) == len(active):
                self._active, self._powers, self._maxima = rows, logits, maxima
        return tuple(outputs)

    def backward(
        self,
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
        """Return the gradient of :meth:`forward` with respect to ``hidden``; add that of ``weight`` to ``grad_weight``.

        With z the logits and p their softmax: d log p(label) / dz = onehot(label) - p, and
        d entropy / dz = -p (log p + entropy).

        Args:
            entropy, log_normaliser: what :meth:`forward` returned, last called with these inputs.
            grad_logprobs, grad_entropy: float32 [tokens], the gradients of the loss.
            grad_weight: float32 [vocabulary, width], changed in place; None for a weight that is not trained.

        Returns:
            float32 [tokens, width].
        """
        grad_hidden = np.zeros_like(hidden)
        active = np.flatnonzero((mask != 0) & ((grad_logprobs != 0) | (grad_entropy != 0)))
        has_powers = len(self._active) > 0 and not grad_entropy[active].any()
        for rows in [active] if has_powers else _tiles(active, weight):
            # Gradients of the logits are slopes times factors, which the narrow matrices are multiplied by.
            if has_powers:
                slopes, factors = self._slopes_of_powers(rows, labels[rows], log_normaliser[rows], grad_logprobs[rows])
            else:
                self._forget()
                slopes, factors = self._logits(hidden[rows], weight), np.ones((len(rows), 1), np.float32)
                given = (log_normaliser[rows], entropy[rows], grad_logprobs[rows], grad_entropy[rows])
                _turn_into_slopes(slopes, labels[rows], *(array[:, None] for array in given))
            grad_hidden[rows] = (slopes @ weight) * factors
            for block in () if grad_weight is None else _blocks(grad_weight):  # a whole product is as large as it
                grad_weight[block] += slopes[:, block].T @ (hidden[rows] * factors)
        self._forget()
        return grad_hidden

    def _logits(self, hidden: np.ndarray, weight: np.ndarray) -> np.ndarray:
        size = len(hidden) * len(weight)
        if len(self._memory) < size:
            self._memory = np.empty(size, np.float32)
        return np.matmul(hidden, weight.T, out=self._memory[:size].reshape(len(hidden), len(weight)))

    def _slopes_of_powers(
        self, rows: np.ndarray, labels: np.ndarray, log_normaliser: np.ndarray, grad_logprobs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return slopes and factors without entropy: a row of p is one of powers times a factor."""
        places = np.searchsorted(self._active, rows)
        if len(places) and (np.diff(places) == 1).all():
            places = slice(places[0], places[-1] + 1)  # a view
        powers, distances = self._powers[places], log_normaliser - self._maxima[places]
        powers[np.arange(len(rows)), labels] -= np.exp(distances)  # with that, a row is one of p - onehot(label)
        return powers, (-grad_logprobs * np.exp(-distances))[:, None]


def _turn_into_slopes(
    logits: np.ndarray,
    labels: np.ndarray,
    log_normaliser: np.ndarray,
    entropy: np.ndarray,
    grad_logprobs: np.ndarray,
    grad_entropy: np.ndarray,
) -> None:
    """Replace logits [tokens, vocabulary] by their gradients; ``labels`` is [tokens], the others [tokens, 1]."""
    for block in _blocks(logits):
        z = logits[block]
        z -= log_normaliser[block]
        probs = np.exp(z)
        z += entropy[block]
        z *= -grad_entropy[block]
        z -= grad_logprobs[block]
        z *= probs
    logits[np.arange(len(labels)), labels] += grad_logprobs[:, 0]


def _tiles(active: np.ndarray, weight: np.ndarray) -> Iterator[np.ndarray]:
    """Cut the numbers of positions into tiles."""
    size = max(1, MAX_TILE_BYTES // (len(weight) * weight.itemsize))
    return (active[start : start + size] for start in range(0, len(active), size))


def _blocks(matrix: np.ndarray) -> Iterator[slice]:
    """Cut the rows of a matrix into blocks."""
    size = max(1, BLOCK_BYTES // (matrix.shape[1] * matrix.itemsize))
    return (slice(start, start + size) for start in range(0, len(matrix), size))
