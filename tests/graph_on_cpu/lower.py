"""Rewrite the graph that was compiled for one rank of an Ascend cluster so that a CPU rank can execute it.

MindSpore's semi-auto parallel compiler shards the training step for Ascend only, but what it writes is a plain graph:
operators on shards, and collectives between named groups of ranks. Four things keep the CPU from running it, and each
is rewritten: collectives without a CPU kernel (``collectives``), fused Ascend kernels (``kernels``, those of experts in
``expert_kernels``), half precision, which becomes float32, and sizes that routing decides, which become fixed ones
(``routing``). The sharding, the schedule of the pipeline and the order of the collectives are the compiler's and stay
as they are: running them is the point.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mindspore.train import mind_ir_pb2 as ir

from graph_on_cpu.collectives import LOWER_COLLECTIVE, Groups
from graph_on_cpu.expert_kernels import LOWER_EXPERT_KERNEL, read_what_was_written
from graph_on_cpu.inline import inline_functions
from graph_on_cpu.kernels import LOWER_KERNEL
from graph_on_cpu.mindir import (
    CALL_PREFIX,
    FLOAT32_TYPE_ID,
    HALF_TYPE_IDS,
    Attribute,
    Emitter,
    Program,
    TensorType,
    Value,
    attribute,
    output_types,
    scalar,
)
from graph_on_cpu.routing import fix_routed_sizes

_LOWER_KERNEL = LOWER_KERNEL | LOWER_EXPERT_KERNEL
_CPU_COLLECTIVES = frozenset({"AllReduce", "AllGather"})
# Operators with an input that names the dtype of their output, and which one it is.
_DTYPE_INPUTS = {
    "Cast": 1,
    "SumExt": 3,
    "MeanExt": 3,
    "ZerosLikeExt": 1,
    "OnesLikeExt": 1,
    "Zeros": 1,
    "Ones": 1,
    "FillScalar": 2,
    "FillTensor": 2,
}


@dataclass(frozen=True)
class LoweredGraph:
    """A graph that a CPU rank can load with `mindspore.load`.

    Attributes:
        path: the MindIR file.
        groups: communication groups to create before the graph runs, ranks by name; every rank's graph names
            the groups of that rank, and names are the same on all of them.
        replaced: how many nodes of each operator were rewritten.
    """

    path: str
    groups: dict[str, tuple[int, ...]]
    replaced: dict[str, int]


def lower_graph(path: str | os.PathLike, rank: int, out_path: str | os.PathLike) -> LoweredGraph:
    """Rewrite the graph of ``rank`` from the file ``path`` into ``out_path``.

    Raises:
        LoweringError: the file is damaged, or the graph does something the CPU cannot.
    """
    program = Program.load(path)
    inline_functions(program)
    groups = Groups(rank)
    for primitive in program.model.primitives:
        groups.adopt(primitive)
    fix_routed_sizes(program)
    read_what_was_written(program)
    use_float32(program)
    replaced: Counter[str] = Counter()
    for graph in program.graphs:
        _lower_nodes(program, graph, groups, replaced)
        order_collectives(program, graph)
    program.save(out_path)
    return LoweredGraph(os.fspath(out_path), dict(groups.members), dict(replaced))


def _lower_nodes(program: Program, graph: ir.GraphProto, groups: Groups, replaced: Counter[str]) -> None:
    values = _values(graph)
    constants = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
    nodes = []
    for node in graph.node:
        primitive = program.primitive_of(node) if node.op_type.startswith(CALL_PREFIX) else None
        op_type = primitive.op_type if primitive is not None else ""
        # None stands for an input that is no tensor: an option, or a mark of the order of side effects.
        inputs = [values.get(name, Value(name, (), TensorType.UNDEFINED)) for name in node.input]
        emitter = Emitter(program, node, constants)
        if op_type in _LOWER_KERNEL:
            _LOWER_KERNEL[op_type](emitter, inputs)
        elif op_type not in LOWER_COLLECTIVE or not LOWER_COLLECTIVE[op_type](emitter, primitive, groups, inputs):
            nodes.append(node)
            continue
        nodes.extend(emitter.nodes)
        replaced[op_type] += 1
    _replace_nodes(graph, nodes)


def _replace_nodes(graph: ir.GraphProto, nodes: Sequence[ir.NodeProto]) -> None:
    del graph.node[:]
    graph.node.extend(nodes)


def order_collectives(program: Program, graph: ir.GraphProto) -> None:
    """Make every collective of a graph wait for the one before it.

    Ascend has a stream per group; the CPU has one message queue per pair of ranks, where messages of two
    groups that overtake each other would be taken for one another. The nodes of MindIR are sorted by dependency, and in
    the same way on every rank.
    """
    values = _values(graph)
    nodes, previous = [], None
    for node in graph.node:
        primitive = program.primitive_of(node) if node.op_type.startswith(CALL_PREFIX) else None
        if primitive is not None and primitive.op_type in _CPU_COLLECTIVES:
            if previous is not None:
                value = values[node.input[0]]
                emitter = Emitter(program, node, {})
                turn = emitter.call("Depend", value, previous, shape=value.shape, dtype=value.dtype)
                nodes.extend(emitter.nodes)
                node.input[0] = turn.name
            previous = values[node.output[0]]
        nodes.append(node)
    _replace_nodes(graph, nodes)


def _values(graph: ir.GraphProto) -> dict[str, Value]:
    """Every single tensor of a graph by name: inputs, parameters, and what nodes return."""
    values = {}
    for entry in graph.input:
        if entry.tensor:
            values[entry.name] = Value(entry.name, tuple(entry.tensor[0].dims), entry.tensor[0].data_type)
    for parameter in graph.parameter:
        values[parameter.name] = Value(parameter.name, tuple(parameter.dims), parameter.data_type)
    for node in graph.node:
        if node.op_type == "Constant":
            tensors = attribute(node, "value").tensors
            if tensors:
                values[node.output[0]] = Value(node.output[0], tuple(tensors[0].dims), tensors[0].data_type)
        elif attribute(node, "shape") is not None:
            types = output_types(node)
            if len(types) == 1:
                values[node.output[0]] = Value(node.output[0], *types[0])
    return values


def use_float32(program: Program) -> None:
    """Turn every float16 and bfloat16 tensor of a program, and every cast to one, into float32.

    The CPU has no bfloat16 kernels, and few for float16.
    """
    for graph in program.graphs:
        for tensor in graph.parameter:
            _widen(tensor)
        for entry in (*graph.input, *graph.output):
            for tensor in entry.tensor:
                _widen(tensor)
        for node in graph.node:
            for entry in node.attribute:
                _widen_attribute(entry)
        _widen_casts(program, graph)


def _widen_attribute(entry: ir.AttributeProto) -> None:
    for tensor in entry.tensors:
        _widen(tensor)
    for value in entry.values:
        _widen_attribute(value)


def _widen(tensor: ir.TensorProto) -> None:
    if tensor.data_type not in HALF_TYPE_IDS.values():
        return
    if tensor.raw_data:
        if tensor.data_type == TensorType.BFLOAT16:
            bits = np.frombuffer(tensor.raw_data, np.uint16).astype(np.uint32) << 16
            tensor.raw_data = bits.view(np.float32).tobytes()
        else:
            tensor.raw_data = np.frombuffer(tensor.raw_data, np.float16).astype(np.float32).tobytes()
    tensor.data_type = TensorType.FLOAT


def _widen_casts(program: Program, graph: ir.GraphProto) -> None:
    """The constants that name a dtype are shared with other uses of their number, so casts get one of their own."""
    constants = {node.output[0]: attribute(node, "value") for node in graph.node if node.op_type == "Constant"}
    float32 = None
    for node in list(graph.node):
        primitive = program.primitive_of(node)
        place = _DTYPE_INPUTS.get(primitive.op_type) if primitive is not None else None
        if place is None or place >= len(node.input) or node.input[place] not in constants:
            continue
        if scalar(constants[node.input[place]]) not in HALF_TYPE_IDS:
            continue
        if float32 is None:
            float32 = ir.NodeProto(name=program.new_name("float32"), op_type="Constant")
            float32.output.append(float32.name)
            float32.attribute.add(name="value", type=Attribute.INT64, i=FLOAT32_TYPE_ID)
        node.input[place] = float32.name
    if float32 is not None:
        graph.node.insert(0, float32)
