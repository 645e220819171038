"""Ascend's operators of a mixture of experts, in terms of operators that the CPU has kernels for in graph mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mindspore.train import mind_ir_pb2 as ir

from graph_on_cpu.kernels import halves
from graph_on_cpu.mindir import (
    FLOAT32_TYPE_ID,
    INT32_TYPE_ID,
    INT64_TYPE_ID,
    Emitter,
    LoweringError,
    Program,
    TensorType,
    Value,
)

# Inputs of GroupedMatmul behind left, right and what no cell gives.
_GROUP_ENDS, _SPLIT_ITEM, _GROUP_TYPE, _TRANSPOSE = 7, 8, 9, (10, 11)
_ROWS, _SUMMED = 0, 2  # what its groups divide: rows of the result, or the axis that is summed over
_WRITERS = ("InplaceScatterSrc", "InplaceScatterAdd", "InplaceIndexAddExt")


def read_what_was_written(program: Program) -> None:
    """Let nodes take the result of an operator that writes in place, not the tensor that it has written into.

    Raises:
        LoweringError: something else reads that tensor.
    """
    for graph in program.graphs:
        written = {}
        for node in graph.node:
            primitive = program.primitive_of(node)
            if primitive is not None and primitive.op_type in _WRITERS:
                written[node.input[0]] = node.output[0]
        for node in graph.node:
            _read(node, written, graph)


def _read(node: ir.NodeProto, written: dict[str, str], graph: ir.GraphProto) -> None:
    for name in set(node.input) & written.keys():
        if node.output[0] == written[name]:
            continue
        if list(node.input) != [name, written[name]]:
            raise LoweringError(f"{node.op_type} in {graph.name} reads a tensor that another operator writes in place")
        node.input[0] = written[name]


def lower_sort(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Sorted values, and where they were."""
    values, places = emitter.outputs
    axis, is_descending = emitter.constant_input(1), bool(emitter.constant_input(2))
    found = _sort(emitter, inputs[0], axis, is_descending)
    emitter.make_tuple(found, name=values.name)
    assert values.shape == places.shape == inputs[0].shape


