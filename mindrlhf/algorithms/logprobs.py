"""Token log-probabilities and entropy from hidden states: graph cells."""

import heapq
import itertools
import weakref

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.operations._pyfunc_registry import add_pyfunc

from mindrlhf.algorithms.chunked_head import ChunkedTokenLogProbs
from mindrlhf.algorithms.top_k.rest import with_rest
from mindrlhf.cpu.training import vocabulary


class GraphTokenLogProbs(nn.Cell):
    """Plain MindSpore operators: the form that Ascend compiles, one micro-batch of logits at a time.

    Under semi-auto parallel the vocabulary stays split over the model-parallel ranks: what they exchange is, per token,
    the largest logit and sums over the vocabulary, never logits or weights (Shoeybi et al. 2019, arXiv:1909.08053,
    section 3).

    Args:
        weight: output projection [vocabulary, width].
        splits: ranks that share the rows, each row, and the vocabulary.
    """

    def __init__(self, weight: ms.Parameter, splits: tuple[int, int, int] = (1, 1, 1)):
        super().__init__(auto_prefix=False)
        self.weight = weight
        logits, token = (splits,), ((*splits[:2], 1),)
        tokens = (splits[:2],)
        self.cast = ops.Cast()
        part = weight.shape[0] // splits[2]
        self.first_rows = ms.Tensor(np.arange(splits[2], dtype=np.int32) * part)
        self.project, self.pick = _project, _pick
        if max(splits) > 1:
            self.project, self.pick = _split_project(), _split_pick(splits[2])
        self.max = ops.ReduceMax(keep_dims=True).shard(logits)
        self.subtract = ops.Sub().shard(logits + token)
        self.exp = ops.Exp().shard(logits)
        self.sum = ops.ReduceSum(keep_dims=True).shard(logits)
        self.log = ops.Log().shard(token)
        self.multiply = ops.Mul().shard(logits + logits)
        self.divide = ops.RealDiv().shard(token + token)
        self.subtract_tokens = ops.Sub().shard(token + token)
        self.squeeze = ops.Squeeze(-1).shard(token)
        self.mask = ops.Mul().shard(tokens + tokens)

    def construct(self, hidden, labels, mask, words=None):
        """Return log-probabilities and entropies, float32 [rows, length] each, 0 where ``mask`` is 0.

        ``hidden`` is [rows, length, width]; ``labels`` int32 and ``mask`` float32 [rows, length]. With ``words``, int32
        [rows, length, k], which are of models on one rank, their log-probabilities and that of all others together
        come third, float32 [rows, length, k + 1].
        """
        logits = self.cast(self.project(hidden, self.cast(self.weight, hidden.dtype)), ms.float32)
        logits = self.subtract(logits, ops.stop_gradient(self.max(logits, -1)))
        weights = self.exp(logits)
        total = self.sum(weights, -1)
        log_total = self.log(total)
        chosen = self.sum(self.pick(logits, labels, self.first_rows), -1)
        mean = self.divide(self.sum(self.multiply(weights, logits), -1), total)
        logprobs = self.squeeze(self.subtract_tokens(chosen, log_total))
        entropy = self.squeeze(self.subtract_tokens(log_total, mean))
        if words is None:
            return self.mask(logprobs, mask), self.mask(entropy, mask)
        word_logprobs = with_rest(ops.gather_elements(logits, 2, words) - log_total)
        return self.mask(logprobs, mask), self.mask(entropy, mask), word_logprobs * ops.expand_dims(mask, -1)


# What a rank does with its own part of the vocabulary: MindSpore's Morph runs a function on local shards.


def _project(hidden, weight):
    """Logits [rows, length, vocabulary]; a plain reshape of rows split along two axes would gather them first."""
    rows = ops.reshape(hidden, (-1, hidden.shape[-1]))
    logits = ops.MatMul(transpose_b=True)(rows, weight)
    return ops.reshape(logits, (hidden.shape[0], hidden.shape[1], weight.shape[0]))


