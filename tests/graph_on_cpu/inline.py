"""Merge the functions of a MindIR program into its main graph.

The compiler keeps the graph of a micro-batch apart (MindFormers' lazy inline): a forward function that returns its
result and a closure, which computes the gradient. The CPU would run such functions as graphs of their own, and no order
of collectives holds between graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspore.train import mind_ir_pb2 as ir

from graph_on_cpu.mindir import CALL_PREFIX, LoweringError, Program, attribute, scalar


@dataclass(frozen=True)
class _Closure:
    """A function with its first arguments."""

    function: str
    arguments: tuple[str | _Closure | _Tuple, ...]


@dataclass(frozen=True)
class _Tuple:
    """A tuple that holds a closure, which no node of a flat graph can."""

    elements: tuple[str | _Closure | _Tuple, ...]


_Symbol = str | _Closure | _Tuple  # what a name in a function stands for in the flat graph


def inline_functions(program: Program) -> None:
    """Replace every call of a function in ``program`` by the function's nodes.

    Raises:
        LoweringError: a closure is used in another way than being called.
    """
    if not program.model.functions:
        return
    graph = program.model.graph
    inliner = _Inliner(program)
    result = inliner.run(graph, {}, "")
    if not isinstance(result, str):
        raise LoweringError("the graph returns a function")
    graph.output[0].name = result
    del graph.node[:]
    graph.node.extend(inliner.nodes)
    del program.model.functions[:]


class _Inliner:
    def __init__(self, program: Program):
        self.program = program
        self.functions = {function.name: function for function in program.model.functions}
        # Constants have one name in the whole file, and a function may use those of another.
        constants = {node.output[0]: node for graph in program.graphs for node in graph.node if _is_constant(node)}
        self.constants = constants
        self.nodes = [ir.NodeProto.FromString(node.SerializeToString()) for node in constants.values()]

    def run(self, graph: ir.GraphProto, symbols: dict[str, _Symbol], prefix: str) -> _Symbol:
        """Add the nodes of a graph whose inputs are bound in ``symbols``; return what it returns."""
        for node in graph.node:
            if _is_constant(node):
                continue
            inputs = [symbols.get(name, name) for name in node.input]
            symbols[node.output[0]] = self._evaluate(node, inputs, symbols, prefix)
        returned = graph.output[0].name
        return symbols.get(returned, returned)

    def _evaluate(self, node: ir.NodeProto, inputs: list[_Symbol], symbols: dict[str, _Symbol], prefix: str) -> _Symbol:
        callee = node.op_type.removeprefix(CALL_PREFIX)
        if callee in self.functions:
            return self._call(_Closure(callee, ()), inputs)
        closure = symbols.get(callee)
        if isinstance(closure, _Closure):
            return self._call(closure, inputs)
        primitive = self.program.primitive_of(node)
        op_type = primitive.op_type if primitive is not None else node.op_type
        is_flat = all(isinstance(value, str) for value in inputs)
        if op_type == "Partial":
            return _Closure(node.input[0], tuple(inputs[1:]))
        if op_type == "MakeTuple" and not is_flat:
            return _Tuple(tuple(inputs))
        if op_type == "TupleGetItem" and isinstance(inputs[0], _Tuple):
            return inputs[0].elements[scalar(attribute(self.constants[inputs[1]], "value"))]
        if op_type == "Depend" and not isinstance(inputs[0], str):
            return inputs[0]
        if op_type in ("Depend", "UpdateState") and not is_flat:
            # What waits for a call waits for its results.
            inputs = [inputs[0], *(_first_value(value) for value in inputs[1:])]
        elif not is_flat:
            raise LoweringError(f"{op_type} takes a function, which the CPU's flat graph has not")
        return self._copy(node, inputs, prefix)

    def _call(self, closure: _Closure, arguments: list[_Symbol]) -> _Symbol:
        function = self.functions[closure.function]
        values = [*closure.arguments, *arguments]
        names = [entry.name for entry in function.input]
        if len(names) != len(values):
            raise LoweringError(f"{function.name} takes {len(names)} inputs and is called with {len(values)}")
        return self.run(function, dict(zip(names, values)), self.program.new_name("call") + "_")

    def _copy(self, node: ir.NodeProto, inputs: list[str], prefix: str) -> str:
        copy = ir.NodeProto.FromString(node.SerializeToString())
        copy.name = copy.output[0] = prefix + node.output[0]
        del copy.input[:]
        copy.input.extend(inputs)
        self.nodes.append(copy)
        return copy.output[0]


def _is_constant(node: ir.NodeProto) -> bool:
    return node.op_type == "Constant"


def _first_value(value: _Symbol) -> str:
    """A node to wait for in place of ``value``."""
    parts = value.elements if isinstance(value, _Tuple) else value.arguments if isinstance(value, _Closure) else ()
    return value if isinstance(value, str) else next(_first_value(part) for part in parts)
