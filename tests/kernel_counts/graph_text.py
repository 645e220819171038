"""The kernels of a compiled graph: reads MindSpore's last intermediate representation and its execution order.

In simulation MindSpore's back end decides all that a device would be given: every kernel with its shapes and dtypes,
its stream, and the events by which streams wait for each other. ``MS_DEV_SAVE_GRAPHS`` writes both as text.
"""

import csv
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindrlhf.dryrun.compile.request import COLLECTIVES

# The passes after which all is decided; the dump of all passes takes gigabytes.
_LAST_PASS = "hwopt_comm_after_eliminate_nopnode"
SEND, RECEIVE = "StreamSend", "StreamRecv"
FORWARD, RECOMPUTE, BACKWARD, STATE = "forward", "recompute", "backward", "state"
PARTS = (FORWARD, RECOMPUTE, BACKWARD, STATE)
# What a collective carries; of a kernel that casts a weight, WEIGHTS too.
WEIGHTS, GRADIENTS, ACTIVATIONS = "weights", "gradients", "activations"
# Products: what the cube units compute.
PRODUCTS = re.compile(r"(Batch)?MatMul\w*|GroupedMatmul\w*|FlashAttention\w+|MatmulReduceScatter|AllGatherMatmul")
# Nodes that launch nothing.
_NO_KERNEL = frozenset(
    (
        *("Depend", "Load", "UpdateState", "MakeTuple", "TupleGetItem", "Return", "Reshape", "ExpandDims", "Squeeze"),
        *("ConditionGather", "ConditionSwitch", "Flatten", "FlattenGrad", "View"),
    )
)
# Nodes whose result is their first input, in other words or places.
_MOVES = frozenset(
    (
        *("Cast", "Depend", "Load", "TensorMove", "TupleGetItem", "Reshape", "ExpandDims", "Squeeze", "Transpose"),
        *("AllGather", "Split", "SplitWithSize", "StridedSlice", "Concat", "MakeTuple", "View"),
    )
)
# What stands between the reduction of a gradient and what is done with it.
_SCALES = _MOVES | {"RealDiv", "Div", "Divs", "Mul", "Muls", "AddN", "Add", "AllReduce", "ReduceScatter"}
_INPUTS = "inputs"  # with a number behind it: parameters of the graph that are its inputs
_WRITES = ("Assign", "AssignAdd", "TensorMove")
_NODE = re.compile(r"^  %(\d+)\(([^)]*)\) = (\S+?)\(")
_TENSOR = re.compile(r"(\w+)x[A-Za-z0-9_]+\[const vector\]\{([\d, -]*)\}")
_ATTRIBUTES = re.compile(r"\) (?=\{instance name|primitive_attrs: |cnode_attrs: |cnode_primal_attrs: )")
_GROUP = re.compile(r'rank_list: \(([\d, ]+)\)|group: "(?:[a-z]+-)?((?:\d+-)+\d+)"')
_ORDER = re.compile(r"@kernel_graph\d+:([^{]+)\{\[0\]: ValueNode<Primitive> (\w+)")
_LAYER = re.compile(r"layers\.(\d+)\.|layers-\w*/(\d+)-")
_PRIMITIVE = re.compile(r"^(PrimFunc|PrimAscend)_")


@dataclass(frozen=True)
class Kernel:
    """Item of a stream: a kernel, or an event that the stream sends or waits for.

    Attributes:
        op: as MindSpore names it.
        part: of the step, one of ``PARTS``.
        stream: number of the stream; -1 where the order of launches is not known.
        event: that ``StreamSend`` sends and ``StreamRecv`` waits for; -1 of kernels.
        inputs, outputs: dtype and dimensions of each tensor; a dimension is -1 where only the run knows it.
        ranks: of a collective's group.
        role: what a collective carries, or that a cast is of a weight.
        layer: of the decoder, from 0; -1 elsewhere.
    """

    op: str
    part: str
    stream: int
    event: int = -1
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    outputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ranks: tuple[int, ...] = ()
    role: str = ""
    layer: int = -1


@dataclass(eq=False)
class _Node:
    """A node of the graph; ``values`` are what it is computed from: nodes, and parameters of the graph by name."""

    name: str
    op: str
    values: list["_Node | str"]
    attributes: str = ""
    scope: str = ""
    tensors_in: tuple = ()
    tensors_out: tuple = ()
    users: list["_Node"] = field(default_factory=list)
    part: str = ""

    @property
    def inputs(self) -> list["_Node"]:
        return [one for one in self.values if isinstance(one, _Node)]


