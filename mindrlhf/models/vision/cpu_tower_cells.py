"""Cells of a vision tower on the CPU; see :class:`mindrlhf.models.vision.tower.VisionTower`."""

import numpy as np
from mindspore import Tensor, nn

from mindrlhf.models.cpu_cells import AttentionFunction, Linear, RmsNorm, Rotate
from mindrlhf.models.cpu_decoder import HIDDEN_SCORE
from mindrlhf.specs import VisionDims

__all__ = ["Attention", "HiddenKeys", "Linear", "RmsNorm"]


class HiddenKeys(nn.Cell):
    """Mask added to the scores of keys, `[I, R]`, from where patches are, `[I, R]`."""

    def construct(self, is_patch):
        return (1.0 - is_patch) * HIDDEN_SCORE


class Attention(nn.Cell):
    """Rotated queries and keys, scores, and mixed values."""

    def __init__(self, vision: VisionDims):
        super().__init__()
        self.attention = AttentionFunction()
        self.rotate = Rotate(vision.head_dim)
        self.scale = vision.head_dim**-0.5
        half = np.eye(vision.head_dim // 2, dtype=np.float32)
        self.turn = Tensor(np.block([[np.zeros_like(half), half], [-half, np.zeros_like(half)]]))

    def construct(self, heads, hidden_keys, cos, sin):
        """Return `[G, heads, size, d]`.

        Args:
            heads: query, key and value, `[3, G, heads, size, d]`, of G groups that see nothing of one another.
            hidden_keys: `[G, 1, 1, size]`, of ``HiddenKeys``.
            cos, sin: `[G, 1, size, d]`.
        """
        query = self.rotate(heads[0], cos, sin, self.turn) * self.scale
        key = self.rotate(heads[1], cos, sin, self.turn)
        return self.attention(query, key, heads[2], hidden_keys)[0]
