"""Kernels read from MindSpore's text: a small graph in its format, whose parts and roles are known by hand."""

import csv
import io
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernel_counts.graph_text import Kernel, element_bytes, order_kernels, parse_graph, read_kernels, size_bytes
from kernel_counts.replay import product_operations

SCOPE = "Default/network-_VirtualDatasetCell/layers-CellList/0-TransformerLayer"
F32, B16 = "Float32xDefaultFormat", "BFloat16xDefaultFormat"


class Text:
    """Writes a graph and an execution order as MindSpore does."""

    def __init__(self):
        self.lines, self.rows, self.collectives = [], [], []
        self._names = {}

    def node(self, op, arguments, given, made, *, scope=SCOPE, name="", attributes="", stream=0, group=""):
        number = len(self.lines) + 1
        name = name or f"CNode_{number}"
        self._names[f"%{number}"] = name

        def tensors(side):
            return ", ".join(
                f"<{kind}[const vector]{{{', '.join(map(str, dims))}}}>" for kind, dims in side
            )

        self.lines.append(
            f"  %{number}({name}) = PrimFunc_{op}({arguments}) primitive_attrs: {{visited: Bool(1)}} "
            f"cnode_attrs: {{{attributes}}}\n"
            f"      : (<Tensor[Abstract], (1)>) -> (<Tensor[Abstract], (1)>)\n"
            f"      : ({tensors(given)}) -> ({tensors(made)})\n"
            f"      : (Tensor) -> (Tensor)\n"
            f"      # Fullname with scope: ({scope}/{op}-op{number})\n"
        )
        inputs = [self._names.get(one.strip(), "param") for one in arguments.split(",")]
        shown = ", ".join(f"[{place}]: {one}" for place, one in enumerate(inputs, 1))
        self.rows.append((op, stream, "", f"@kernel_graph0:{name}{{[0]: ValueNode<Primitive> PrimFunc_{op}, {shown}}}"))
        if group:
            sides = [(str(tuple(dims)), kind.partition("x")[0]) for kind, dims in (given[0], made[0])]
            self.collectives.append((str(len(self.rows)), group, *sides[0], *sides[1]))
        return f"%{number}"

    def event(self, op, stream, event):
        self.rows.append((op, stream, str(event), f"@kernel_graph0:CNode_e{{[0]: ValueNode<Primitive> {op}}}"))

    def kernels(self, world_size=4):
        order = io.StringIO()
        writer = csv.writer(order)
        writer.writerow(("index", "node_name", "stream_id", "node_info", "event_id"))
        for index, (op, stream, event, info) in enumerate(self.rows, 1):
            writer.writerow((index, op, stream, info, event))
        order.seek(0)
        names = ("index", "comm_rank", "input_shape", "input_type", "output_shape", "output_type")
        moved = [dict(zip(names, row)) for row in self.collectives]
        nodes = parse_graph("".join(self.lines).splitlines(keepends=True))
        return list(order_kernels(nodes, csv.DictReader(order), moved, world_size))


@pytest.fixture(scope="module")
def kernels():
    """A weight is gathered in float32 and cast, used, cast again to be used once more, and its gradient added up."""
    text = Text()
    whole, shard, hidden = (F32, (8, 16)), (F32, (4, 16)), (B16, (64, 8))
    text.event("StreamSend", 0, 5)
    text.event("StreamRecv", 1, 5)
    gathered = text.node("AllGather", "%para1_decoder.weight", [shard], [whole], stream=1, group="0 2")
    text.event("StreamSend", 1, 6)
    text.event("StreamRecv", 0, 6)
    cast = text.node("Cast", f"{gathered}, I64(43)", [whole], [(B16, (8, 16))])
    x = text.node("Cast", "%para0_inputs0, I64(43)", [(F32, (64, 8))], [hidden])
    product = text.node("MatMul", f"{x}, {cast}", [hidden, (B16, (8, 16))], [(B16, (64, 16))])
    loss = text.node("ReduceSum", product, [(B16, (64, 16))], [(F32, (1,))], scope="Default")
    # Between two graphs, results pass through a tuple: what is taken out of it is not what else is in it.
    both = text.node("MakeTuple", f"{gathered}, {loss}", [], [])
    again = text.node("TupleGetItem", f"{both}, I64(0)", [], [])
    twice = text.node("Cast", again, [whole], [(B16, (8, 16))], attributes="duplicated: Bool(1)")
    gradients = f"Gradients/{SCOPE}"
    weight = text.node("MatMul", f"{x}, {loss}", [hidden, (B16, (64, 16))], [(B16, (8, 16))], scope=gradients)
    text.node("MatMul", f"{twice}, {loss}", [(B16, (8, 16)), (B16, (64, 16))], [hidden], scope=gradients)
    wide = text.node("Cast", weight, [(B16, (8, 16))], [whole], scope=gradients)
    reduced = text.node("ReduceScatter", wide, [whole], [shard], scope=gradients, group="0 2")
    mean = text.node("RealDiv", reduced, [shard], [shard], scope=gradients)
    total = text.node("Add", f"%para2_grad.weight, {mean}", [shard, shard], [shard], scope="Default")
    text.node("Assign", f"%para2_grad.weight, {total}", [shard, shard], [shard], scope="Default")
    # A kernel that another scope has given its name to, of the network's.
    norm = text.node("ReduceSum", total, [shard], [(F32, (1,))], scope=f"{SCOPE}/rotary")
    text.node("AllReduce", norm, [(F32, (1,))], [(F32, (1,))], scope="Default", group="0 1 2 3")
    return text.kernels()