def lower_top_k(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """The largest values along the last axis, and where they are."""
    count, axis = emitter.constant_input(1), emitter.constant_input(2)
    last = len(inputs[0].shape) - 1
    if axis % (last + 1) != last or not emitter.constant_input(3):
        raise LoweringError("TopkExt of anything but the largest of the last axis cannot run on the CPU")
    found = _sort(emitter, inputs[0], last, True)
    emitter.make_tuple([emitter.slice(one, last, 0, count) for one in found], name=emitter.outputs[0].name)


def lower_one_hot(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """1 at the number that is given, 0 elsewhere: what its third and fourth input say in MindFormers' cells."""
    (value, *_), output = inputs, emitter.output
    numbers = emitter.array(np.arange(output.shape[-1], dtype=np.int32))
    column = emitter.reshape(value, (*value.shape, 1))
    equal = emitter.call("Equal", column, numbers, shape=output.shape, dtype=TensorType.BOOL)
    emitter.result("Cast", equal, INT32_TYPE_ID)


def lower_cumulative_sum(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Sums of all up to each, of one axis."""
    (value, *_), output = inputs, emitter.output
    (size,) = value.shape
    row = emitter.reshape(value, (1, size))
    sums = emitter.matmul(row, emitter.array(np.triu(np.ones((size, size), np.float32))))
    emitter.reshape(sums, output.shape, name=output.name)


def lower_index_select(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Rows of a tensor."""
    emitter.result("Gather", inputs[0], inputs[2], emitter.constant_input(1), 0)


def lower_index_add(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Add rows to those of a tensor."""
    output = emitter.output
    if emitter.constant_input(1) != 0 or emitter.constant_input(4) != 1:
        raise LoweringError("InplaceIndexAddExt of anything but rows cannot run on the CPU")
    places = emitter.cast(inputs[2], INT32_TYPE_ID, TensorType.INT32)
    sums = emitter.call(
        "UnsortedSegmentSum", inputs[3], places, output.shape[0], shape=output.shape, dtype=output.dtype
    )
    emitter.binary("Add", inputs[0], sums, name=output.name)


def lower_scatter(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Put values where they belong along the last axis, where each place gets one at most and there were zeros."""
    into, _, places, values = inputs
    output, last = emitter.output, len(into.shape) - 1
    if emitter.constant_input(1) % (last + 1) != last:
        raise LoweringError("InplaceScatterSrc along another axis than the last cannot run on the CPU")
    numbers = emitter.array(np.arange(output.shape[-1], dtype=np.int64))
    spread = (*places.shape, output.shape[-1])
    equal = emitter.call(
        "Equal", emitter.reshape(places, (*places.shape, 1)), numbers, shape=spread, dtype=TensorType.BOOL
    )
    marks = emitter.cast(equal, FLOAT32_TYPE_ID, TensorType.FLOAT)
    placed = emitter.binary("Mul", marks, emitter.reshape(values, (*values.shape, 1)))
    sums = emitter.sum(placed, (last,), output.shape)
    emitter.binary("Add", into, sums, name=output.name)


def lower_scatter_add(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Add one value to each row of a matrix, at its own place."""
    into, _, places, values = inputs[:4]  # behind them may be a mark of the order of side effects
    output = emitter.output
    if emitter.constant_input(1) % 2 != 1 or places.shape != (output.shape[0], 1):
        raise LoweringError("InplaceScatterAdd of anything but one value in each row cannot run on the CPU")
    numbers = emitter.array(np.arange(output.shape[1], dtype=np.int64))
    equal = emitter.call("Equal", places, numbers, shape=output.shape, dtype=TensorType.BOOL)
    placed = emitter.binary("Mul", emitter.cast(equal, FLOAT32_TYPE_ID, TensorType.FLOAT), values)
    emitter.binary("Add", into, placed, name=output.name)


def lower_remainder(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Remainder of numbers that are not negative."""
    output = emitter.output
    divisor = emitter.number(emitter.constant_input(1), output.dtype)
    emitter.binary("FloorMod", inputs[0], divisor, name=output.name)


def lower_dense(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """x W^T, without a bias."""
    x, weight = inputs[:2]
    if not emitter.is_none(2):
        raise LoweringError("Dense with a bias cannot run on the CPU")
    rows = emitter.reshape(x, (int(np.prod(x.shape[:-1])), x.shape[-1]))
    product = emitter.matmul(rows, weight, transpose_b=True)
    emitter.reshape(product, emitter.output.shape, name=emitter.output.name)


def lower_matmul(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Product of two matrices."""
    left, right = inputs[:2]
    if len(left.shape) != 2 or len(right.shape) != 2:
        raise LoweringError("MatMulExt of anything but two matrices cannot run on the CPU")
    emitter.matmul(left, right, name=emitter.output.name)


def lower_gated(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): silu of the first half, times the second."""
    gate, up = halves(emitter, inputs[0])
    sigmoid = emitter.like("Sigmoid", gate)
    emitter.binary("Mul", emitter.binary("Mul", gate, sigmoid), up, name=emitter.output.name)


def lower_gated_grad(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """With s = sigmoid(a): da = dy b s (1 + a (1 - s)) and db = dy a s."""
    slope, x = inputs[:2]
    gate, up = halves(emitter, x)
    sigmoid = emitter.like("Sigmoid", gate)
    one = emitter.number(1.0, gate.dtype)
    rest = emitter.binary("Mul", gate, emitter.binary("Sub", one, sigmoid))
    curve = emitter.binary("Mul", sigmoid, emitter.binary("Add", one, rest))
    gate_slope = emitter.binary("Mul", emitter.binary("Mul", slope, up), curve)
    up_slope = emitter.binary("Mul", slope, emitter.binary("Mul", gate, sigmoid))
    emitter.concat([gate_slope, up_slope], len(x.shape) - 1, name=emitter.output.name)


def lower_softmax_grad(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """y (dy - sum of dy y), along the last axis."""
    slope, y = inputs[:2]
    last = len(y.shape) - 1
    products = emitter.binary("Mul", slope, y)
    sums = emitter.sum(products, (last,), (*y.shape[:-1], 1), keep_dims=True)
    emitter.binary("Mul", y, emitter.binary("Sub", slope, sums), name=emitter.output.name)


def lower_grouped_matmul(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Product of each expert's rows with its matrix; or, for its gradient, sums over each expert's rows.

    Groups follow each other and are given by their ends. Rows behind the last are zero in the result.
    """
    if any(emitter.constant_input(place) for place in _TRANSPOSE):
        raise LoweringError("GroupedMatmul of transposed matrices cannot run on the CPU")
    left, right = (emitter.element(value, 0) for value in inputs[:2])
    output, kind = emitter.output, emitter.constant_input(_GROUP_TYPE)
    (num_groups,) = inputs[_GROUP_ENDS].shape
    if kind == _ROWS:
        (num_rows, size), width = left.shape, right.shape[2]
        member = _members(emitter, inputs[_GROUP_ENDS], num_rows)
        rows = emitter.reshape(left, (1, num_rows, size))
        spread = emitter.binary("Mul", rows, emitter.reshape(member, (num_groups, num_rows, 1)))
        products = emitter.batched_matmul(spread, right, (num_groups, num_rows, width))
        result = emitter.sum(products, (0,), output.shape)
    elif kind == _SUMMED:
        (size, num_rows), width = left.shape, right.shape[1]
        member = _members(emitter, inputs[_GROUP_ENDS], num_rows)
        columns = emitter.reshape(left, (1, size, num_rows))
        spread = emitter.binary("Mul", columns, emitter.reshape(member, (num_groups, 1, num_rows)))
        rows = emitter.reshape(right, (1, num_rows, width))
        others = emitter.binary("Mul", rows, emitter.reshape(member, (num_groups, num_rows, 1)))
        result = emitter.batched_matmul(spread, others, output.shape)
    else:
        raise LoweringError(f"GroupedMatmul with group_type {kind} cannot run on the CPU")
    emitter.make_tuple([result], name=output.name)


def lower_transpose(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Swap two axes."""
    rank = len(inputs[0].shape)
    first, second = (emitter.constant_input(place) % rank for place in (1, 2))
    axes = list(range(rank))
    axes[first], axes[second] = second, first
    emitter.result("Transpose", inputs[0], tuple(axes))


def lower_zeros(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Zeros, whose shape need not be asked for."""
    output = emitter.output
    emitter.reshape(emitter.zeros(output.shape, output.dtype), output.shape, name=output.name)


def lower_shape(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """Nothing: only zeros take a shape that was asked for, and know it."""


def lower_move(emitter: Emitter, inputs: Sequence[Value]) -> None:
    """All is in the memory of the host."""
    emitter.reshape(inputs[0], emitter.output.shape, name=emitter.output.name)


LOWER_EXPERT_KERNEL: dict[str, Callable[[Emitter, Sequence[Value]], None]] = {
    "SortExt": lower_sort,
    "TopkExt": lower_top_k,
    "OneHotExt": lower_one_hot,
    "CumsumExt": lower_cumulative_sum,
    "IndexSelect": lower_index_select,
    "InplaceIndexAddExt": lower_index_add,
    "InplaceScatterSrc": lower_scatter,
    "InplaceScatterAdd": lower_scatter_add,
    "FmodScalar": lower_remainder,
    "Dense": lower_dense,
    "MatMulExt": lower_matmul,
    "Swiglu": lower_gated,
    "SwigluGrad": lower_gated_grad,
    "SoftmaxBackward": lower_softmax_grad,
    "GroupedMatmul": lower_grouped_matmul,
    "TransposeExtView": lower_transpose,
    "Zeros": lower_zeros,
    "Shape": lower_shape,
    "MoveTo": lower_move,
}


def _sort(emitter: Emitter, value: Value, axis: int, is_descending: bool) -> list[Value]:
    """Sorted values and where they were, int64, as Ascend's operators count."""
    found = emitter.call("Sort", value, shape=value.shape, dtype=value.dtype, axis=axis, descending=is_descending)
    places = emitter.element(Value(found.name, value.shape, TensorType.INT32), 1)
    return [emitter.element(found, 0), emitter.cast(places, INT64_TYPE_ID, TensorType.INT64)]


def _members(emitter: Emitter, ends: Value, num_rows: int) -> Value:
    """1 where a row is in a group, `[groups, rows]`."""
    (num_groups,) = ends.shape
    column = emitter.reshape(emitter.cast(ends, FLOAT32_TYPE_ID, TensorType.FLOAT), (num_groups, 1))
    starts = emitter.matmul(emitter.array(np.eye(num_groups, k=-1, dtype=np.float32)), column)
    places = emitter.array(np.arange(num_rows, dtype=np.float32)[None])
    return emitter.between(places, starts, column)
