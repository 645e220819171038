"""Inputs of the CPU decoder of a vision-language model: tokens or rows of images, and positions on three axes."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from mindrlhf.models.cpu_decoder import DecoderInputs
from mindrlhf.models.rotary import axis_frequencies
from mindrlhf.specs import ModelDims


class ImageDecoderInputs(DecoderInputs):
    """In place of :class:`mindrlhf.models.cpu_decoder.DecoderInputs`; the cells around it do not know the difference.

    The vision tower runs outside the graph. Its output is a parameter that is set before a run, as a learning rate is:
    other images, the same graph.

    Args:
        model: MindFormers' GPTModel.
        config: its config.
        max_length: longest row.
        dims: sizes of a model with vision.
        num_image_rows: merged patches of one micro-batch, at most.
    """

    def __init__(self, model, config, max_length: int, dims: ModelDims, num_image_rows: int = 1):
        super().__init__(model, config, max_length, dims)
        self.vocab_size = dims.vocab_size
        self.frequencies = Tensor(axis_frequencies(dims))
        self.num_deep = len(dims.vision.deepstack_blocks)
        rows = np.zeros((num_image_rows, (1 + self.num_deep) * dims.hidden_size), np.float32)
        self.image_rows = Parameter(Tensor(rows), name="image_rows", requires_grad=False)

    def construct(self, input_ids, segment_ids):
        """Return hidden states `[B*S, H]`, mask and rotary tables.

        The rows of images are those that were set: `[N, H]`, or `[N, (1 + D) * H]` where D layers are given rows too.

        Args:
            input_ids: `[B, S, 4]` int32: a token, or the vocabulary's size plus the number of a row of images; then
                time, row and column of its position.
            segment_ids: `[B, S]` int32, 0 is padding.
        """
        batch, length = segment_ids.shape
        tokens = input_ids[:, :, 0]
        is_image = ops.cast(tokens >= self.vocab_size, ms.int32)
        hidden_states = self.embed(tokens * (1 - is_image))
        rows = ops.gather(self.image_rows, ops.reshape((tokens - self.vocab_size) * is_image, (-1,)), 0)
        is_image = ops.cast(ops.reshape(is_image, (-1, 1)), hidden_states.dtype)
        added = ()
        if self.num_deep:
            rows = rows * is_image
            for number in range(self.num_deep):
                added += (rows[:, (1 + number) * self.hidden_size : (2 + number) * self.hidden_size],)
            rows = rows[:, : self.hidden_size]
        hidden_states = hidden_states * (1.0 - is_image) + rows * is_image
        positions = ops.cast(ops.reshape(input_ids[:, :, 1:], (-1, 3)), ms.float32)
        angles = ops.matmul(positions, self.frequencies)
        angles = ops.reshape(ops.concat((angles, angles), 1), (batch, 1, 1, length, -1))
        cos, sin = ops.cos(angles), ops.sin(angles)
        tables = ()
        for table, heads in zip((cos, sin, cos * self.scale, sin * self.scale), self.heads_of_tables):
            tables += (self._for_all_heads(table, 1, heads),)
        tables += (self.turn, self.scale) + added
        return hidden_states, self.mask(segment_ids), tables
