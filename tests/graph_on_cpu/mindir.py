"""Reading and rewriting MindIR graphs: the file format of `mindspore.export`, as protobuf messages.

A node of MindIR names the primitive it calls; primitives are shared between nodes, so a rewrite never changes one in
place but adds its own. Every node carries the shapes and dtypes of its outputs, and the rewrites here are told
theirs: nothing is inferred.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mindspore.train import mind_ir_pb2 as ir

from mindrlhf.errors import RunFailure

CALL_PREFIX = "REF::"
LOWERED_PREFIX = "lowered_"
Attribute = ir.AttributeProto
TensorType = ir.TensorProto

NUMPY_DTYPES = {
    TensorType.FLOAT: np.dtype(np.float32),
    TensorType.DOUBLE: np.dtype(np.float64),
    TensorType.FLOAT16: np.dtype(np.float16),
    TensorType.UINT8: np.dtype(np.uint8),
    TensorType.INT8: np.dtype(np.int8),
    TensorType.INT32: np.dtype(np.int32),
    TensorType.INT64: np.dtype(np.int64),
    TensorType.BOOL: np.dtype(np.bool_),
}
# MindSpore's TypeId of float32: how casts and reductions name the dtype they are to return.
INT32_TYPE_ID, INT64_TYPE_ID, FLOAT32_TYPE_ID = 34, 35, 43
HALF_TYPE_IDS = {42: TensorType.FLOAT16, 45: TensorType.BFLOAT16}


class LoweringError(RunFailure):
    """A graph holds something that cannot be turned into kernels of the CPU."""


@dataclass(frozen=True)
class Value:
    """One tensor in a graph: the name that nodes refer to, its shape and its dtype (`TensorProto.DataType`)."""

    name: str
    shape: tuple[int, ...]
    dtype: int


class Program:
    """One MindIR file in memory.

    Attributes:
        model: the protobuf message.
        primitives: by name.
    """

    def __init__(self, model: ir.ModelProto):
        self.model = model
        self.primitives = {primitive.name: primitive for primitive in model.primitives}
        self._num_names = 0

    @classmethod
    def load(cls, path: str | os.PathLike) -> Program:
        """Read a file that `mindspore.export` wrote.

        Raises:
            LoweringError: it cannot be read, or is none.
        """
        model = ir.ModelProto()
        try:
            model.ParseFromString(Path(path).read_bytes())
        except OSError as error:
            raise LoweringError(f"{path}: {error.strerror}") from error
        except Exception as error:  # protobuf's DecodeError has another home in each of its versions
            raise LoweringError(f"{path} is not a MindIR file, or a damaged one: {error}") from error
        if not model.graph.node:
            raise LoweringError(f"{path} is not a MindIR file: it holds no graph")
        return cls(model)

    def save(self, path: str | os.PathLike) -> None:
        """Write the file below a temporary name, then rename it: readers see all of it or nothing."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(self.model.SerializeToString())
        os.replace(temporary, path)

    @property
    def graphs(self) -> list[ir.GraphProto]:
        """The functions and, last, the graph that calls them."""
        return [*self.model.functions, self.model.graph]

    def primitive_of(self, node: ir.NodeProto) -> ir.PrimitiveProto | None:
        """Return the primitive that ``node`` calls; None for constants and calls of functions."""
        return self.primitives.get(node.op_type.removeprefix(CALL_PREFIX))

    def add_primitive(self, op_type: str, attributes: dict[str, int | str | bool]) -> ir.PrimitiveProto:
        """Add a primitive; those without attributes take all of their options as inputs."""
        primitive = self.model.primitives.add()
        primitive.op_type = op_type
        primitive.name = f"{op_type}:lowered{len(self.model.primitives)}"
        primitive.prim_type = (
            ir.PrimitiveProto.PRIMITIVE
            if attributes or op_type in _PLAIN_PRIMITIVES
            else ir.PrimitiveProto.PRIMITIVE_FUNCTION
        )
        for name, value in attributes.items():
            set_attribute(primitive, name, value)
        self.primitives[primitive.name] = primitive
        return primitive

    def new_name(self, hint: str) -> str:
        """Return a name that nothing in the file has."""
        self._num_names += 1
        return f"{LOWERED_PREFIX}{hint}_{self._num_names}"