def _pick(logits, labels, first_row):
    """Logits of the labels that are among a rank's rows of the vocabulary, else 0: [rows, length, 1]."""
    index = ops.expand_dims(labels - first_row, -1)
    inside = ops.logical_and(index >= 0, index < logits.shape[-1])
    chosen = ops.gather_elements(logits, 2, ops.select(inside, index, ops.zeros_like(index)))
    return chosen * ops.cast(inside, ms.float32)


def _first_dtype(dtype, *others):
    return dtype


def _split_project():
    from mindformers.parallel_core.training_graph.device_matrix import layout

    def infer_shape(hidden_shape, weight_shape):
        return [hidden_shape[0], hidden_shape[1], weight_shape[0]]

    morph = ops.operations.Morph(_project, infer_shape, _first_dtype)
    return morph.add_prim_attr("self_define_shard", True).shard(
        in_strategy=(layout("dp", "cp", "None"), layout("tp", "None")), out_strategy=(layout("dp", "cp", "tp"),)
    )


def _split_pick(num_parts: int):
    from mindformers.parallel_core.training_graph.device_matrix import layout

    def infer_shape(logits_shape, labels_shape, starts_shape):
        return [*labels_shape, num_parts]

    morph = ops.operations.Morph(_pick, infer_shape, _first_dtype)
    return morph.add_prim_attr("self_define_shard", True).shard(
        in_strategy=(layout("dp", "cp", "tp"), layout("dp", "cp"), layout("tp")),
        out_strategy=(layout("dp", "cp", "tp"),),
    )


_free_numbers: list[int] = []  # a heap: of kernels that are no more
_next_number = itertools.count(1)


def name_kernel(owner: nn.Cell, kernel: ops.Custom, function) -> None:
    """Give a Python function that a graph calls a number that is the same in every process that builds the same model.

    MindSpore's own is the function's address, under which the next process knows another function, or none. The number
    is free again when its owner is gone.
    """
    number = heapq.heappop(_free_numbers) if _free_numbers else next(_next_number)
    add_pyfunc(number, function)
    weakref.finalize(owner, _free_kernel, number)
    kernel.add_prim_attr("fn_id", number)
    kernel.add_prim_attr("uniq_name", f"kernel_{number}")


def _free_kernel(number: int) -> None:
    add_pyfunc(number, None)  # and with it the arrays that it held
    heapq.heappush(_free_numbers, number)


class TiledTokenLogProbs(nn.Cell):
    """The same values through the tiled NumPy kernels of :mod:`mindrlhf.cpu.training.vocabulary` (CPU, float32).

    The weight, often most of a small model, never enters the graph: the kernels read it where it lies, and add its
    gradient to ``weight_gradient``, a NumPy array of this cell that the optimiser step collects. As a graph
    input and output it would be copied four times in every micro-batch. So ``bind`` must come before each run. A
    weight that is not trained when the cell is made has no gradient.
    """

    def __init__(self, weight: ms.Parameter):
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.weight_gradient = weight_gradient = np.zeros(weight.shape, np.float32) if weight.requires_grad else None
        # A list, since MindSpore cells do not take plain arrays as attributes that change.
        self.bound: list[np.ndarray] = []
        bound = self.bound  # MindSpore keeps the functions: they must not keep the cell
        kept = vocabulary.KeptPowers()

        def forward(hidden, labels, mask):
            return vocabulary.forward(hidden, bound[0], labels, mask, kept=kept)

        def backward(hidden, labels, mask, entropy, log_normaliser, grad_logprobs, grad_entropy):
            results = (entropy, log_normaliser, grad_logprobs, grad_entropy)
            return vocabulary.backward(hidden, bound[0], labels, mask, *results, weight_gradient, kept=kept)

        self.forward_kernel = ops.Custom(
            forward,
            out_shape=lambda hidden, labels, mask: (labels, labels, labels),
            out_dtype=lambda hidden, labels, mask: (hidden, hidden, hidden),
            func_type="pyfunc",
        )
        self.backward_kernel = ops.Custom(
            backward,
            out_shape=lambda hidden, *others: hidden,
            out_dtype=lambda hidden, *others: hidden,
            func_type="pyfunc",
        )
        name_kernel(self, self.forward_kernel, forward)
        name_kernel(self, self.backward_kernel, backward)

    def bind(self) -> None:
        """Look up where the weight lies now. The kernels cannot: asking MindSpore from inside a run would deadlock."""
        # The first run may move a parameter; a copy outlives that.
        self.bound[:] = [self.weight.asnumpy() if self.bound else self.weight.asnumpy().copy()]

    def construct(self, hidden, labels, mask):
        """Return what :class:`GraphTokenLogProbs` returns, and the log-normaliser that ``bprop`` needs."""
        return self.forward_kernel(hidden, labels, mask)

    def bprop(self, hidden, labels, mask, out, dout):
        """Return the gradient of the hidden states; MindSpore calls this by name."""
        grad_hidden = self.backward_kernel(hidden, labels, mask, out[1], out[2], dout[0], dout[1])
        return grad_hidden, ops.zeros_like(labels), ops.zeros_like(mask)


