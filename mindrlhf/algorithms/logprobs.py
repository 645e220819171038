"""Token log-probabilities and entropy from hidden states: graph cells."""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from mindrlhf.algorithms.chunked_head import ChunkedTokenLogProbs
from mindrlhf.algorithms.head import WHOLE_HEAD, HeadTile
from mindrlhf.algorithms.top_k.rest import with_rest
from mindrlhf.system import speed_ups


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

    def construct(self, hidden, labels, mask, token_ids=None):
        """Return log-probabilities and entropies, float32 [rows, length] each, 0 where ``mask`` is 0.

        ``hidden`` is [rows, length, width]; ``labels`` int32 and ``mask`` float32 [rows, length]. With ``token_ids``,
        int32 [rows, length, k], which are of models on one rank, their log-probabilities and that of all others
        together come third, float32 [rows, length, k + 1].
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
        if token_ids is None:
            return self.mask(logprobs, mask), self.mask(entropy, mask)
        top_k_logprobs = with_rest(ops.gather_elements(logits, 2, token_ids) - log_total)
        return self.mask(logprobs, mask), self.mask(entropy, mask), top_k_logprobs * ops.expand_dims(mask, -1)


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


def _graph_logprobs(model, tile: HeadTile) -> nn.Cell:
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

    def __init__(self, model, temperature: float, device: str, tile: HeadTile = WHOLE_HEAD):
        super().__init__(auto_prefix=False)
        self.model = model
        self.device = device
        if fast := speed_ups.of_rank(device):
            self.token_logprobs = fast.TiledTokenLogProbs(model.head_weight, in_graph=model.dims.tied)
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
        """Return hidden states as the head takes them, [rows, length, width]."""
        # Scaling the hidden states scales the logits, at the width of the model instead of the vocabulary.
        return self.scale(self.model(input_ids, segment_ids), self.inverse_temperature)

    def of_labels(self, input_ids, segment_ids, labels, mask):
        """Return what :meth:`construct` does, which a subclass may extend."""
        outputs = self.token_logprobs(self.scaled_hidden(input_ids, segment_ids), labels, mask)
        return outputs[0], outputs[1]