def of(kernels, op):
    return [kernel for kernel in kernels if kernel.op == op]


def test_parts_follow_from_where_gradients_are(kernels):
    parts = Counter(kernel.part for kernel in kernels if kernel.part)
    assert parts == {"forward": 5, "recompute": 1, "backward": 5, "state": 4}
    assert [kernel.part for kernel in of(kernels, "Cast")] == ["forward", "forward", "recompute", "backward"]
    assert [kernel.part for kernel in of(kernels, "ReduceSum")] == ["forward", "state"]


def test_casts_of_weights_are_known_also_behind_a_tuple(kernels):
    assert [kernel.role for kernel in of(kernels, "Cast")] == ["weights", "", "weights", ""]


def test_collectives_tell_what_they_carry(kernels):
    (gather,), (scatter,), (norm,) = (of(kernels, op) for op in ("AllGather", "ReduceScatter", "AllReduce"))
    assert (gather.role, gather.part, gather.ranks, gather.stream) == ("weights", "forward", (0, 2), 1)
    assert (scatter.role, norm.role) == ("gradients", "state")
    assert gather.inputs == (("Float32", (4, 16)),) and gather.outputs == (("Float32", (8, 16)),)


def test_events_stand_where_streams_wait(kernels):
    assert kernels[0] == Kernel("StreamSend", "", 0, 5) and kernels[1] == Kernel("StreamRecv", "", 1, 5)
    assert [kernel.event for kernel in kernels[3:5]] == [6, 6]


def test_what_launches_nothing_is_no_kernel(kernels):
    assert not {"MakeTuple", "TupleGetItem"} & {kernel.op for kernel in kernels}


def test_gradients_of_activations_are_no_gradients_of_weights():
    text = Text()
    hidden, scope = (B16, (64, 8)), f"Gradients/{SCOPE}"
    start = text.node("Cast", "%para0_inputs0", [hidden], [hidden])
    gathered = text.node("AllGather", start, [hidden], [(B16, (128, 8))], group="0 1")
    back = text.node("ReduceScatter", gathered, [(B16, (128, 8))], [hidden], scope=scope, group="0 1")
    text.node("RmsNormGrad", back, [hidden], [hidden], scope=scope)
    assert [kernel.role for kernel in text.kernels() if kernel.ranks] == ["activations", "activations"]


def test_of_kernels_with_one_name_each_is_found_by_its_inputs():
    text = Text()
    a = text.node("Cast", "%para0_inputs0", [(F32, (2,))], [(B16, (2,))], name="a")
    b = text.node("Cast", "%para1_inputs1", [(F32, (3,))], [(B16, (3,))], name="b")
    text.node("Neg", a, [(B16, (2,))], [(B16, (2,))], name="dx")
    text.node("Neg", b, [(B16, (3,))], [(B16, (3,))], name="dx")
    text.rows[2:] = text.rows[:1:-1]  # launched the other way round
    assert [kernel.outputs[0][1] for kernel in of(text.kernels(), "Neg")] == [(3,), (2,)]


@pytest.mark.parametrize(("dtype", "size"), [("Float32", 4), ("BFloat16", 2), ("Int64", 8), ("UInt8", 1), ("Bool", 1)])
def test_bytes_of_an_element(dtype, size):
    assert element_bytes(dtype) == size
    assert size_bytes([(dtype, (3, 5)), (dtype, ())]) == 16 * size
    assert size_bytes([(dtype, (-1, 5))]) == 0


ON_A_CPU = """
import sys
from pathlib import Path
from kernel_counts.graph_text import dump_kernels
dump_kernels(Path(sys.argv[1]))
import mindspore as ms
import numpy as np
from mindspore import nn, ops

class Loss(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(np.ones((8, 16), np.float32), name="weight")

    def construct(self, x):
        return ops.ReduceSum()(ops.tanh(ops.matmul(x, self.weight)))

class Gradients(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.of = ops.value_and_grad(loss, None, ms.ParameterTuple([loss.weight]))

    def construct(self, x):
        return self.of(x)

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_device("CPU")
Gradients(Loss())(ms.Tensor(np.ones((4, 8), np.float32)))
"""


def test_graphs_of_a_cpu_are_read_alike(tmp_path):
    script, dumps = tmp_path / "cells.py", tmp_path / "dumps"  # MindSpore compiles what lies in a file
    script.write_text(ON_A_CPU)
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, Path(__file__).parents[1:3]))}
    subprocess.run([sys.executable, str(script), str(dumps)], check=True, timeout=300, env=environment)
    products = [kernel for kernel in read_kernels(dumps, 1) if kernel.op == "MatMul"]
    # x w, and x^T dy: the gradient of x is nobody's.
    assert [product_operations(kernel) for kernel in products] == [2 * 4 * 8 * 16] * 2
    assert {kernel.stream for kernel in products} == {-1}
