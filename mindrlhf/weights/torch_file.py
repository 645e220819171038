"""PyTorch's files of weights (``pytorch_model.bin``), only as far as to see whether they hold what others do.

A file is a ZIP archive: a pickle that names the tensors, and a member with the bytes of each storage. The pickle is
read by an unpickler that knows tensors, ordered dictionaries and nothing else, so that it runs nothing.
"""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindrlhf.weights.tensors import TensorInfo

_DTYPES = {
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
}
_MAX_PICKLE_BYTES = 64 << 20


class _Storage(NamedTuple):
    dtype: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # in elements
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class UnknownContent(Exception):
    """The file is not of this form; nothing can be said of what it holds."""


class TorchFile:
    """The tensors of one file, read one at a time.

    Raises:
        UnknownContent: it is no such archive, or holds something else than tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                (member,) = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
                if member.file_size > _MAX_PICKLE_BYTES:
                    raise UnknownContent(f"{path} has a pickle of {member.file_size} bytes")
                self._folder = member.filename.removesuffix("data.pkl")
                with archive.open(member) as file:
                    found = _Unpickler(file).load()
        # Pickles and archives that are damaged fail in every way.
        except Exception as error:
            raise UnknownContent(f"{path} cannot be read: {error}") from error
        self._tensors = {
            name: one for name, one in dict(found).items() if isinstance(one, _Tensor) and isinstance(name, str)
        }

    def names(self) -> list[str]:
        """Every tensor name."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Name, dtype and shape of a tensor."""
        tensor = self._tensors[name]
        return TensorInfo(name, tensor.storage.dtype, tensor.shape)

    def read(self, name: str) -> np.ndarray:
        """Return a tensor; bfloat16 as uint16 bit patterns.

        Raises:
            UnknownContent: it is not stored in the order of its elements, or the file is damaged.
        """
        tensor, info = self._tensors[name], self.info(name)
        strides = np.cumprod([1, *info.shape[:0:-1]])[::-1] if info.shape else ()
        if tuple(strides) != tensor.strides:
            raise UnknownContent(f"{self.path}: tensor {name!r} is transposed")
        try:
            with (
                zipfile.ZipFile(self.path) as archive,
                archive.open(f"{self._folder}data/{tensor.storage.key}") as file,
            ):
                file.seek(tensor.offset * info.numpy_dtype.itemsize)
                data = file.read(info.size_bytes)
            return np.frombuffer(data, info.numpy_dtype).reshape(info.shape)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UnknownContent(f"{self.path}: tensor {name!r} cannot be read: {error}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _rebuild_parameter
        if module == "torch" and name in _DTYPES:
            return name  # the storage's type, which is only ever passed on
        raise pickle.UnpicklingError(f"{module}.{name} is no tensor")

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, *_ = pid
        return _Storage(_DTYPES[kind], str(key))


def _rebuild_tensor(storage: _Storage, offset: int, size: tuple, stride: tuple, *_: Any) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, size)), tuple(map(int, stride)))


def _rebuild_parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor
