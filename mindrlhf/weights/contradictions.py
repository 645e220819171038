"""Weights that contradict each other within one model directory: a tied head, PyTorch's files beside safetensors.

What one of two files leaves open, :class:`mindrlhf.weights.hf.SafetensorsDirectory` refuses.
"""

import logging

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.weights.hf import TensorDirectory
from mindrlhf.weights.tensors import STORAGE_DTYPES, convert_dtype
from mindrlhf.weights.torch_file import TorchFile, UnknownContent

OUTPUT_NAME, _EMBEDDING_END = "lm_head.weight", "embed_tokens.weight"
# Of the tensors that are compared with a PyTorch file: the smallest, which every training moves.
_MAX_COMPARED, _MAX_COMPARED_BYTES = 8, 1 << 20
_ROWS_PER_COMPARISON = 4096
_ROUNDING = 2.0**-7  # of bfloat16
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
    """Say when files lie beside those of a model that are not read, or PyTorch's that hold other weights, as far as
    that can be seen.

    Args:
        name: what PyTorch's files are called.
    """
    for unread in source.unread_files():
        _logger.warning("%s is not read: the model is in other files beside it", source.directory / unread)
    for path in sorted(source.directory.glob(f"{name}*.bin")):
        try:
            difference = _difference(source, TorchFile(path))
        except UnknownContent:
            continue  # of an old format; transformers does not read it either where there are safetensors
        if difference:
            _logger.warning(
                "%s holds other weights than the safetensors beside it (%s): the safetensors are read", path, difference
            )
            return


def _difference(source: TensorDirectory, file: TorchFile) -> str:
    known, found = set(source.names()), set(file.names())
    if not known & found:
        return f"no tensor of {len(found)} has a name that these have"
    shared = sorted(known & found, key=lambda name: (source.info(name).size_bytes, name))
    for name in shared:
        if source.info(name).shape != file.info(name).shape:
            return f"{name} has another shape"
    for name in shared[:_MAX_COMPARED]:
        if source.info(name).size_bytes > _MAX_COMPARED_BYTES:
            break
        dtypes = source.info(name).dtype, file.info(name).dtype
        if not STORAGE_DTYPES.keys() >= set(dtypes):
            continue
        arrays = [convert_dtype(one.read(name), own, "float32") for one, own in zip((source, file), dtypes)]
        tolerance = 0.0 if dtypes[0] == dtypes[1] else _ROUNDING
        if not np.allclose(*arrays, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{name} differs"
    return ""
