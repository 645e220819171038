"""Ascend's fused kernels, in terms of operators that the CPU has kernels for.

The results are those of exact arithmetic in float32, not bit for bit those of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graph_on_cpu.mindir import FLOAT32_TYPE_ID, Emitter, LoweringError, Value

# What a hidden position adds to its score: far below any score, and finite, so that a row of hidden positions only
# (padding) is no NaN.
HIDDEN_SCORE = -1e9
# Forms of query, key and value: [B, S, N*D], which context parallelism takes, and [B, N, S, D].
_LAYOUT_BSH, _LAYOUT_BNSD = 0, 1

# Inputs of FlashAttentionScore and its gradient behind query, key and value.
_FORWARD = {"shift": 3, "drop_mask": 4, "mask": 6, "num_heads": 10, "scale": 12, "layout": 16, "sparse": 17}
_BACKWARD = {"shift": 4, "drop_mask": 5, "mask": 7, "num_heads": 15, "scale": 17, "layout": 21, "sparse": 22}


def lower_rms_norm(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4. Returns (normalised, 1 / rms)."""
    x, weight = inputs[:2]
    normalised, inverse_rms = emitter.outputs
    epsilon = emitter.number(emitter.constant_input(2), x.dtype)
    square = emitter.like("Square", x)
    mean = emitter.call("ReduceMean", square, (-1,), True, shape=inverse_rms.shape, dtype=x.dtype)
    shifted = emitter.binary("Add", mean, epsilon)
    inverse = emitter.like("Rsqrt", shifted)
    scaled = emitter.binary("Mul", emitter.binary("Mul", x, inverse), weight)
    emitter.make_tuple([scaled, inverse], name=normalised.name)


