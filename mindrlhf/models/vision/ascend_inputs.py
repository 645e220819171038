"""Inputs of the Ascend decoder of a vision-language model: tokens or rows of images, and positions on three axes.

Data-parallel ranks have images of their own: each looks up the rows of its own only, and no collective is added.
"""

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from mindrlhf.models.ascend_cells import DecoderInputs
from mindrlhf.models.ascend_layers import on_each_rank
from mindrlhf.models.rotary import axis_frequencies
from mindrlhf.specs import ModelDims
from mindrlhf.specs.rules import IMAGE_ROWS_NAME


class ImageDecoderInputs(DecoderInputs):
    """In place of :class:`mindrlhf.models.ascend_cells.DecoderInputs`; see the cell of the same name for the CPU.

    Args:
        model: MindFormers' GPTModel; its rotary cells must take tables by row
            (:func:`mindrlhf.models.ascend_layers.fuse_rotation`).
        config: its config.
        max_length: longest row.
        dims: sizes of a model with vision.
        num_image_rows: merged patches of one call on a rank, at most.

    Attributes:
        image_rows: `[data-parallel ranks * N, H]` float32, `[N, H]` on each rank once a graph is compiled;
            `(1 + D) * H` wide where D layers are given rows too.
    """

    def __init__(self, model, config, max_length: int, dims: ModelDims, num_image_rows: int):
        super().__init__(model, config, max_length, dims)
        self.vocab_size = dims.vocab_size
        frequencies = axis_frequencies(dims)
        self.frequencies = tuple(Tensor(one) for one in np.concatenate([frequencies, frequencies], axis=1))
        self.num_deep = num_deep = len(dims.vision.deepstack_blocks)
        self.hidden_size = dims.hidden_size
        shape = (config.data_parallel_size * num_image_rows, (1 + num_deep) * dims.hidden_size)
        rows = initializer("zeros", shape, ms.float32)
        self.image_rows = Parameter(rows, name=IMAGE_ROWS_NAME, requires_grad=False, parallel_optimizer=False)
        length_axis = "cp_tp" if config.sequence_parallel else "cp"
        ids = ("dp", "cp", "None")
        self.text = on_each_rank(self._text, _tokens_shape, [ids], ("dp", "cp"))
        hidden, by_length = (length_axis, "dp", "None"), ("dp", length_axis, "None")
        inputs = [hidden, by_length, ("dp", "None")]
        self.see = on_each_rank(self._see, _first, inputs, hidden)
        self.added = nn.CellList([RowsBehindLayer(dims, number, inputs) for number in range(num_deep)])
        # Every pipeline stage computes the angles, and MindSpore places no Morph in several.
        dp, cp = config.data_parallel_size, config.context_parallel_size
        by_position = layout("cp", "dp", "None")
        self.axis = ops.StridedSlice().shard(((dp, cp, 1),))
        self.as_float = ops.Cast().shard(((dp, cp, 1),))
        self.transpose_positions = ops.Transpose().shard((layout("dp", "cp", "None"),))
        self.multiply = ops.Mul().shard((by_position, layout("None")))
        self.add = ops.Add().shard((by_position, by_position))
        self.add_axis_of_heads = ops.ExpandDims().shard((by_position,))

    def construct(self, input_ids, segment_ids):
        """Return hidden states `[S, B, H]`, the mask, and rotary tables, two of `[S, B, 1, D]`.

        Behind them comes what the first layers add to their outputs, `[S, B, H]` each, if any do.

        Args:
            input_ids: `[B, S, 4]` int32; see
                :meth:`mindrlhf.models.vision.cpu_inputs.ImageDecoderInputs.with_images`. Image rows are counted on
                each data-parallel rank, through its rows of the call.
            segment_ids: `[B, S]` int32, 0 is padding.
        """
        hidden_states, mask, _ = super().construct(self.text(input_ids), segment_ids)
        tables = self.tables((self._angles_of_axes(input_ids), 1.0))
        for rows_behind in self.added:
            tables += (rows_behind(hidden_states, input_ids, self.image_rows),)
        return self.see(hidden_states, input_ids, self.image_rows), mask, tables

    def _angles_of_axes(self, input_ids):
        """Angles `[S, B, 1, D]`, float32: no product of matrices, whose inputs devices may round."""
        angles = self._of_axis(input_ids, 0)
        angles = self.add(self.add(angles, self._of_axis(input_ids, 1)), self._of_axis(input_ids, 2))
        return self.add_axis_of_heads(angles, 2)

    def _of_axis(self, input_ids, axis):
        batch, length, _ = input_ids.shape
        positions = self.axis(input_ids, (0, 0, 1 + axis), (batch, length, 2 + axis), (1, 1, 1))
        positions = self.transpose_positions(self.as_float(positions, ms.float32), (1, 0, 2))
        return self.multiply(positions, self.frequencies[axis])

    # What follows runs on each rank, on the shard that it has.

    def _text(self, input_ids):
        """Tokens `[B, S]`, 0 in the place of image rows."""
        tokens = input_ids[:, :, 0]
        return tokens * ops.cast(tokens < self.vocab_size, tokens.dtype)

    def _see(self, hidden_states, input_ids, image_rows):
        """Put image rows `[N, H]` into hidden states `[S, B, H]`."""
        if self.num_deep:
            image_rows = image_rows[:, : self.hidden_size]
        rows, is_image = _rows_of(hidden_states, input_ids, image_rows, self.vocab_size)
        return hidden_states * (1.0 - is_image) + rows * is_image


class RowsBehindLayer(nn.Cell):
    """Addend of a decoder layer's output: rows of images, and zeros where no image is.

    Args:
        dims: sizes of the model.
        layer: number of the layer, from 0.
        inputs: names of the axes of the inputs; those of the first are the output's.
    """

    def __init__(self, dims: ModelDims, layer: int, inputs: list[tuple[str, ...]]):
        super().__init__(auto_prefix=False)
        self.vocab_size = dims.vocab_size
        self.start, self.stop = (1 + layer) * dims.hidden_size, (2 + layer) * dims.hidden_size
        self.rows = on_each_rank(self._rows, _first, inputs, inputs[0])

    def construct(self, hidden_states, input_ids, image_rows):
        """Return `[S, B, H]`, in the dtype of ``hidden_states``."""
        return self.rows(hidden_states, input_ids, image_rows)

    def _rows(self, hidden_states, input_ids, image_rows):
        own = image_rows[:, self.start : self.stop]
        rows, is_image = _rows_of(hidden_states, input_ids, own, self.vocab_size)
        return rows * is_image


def _rows_of(hidden_states, input_ids, image_rows, vocab_size):
    """The image row `[S, B, H]` of each position, any where no image is, and where images are `[S, B, 1]`, 0 or 1."""
    tokens = ops.transpose(input_ids[:, :, 0], (1, 0))
    is_image = ops.cast(tokens >= vocab_size, tokens.dtype)
    rows = ops.cast(ops.gather(image_rows, (tokens - vocab_size) * is_image, 0), hidden_states.dtype)
    return rows, ops.cast(ops.expand_dims(is_image, 2), hidden_states.dtype)


def _first(first, *others):
    return first


def _tokens_shape(ids_shape):
    return ids_shape[:2]
