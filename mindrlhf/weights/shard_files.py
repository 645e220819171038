"""The files of a sharded directory: what a rank holds, as safetensors or in MindSpore's ckpt format."""

from collections.abc import Mapping
from pathlib import Path

from mindrlhf.weights.ckpt_file import CkptFile, ckpt_layout
from mindrlhf.weights.file_writer import FileLayout
from mindrlhf.weights.safetensors_file import SafetensorsFile, safetensors_layout, wide_first
from mindrlhf.weights.tensors import SHARD_DTYPES, TensorInfo

FILE_FORMATS = ("safetensors", "ckpt")


def shard_layout(infos: Mapping[str, TensorInfo], file_format: str) -> FileLayout:
    """Lay out the file of a rank."""
    if file_format == "safetensors":
        return safetensors_layout(wide_first(infos.values()), {"format": "ms"})
    return ckpt_layout(infos.values())


def open_shard(path: Path, file_format: str) -> SafetensorsFile | CkptFile:
    """Open the file of a rank.

    Raises:
        UserError: it is missing or damaged.
    """
    return SafetensorsFile(path, SHARD_DTYPES) if file_format == "safetensors" else CkptFile(path)
