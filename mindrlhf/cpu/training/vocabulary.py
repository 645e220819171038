"""The vocabulary projection, log-softmax and entropy in one pass over tiles, with its gradient: NumPy.

The CPU stand-in of a fused linear cross-entropy kernel. A tile of logits fits the cache and is thrown away
at once, so neither the logits nor the probabilities of a large batch are ever materialised; the backward pass
computes the tiles again from the saved log-normaliser. What is small enough is kept for it instead. Only positions
whose mask is not 0 are computed.
"""

import numpy as np

# Tile of logits: 512 x 1024 float32 = 2 MiB, about a core's share of cache.
TOKEN_TILE = 512
VOCABULARY_TILE = 1024

# An exponent whose power can be multiplied with room to spare in float32, where exp(88) is near the largest number.
_FAR = 60.0

# What the forward pass may keep for the backward pass.
MAX_KEPT_BYTES = 384 << 20


class KeptPowers:
    """exp(logit - maximum) of a micro-batch, from its forward to its backward pass; nothing where that is too large.

    The maximum is that of a token's logits up to and with those of the tile.
    """

    def __init__(self) -> None:
        # Kept from micro-batch to micro-batch: new memory would be filled with zeros by the system first.
        self._memory = np.zeros(0, np.float32)
        self.clear()

    def clear(self) -> None:
        """Forget it all."""
        self._powers = self._memory[:0].reshape(0, 0, 0)  # [tiles, kept tokens, tile], the last not full
        self._maxima = np.zeros((0, 0), np.float32)  # [kept tokens, tiles]
        self._places = np.zeros(0, np.int64)  # of each token among the kept ones

    def begin(self, active: np.ndarray, num_tokens: int, vocabulary: int) -> None:
        """Make room for the tokens whose numbers are ``active``, if there may be."""
        self.clear()
        num_tiles, width = -(-vocabulary // VOCABULARY_TILE), min(VOCABULARY_TILE, vocabulary)
        size = num_tiles * len(active) * width
        if size * self._memory.itemsize > MAX_KEPT_BYTES:
            return
        if len(self._memory) < size:
            self._memory = np.empty(size, np.float32)
        self._powers = self._memory[:size].reshape(num_tiles, len(active), width)
        self._maxima = np.empty((len(active), num_tiles), np.float32)
        self._places = np.zeros(num_tokens, np.int64)
        self._places[active] = np.arange(len(active))

    def of(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return powers [tiles, n, tile] and maxima [n, tiles] of active tokens, views where they lie side by side."""
        if not self._powers.size:
            return None
        places = self._places[tokens]
        if len(places) and (np.diff(places) == 1).all():
            places = slice(places[0], places[-1] + 1)
        return self._powers[:, places], self._maxima[places]


def forward(
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray,
    kept: KeptPowers | None = None,
) -> tuple[np.ndarray, ...]:
    """Compute log p(label), the entropy of p and the log-normaliser, p = softmax(hidden @ weight.T).

    Args:
        hidden: float32 [tokens, width]; a temperature is applied to it beforehand.
        weight: float32 [vocabulary, width].
        labels: int32 [tokens].
        mask: float32 [tokens]; 0 skips a position.
        kept: takes what :func:`backward` would compute again.

    Returns:
        float32 [tokens] each: log-probability, entropy (nats), log-normaliser; 0 at skipped positions.
    """
    outputs = [np.zeros(len(labels), np.float32) for _ in range(3)]
    active = np.flatnonzero(mask)
    if kept is not None:
        kept.begin(active, len(labels), len(weight))
    for rows in _token_tiles(active):
        room = None if kept is None else kept.of(rows)
        values = _forward_tile(hidden[rows], weight, labels[rows], room)
        for output, computed in zip(outputs, values, strict=True):
            output[rows] = computed
    return tuple(outputs)


def _token_tiles(active: np.ndarray) -> list[np.ndarray]:
    """Cut the numbers of positions into tiles."""
    return [active[start : start + TOKEN_TILE] for start in range(0, len(active), TOKEN_TILE)]


def _forward_tile(
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    room: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, ...]:
    num_tokens, vocabulary = len(hidden), len(weight)
    # Running maximum, sum of exp(z - maximum) and sum of z exp(z - maximum) over the tiles seen so far
    # (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3).
    maximum = np.full(num_tokens, -np.inf, np.float32)
    normaliser = np.zeros(num_tokens, np.float64)
    weighted = np.zeros(num_tokens, np.float64)
    label_logits = np.einsum("th,th->t", hidden, weight[labels])
    logits = np.empty((num_tokens, min(VOCABULARY_TILE, vocabulary)), np.float32)
    powers = np.empty_like(logits)
    for number, start in enumerate(range(0, vocabulary, VOCABULARY_TILE)):
        tile = weight[start : start + VOCABULARY_TILE]
        z, e = logits[:, : len(tile)], (powers if room is None else room[0][number])[:, : len(tile)]
        np.matmul(hidden, tile.T, out=z)
        new_maximum = np.maximum(maximum, z.max(axis=1))
        rescale = np.exp(maximum - new_maximum)
        np.exp(np.subtract(z, new_maximum[:, None], out=e), out=e)
        normaliser = normaliser * rescale + e.sum(axis=1)
        weighted = weighted * rescale + np.einsum("tv,tv->t", e, z)
        maximum = new_maximum
        if room is not None:
            room[1][:, number] = maximum
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
    kept: KeptPowers | None = None,
) -> np.ndarray:
    """Return the gradient of :func:`forward` with respect to ``hidden``; add that of ``weight`` to ``grad_weight``.

    With z the logits and p their softmax: d log p(label) / dz = onehot(label) - p, and
    d entropy / dz = -p (log p + entropy).

    Args:
        entropy, log_normaliser: what :func:`forward` returned.
        grad_logprobs, grad_entropy: float32 [tokens], the gradients of the loss.
        grad_weight: float32 [vocabulary, width], changed in place; None for a weight that is not trained.
        kept: what :func:`forward` has put there for these inputs; it is forgotten then.

    Returns:
        float32 [tokens, width].
    """
    grad_hidden = np.zeros_like(hidden)
    has_gradient = (grad_logprobs != 0) | (grad_entropy != 0)
    for rows in _token_tiles(np.flatnonzero((mask != 0) & has_gradient)):
        powers = None if kept is None or grad_entropy[rows].any() else kept.of(rows)
        if powers is not None:
            grad_hidden[rows] = _backward_tile_of_powers(
                hidden[rows], weight, labels[rows], log_normaliser[rows], grad_logprobs[rows], grad_weight, *powers
            )
            continue
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
    if kept is not None:
        kept.clear()
    return grad_hidden


def _backward_tile_of_powers(
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    log_normaliser: np.ndarray,
    grad_logprobs: np.ndarray,
    grad_weight: np.ndarray | None,
    powers: np.ndarray,
    maxima: np.ndarray,
) -> np.ndarray:
    """The gradient of :func:`_backward_tile` without entropy: a row of p is one of powers times a factor.

    The powers are changed: with 1 divided by that factor taken from the label's, a row is one of p - onehot(label).
    Labels for which that would be too large for a float32 are added by themselves.
    """
    grad_hidden = np.zeros_like(hidden)
    distances = log_normaliser[:, None] - maxima
    factors = -grad_logprobs[:, None] * np.exp(-distances)
    is_near = distances[np.arange(len(labels)), labels // VOCABULARY_TILE] < _FAR
    for number, start in enumerate(range(0, len(weight), VOCABULARY_TILE)):
        tile = weight[start : start + VOCABULARY_TILE]
        power, factor = powers[number, :, : len(tile)], factors[:, number, None]
        labelled = np.flatnonzero(is_near & (labels >= start) & (labels < start + len(tile)))
        power[labelled, labels[labelled] - start] -= np.exp(distances[labelled, number])
        grad_hidden += (power @ tile) * factor
        if grad_weight is not None:
            grad_weight[start : start + len(tile)] += power.T @ (hidden * factor)
    far = np.flatnonzero(~is_near)
    grad_hidden[far] += _label_gradient(hidden[far], weight, labels[far], grad_logprobs[far], grad_weight)
    return grad_hidden


def _label_gradient(
    hidden: np.ndarray,
    weight: np.ndarray,
    labels: np.ndarray,
    grad_logprobs: np.ndarray,
    grad_weight: np.ndarray | None,
) -> np.ndarray:
    """Return what the labels' logits add to the gradient of ``hidden``, and add that of ``weight``."""
    if grad_weight is not None:
        np.add.at(grad_weight, labels, grad_logprobs[:, None] * hidden)
    return grad_logprobs[:, None] * weight[labels]


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
    is_dense = bool(grad_entropy.any())
    # Without entropy the gradient of a row of logits is -grad_logprobs * p but for its label. That factor is
    # applied to the narrow matrices, not to the tile.
    row_scale = np.ones((len(hidden), 1), np.float32) if is_dense else -grad_logprobs[:, None]
    scaled_hidden = hidden * row_scale
    logits = np.empty((len(hidden), min(VOCABULARY_TILE, len(weight))), np.float32)
    for start in range(0, len(weight), VOCABULARY_TILE):
        tile = weight[start : start + VOCABULARY_TILE]
        z = logits[:, : len(tile)]
        np.subtract(np.matmul(hidden, tile.T, out=z), log_normaliser[:, None], out=z)
        if is_dense:
            scale = -grad_logprobs[:, None] - grad_entropy[:, None] * (z + entropy[:, None])
            np.multiply(np.exp(z, out=z), scale, out=z)
        else:
            np.exp(z, out=z)
        grad_hidden += z @ tile
        if grad_weight is not None:
            grad_weight[start : start + len(tile)] += z.T @ scaled_hidden
    return grad_hidden * row_scale + _label_gradient(hidden, weight, labels, grad_logprobs, grad_weight)
