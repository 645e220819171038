"""The collectives of a compiled graph: kind, group, how often, how many bytes (reads MindSpore's MindIR protobuf)."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from mindrlhf.dryrun.compile.request import COLLECTIVES, Collective

if TYPE_CHECKING:
    from mindspore.train.mind_ir_pb2 import GraphProto, ModelProto, NodeProto, PrimitiveProto

_REFERENCE = "REF::"
# Bytes of an element by the number that MindIR (as ONNX) gives its dtype.
_ELEMENT_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2}


def read_collectives(
    model: "ModelProto", world_size: int, groups: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> tuple[Collective, ...]:
    """Return the collectives of one execution of a graph, those that are alike counted together.

    A function that is called several times, as a layer or a micro-batch may be, counts as often as it is called.

    Args:
        model: a graph sharded for one rank.
        world_size: number of ranks, which are the world group.
        groups: the ranks, by name, of groups that the process has made itself; the compiler's own tell theirs.
    """
    known = {"hccl_world_group": tuple(range(world_size)), **groups}
    primitives = {primitive.name: primitive for primitive in model.primitives}
    graphs = {graph.name: graph for graph in (*model.functions, model.graph)}
    calls = _count_calls(graphs, model.graph.name)
    counts: Counter = Counter()
    for name, graph in graphs.items():
        sizes = {output: _output_bytes(node) for node in graph.node for output in node.output}
        for node in graph.node:
            primitive = primitives.get(node.op_type.removeprefix(_REFERENCE))
            if primitive is None or primitive.op_type not in COLLECTIVES:
                continue
            group = _group_ranks(primitive, known)
            output_bytes = _output_bytes(node)
            input_bytes = _input_bytes(primitive.op_type, output_bytes, len(group))
            if primitive.op_type in ("Send", "AlltoAll", "AlltoAllV"):
                input_bytes = sizes.get(node.input[0], output_bytes)
            counts[primitive.op_type, group, input_bytes, output_bytes] += calls[name]
    return tuple(
        Collective(kind, group, count, input_bytes, output_bytes)
        for (kind, group, input_bytes, output_bytes), count in sorted(counts.items())
        if count
    )


def _count_calls(graphs: dict[str, "GraphProto"], root: str) -> Counter:
    """Count the runs of each graph. A backward graph is returned by its forward graph, and runs as often."""
    references = {name: Counter(_references(graph.node, graphs)) for name, graph in graphs.items()}
    calls: Counter = Counter()

    def count(name: str, times: int) -> None:
        calls[name] += times
        for callee, number in references[name].items():
            count(callee, times * number)

    count(root, 1)
    return calls


def _references(nodes: Iterable["NodeProto"], graphs: dict[str, "GraphProto"]) -> Iterable[str]:
    for node in nodes:
        for name in (node.op_type, *node.input):
            if name.removeprefix(_REFERENCE) in graphs:
                yield name.removeprefix(_REFERENCE)


def _group_ranks(primitive: "PrimitiveProto", known: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    attributes = {attribute.name: attribute for attribute in primitive.attribute}
    group = _text(attributes["group"].s)
    if group in known:
        return tuple(known[group])
    for name in ("group_rank_ids", "rank_list"):
        if name in attributes:
            ranks = _integers(attributes[name])
            if ranks:
                return ranks
    raise AssertionError(f"{primitive.name} tells no ranks of its group {group}")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _integers(attribute) -> tuple[int, ...]:
    if attribute.ints:
        return tuple(attribute.ints)
    return tuple(value.ints[0] if value.ints else value.i for value in attribute.values)


def _output_bytes(node: "NodeProto") -> int:
    """Bytes of a node's first output, 0 when it is no tensor or its size is known at run time only."""
    for attribute in node.attribute:
        tensors = [*attribute.tensors, *(tensor for value in attribute.values for tensor in value.tensors)]
        if attribute.name == "shape" and tensors:  # a tuple of tensors, such as a broadcast's, has them in its values
            tensor = tensors[0]
            num_elements = 0 if min(tensor.dims, default=1) < 0 else math.prod(tensor.dims)
            return num_elements * _ELEMENT_BYTES.get(tensor.data_type, 0)
    return 0


def _input_bytes(kind: str, output_bytes: int, group_size: int) -> int:
    if kind == "AllGather":
        return output_bytes // group_size
    return output_bytes * group_size if kind == "ReduceScatter" else output_bytes


def summarize(collectives: Sequence[Collective]) -> list[tuple[str, int, int, int]]:
    """Return (kind, group size, count, bytes of the larger side in all) for each kind and group size."""
    counts: Counter = Counter()
    sums: Counter = Counter()
    for collective in collectives:
        key = collective.kind, len(collective.group_ranks)
        counts[key] += collective.count
        sums[key] += collective.count * max(collective.input_bytes, collective.output_bytes)
    return [(*key, counts[key], sums[key]) for key in sorted(counts)]
