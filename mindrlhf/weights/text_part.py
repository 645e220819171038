"""The decoder in a checkpoint of Qwen3.5 that has a vision tower, by the names of a text model."""

import logging
import os
from collections import Counter

import numpy as np

from mindrlhf.specs.qwen3_5 import DECODER_PREFIX, LEFT_OUT
from mindrlhf.weights.hf import SafetensorsDirectory
from mindrlhf.weights.tensors import TensorInfo

_logger = logging.getLogger(__name__)


class TextPart(SafetensorsDirectory):
    """The safetensors of a directory without those of ``LEFT_OUT``, which are counted in the log."""

    def __init__(self, model_dir: str | os.PathLike):
        super().__init__(model_dir)
        counts = Counter(next((one for one in LEFT_OUT if name.startswith(one)), "") for name in super().names())
        for prefix in LEFT_OUT:
            if counts[prefix]:
                _logger.warning(
                    "%s: %d tensors %s* are left out: it becomes a text model", model_dir, counts[prefix], prefix
                )

    def names(self) -> list[str]:
        """Every tensor name, as a text model has it."""
        kept = (name for name in super().names() if not name.startswith(LEFT_OUT))
        return [name.replace(DECODER_PREFIX, "model.", 1) for name in kept]

    def info(self, name: str) -> TensorInfo:
        return super().info(self._stored(name))._replace(name=name)

    def read(self, name: str) -> np.ndarray:
        return super().read(self._stored(name))

    def release(self, name: str) -> None:
        super().release(self._stored(name))

    def _stored(self, name: str) -> str:
        return name.replace("model.", DECODER_PREFIX, 1) if name.startswith("model.") else name