def _graph_logprobs(model, tile: vocabulary.HeadTile) -> nn.Cell:
    if not tile:
        return GraphTokenLogProbs(model.head_weight, model.splits)
    return ChunkedTokenLogProbs(model.head_weight, tile, model.splits)


class PolicyLogProbs(nn.Cell):
    """Log-probabilities of the labels under a model, at a sampling temperature.

    Args:
        model: returns hidden states.
        temperature: of sampling.
        device: `cpu` or `ascend`.
        tile: on Ascend, of how many logits there is memory at a time; all of them unless given.
    """

    def __init__(self, model, temperature: float, device: str, tile: vocabulary.HeadTile = vocabulary.WHOLE_HEAD):
        super().__init__(auto_prefix=False)
        self.model = model
        self.is_tiled = device == "cpu"
        if self.is_tiled:
            self.token_logprobs = TiledTokenLogProbs(model.head_weight)
        else:
            self.token_logprobs = _graph_logprobs(model, tile)
            self.scale = ops.Mul().shard(((*model.splits[:2], 1), ()))
        self.inverse_temperature = 1.0 / temperature

    def construct(self, input_ids, segment_ids, labels, mask):
        """Return log-probabilities and entropies, float32 [rows, length] each, 0 where ``mask`` is 0.

        All inputs are [rows, length] as in :class:`mindrlhf.data.packing.PackedRows`; the first has its
        ``model_inputs``.
        """
        return self.of_labels(input_ids, segment_ids, labels, mask)

    def scaled_hidden(self, input_ids, segment_ids):
        """Return hidden states as the head takes them, on a CPU [rows * length, width], else [rows, length, width]."""
        hidden = self.model(input_ids, segment_ids)
        # Scaling the hidden states scales the logits, at the width of the model instead of the vocabulary.
        if not self.is_tiled:
            return self.scale(hidden, self.inverse_temperature)
        return ops.reshape(hidden, (-1, hidden.shape[-1])) * self.inverse_temperature

    def of_labels(self, input_ids, segment_ids, labels, mask):
        """See :meth:`construct`."""
        hidden = self.scaled_hidden(input_ids, segment_ids)
        if not self.is_tiled:
            return self.token_logprobs(hidden, labels, mask)
        outputs = self.token_logprobs(hidden, ops.reshape(labels, (-1,)), ops.reshape(mask, (-1,)))
        return ops.reshape(outputs[0], labels.shape), ops.reshape(outputs[1], labels.shape)

    def bind(self) -> None:
        """To be called before each run of a graph that holds this cell."""
        if self.is_tiled:
            self.token_logprobs.bind()

    def graph_parameters(self) -> list[ms.Parameter]:
        """Return the trained parameters that the graph differentiates: all, but an untied head that is tiled."""
        parameters = self.model.trainable_params()
        if not self.is_tiled or self.model.dims.tied:
            return parameters
        return [parameter for parameter in parameters if parameter is not self.model.head_weight]

    def collect_weight_gradient(self, accumulator: np.ndarray) -> None:
        """Add to ``accumulator`` [vocabulary, width] the part of a trained head's gradient that the graph lacks."""
        if self.is_tiled:
            accumulator += self.token_logprobs.weight_gradient
            self.token_logprobs.weight_gradient.fill(0.0)