# Primitives that MindSpore does not generate from an operator definition: they have no options as inputs.
_PLAIN_PRIMITIVES = frozenset({"MakeTuple", "TupleGetItem", "Depend", "AddN"})


class Emitter:
    """Builds the nodes that stand in the place of one other node.

    Args:
        program: what they are added to.
        replaced: the node; its scope and fusion marks carry over.
        constants: the graph's constants by name.
    """

    def __init__(self, program: Program, replaced: ir.NodeProto, constants: dict[str, ir.NodeProto]):
        self.program = program
        self.replaced = replaced
        self.nodes: list[ir.NodeProto] = []
        self._constants = constants

    @property
    def outputs(self) -> list[Value]:
        """The outputs of the replaced node, under its own name."""
        return [Value(self.replaced.output[0], *typed) for typed in output_types(self.replaced)]

    @property
    def output(self) -> Value:
        """The only output of the replaced node."""
        (value,) = self.outputs
        return value

    def constant_input(self, index: int) -> int | float | str | None:
        """Return the value of an input of the replaced node that is a scalar constant."""
        name = self.replaced.input[index]
        if name not in self._constants:
            raise LoweringError(f"{self.replaced.op_type}: input {index} is computed, a constant was expected")
        return scalar(attribute(self._constants[name], "value"))

    def is_none(self, index: int) -> bool:
        """Whether an input of the replaced node is None."""
        node = self._constants.get(self.replaced.input[index])
        return node is not None and attribute(node, "value").type == Attribute.NONE

    def call(
        self,
        op_type: str,
        *inputs: Value | int | bool | float | tuple[int, ...],
        shape: Sequence[int],
        dtype: int,
        name: str | None = None,
        **attributes: int | str | bool,
    ) -> Value:
        """Add a call; plain Python inputs become constants. ``name`` is that of the output, a fresh one by default."""
        primitive = self.program.add_primitive(op_type, attributes)
        names = [value.name if isinstance(value, Value) else self._constant(value) for value in inputs]
        name = name or self.program.new_name(op_type)
        types = self._node(primitive, names, name).attribute.add(name="shape", type=Attribute.TENSORS)
        _set_type(types.tensors.add(), shape, dtype)
        return Value(name, tuple(shape), dtype)

    def make_tuple(self, values: Sequence[Value], name: str | None = None) -> Value:
        """Add a tuple of tensors; the result's shape and dtype are those of its first element."""
        name = name or self.program.new_name("MakeTuple")
        node = self._node(self.program.add_primitive("MakeTuple", {}), [value.name for value in values], name)
        types = node.attribute.add(name="shape", type=Attribute.TUPLE)
        for value in values:
            _set_type(types.values.add(type=Attribute.TENSORS).tensors.add(), value.shape, value.dtype)
        return Value(name, values[0].shape, values[0].dtype)

    def zeros(self, shape: Sequence[int], dtype: int) -> Value:
        """Add a constant tensor of zeros."""
        return self.array(np.zeros(shape, NUMPY_DTYPES[dtype]))

    def array(self, numbers: np.ndarray) -> Value:
        """Add a constant tensor."""
        name = self.program.new_name("array")
        dtype = next(key for key, known in NUMPY_DTYPES.items() if known == numbers.dtype)
        value = self._constant_node(name)
        value.type = Attribute.TENSORS
        tensor = value.tensors.add()
        _set_type(tensor, numbers.shape, dtype)
        tensor.name = "value0"
        tensor.raw_data = np.ascontiguousarray(numbers).tobytes()
        return Value(name, numbers.shape, dtype)

    def zero_parameter(self, shape: Sequence[int], dtype: int) -> Value:
        """Add a parameter of the program, zeros that the compiler may not take for a constant."""
        graph = self.program.model.graph
        tensor = graph.parameter.add()
        tensor.name = f"{graph.name}:{self.program.new_name('zero_parameter')}"
        _set_type(tensor, shape, dtype)
        return Value(tensor.name, tuple(shape), dtype)

    def number(self, number: float, dtype: int) -> Value:
        """Add a constant tensor without axes."""
        return self.array(np.array(number, NUMPY_DTYPES[dtype]))

    def result(self, op_type: str, *inputs: Value | int | bool | float | tuple[int, ...]) -> Value:
        """Add the call that gives the only output of the replaced node."""
        output = self.output
        return self.call(op_type, *inputs, shape=output.shape, dtype=output.dtype, name=output.name)

    def like(self, op_type: str, value: Value, *options: int | bool | float | tuple[int, ...]) -> Value:
        """Add a call whose result has the shape and dtype of its first input."""
        return self.call(op_type, value, *options, shape=value.shape, dtype=value.dtype)

    def sum(self, value: Value, axes: tuple[int, ...], shape: Sequence[int], keep_dims: bool = False) -> Value:
        """Add a sum over axes."""
        return self.call("ReduceSum", value, axes, keep_dims, False, shape=shape, dtype=value.dtype)

    def batched_matmul(
        self, left: Value, right: Value, shape: Sequence[int], transpose_a: bool = False, transpose_b: bool = False
    ) -> Value:
        """Add products of two rows of matrices."""
        return self.call("BatchMatMul", left, right, transpose_a, transpose_b, shape=shape, dtype=left.dtype)

    def reshape(self, value: Value, shape: Sequence[int], name: str | None = None) -> Value:
        """Add a reshape."""
        return self.call("Reshape", value, tuple(shape), shape=shape, dtype=value.dtype, name=name)

    def element(self, value: Value, index: int) -> Value:
        """Take an element of a tuple, of which ``value`` has shape and dtype."""
        return self.call("TupleGetItem", value, index, shape=value.shape, dtype=value.dtype)

    def cast(self, value: Value, type_id: int, dtype: int) -> Value:
        """Add a cast, to MindSpore's and to the file's name of a dtype."""
        return self.call("Cast", value, type_id, shape=value.shape, dtype=dtype)

    def binary(self, op_type: str, left: Value, right: Value, name: str | None = None) -> Value:
        """Add an elementwise operator; the shapes broadcast."""
        rank = max(len(left.shape), len(right.shape))
        shapes = [(1,) * (rank - len(value.shape)) + value.shape for value in (left, right)]
        shape = tuple(max(sizes) for sizes in zip(*shapes))
        return self.call(op_type, left, right, shape=shape, dtype=left.dtype, name=name)

    def matmul(self, left: Value, right: Value, transpose_b: bool = False, name: str | None = None) -> Value:
        """Add a product of two matrices."""
        shape = (left.shape[0], right.shape[0 if transpose_b else 1])
        return self.call("MatMul", left, right, False, transpose_b, shape=shape, dtype=left.dtype, name=name)

    def between(self, numbers: Value, starts: Value, ends: Value) -> Value:
        """Mark with 1, else 0, which numbers lie from a start up to its end, all float32; the shapes broadcast."""
        after = self.binary("GreaterEqual", numbers, starts)
        before = self.binary("Less", numbers, ends)
        return self.binary("Mul", *(self.cast(one, FLOAT32_TYPE_ID, TensorType.FLOAT) for one in (after, before)))

    def slice(self, value: Value, axis: int, start: int, stop: int, name: str | None = None) -> Value:
        """Add a slice along one axis."""
        begin, end = [0] * len(value.shape), list(value.shape)
        begin[axis], end[axis] = start, stop
        shape = tuple(stop - start for start, stop in zip(begin, end))
        ones = (1,) * len(shape)
        masks = (0,) * 5
        return self.call(
            "StridedSlice", value, tuple(begin), tuple(end), ones, *masks, shape=shape, dtype=value.dtype, name=name
        )

    def concat(self, values: Sequence[Value], axis: int, name: str | None = None) -> Value:
        """Add a concatenation."""
        shape = list(values[0].shape)
        shape[axis] = sum(value.shape[axis] for value in values)
        return self.call("Concat", self.make_tuple(values), axis, shape=shape, dtype=values[0].dtype, name=name)

    def _node(self, primitive: ir.PrimitiveProto, inputs: Sequence[str], name: str) -> ir.NodeProto:
        node = ir.NodeProto(name=name, op_type=CALL_PREFIX + primitive.name, domain=self.replaced.domain)
        node.input.extend(inputs)
        node.output.append(name)
        self.nodes.append(node)
        return node

    def _constant(self, value: int | bool | float | tuple[int, ...]) -> str:
        name = self.program.new_name("constant")
        _set_value(self._constant_node(name), value)
        return name

    def _constant_node(self, name: str) -> ir.AttributeProto:
        node = ir.NodeProto(name=name, op_type="Constant")
        node.output.append(name)
        self.nodes.append(node)
        return node.attribute.add(name="value")


