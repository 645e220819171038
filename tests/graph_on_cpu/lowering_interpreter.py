"""A NumPy interpreter of lowered graphs, all ranks in lockstep, and a builder of graphs with one operator."""

from math import prod

import numpy as np
from mindspore.train import mind_ir_pb2 as ir

from graph_on_cpu.collectives import CPU_WORLD
from graph_on_cpu.lower import lower_graph
from graph_on_cpu.mindir import (
    NUMPY_DTYPES,
    Attribute,
    Emitter,
    Program,
    Value,
    attribute,
    integers,
    output_types,
    scalar,
)

FLOAT, INT32, UINT8 = ir.TensorProto.FLOAT, ir.TensorProto.INT32, ir.TensorProto.UINT8


def one_node_program(op_type, inputs, outputs, attributes=None, ranks=None):
    """A program that calls one operator.

    Args:
        inputs: (shape, dtype) of a tensor, or a constant: number, tuple of numbers or None.
        outputs: (shape, dtype) each; several make a tuple.
        ranks: the members of its group.
    """
    program = Program(ir.ModelProto())
    graph = program.model.graph
    graph.name = "graph"
    # The emitter only takes the scope of the node that it is to replace.
    emitter = Emitter(program, ir.NodeProto(name="unused"), {})
    values = []
    for index, entry in enumerate(inputs):
        if isinstance(entry, tuple) and entry and isinstance(entry[0], tuple):
            shape, dtype = entry
            tensor = graph.input.add(name=f"input{index}").tensor.add(data_type=dtype)
            tensor.dims.extend(shape)
            values.append(Value(f"input{index}", shape, dtype))
        elif entry is None:
            node = ir.NodeProto(name=f"none{index}", op_type="Constant", output=[f"none{index}"])
            node.attribute.add(name="value", type=Attribute.NONE)
            emitter.nodes.append(node)
            values.append(Value(f"none{index}", (), 0))
        else:
            values.append(entry)
    shape, dtype = outputs[0]
    emitter.call(op_type, *values, shape=shape, dtype=dtype, name="result", **(attributes or {}))
    node = emitter.nodes[-1]
    if len(outputs) > 1:
        types = attribute(node, "shape")
        types.Clear()
        types.name, types.type = "shape", Attribute.TUPLE
        for shape, dtype in outputs:
            element = types.values.add(type=Attribute.TENSORS)
            element.tensors.add(data_type=dtype, dims=shape)
    if ranks is not None:
        entry = program.model.primitives[-1].attribute.add(name="group_rank_ids", type=Attribute.TUPLE)
        for rank in ranks:
            entry.values.add(type=Attribute.UINT32, ints=[rank])
    graph.node.extend(emitter.nodes)
    graph.output.add(name="result")
    return program


def lower_for(program, rank, directory):
    """Return the lowered program of one rank and its groups."""
    program.save(directory / "graph.mindir")
    lowered = lower_graph(directory / "graph.mindir", rank, directory / f"lowered_{rank}.mindir")
    return Program.load(lowered.path), lowered.groups


def run(programs, groups, inputs):
    """Run one program per rank, node by node; ``inputs`` by rank and name. Return the results by rank."""
    values = [dict(entry) for entry in inputs]
    for rank, program in enumerate(programs):
        for parameter in program.model.graph.parameter:
            values[rank][parameter.name] = np.zeros(tuple(parameter.dims))
    pending = [list(program.model.graph.node) for program in programs]
    while any(pending):
        arrived = {}
        for rank, (program, nodes) in enumerate(zip(programs, pending)):
            while nodes and not _is_collective(program, nodes[0]):
                node = nodes.pop(0)
                values[rank][node.output[0]] = _compute(program, node, values[rank])
            if nodes:
                group = scalar(attribute(program.primitive_of(nodes[0]), "group"))
                members = tuple(range(len(programs))) if group == CPU_WORLD else groups[rank][group]
                arrived.setdefault((group, members), []).append(rank)
        complete = {key: ranks for key, ranks in arrived.items() if tuple(ranks) == key[1]}
        assert complete or not any(pending), f"the ranks wait for each other: {arrived}"
        for ranks in complete.values():
            _communicate(programs, pending, values, ranks)
    return [entry["result"] for entry in values]


def _is_collective(program, node):
    primitive = program.primitive_of(node)
    return primitive is not None and primitive.op_type in ("AllReduce", "AllGather")


def _communicate(programs, pending, values, ranks):
    nodes = [pending[rank].pop(0) for rank in ranks]
    op_types = {programs[rank].primitive_of(node).op_type for rank, node in zip(ranks, nodes)}
    arrays = [values[rank][node.input[0]] for rank, node in zip(ranks, nodes)]
    assert len(op_types) == 1 and len({array.shape for array in arrays}) == 1, "ranks disagree about a collective"
    result = np.concatenate(arrays) if op_types == {"AllGather"} else sum(arrays)
    for rank, node in zip(ranks, nodes):
        values[rank][node.output[0]] = result


def _softmax(x, axes):
    powers = np.exp(x - x.max(axis=axes[0], keepdims=True))
    return powers / powers.sum(axis=axes[0], keepdims=True)


def _matmul(a, b, transpose_a, transpose_b):
    return (np.swapaxes(a, -1, -2) if transpose_a else a) @ (np.swapaxes(b, -1, -2) if transpose_b else b)


def _segment_sum(x, ids, count):
    result = np.zeros((count, *x.shape[1:]))
    np.add.at(result, ids, x)
    return result


_OPERATORS = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Equal": np.equal,
    "Square": np.square,
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "ReduceMean": lambda x, axes, keep: x.mean(axis=axes, keepdims=bool(keep)),
    "ReduceSum": lambda x, axes, keep, _: x.sum(axis=axes, keepdims=bool(keep)),
    "ReduceMax": lambda x, axes, keep: x.max(axis=axes, keepdims=bool(keep)),
    "ReduceMin": lambda x, axes, keep: x.min(axis=axes, keepdims=bool(keep)),
    "Softmax": _softmax,
    "BatchMatMul": _matmul,
    "Cast": lambda x, _: np.asarray(x, np.float64),
    "Reshape": np.reshape,
    "Transpose": np.transpose,
    "Gather": lambda table, ids, axis, _: np.take(table, ids, axis=axis),
    "UnsortedSegmentSum": _segment_sum,
    "StridedSlice": lambda x, first, last, *_: x[tuple(slice(*bounds) for bounds in zip(first, last))],
    "Concat": lambda parts, axis: np.concatenate(parts, axis=axis),
    "MakeTuple": lambda *parts: parts,
    "Depend": lambda x, _: x,
}


def _compute(program, node, values):
    if node.op_type == "Constant":
        entry = attribute(node, "value")
        if entry.type == Attribute.TENSORS:
            tensor = entry.tensors[0]
            array = np.frombuffer(tensor.raw_data, NUMPY_DTYPES[tensor.data_type]).reshape(tuple(tensor.dims))
            return array.astype(np.float64)
        return tuple(integers(entry)) if entry.type == Attribute.TUPLE else scalar(entry)
    result = _OPERATORS[program.primitive_of(node).op_type](*(values[name] for name in node.input))
    shapes = [shape for shape, _ in output_types(node)]
    parts = result if isinstance(result, tuple) else (result,)
    assert [part.shape for part in parts] == shapes, f"{node.op_type} declares {shapes}"
    assert prod(shapes[0]) == parts[0].size
    return result
