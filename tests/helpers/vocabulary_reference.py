"""Log-probabilities, entropy and their gradients through full float64 logits: what the kernels must equal."""

import numpy as np
import pytest

from mindrlhf.cpu.training import vocabulary

NUM_TOKENS, WIDTH, VOCABULARY = 23, 6, 50


# Tokens of a tile and of a block, for the vocabulary of ``draw``.
TILES = [(512, 1024), (1, 1), (8, 3), (100, 2)]


@pytest.fixture(params=TILES, ids=[f"{tile}x{block}" for tile, block in TILES])
def tiles(request, monkeypatch):
    """Several sizes of tiles, in turn."""
    tile, block = request.param
    monkeypatch.setattr(vocabulary, "MAX_TILE_BYTES", tile * VOCABULARY * 4)
    monkeypatch.setattr(vocabulary, "BLOCK_BYTES", block * VOCABULARY * 4)


def draw(seed=0, num_tokens=NUM_TOKENS, vocabulary_size=VOCABULARY, scale=1.0):
    """Return random hidden states, weight, labels and mask of the kernels."""
    stream = np.random.default_rng(seed)
    hidden = (stream.standard_normal((num_tokens, WIDTH)) * scale).astype(np.float32)
    weight = stream.standard_normal((vocabulary_size, WIDTH)).astype(np.float32)
    labels = stream.integers(0, vocabulary_size, num_tokens).astype(np.int32)
    mask = (stream.random(num_tokens) < 0.7).astype(np.float32)
    return hidden, weight, labels, mask


def forward(hidden, weight, labels, mask):
    """Return log p(label), entropy and log-normaliser, float64 [tokens] each, 0 where ``mask`` is 0."""
    logprobs, log_normaliser = _log_softmax(hidden, weight)
    chosen = logprobs[np.arange(len(labels)), labels]
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
    active = np.asarray(mask) != 0
    return tuple(np.where(active, values, 0.0) for values in (chosen, entropy, log_normaliser))


def backward(hidden, weight, labels, mask, grad_logprobs, grad_entropy):
    """Return the gradients of sum(grad_logprobs * logprob + grad_entropy * entropy) for hidden and weight."""
    logprobs, _ = _log_softmax(hidden, weight)
    probs = np.exp(logprobs)
    entropy = -(probs * logprobs).sum(axis=1, keepdims=True)
    onehot = np.zeros_like(probs)
    onehot[np.arange(len(labels)), labels] = 1.0
    active = (np.asarray(mask) != 0)[:, None]
    grad_logits = np.asarray(grad_logprobs, np.float64)[:, None] * (onehot - probs)
    grad_logits -= np.asarray(grad_entropy, np.float64)[:, None] * probs * (logprobs + entropy)
    grad_logits = np.where(active, grad_logits, 0.0)
    return grad_logits @ weight.astype(np.float64), grad_logits.T @ hidden.astype(np.float64)


def _log_softmax(hidden, weight):
    logits = hidden.astype(np.float64) @ weight.astype(np.float64).T
    peak = logits.max(axis=1, keepdims=True)
    log_normaliser = peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    return logits - log_normaliser, log_normaliser[:, 0]