def attribute(message: ir.NodeProto | ir.PrimitiveProto, name: str) -> ir.AttributeProto | None:
    """Return the attribute ``name``, None when there is none."""
    return next((entry for entry in message.attribute if entry.name == name), None)


def set_attribute(message: ir.NodeProto | ir.PrimitiveProto, name: str, value: int | str | bool) -> None:
    """Set the attribute ``name``, or replace it whatever its type was."""
    entry = attribute(message, name)
    if entry is None:
        entry = message.attribute.add()
    entry.Clear()
    entry.name = name
    _set_value(entry, value)


def scalar(entry: ir.AttributeProto) -> int | float | str | None:
    """Return the number or text of an attribute; None when it is neither."""
    if entry.type == Attribute.STRING:
        return entry.s.decode()
    if entry.type == Attribute.FLOAT:
        return entry.f
    if entry.type in (Attribute.INT64, Attribute.INT32, Attribute.UINT32, Attribute.BOOL):
        return entry.ints[0] if entry.ints else entry.i
    return None


def integers(entry: ir.AttributeProto | None) -> list[int]:
    """Return the numbers of an attribute that is a tuple of them, in either of the two forms MindSpore writes."""
    if entry is None:
        return []
    return list(entry.ints) or [scalar(value) for value in entry.values]