def dump_kernels(directory: Path) -> None:
    """Have this process, whose MindSpore is not set up yet, write what :func:`read_kernels` reads."""
    os.environ.update(
        MS_DEV_SAVE_GRAPHS="2", MS_DEV_SAVE_GRAPHS_PATH=str(directory), MS_DEV_DUMP_IR_PASSES=_LAST_PASS
    )


def read_kernels(directory: Path, world_size: int) -> tuple[Kernel, ...]:
    """Return the kernels of a rank's largest graph as they are launched, and the events between its streams."""
    root = next(directory.glob("rank_*"), directory)  # a process without ranks, on a CPU, has no directory for its own
    graph = max(root.glob(f"{_LAST_PASS}_*.ir"), key=lambda path: path.stat().st_size)
    with open(graph, encoding="utf-8") as file:
        nodes = parse_graph(file)
    order = root / "execute_order"
    if not (order / "execute_order.csv").exists():
        return tuple(_kernels([(node, -1, None) for node in nodes if node.op not in _NO_KERNEL], nodes, world_size))
    with (
        open(order / "execute_order.csv", encoding="utf-8", newline="") as of_all,
        open(order / "comm_execute_order.csv", encoding="utf-8") as of_some,
    ):
        return tuple(order_kernels(nodes, csv.DictReader(of_all), csv.DictReader(of_some), world_size))


def parse_graph(lines: Iterable[str]) -> list[_Node]:
    """Return the nodes of a textual graph, with their inputs and users."""
    by_number: dict[str, _Node] = {}
    node, num_types = None, 0
    for line in lines:
        if found := _NODE.match(line):
            arguments, *attributes = _ATTRIBUTES.split(line[found.end() :], maxsplit=1)
            op = _PRIMITIVE.sub("", found[3])
            node = _Node(found[2], op, _values(op, arguments, by_number), "".join(attributes))
            by_number[found[1]], num_types = node, 0
        elif node is None:
            continue
        elif line.startswith("      : "):
            num_types += 1
            if num_types == 2:  # the first line has abstract values, the second what the device holds
                given, _, made = line.strip()[1:].rpartition(" -> ")
                node.tensors_in, node.tensors_out = _tensors(given), _tensors(made)
        elif "Fullname with scope" in line:
            node.scope = line.split("(", 1)[1].rstrip()[:-1]
    nodes = list(by_number.values())
    for node in nodes:
        for parent in node.inputs:
            parent.users.append(node)
    return nodes


def _values(op: str, arguments: str, by_number: Mapping[str, _Node]) -> list[_Node | str]:
    """What a node is computed from, without what it merely comes after."""
    found = [
        by_number[number] if number else parameter
        for number, parameter in re.findall(r"%(?:(\d+)\b|para\d+_([^\s,)]+))", arguments)
        if not number or number in by_number
    ]
    if op in ("Depend", "Load"):
        return found[:1]
    if op == "TupleGetItem" and (index := re.search(r"I64\((\d+)\)", arguments)):
        made = found[0]
        while isinstance(made, _Node) and made.op == "Depend" and made.values:
            made = made.values[0]
        if isinstance(made, _Node) and made.op == "MakeTuple" and int(index[1]) < len(made.values):
            return [made.values[int(index[1])]]
    return [] if op == "UpdateState" else found


def _tensors(text: str) -> tuple:
    return tuple((kind, _integers(dims)) for kind, dims in _TENSOR.findall(text))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def order_kernels(
    nodes: list[_Node], order: Iterable[Mapping], collectives: Iterable[Mapping], world_size: int
) -> Iterator[Kernel]:
    """Yield the entries of an execution order.

    Args:
        order, collectives: rows of ``execute_order.csv`` and of ``comm_execute_order.csv``.
    """
    moved = {row["index"]: row for row in collectives}
    rows = list(order)
    placed = _place(nodes, rows)
    entries: list = []
    for row in rows:
        op = _PRIMITIVE.sub("", _ORDER.match(row["node_info"])[2])
        if op in (SEND, RECEIVE):
            entries.append(Kernel(op, "", int(row["stream_id"]), int(row["event_id"])))
        elif row["index"] in placed and op not in _NO_KERNEL:
            entries.append((placed[row["index"]], int(row["stream_id"]), moved.get(row["index"])))
    yield from _kernels(entries, nodes, world_size)


