"""Functions that return closures, as lazy inline leaves them, merged into one graph that computes the same."""

import numpy as np
import pytest
from mindspore.train import mind_ir_pb2 as ir

from graph_on_cpu.lowering_interpreter import FLOAT, lower_for, run
from graph_on_cpu.mindir import Attribute, LoweringError, Program

SHAPE = (2, 3)


def add_node(program, graph, op_type, name, inputs):
    """A call of an operator, of a function or of a closure."""
    is_call = op_type in {function.name for function in program.model.functions} or op_type.startswith("graph")
    if not is_call and op_type not in program.primitives:
        primitive = program.add_primitive(op_type, {})
        primitive.name = op_type
        program.primitives[op_type] = primitive
    node = graph.node.add(name=name, op_type=f"REF::{op_type}", input=inputs, output=[name])
    types = node.attribute.add(name="shape", type=Attribute.TENSORS)
    types.tensors.add(data_type=FLOAT, dims=SHAPE)


def add_index(graph, name, number):
    node = graph.node.add(name=name, op_type="Constant", output=[name])
    node.attribute.add(name="value", type=Attribute.INT64, i=number)


def closure_program():
    """forward(x, w) -> (x * w, backward(w, .)); backward(w, d) -> d * w. The main graph calls both, twice."""
    program = Program(ir.ModelProto())
    forward, backward = program.model.functions.add(name="forward"), program.model.functions.add(name="backward")
    for name in ("x", "w"):
        forward.input.add(name=f"forward:{name}")
    add_node(program, forward, "Mul", "forward:product", ["forward:x", "forward:w"])
    add_node(program, forward, "Partial", "forward:closure", ["backward", "forward:w"])
    add_node(program, forward, "MakeTuple", "forward:pair", ["forward:product", "forward:closure"])
    forward.output.add(name="forward:pair")
    for name in ("w", "d"):
        backward.input.add(name=f"backward:{name}")
    add_node(program, backward, "Mul", "backward:product", ["backward:d", "backward:w"])
    backward.output.add(name="backward:product")
    main = program.model.graph
    main.name = "graph"
    for name in ("input0", "input1"):
        main.input.add(name=name).tensor.add(data_type=FLOAT, dims=SHAPE)
    add_index(main, "zero", 0)
    add_index(main, "one", 1)
    total = "input0"
    for call in range(2):
        add_node(program, main, "forward", f"graph:pair{call}", [total, "input1"])
        add_node(program, main, "TupleGetItem", f"graph:value{call}", [f"graph:pair{call}", "zero"])
        add_node(program, main, "TupleGetItem", f"graph:closure{call}", [f"graph:pair{call}", "one"])
        add_node(program, main, f"graph:closure{call}", f"graph:gradient{call}", [f"graph:value{call}"])
        total = f"graph:gradient{call}"
    add_node(program, main, "Add", "result", [total, "graph:value0"])
    main.output.add(name="result")
    return program


def test_closures_are_called_with_what_they_captured(tmp_path):
    lowered, groups = lower_for(closure_program(), 0, tmp_path)
    assert not lowered.model.functions
    x, w = np.random.default_rng(0).standard_normal((2, *SHAPE))
    (result,) = run([lowered], [groups], [{"input0": x, "input1": w}])
    np.testing.assert_allclose(result, x * w**4 + x * w, rtol=1e-12)


def test_names_stay_unique(tmp_path):
    lowered, _ = lower_for(closure_program(), 0, tmp_path)
    names = [node.output[0] for node in lowered.model.graph.node]
    assert len(names) == len(set(names))


def test_a_function_as_result_is_refused(tmp_path):
    program = closure_program()
    program.model.graph.output[0].name = "graph:closure0"
    with pytest.raises(LoweringError, match="returns a function"):
        lower_for(program, 0, tmp_path)


def test_a_wrong_number_of_inputs_is_refused(tmp_path):
    program = closure_program()
    del program.model.functions[1].input[:]
    with pytest.raises(LoweringError, match="takes 0 inputs"):
        lower_for(program, 0, tmp_path)
