"""Which tests a program could pass by what it defines itself, as far as their text shows. Standard library only.

A test is worth what stands against the program's values: something the program has no hand in. It has none where both
sides of a comparison come from it, or where one of its functions judges the value of another
(``assert is_solution(solve(x))``, with ``is_solution`` redefined by the program).
"""

import ast


def distrust(tree, programs):
    """Return why a test cannot be trusted, or None; and whether the program's changes to arguments must not show.

    Args:
        tree: the parsed test.
        programs: the names that the program defines.
    """
    for keeps_arguments in (False, True):
        flow = Flow(tree, programs, keeps_arguments)
        if not (reason := flow.reason()):
            return None, keeps_arguments
    return reason, True


class Flow:
    """Where the program's values get to in a test, whatever the order of its statements."""

    def __init__(self, tree, programs, keeps_arguments):
        self._tree = tree
        self._names = {name: name for name in programs}  # what stands for something of the program
        self._add_parameters()
        self._touched = set()  # variables that hold values of the program, or that it may have changed
        self._results = {}  # variables that hold what one of its functions returned: which
        size = -1
        while size != len(self._touched) + len(self._results):
            size = len(self._touched) + len(self._results)
            for node in ast.walk(tree):
                self._follow(node, keeps_arguments)

    def reason(self):
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ExceptHandler) and node.type is not None and self._touches(node.type):
                return "the test catches an exception class of the program's own"
            if isinstance(node, ast.Call) and (names := self._judged(node)):
                return f"the test judges the value of '{names[1]}' by the program's own '{names[0]}'"
            if isinstance(node, ast.Assert):
                for part in ast.walk(node.test):
                    if isinstance(part, ast.Compare) and all(map(self._touches, [part.left, *part.comparators])):
                        return "both sides of a comparison come from the program"
        return None

    def _add_parameters(self):
        """Let parameters stand for what calls in the test give them, as in ``check(solution)``."""
        functions = {node.name: node for node in ast.walk(self._tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                parameters = functions[node.func.id].args.args
                for parameter, argument in zip(parameters, node.args):
                    if isinstance(argument, ast.Name) and argument.id in self._names:
                        self._names[parameter.arg] = self._names[argument.id]

    def _follow(self, node, keeps_arguments):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if self._touches(node.value):
                self._touch(targets)
                for function in self._functions_in(node.value):
                    self._results.update(dict.fromkeys(_variables(targets), function))
                if not keeps_arguments:
                    self._touch_arguments(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)) and self._touches(node.iter):
            self._touch([node.target])
        elif isinstance(node, ast.withitem) and node.optional_vars and self._touches(node.context_expr):
            self._touch([node.optional_vars])
        elif isinstance(node, ast.Expr):
            self._touch_arguments(node.value)

    def _touch_arguments(self, expression):
        for call in ast.walk(expression):
            if isinstance(call, ast.Call) and self._touches(call.func):
                self._touch([argument for argument in call.args if isinstance(argument, ast.Name)])

    def _touch(self, targets):
        self._touched |= _variables(targets) - self._names.keys()

    def _touches(self, expression):
        return any(
            isinstance(node, ast.Name) and (node.id in self._names or node.id in self._touched)
            for node in ast.walk(expression)
        )

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
    return {node.id for expression in expressions for node in ast.walk(expression) if isinstance(node, ast.Name)}
