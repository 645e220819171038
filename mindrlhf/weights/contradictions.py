"""Weights that contradict each other within one model directory: a tied head, PyTorch's files beside safetensors.

What one of two files leaves open, :class:`mindrlhf.weights.hf.SafetensorsDirectory` refuses.
"""

import logging

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.weights.hf import TensorDirectory
from mindrlhf.weights.tensors import convert_dtype

OUTPUT_NAME, _EMBEDDING_END = "lm_head.weight", "embed_tokens.weight"
_ROWS_PER_COMPARISON = 4096
_logger = logging.getLogger(__name__)


def check_tied(source: TensorDirectory) -> None:
    """Check that the head of a model whose config ties it to the embedding is that embedding, where it is stored.

    Raises:
        UserError: it is another matrix.
    """
    if OUTPUT_NAME not in source.names():
        return
    embedding = next(name for name in source.names() if name.endswith(_EMBEDDING_END))
    head, table = source.info(OUTPUT_NAME), source.info(embedding)
    is_same = head.shape == table.shape
    if is_same:
        rows = [(source.read(name), source.info(name).dtype) for name in (OUTPUT_NAME, embedding)]
        for start in range(0, head.shape[0], _ROWS_PER_COMPARISON):
            parts = [
                convert_dtype(array[start : start + _ROWS_PER_COMPARISON], dtype, "float32") for array, dtype in rows
            ]
            is_same = is_same and np.array_equal(*parts, equal_nan=True)
    if not is_same:
        raise UserError(
            f"{source.directory}: config.json ties the head to the embedding, but {OUTPUT_NAME} is another matrix than "
            f"{embedding}: set tie_word_embeddings to false to train with both, or remove {OUTPUT_NAME}"
        )


def warn_of_other_files(source: TensorDirectory, name: str = "pytorch_model") -> None:
    """Say which files of weights lie beside those of a model and are not read: PyTorch's could run code (pickle)."""
    for unread in source.unread_files():
        _logger.warning("%s is not read: the model is in other files beside it", source.directory / unread)
    if found := sorted(source.directory.glob(f"{name}*.bin")):
        _logger.warning("%s is not read: the safetensors beside it are, whatever it holds", found[0])
