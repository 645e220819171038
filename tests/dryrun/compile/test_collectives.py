"""Reading collectives from graphs put together by hand."""

import pytest

from mindrlhf.dryrun.compile.collectives import read_collectives, summarize
from mindrlhf.dryrun.compile.request import Collective

mind_ir = pytest.importorskip("mindspore.train.mind_ir_pb2")
FLOAT32, BFLOAT16 = 1, 16


@pytest.fixture
def model():
    model = mind_ir.ModelProto()
    model.graph.name = "main"
    return model


def add_primitive(model, name, kind, group, ranks=()):
    primitive = model.primitives.add(name=name, op_type=kind)
    primitive.attribute.add(name="group").s = group
    attribute = primitive.attribute.add(name="group_rank_ids")
    for rank in ranks:
        attribute.values.add().ints.append(rank)


def add_node(graph, op_type, output, shape, dtype, inputs=("x",)):
    node = graph.node.add(op_type=op_type)
    node.input.extend(inputs)
    node.output.append(output)
    tensor = node.attribute.add(name="shape").tensors.add()
    tensor.dims.extend(shape)
    tensor.data_type = dtype


def test_bytes_and_groups_of_each_kind(model):
    add_primitive(model, "p0", "AllReduce", b"hccl_world_group")
    add_primitive(model, "p1", "AllGather", b"tp", (4, 5))
    add_primitive(model, "p2", "ReduceScatter", b"dp", (0, 4, 8))
    add_primitive(model, "p3", "Add", b"none")
    add_node(model.graph, "REF::p0", "a", (2, 3), FLOAT32)
    add_node(model.graph, "REF::p1", "b", (8, 2), BFLOAT16)
    add_node(model.graph, "REF::p2", "c", (5,), FLOAT32)
    add_node(model.graph, "REF::p3", "d", (5,), FLOAT32)
    assert read_collectives(model, world_size=3) == (
        Collective("AllGather", (4, 5), 1, 16, 32),
        Collective("AllReduce", (0, 1, 2), 1, 24, 24),
        Collective("ReduceScatter", (0, 4, 8), 1, 60, 20),
    )


def test_functions_count_as_often_as_they_run(model):
    """main calls layer twice; layer returns its backward function; the backward function calls helper three times."""
    layer, backward, helper = (model.functions.add(name=name) for name in ("layer", "backward", "helper"))
    add_primitive(model, "p", "AllReduce", b"tp", (0, 1))
    add_node(layer, "REF::p", "y", (1,), FLOAT32)
    add_node(layer, "REF::partial", "closure", (), 0, inputs=("REF::backward", "y"))
    for index in range(3):
        add_node(backward, "REF::helper", f"h{index}", (2,), FLOAT32)
    add_node(helper, "REF::p", "z", (2,), FLOAT32)
    for index in range(2):
        add_node(model.graph, "REF::layer", f"out{index}", (1,), FLOAT32)
    assert read_collectives(model, world_size=2) == (
        Collective("AllReduce", (0, 1), 2, 4, 4),
        Collective("AllReduce", (0, 1), 6, 8, 8),
    )


@pytest.mark.parametrize(
    ("kind", "group", "shape", "found"),
    [
        ("Send", (0, 4), (4, 4), Collective("Send", (0, 4), 1, 32, 4)),  # as large as its input
        ("AlltoAllV", (0, 1), (-1, 64), Collective("AlltoAllV", (0, 1), 1, 0, 0)),  # routing decides
    ],
)
def test_sizes_that_the_output_does_not_say(model, kind, group, shape, found):
    add_primitive(model, "p", kind, b"group", group)
    add_node(model.graph, "Gather", "given", shape, BFLOAT16)
    result = ((1,), FLOAT32) if kind == "Send" else (shape, BFLOAT16)
    add_node(model.graph, "REF::p", "y", *result, inputs=("given",))
    assert read_collectives(model, world_size=8) == (found,)


def test_groups_that_the_process_has_made_and_tuples(model):
    """A broadcast takes and returns a tuple of tensors, whose shapes are values of one attribute."""
    add_primitive(model, "p", "Broadcast", b"own")
    add_node(model.graph, "REF::p", "y", (0,), FLOAT32)
    shape = model.graph.node[0].attribute[0]
    del shape.tensors[:]
    tensor = shape.values.add().tensors.add()
    tensor.dims.extend((3, 5))
    tensor.data_type = BFLOAT16
    found = read_collectives(model, world_size=8, groups={"own": (1, 5)})
    assert found == (Collective("Broadcast", (1, 5), 1, 30, 30),)


def test_a_group_without_ranks_is_an_error(model):
    add_primitive(model, "p", "AllReduce", b"mystery")
    add_node(model.graph, "REF::p", "y", (1,), FLOAT32)
    with pytest.raises(AssertionError, match="mystery"):
        read_collectives(model, world_size=2)


def test_summary_adds_up_by_kind_and_group_size():
    collectives = (
        Collective("AllGather", (0, 1), 3, 8, 16),
        Collective("AllGather", (2, 3), 1, 50, 100),
        Collective("AllGather", (0, 1, 2, 3), 1, 1, 4),
        Collective("ReduceScatter", (0, 1), 2, 10, 5),
    )
    assert summarize(collectives) == [("AllGather", 2, 4, 148), ("AllGather", 4, 1, 4), ("ReduceScatter", 2, 2, 20)]