def lower_rms_norm_grad(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """With u = x / rms: dx = (dy w - u mean(dy w u)) / rms and dw = sum of dy u over all rows."""
    dy, x, inverse, weight = inputs
    dx, dweight = emitter.outputs
    unit = emitter.binary("Mul", x, inverse)
    slope = emitter.binary("Mul", dy, weight)
    products = emitter.binary("Mul", slope, unit)
    mean = emitter.call("ReduceMean", products, (-1,), True, shape=inverse.shape, dtype=x.dtype)
    direct = emitter.binary("Sub", slope, emitter.binary("Mul", unit, mean))
    gradient = emitter.binary("Mul", direct, inverse)
    rows = tuple(range(len(x.shape) - len(weight.shape)))
    weight_products = emitter.binary("Mul", dy, unit)
    weight_gradient = emitter.sum(weight_products, rows, weight.shape)
    emitter.make_tuple([gradient, weight_gradient], name=dx.name)
    assert dweight.shape == weight.shape, f"RmsNormGrad of {dweight.shape} for a weight of {weight.shape}"


def lower_outer(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Outer product of two vectors."""
    left, right = inputs
    column = emitter.reshape(left, (left.shape[0], 1))
    row = emitter.reshape(right, (1, right.shape[0]))
    emitter.binary("Mul", column, row, name=emitter.output.name)


def lower_embedding(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Rows of a table."""
    ids, table = inputs[:2]
    emitter.result("Gather", table, ids, 0, 0)


def lower_embedding_grad(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Gradients of rows, added up by row."""
    gradient, ids = inputs[:2]
    emitter.result("UnsortedSegmentSum", gradient, ids, emitter.output.shape[0])


def lower_rotation(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """x cos + turned(x) sin, where turned((a, b)) = (-b, a) of the halves of a head (arXiv:2104.09864, eq. 34)."""
    x, cosines, sines = inputs[:3]
    _check_halves(emitter, 3)
    sum_of = [emitter.binary("Mul", x, cosines), emitter.binary("Mul", _turned(emitter, x), sines)]
    emitter.binary("Add", *sum_of, name=emitter.output.name)


def lower_rotation_grad(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """dx = dy cos - turned(dy sin); the tables have no gradient here."""
    dy, cosines, sines = inputs[:3]
    outputs = emitter.outputs
    _check_halves(emitter, 4)
    turned = _turned(emitter, emitter.binary("Mul", dy, sines))
    dx = emitter.binary("Sub", emitter.binary("Mul", dy, cosines), turned)
    emitter.make_tuple([dx, *(emitter.zeros(one.shape, one.dtype) for one in outputs[1:])], name=outputs[0].name)


def _turned(emitter: Emitter, x: Value) -> Value:
    first, second = halves(emitter, x)
    return emitter.concat([emitter.like("Neg", second), first], len(x.shape) - 1)


def _check_halves(emitter: Emitter, place: int) -> None:
    if emitter.constant_input(place) != 0:
        raise LoweringError("RotaryPositionEmbedding of neighbouring channels cannot run on the CPU")


def halves(emitter: Emitter, value: Value) -> tuple[Value, Value]:
    """Both halves of the last axis."""
    axis, size = len(value.shape) - 1, value.shape[-1]
    return emitter.slice(value, axis, 0, size // 2), emitter.slice(value, axis, size // 2, size)


def lower_attention(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """FlashAttentionScore: softmax(scale q k^T + mask) v, with heads that share keys and values.

    The two statistics it returns for its gradient are left at zero, since :func:`lower_attention_grad` computes the
    softmax again.
    """
    maxima, sums, reserved, output = emitter.outputs
    _check_attention(emitter, _FORWARD)
    query, key, value = _by_heads(emitter, inputs[:3], _FORWARD)
    scale = emitter.constant_input(_FORWARD["scale"])
    weights = _attention_weights(emitter, query, key, inputs[_FORWARD["mask"]], scale)
    mixed = emitter.reshape(emitter.batched_matmul(weights, value, _grouped_shape(query, key)), query.shape)
    statistics = [emitter.zeros(entry.shape, entry.dtype) for entry in (maxima, sums, reserved)]
    emitter.make_tuple([*statistics, _as_layout(emitter, mixed, output)], name=maxima.name)


def lower_attention_grad(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Gradient of :func:`lower_attention`: Dao et al. 2022, arXiv:2205.14135, appendix B.2."""
    dquery, dkey, dvalue, dshift = emitter.outputs
    _check_attention(emitter, _BACKWARD)
    query, key, value, doutput = _by_heads(emitter, inputs[:4], _BACKWARD)
    scale = emitter.constant_input(_BACKWARD["scale"])
    weights = _attention_weights(emitter, query, key, inputs[_BACKWARD["mask"]], scale)
    grouped = _grouped_shape(query, key)
    doutput = emitter.reshape(doutput, grouped)
    value_gradient = emitter.batched_matmul(weights, doutput, value.shape, transpose_a=True)
    dweights = emitter.batched_matmul(doutput, value, weights.shape, transpose_b=True)
    products = emitter.binary("Mul", dweights, weights)
    row_sums = emitter.sum(products, (-1,), (*weights.shape[:-1], 1), keep_dims=True)
    dscores = emitter.binary("Mul", weights, emitter.binary("Sub", dweights, row_sums))
    dscores = emitter.binary("Mul", dscores, emitter.number(scale, query.dtype))
    query_gradient = emitter.reshape(emitter.batched_matmul(dscores, key, grouped), query.shape)
    grouped_query = emitter.reshape(query, grouped)
    key_gradient = emitter.batched_matmul(dscores, grouped_query, key.shape, transpose_a=True)
    gradients = zip((query_gradient, key_gradient, value_gradient), (dquery, dkey, dvalue))
    # The last output is the gradient of a position bias, which nobody gave: nothing reads it, and it is empty.
    unused = emitter.zeros((1,), dshift.dtype)
    emitter.make_tuple([*(_as_layout(emitter, *one) for one in gradients), unused], name=dquery.name)


LOWER_KERNEL: dict[str, Callable[[Emitter, Sequence[Value]], None]] = {
    "RmsNorm": lower_rms_norm,
    "RmsNormGrad": lower_rms_norm_grad,
    "RotaryPositionEmbedding": lower_rotation,
    "RotaryPositionEmbeddingGrad": lower_rotation_grad,
    "Outer": lower_outer,
    "Embedding": lower_embedding,
    "EmbeddingDenseBackward": lower_embedding_grad,
    "FlashAttentionScore": lower_attention,
    "FlashAttentionScoreGrad": lower_attention_grad,
}


def _check_attention(emitter: Emitter, places: dict[str, int]) -> None:
    """Refuse the variants of attention that the cells of this project do not use."""
    if emitter.constant_input(places["layout"]) not in (_LAYOUT_BSH, _LAYOUT_BNSD):
        raise LoweringError("FlashAttentionScore in another layout than BSH and BNSD cannot run on the CPU")
    if emitter.constant_input(places["sparse"]) != 0:
        raise LoweringError("FlashAttentionScore with a compressed mask (sparse_mode) cannot run on the CPU")
    if not (emitter.is_none(places["shift"]) and emitter.is_none(places["drop_mask"])):
        raise LoweringError("FlashAttentionScore with a position bias or dropout cannot run on the CPU")
    if emitter.is_none(places["mask"]):
        raise LoweringError("FlashAttentionScore without a mask cannot run on the CPU")


def _by_heads(emitter: Emitter, values: Sequence[Value], places: dict[str, int]) -> list[Value]:
    """Bring the query, and what is as large, into `[B, N, S, D]`, keys and values into `[B, G, Sk, D]`."""
    if emitter.constant_input(places["layout"]) == _LAYOUT_BNSD:
        return list(values)
    head_dim = values[0].shape[2] // emitter.constant_input(places["num_heads"])
    turned = []
    for value in values:
        batch, length, size = value.shape
        heads = emitter.reshape(value, (batch, length, size // head_dim, head_dim))
        turned.append(_swap_heads(emitter, heads))
    return turned


def _as_layout(emitter: Emitter, value: Value, output: Value) -> Value:
    """Bring `[B, N, S, D]` into the form of ``output``."""
    if len(output.shape) == len(value.shape):
        return value
    return emitter.reshape(_swap_heads(emitter, value), output.shape)


def _swap_heads(emitter: Emitter, value: Value) -> Value:
    """Swap the axes of heads and positions."""
    batch, first, second, size = value.shape
    return emitter.call("Transpose", value, (0, 2, 1, 3), shape=(batch, second, first, size), dtype=value.dtype)


def _grouped_shape(query: Value, key: Value) -> tuple[int, ...]:
    """`[B, G, r*S, d]`: the queries that share keys and values, as rows of one matrix."""
    batch, num_heads, length, head_dim = query.shape
    return batch, key.shape[1], num_heads // key.shape[1] * length, head_dim


def _attention_weights(emitter: Emitter, query: Value, key: Value, mask: Value, scale: float) -> Value:
    """Softmax of the scores, `[B, G, r*S, Sk]`; mask `[B, 1, S, Sk]`, 1 where hidden."""
    grouped = _grouped_shape(query, key)
    batch, num_heads, length, _ = query.shape
    rows = emitter.binary("Mul", emitter.reshape(query, grouped), emitter.number(scale, query.dtype))
    scores = emitter.batched_matmul(rows, key, (*grouped[:-1], key.shape[2]), transpose_b=True)
    hidden = emitter.call("Cast", mask, FLOAT32_TYPE_ID, shape=mask.shape, dtype=query.dtype)
    penalty = emitter.binary("Mul", hidden, emitter.number(HIDDEN_SCORE, query.dtype))
    by_head = emitter.reshape(scores, (batch, num_heads, length, key.shape[2]))
    masked = emitter.reshape(emitter.binary("Add", by_head, penalty), scores.shape)
    return emitter.like("Softmax", masked, (-1,))
