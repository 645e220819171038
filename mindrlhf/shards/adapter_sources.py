"""The factors of an adapter to be sharded: those that it begins with, and those of its files."""

import os
from pathlib import Path

import numpy as np

from mindrlhf.algorithms.optimizers import GLOBAL_STEP_NAME, STATE_PREFIXES
from mindrlhf.errors import UserError
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.shards.sources import ShardedSource
from mindrlhf.specs import ModelDims
from mindrlhf.specs.fuse import fuse
from mindrlhf.specs.lora import AdaptedRules
from mindrlhf.weights.adapters.config import saved_rules
from mindrlhf.weights.adapters.peft import AdapterDirectory
from mindrlhf.weights.file_writer import checksum
from mindrlhf.weights.open import is_sharded


def open_adapter_source(
    directory: str | os.PathLike, adapted: AdaptedRules, dims: ModelDims
) -> "AdapterSource | ShardedSource":
    """Open an adapter in PEFT's format, or the shards of one and of its optimiser state.

    Raises:
        UserError: it is damaged, or no adapter of this model and the same targets.
    """
    if is_sharded(directory):
        source: AdapterSource | ShardedSource = ShardedSource(directory, is_partial=True)
    else:
        source = AdapterSource(directory, adapted, dims)
    names = {name for name in source.dtypes if not name.startswith((*STATE_PREFIXES, GLOBAL_STEP_NAME))}
    if other := sorted(names ^ {rule.mf_name for rule in adapted.trained()}):
        verb = "holds" if other[0] in names else "lacks"
        raise UserError(f"{directory} {verb} {other[0]}: it is no adapter of the same model and lora.targets")
    return source


class AdapterSource:
    """An adapter in PEFT's format, fused as MindFormers wants it, as the part of an `ArraySource` that ranks read.

    Raises:
        UserError: it is damaged, or the adapter is another one.
    """

    def __init__(self, directory: str | os.PathLike, adapted: AdaptedRules, dims: ModelDims):
        self.directory = Path(directory)
        self._files = AdapterDirectory(directory)
        self._dims = dims
        self._rules = {rule.mf_name: rule for rule in saved_rules(adapted)}
        shapes = {name: shape for rule in self._rules.values() for name, shape in zip(rule.hf_names, rule.shape(dims))}
        self._files.check_coverage(shapes)
        self.dtypes = dict.fromkeys(self._rules, "float32")

    def read(self, name: str) -> tuple[np.ndarray, dict[str, str]]:
        """A whole array in MindFormers' layout, and the checksums of the tensors it was made of."""
        rule = self._rules[name]
        parts = [self._files.read_float32(hf_name) for hf_name in rule.hf_names]
        return fuse(rule, self._dims, parts), {name: checksum(part) for name, part in zip(rule.hf_names, parts)}

    def read_shard(self, layout: ParameterLayout, rank: int) -> np.ndarray:
        """Return the shard of an array on ``rank``."""
        return np.ascontiguousarray(self.read(layout.name)[0][layout.shard_of(rank)])

    def release(self, name: str) -> None:
        """Keep the file: it is small."""
