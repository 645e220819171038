"""Sizes that routing decides while a graph runs, as fixed ones: how many tokens a rank's experts get.

MindFormers sends a rank as many tokens as were routed to its experts, and from there on one axis of its tensors has no
size that the compiler knows. The CPU graph gives that axis room for all tokens of all ranks that share the experts.
What is left over comes last: rows of zeros, of an expert behind all others, which are sent back to nobody.
"""

from __future__ import annotations

from math import prod

from mindspore.train import mind_ir_pb2 as ir

from graph_on_cpu.mindir import (
    CALL_PREFIX,
    LoweringError,
    Program,
    attribute,
    integers,
    output_tensors,
    scalar,
)

_UNKNOWN = -1


def fix_routed_sizes(program: Program) -> None:
    """Put fixed sizes in the place of those that routing decides.

    Raises:
        LoweringError: a size depends on something else than routing.
    """
    for graph in program.graphs:
        sizes = _Sizes(program, graph)
        for node in graph.node:
            if node.op_type.startswith(CALL_PREFIX):
                sizes.settle(node)


class _Sizes:
    """Shapes by name, of the nodes of one graph in their order."""

    def __init__(self, program: Program, graph: ir.GraphProto):
        self._program = program
        self._shapes = {entry.name: tuple(entry.tensor[0].dims) for entry in graph.input if entry.tensor}
        self._shapes |= {parameter.name: tuple(parameter.dims) for parameter in graph.parameter}
        self._routed: dict[str, int] = {}  # what was put in the place of a size
        self._num_rows: dict[str, int] = {}  # rows that the counts of an AlltoAllV add up to at most
        self._asked: dict[str, tuple[int, ...]] = {}  # what an operator Shape answers

    def settle(self, node: ir.NodeProto) -> None:
        name, op_type = node.output[0], getattr(self._program.primitive_of(node), "op_type", "")
        if op_type == "Shape":
            self._asked[name] = self._shapes[node.input[0]]
            return
        tensors = [] if attribute(node, "shape") is None else output_tensors(node)
        if not tensors:
            return
        if op_type == "AlltoAllV":
            routed = self._received(node)
        elif any(_UNKNOWN in tensor.dims for tensor in tensors):
            routed = self._routed_size(node, op_type, tensors[0])
        else:
            routed = None
        if routed is not None:
            self._routed[name] = routed
            for tensor in tensors:
                tensor.dims[:] = [routed if size == _UNKNOWN else size for size in tensor.dims]
        self._shapes[name] = tuple(tensors[0].dims)

    def _received(self, node: ir.NodeProto) -> int:
        value, sent, received = node.input
        primitive = self._program.primitive_of(node)
        block_size = scalar(attribute(primitive, "block_size"))
        num_ranks = len(integers(attribute(primitive, "group_rank_ids")))
        num_sent = self._num_rows.setdefault(sent, prod(self._shapes[value]) // block_size)
        # On their way back the counts are those of the way there.
        return self._num_rows.setdefault(received, num_ranks * num_sent) * block_size

    def _routed_size(self, node: ir.NodeProto, op_type: str, tensor: ir.TensorProto) -> int:
        known = prod(size for size in tensor.dims if size != _UNKNOWN)
        if op_type == "Reshape":
            return prod(self._shapes[node.input[0]]) // known
        if op_type == "Zeros" and node.input[0] in self._asked:
            return prod(self._asked[node.input[0]]) // known
        found = next((self._routed[name] for name in node.input if name in self._routed), None)
        if found is None:
            raise LoweringError(f"{op_type} has a size that no routing decides, which the CPU's graph cannot fix")
        return found
