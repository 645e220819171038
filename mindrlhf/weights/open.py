"""Open a directory of weights of any kind, as logical Hugging Face tensors."""

import os
from pathlib import Path

from mindrlhf.weights.hf import SHARDED_NAME, SafetensorsDirectory, TensorDirectory
from mindrlhf.weights.sharded import ShardedDirectory


def is_sharded(model_dir: str | os.PathLike) -> bool:
    """Return whether `mindrlhf weights shard`, or the ranks of a run, wrote a directory."""
    return (Path(model_dir) / SHARDED_NAME).is_file()


def open_tensors(model_dir: str | os.PathLike) -> TensorDirectory:
    """Open a Hugging Face directory, or one that `mindrlhf weights shard` made from such.

    Raises:
        UserError: it is neither, or is damaged.
    """
    return ShardedDirectory(model_dir) if is_sharded(model_dir) else SafetensorsDirectory(model_dir)