def output_tensors(node: ir.NodeProto) -> list[ir.TensorProto]:
    """What a node says of each of its outputs."""
    entry = attribute(node, "shape")
    return list(entry.tensors) or [tensor for value in entry.values for tensor in value.tensors]


def output_types(node: ir.NodeProto) -> list[tuple[tuple[int, ...], int]]:
    """Shape and dtype of each output of a node."""
    return [(tuple(tensor.dims), tensor.data_type) for tensor in output_tensors(node)]


def _set_type(tensor: ir.TensorProto, shape: Sequence[int], dtype: int) -> None:
    tensor.dims.extend(shape)
    tensor.data_type = dtype


def _set_value(entry: ir.AttributeProto, value: int | str | bool | float | tuple[int, ...]) -> None:
    if isinstance(value, bool):
        entry.type, entry.i = Attribute.BOOL, int(value)
    elif isinstance(value, int):
        entry.type, entry.i = Attribute.INT64, value
    elif isinstance(value, float):
        entry.type, entry.f = Attribute.FLOAT, value
    elif isinstance(value, str):
        entry.type, entry.s = Attribute.STRING, value.encode()
    else:
        entry.type = Attribute.TUPLE
        for number in value:
            element = entry.values.add(type=Attribute.INT64)
            element.ints.append(number)