def _kernels(entries: Iterable, nodes: list[_Node], world_size: int) -> Iterator[Kernel]:
    """Yield kernels from events, and from nodes with their stream and their row in MindSpore's list of collectives."""
    _divide(nodes)
    weights = _from_weights(nodes)
    for entry in entries:
        if isinstance(entry, Kernel):
            yield entry
            continue
        node, stream, exact = entry
        given, made, ranks, role = node.tensors_in, node.tensors_out, (), ""
        if node.op in COLLECTIVES:
            if exact:  # names of nodes may repeat: MindSpore's list is right about the sizes
                given, made = (_listed(exact, side) for side in ("input", "output"))
                ranks = _integers(exact["comm_rank"])
            elif named := _GROUP.search(node.attributes):
                ranks = _integers((named[1] or named[2]).replace("-", " "))
            ranks = ranks or tuple(range(world_size))
            role = _carries(node, weights)
        elif node.op == "Cast" and node.part != STATE and node in weights:
            role = WEIGHTS
        yield Kernel(node.op, node.part, stream, -1, given, made, ranks, role, _layer(node, weights))


def _listed(row: Mapping, side: str) -> tuple:
    return tuple(
        (kind, _integers(dims))
        for kind, dims in zip(re.findall(r"\w+", row[f"{side}_type"]), re.findall(r"\(([^)]*)\)", row[f"{side}_shape"]))
    )


def _place(nodes: list[_Node], rows: list[Mapping]) -> dict[str, _Node]:
    """Return the nodes by their index in the execution order; names repeat, those of inputs tell nodes apart."""
    waiting: dict[tuple[str, str], list[_Node]] = {}
    for node in nodes:
        waiting.setdefault((node.name, node.op), []).append(node)
    placed = {}
    for row in rows:
        found = _ORDER.match(row["node_info"])
        candidates = waiting.get((found[1], _PRIMITIVE.sub("", found[2])))
        if not candidates:
            continue
        names = set(re.findall(r"\[\d+\]: ([^,{}\s]+)", row["node_info"]))
        fitting = (one for one in candidates if all(parent.name in names for parent in one.inputs))
        node = next(fitting, candidates[0])
        candidates.remove(node)
        placed[row["index"]] = node
    return placed


def _divide(nodes: list[_Node]) -> None:
    """Give each node its part of the step: what is computed again says so, and so do gradients.

    What these are computed from is the forward pass, with what else follows from it and from no gradient. The rest
    works on sums, moments and weights, as does whatever writes to a parameter.
    """
    for node in nodes:
        if node.op in _WRITES:
            node.part = STATE
        elif "duplicated: Bool(1)" in node.attributes:
            node.part = RECOMPUTE
        elif node.scope.startswith("Gradients/"):
            node.part = BACKWARD
    waiting = [parent for node in nodes if node.part in (RECOMPUTE, BACKWARD) for parent in node.inputs]
    while waiting:
        node = waiting.pop()
        if not node.part:
            node.part = FORWARD
            waiting += node.inputs
    for node in nodes:  # inputs come before what follows from them
        if not node.part:
            sources = {FORWARD if isinstance(value, str) else value.part for value in node.values if _is_fed(value)}
            node.part = FORWARD if sources and sources <= {FORWARD, RECOMPUTE} else STATE


def _is_fed(value: _Node | str) -> bool:
    return not isinstance(value, str) or value.startswith(_INPUTS)


def _from_weights(nodes: list[_Node]) -> set[_Node]:
    """The nodes that are parameters, moved, gathered or cast, and nothing else; nodes come after their inputs."""
    found: set[_Node] = set()
    for node in nodes:
        are_weights = (
            value in found if isinstance(value, _Node) else not value.startswith(_INPUTS) for value in node.values
        )
        if node.op in _MOVES and node.values and all(are_weights):
            found.add(node)
    return found


def _carries(node: _Node, weights: set[_Node]) -> str:
    if node in weights:
        return WEIGHTS
    if node.part != BACKWARD:
        return ACTIVATIONS if node.part != STATE else STATE
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user in seen or user.part == STATE:
                continue
            if user.op not in _SCALES:
                return ACTIVATIONS
            seen.add(user)
            waiting.append(user)
    return GRADIENTS


def _layer(node: _Node, weights: set[_Node]) -> int:
    """The layer of a weight that is gathered or cast, by its name; of others, by where they stand."""
    value: _Node | str = node
    while isinstance(value, _Node) and value in weights:
        value = value.values[0]
    named = _LAYER.search(value.scope if isinstance(value, _Node) else value)
    return int(named[1] or named[2]) if named else -1


def size_bytes(tensors: Iterable) -> int:
    """Return the bytes of tensors, each a dtype as MindSpore names it and dimensions; 0 where these are not known."""
    return sum(math.prod(dims) * element_bytes(kind) for kind, dims in tensors if min(dims, default=0) >= 0)


def element_bytes(kind: str) -> int:
    """Return the bytes of an element of a dtype that MindSpore names, such as BFloat16."""
    bits = re.search(r"\d+$", kind)
    return int(bits[0]) // 8 if bits else 1
