"""Inputs of a CPU decoder whose layers differ: some attend to a sliding window, or have linear attention."""

import numpy as np
from mindspore import Tensor, ops

from mindrlhf.models.cpu_decoder import HIDDEN_SCORE, DecoderInputs
from mindrlhf.models.gated_delta import Ancestors
from mindrlhf.specs import ModelDims


class WindowDecoderInputs(DecoderInputs):
    """In place of :class:`mindrlhf.models.cpu_decoder.DecoderInputs`: two masks and two sets of rotary tables.

    The first are of layers that attend to all, the second of those with the window; see
    :class:`mindrlhf.models.layers.SandwichLayer`.

    Args:
        model, config, max_length: as there.
        dims: sizes of a model with ``local``.
    """

    def __init__(self, model, config, max_length: int, dims: ModelDims):
        super().__init__(model, config, max_length, dims)
        self.local = DecoderInputs(model, config, max_length, dims.of_local_layers)
        self.local.causal = self.causal
        self.window = dims.local.window
        self.far = Tensor(np.tril(np.full((max_length, max_length), HIDDEN_SCORE, np.float32), k=-self.window))

    def construct(self, input_ids, segment_ids):
        """See :class:`mindrlhf.models.causal_lm.CausalLM`."""
        embedded, mask, rotary = super().construct(input_ids, segment_ids)
        _, _, local_rotary = self.local(input_ids, segment_ids)
        batch, length = segment_ids.shape
        if input_ids.ndim == 3:
            # By positions: a response lies behind others of its prompt. As (n_i, 1) @ (1, -n_j).
            numbers = ops.cast(input_ids[:, 2], self.causal.dtype)
            ones = ops.ones_like(numbers)
            back = self.matmul(ops.stack((numbers, ones), 2), ops.stack((ones, -numbers), 1))
            far = ops.reshape(ops.relu(back - (self.window - 1.0)) * HIDDEN_SCORE, (batch, 1, length, length))
        else:
            far = ops.tile(ops.reshape(self.far[:length, :length], (1, 1, length, length)), (batch, 1, 1, 1))
        near = mask + ops.tile(far, (1, self.num_groups, self.heads_per_group, 1))
        return embedded, (mask, near), (rotary, local_rotary)


class LinearDecoderInputs(DecoderInputs):
    """In place of :class:`mindrlhf.models.cpu_decoder.DecoderInputs`: the mask is a pair, see
    :mod:`mindrlhf.models.cpu_linear_attention`.
    """

    def __init__(self, model, config, max_length: int, dims: ModelDims):
        super().__init__(model, config, max_length, dims)
        self.ancestors = Ancestors(dims.linear.conv_width)

    def construct(self, input_ids, segment_ids):
        """See :class:`mindrlhf.models.causal_lm.CausalLM`."""
        embedded, mask, rotary = super().construct(input_ids, segment_ids)
        shares_prompts = input_ids.ndim == 3
        continued = input_ids[:, 1] if shares_prompts else segment_ids
        return embedded, (mask, self.ancestors(segment_ids, continued, shares_prompts)), rotary
