"""GGUF files, read by the package `gguf`: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

import os
from pathlib import Path

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.weights.safetensors_file import release_pages
from mindrlhf.weights.tensors import TensorInfo

# Types whose numbers are stored as they are; others are quantised, and read as float32.
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

Value = int | float | bool | str | list


class GgufFile:
    """One GGUF file, memory-mapped.

    Attributes:
        path: the file.
        metadata: value by name.
        tensors: by name; dtype is that in which :meth:`read` returns them.

    Raises:
        UserError: the file is missing, no GGUF, or damaged.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        try:
            self._reader = _reader(self.path)
            if self._reader.byte_order != "I":
                raise ValueError("it is of the other byte order")
            fields = self._reader.fields.items()
            self.metadata: dict[str, Value] = {name: field.contents() for name, field in fields}
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            self.tensors = {
                name: TensorInfo(
                    name, _STORED.get(tensor.tensor_type.name, "float32"), tuple(tensor.shape.tolist()[::-1])
                )
                for name, tensor in self._tensors.items()
            }
        # The reader raises what NumPy and struct do where the bytes are not what it expects.
        except Exception as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{self.path} cannot be read as GGUF ({reason}): download it again") from error

    def read(self, name: str) -> np.ndarray:
        """Return the tensor: of stored numbers a read-only view, bfloat16 as uint16 bit patterns.

        Raises:
            UserError: it holds what is no number, or is of a type that the package cannot undo.
        """
        import gguf

        tensor, info = self._tensors[name], self.tensors[name]
        kind = tensor.tensor_type
        if kind.name in _STORED:
            array = tensor.data.view(info.numpy_dtype).reshape(info.shape)
        else:
            try:
                array = gguf.dequantize(tensor.data, kind)
            except NotImplementedError as error:
                raise UserError(f"{self.path}: tensor {name!r} is of type {kind.name}, which is not read") from error
        is_finite = (array & 0x7F80 != 0x7F80) if kind.name == "BF16" else np.isfinite(array)
        if not is_finite.all():
            raise UserError(f"{self.path}: tensor {name!r} holds values that are no numbers: download it again")
        return array

    def release(self, name: str) -> None:
        """Give back the memory that maps a tensor; see `SafetensorsFile.release`."""
        tensor = self._tensors[name]
        release_pages(self._reader.data, tensor.data_offset, tensor.data_offset + tensor.n_bytes)


def _reader(path: Path):
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(self, offset, dtype, count=1, override_order=None):
            # Or a count beyond the end of the file is followed without end.
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("less data than its header states")
            return super()._get(offset, dtype, count, override_order)

    return Reader(path)
