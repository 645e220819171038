"""Tests that a program could pass by its own definitions, as far as their text shows. Standard library only.

A test is worth what stands against the program's values: something the program has no hand in. It has none where both
sides of a comparison come from it, or where one of its functions judges the value of another
(``assert is_solution(solve(x))``, with ``is_solution`` redefined by the program).
"""

# ruff: noqa: F821 -- statements.py stands before this text when it runs

import ast

# Methods of unittest that compare their first two arguments; functions that do.
COMPARING = ("Equal", "Equals", "In", "Is", "IsNot", "Less", "Greater")
NEAR = ("isclose", "allclose", "array_equal")


def distrust(tree, programs):
    """Return why a test cannot be trusted, or None; and whether the program's changes to arguments must not show.

    Args:
        tree: the parsed test.
        programs: the names of the test that stand for what the program defines, with its own names for them.
    """
    for keeps_arguments in (False, True):
        flow = Flow(tree, programs, keeps_arguments)
        if not (reason := flow.reason()):
            return None, keeps_arguments
    return reason, True


def asked_apart(tree, programs):
    """Return the names called in assertions that no value of the program gets to."""
    flow = Flow(tree, programs, False)
    names = set()
    for node in filter(is_check, ast.walk(tree)):
        asked = node.test if isinstance(node, ast.Assert) else node
        if not flow.touches(asked):
            names |= {part.func.id for part in ast.walk(asked) if _is_plain_call(part)}
    return names


def wraps_others(tree, name):
    """Return True for a function that is given another's result: it could judge that, and is not the one asked for."""
    for node in ast.walk(tree):
        if _is_plain_call(node) and node.func.id == name:
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                inner = {part.func.id for part in ast.walk(argument) if _is_plain_call(part)}
                if inner - TYPES - {name}:
                    return True
    return False


class Flow:
    """Names that the program's values reach in a test, whatever the order of its statements."""

    def __init__(self, tree, programs, keeps_arguments):
        self._nodes = list(ast.walk(tree))
        self._names = dict(programs)  # what stands for something of the program
        self._add_parameters()
        self._touched = set()  # variables that hold values of the program, or that it may have changed
        self._results = {}  # variables that hold what one of its functions returned: which
        size = -1
        while size != len(self._touched) + len(self._results):
            size = len(self._touched) + len(self._results)
            for node in self._nodes:
                self._follow(node, keeps_arguments)

    def reason(self):
        for node in self._nodes:
            if any(map(self.touches, _caught(node))):
                return "the test catches an exception class of the program's own"
            if any(all(map(self.touches, pair)) for pair in _compared(node)):
                return "both sides of a comparison come from the program"
            if isinstance(node, ast.Call) and (names := self._judged(node)):
                return f"the test judges the value of '{names[1]}' by the program's own '{names[0]}'"
            if is_check(node):
                for part in ast.walk(node.test if isinstance(node, ast.Assert) else node):
                    if isinstance(part, ast.Compare) and all(map(self.touches, [part.left, *part.comparators])):
                        return "both sides of a comparison come from the program"
        return None

    def _add_parameters(self):
        """Let parameters stand for what calls in the test give them, as in ``check(solution)``."""
        functions = {node.name: node for node in self._nodes if isinstance(node, ast.FunctionDef)}
        for node in self._nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                parameters = functions[node.func.id].args.args
                for parameter, argument in zip(parameters, node.args):
                    if isinstance(argument, ast.Name) and argument.id in self._names:
                        self._names[parameter.arg] = self._names[argument.id]

    def _follow(self, node, keeps_arguments):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if self.touches(node.value):
                self._touch(targets)
                for function in self._functions_in(node.value):
                    self._results.update(dict.fromkeys(_variables(targets), function))
                if not keeps_arguments:
                    self._touch_arguments(node.value)
            if isinstance(node.value, (ast.Name, ast.List, ast.Tuple, ast.Dict)):
                # Two names of one object: what changes the one changes the other.
                names = _variables(targets) | _variables([node.value])
                if not names.isdisjoint(self._touched):
                    self._touched |= names - self._names.keys()
        elif isinstance(node, (ast.For, ast.comprehension)) and self.touches(node.iter):
            self._touch([node.target])
        elif isinstance(node, ast.withitem) and node.optional_vars and self.touches(node.context_expr):
            self._touch([node.optional_vars])
        elif isinstance(node, ast.Expr) and not any(map(is_check, ast.walk(node))):
            self._touch_arguments(node.value)

    def _touch_arguments(self, expression):
        for call in ast.walk(expression):
            if isinstance(call, ast.Call) and self.touches(call.func):
                self._touch([argument for argument in call.args if isinstance(argument, ast.Name)])

    def _touch(self, targets):
        self._touched |= _variables(targets) - self._names.keys()

    def touches(self, expression):
        return any(name in self._names or name in self._touched for name in _variables([expression]))

    def _functions_in(self, expression):
        """Return the program's functions that an expression calls. By their names: classes begin with a capital."""
        return [
            self._names[node.func.id]
            for node in ast.walk(expression)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in self._names
            and not self._names[node.func.id][:1].isupper()
        ]

    def _judged(self, call):
        """Return the function called and the other one whose value it is given, if both are the program's."""
        if not isinstance(call.func, ast.Name) or call.func.id not in self._names:
            return None
        outer = self._names[call.func.id]
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            given = self._functions_in(argument)
            given += [self._results[name] for name in _variables([argument]) if name in self._results]
            for inner in given:
                if inner != outer:
                    return outer, inner
        return None


def _variables(expressions):
    """Return the names in expressions; ``self.x`` is one of its own."""
    names, stack = set(), list(expressions)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            names.add(f"self.{node.attr}")
        elif isinstance(node, ast.Name):
            names.add(node.id)
        else:
            stack += ast.iter_child_nodes(node)
    return names


def _is_plain_call(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _called(node):
    """Return the last part of the name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _caught(node):
    """Return the classes of exceptions that a node catches."""
    if isinstance(node, ast.ExceptHandler) and node.type is not None:
        return [node.type]
    if isinstance(node, ast.Call) and _called(node) in ("raises", "assertRaises", "assertRaisesRegex"):
        return node.args[:1]
    return []


def _compared(node):
    """Return the pairs of expressions that a call compares."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return []
    name = _called(node)
    compares = name.startswith("assert") and name.endswith(COMPARING) and name != "assertNotIn"
    return [node.args[:2]] if compares or name in NEAR else []
