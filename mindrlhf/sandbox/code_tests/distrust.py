"""Tests that a program could pass by its own definitions, as far as their text shows. Standard library only.

A test is worth what stands against the program's values: something the program has no hand in. It has none where both
sides of a comparison come from it, or where one of its functions judges the value of another
(``assert is_solution(solve(x))``, with ``is_solution`` redefined by the program).
"""

# ruff: noqa: F821 -- statements.py stands before this text when it runs

import ast

if __name__ != "__main__":  # in the judge's process, statements.py stands before this text
    from mindrlhf.sandbox.code_tests.statements import TYPES, is_check

# Methods of unittest that compare their first two arguments; functions that do.
COMPARING = ("Equal", "Equals", "In", "Is", "IsNot", "Less", "Greater")
NEAR = ("isclose", "allclose", "array_equal")
# Functions that return what they are given, in another container; that call their first argument; that keep others.
SAME = ("list", "tuple", "set", "frozenset", "sorted", "reversed", "iter", "deque", "dict", "deepcopy", "copy", "cast")
OVER = ("map", "filter", "starmap", "filterfalse", "takewhile", "dropwhile", "reduce")
PUTTING = ("append", "appendleft", "add", "insert", "setdefault", "extend", "extendleft", "update", "put")
# What runs a text, by full names or, with a dot, by modules.
EVALUATING = ("eval", "exec", "compile", "__import__", "os.system", "os.popen", "types.FunctionType", "types.CodeType")
EVALUATING_MODULES = ("pickle", "_pickle", "marshal", "shelve", "subprocess", "runpy", "code", "codeop", "importlib")
EVALUATING_MODULES += ("ctypes", "timeit", "doctest", "cProfile", "profile", "trace", "pdb", "bdb", "builtins", "dill")
MAX_PARTS, MAX_DEPTH = 20, 4  # of a value whose parts are told apart


def distrust(tree, programs, allow_own_helpers):
    """Return why a test cannot be trusted, or None; and whether the program's changes to arguments must not show.

    Args:
        tree: the parsed test.
        programs: the names of the test that stand for what the program defines, with its own names for them.
        allow_own_helpers: the program's own definitions may judge.
    """
    for keeps_arguments in (False, True):
        flow = Flow(tree, programs, keeps_arguments)
        if not (reason := flow.evaluates() or not allow_own_helpers and flow.reason()):
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


NONE, PROGRAM = frozenset(), frozenset({""})


class Flow:
    """Variables that the program's values reach in a test, whatever the order of its statements.

    A value is the set of the program's functions that it comes from ("" stands for what else is the program's, nothing
    for the test's own), or, where the parts are told apart, ("tuple", *parts), ("list", item), ("dict", key, value).
    """

    def __init__(self, tree, programs, keeps_arguments):
        self._named = set()  # nodes with a name in them: others are the test's own
        _find_named(tree, self._named)
        self._nodes = [node for node in ast.walk(tree) if node in self._named]
        self._names = dict(programs)  # what stands for something of the program
        self._keeps_arguments = keeps_arguments
        self._values = {}  # of variables, and under "f()" what functions of the test return
        self._changed = set()  # variables that the program may have changed in place
        self._find_functions()
        self._scalars = self._find_scalars()
        self._add_parameters()
        before = None
        while before != (state := (dict(self._values), len(self._changed))):
            before = state
            for node in self._nodes:
                self._follow(node)

    def evaluates(self):
        names = filter(None, map(self._evaluated, self._nodes))
        return next(
            (f"'{name}' is given what the program returns, which would run among the tests" for name in names), ""
        )

    def reason(self):
        for node in self._nodes:
            if any(map(self.touches, _caught(node))):
                return "the test catches an exception class of the program's own"
            if any(all(map(self.touches, pair)) for pair in _compared(node)):
                return "both sides of a comparison come from the program"
            if isinstance(node, ast.Call) and (names := self._judged(node)):
                return f"the test judges the value of '{names[1]}' by the program's own '{names[0]}'"
            for part in ast.walk(checked) if (checked := _checked(node)) is not None else ():
                sides = [part.left, *part.comparators] if isinstance(part, ast.Compare) else []
                if sides and all(map(self.touches, sides)):
                    return "both sides of a comparison come from the program"
                if any(map(_is_class_of, sides)) and any(
                    isinstance(one, ast.Name) and one.id in self._names for one in sides
                ):
                    return "the test compares a class with one of the program's own"
        return None

    def touches(self, expression):
        return bool(_leaf(self._value(expression)))

    def _find_functions(self):
        """Find the test's own functions, by name, and which variables are theirs; what modules are called."""
        self._functions, self._scopes, self._modules = {}, {}, {}
        for node in self._nodes:
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                inside = list(ast.walk(node))
                own = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
                own |= {one.arg for one in inside if isinstance(one, ast.arg)}
                own -= {name for one in inside if isinstance(one, (ast.Global, ast.Nonlocal)) for name in one.names}
                scope = node.name if isinstance(node, ast.FunctionDef) else ""
                if scope:
                    self._functions[scope] = node
                for one in inside:
                    if not isinstance(node, ast.Lambda) or one not in self._scopes:
                        self._scopes[one] = [(scope, own), *self._scopes.get(node, [])]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.Lambda):
                    self._functions[node.targets[0].id] = node.value
                elif _is_evaluating(name := self._full_name(node.value)):
                    self._modules[node.targets[0].id] = name
            elif isinstance(node, ast.Import):
                self._modules.update((one.asname, one.name) for one in node.names if one.asname)
            elif isinstance(node, ast.ImportFrom):
                self._modules.update((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)

    def _find_scalars(self):
        """Return the variables that are numbers and texts alone, which nobody can change in place."""
        sources = {}

        def add(target, values):
            if isinstance(target, (ast.Tuple, ast.List)):
                for column, part in enumerate(target.elts):
                    rows = [getattr(value, "elts", ()) for value in values]
                    add(part, [row[column] if len(row) == len(target.elts) else None for row in rows])
            elif isinstance(target, (ast.Name, ast.arg)):
                sources.setdefault(self._base(target), []).extend(values)

        def items(node):
            if isinstance(node, ast.Name) and len(known := sources.get(self._base(node), ())) == 1:
                node = None if self._base(node) in filled else known[0]
            if isinstance(node, ast.Constant) or isinstance(node, ast.Call) and _called(node) == "range":
                return [ast.Constant(0)]
            if isinstance(node, ast.Call) and _called(node) in SAME and len(node.args) == 1:
                return items(node.args[0])
            if isinstance(node, ast.Call) and _called(node) == "zip":
                columns = list(map(items, node.args))  # of a range one number stands for all
                rows = range(max(map(len, columns), default=0))
                return [ast.Tuple([one[row] if row < len(one) else ast.Constant(0) for one in columns]) for row in rows]
            if isinstance(node, ast.Call) and _called(node) == "enumerate" and node.args:
                return [ast.Tuple([ast.Constant(0), item]) for item in items(node.args[0])]
            if isinstance(node, ast.Call) and _called(node) == "items" and isinstance(node.func, ast.Attribute):
                node = None if (name := self._base(node.func)) in filled else sources.get(name, [None])[0]
                return (
                    [ast.Tuple(list(pair)) for pair in zip(node.keys, node.values)]
                    if isinstance(node, ast.Dict)
                    else [None]
                )
            return node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [None]

        puts = [node.func for node in self._nodes if isinstance(node, ast.Call) and _called(node) in PUTTING]
        puts += [node for node in self._nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
        filled = set(map(self._base, puts))
        loops = [node for node in self._nodes if isinstance(node, (ast.For, ast.comprehension))]
        for node in self._nodes:
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    add(target, [node.value])
            elif isinstance(node, (ast.arg, ast.withitem)):
                add(node if isinstance(node, ast.arg) else node.optional_vars, [None])
        for node in loops:
            add(node.target, items(node.iter))
        return {name for name, values in sources.items() if all(map(_is_scalar, values))}

    def _add_parameters(self):
        """Let parameters stand for what calls in the test give them, as in ``check(solution)``."""
        for node in self._nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                for parameter, argument in zip(self._parameters(node.func), node.args):
                    if isinstance(argument, ast.Name) and argument.id in self._names:
                        self._names[parameter.arg] = self._names[argument.id]

    def _follow(self, node):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._bind(target, self._value(node.value))
                self._pour(node.value, self._changes(target))
            if writes_back(node, self._keeps_arguments):
                self._change_arguments(node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._bind(node.target, _item(self._value(node.iter)))
            if _leaf(changes := self._changes(node.target)):
                self._pour(node.iter, ("list", changes))
        elif isinstance(node, ast.withitem) and node.optional_vars:
            self._bind(node.optional_vars, _leaf(self._value(node.context_expr)))
        elif isinstance(node, (ast.Return, ast.Yield)) and node.value is not None and self._scopes.get(node):
            value = self._value(node.value)
            self._join(f"{self._scopes[node][0][0]}()", ("list", value) if isinstance(node, ast.Yield) else value)
        elif isinstance(node, ast.Expr) and writes_back(node, self._keeps_arguments):
            self._change_arguments(node.value)
        elif isinstance(node, ast.Call):
            self._follow_call(node)
        elif isinstance(node, ast.FunctionDef):
            for parameter in node.args.args:
                if any("fixture" in ast.unparse(one) for one in self._decorators(parameter.arg)):
                    self._bind(parameter, self._values.get(f"{parameter.arg}()", NONE))

    def _decorators(self, name):
        return getattr(self._functions.get(name), "decorator_list", ())

    def _follow_call(self, node):
        """Give parameters of the test's own functions their values, and containers what is put into them."""
        name, arguments = _called(node), [self._value(argument) for argument in node.args]
        if name in OVER and node.args:  # map(lambda got, want: ..., results, wanted)
            parameters, items = self._parameters(node.args[0]), [_item(argument) for argument in arguments[1:]]
            items = _parts(items[0], len(parameters)) if name == "starmap" and items else items
            for parameter, value in zip(parameters, items):
                self._bind(parameter, value)
            return
        parameters = self._parameters(node.func)
        for parameter, argument, value in zip(parameters, node.args, arguments):
            self._bind(parameter, value)
            self._pour(argument, self._changes(parameter))
        for parameter in parameters:
            for keyword in node.keywords:
                if keyword.arg == parameter.arg:
                    self._bind(parameter, self._value(keyword.value))
        if isinstance(node.func, ast.Attribute) and name in PUTTING:
            for argument in arguments:
                value = argument if name in ("extend", "extendleft", "update") else ("list", argument)
                if _leaf(value):
                    self._join(self._base(node.func), value if isinstance(node.func.value, ast.Name) else _leaf(value))

    def _parameters(self, function):
        if not isinstance(function, ast.Lambda):
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
            if name not in self._functions:
                return []
            is_method, function = isinstance(function, ast.Attribute), self._functions[name]
        else:
            is_method = False
        spec = function.args
        return [*spec.posonlyargs, *spec.args][is_method:] + ([spec.vararg] if spec.vararg else []) + spec.kwonlyargs

    def _bind(self, target, value):
        if isinstance(target, (ast.Tuple, ast.List)):
            for part, item in zip(target.elts, _parts(value, len(target.elts), target.elts)):
                self._bind(part, item)
        elif isinstance(target, (ast.Name, ast.arg)):
            self._join(self._base(target), value)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, ("list", value))
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            value = value if isinstance(target.slice, ast.Slice) else ("dict", _leaf(self._value(target.slice)), value)
            self._join(self._base(target), value if _leaf(value) else NONE)
        else:
            self._join(self._base(target), _leaf(value))

    def _join(self, name, value):
        if name and name not in self._names:
            self._values[name] = _capped(_joined(self._values.get(name, NONE), value), MAX_DEPTH)

    def _base(self, node):
        """Return the variable that an expression is, or is a part of; of a function its own one. Or None."""
        while not isinstance(node, (ast.Name, ast.arg)):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls"):
                return f"self.{node.attr}"
            if isinstance(node, ast.Call) and _called(node) in ("get", "setdefault", "pop", "next", "iter"):
                node = node.func if isinstance(node.func, ast.Attribute) else (node.args or [None])[0]
            elif isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
                node = node.value
            else:
                return None
        name = node.id if isinstance(node, ast.Name) else node.arg
        if name in self._names or name in ("self", "cls"):
            return name
        return next((f"{scope}:{name}" for scope, own in self._scopes.get(node, ()) if name in own), name)

    def _changes(self, target):
        """Return which parts of a target the program may have changed, as a value."""
        if isinstance(target, (ast.Tuple, ast.List)):
            return ("tuple", *map(self._changes, target.elts))
        return PROGRAM if isinstance(target, (ast.Name, ast.arg)) and self._base(target) in self._changed else NONE

    def _pour(self, source, changes):
        """Let changes of what came out of an expression show in the variables that it came from."""
        if not _leaf(changes):
            return
        if isinstance(source, (ast.Tuple, ast.List, ast.Set)):
            for part in source.elts:
                self._pour(part, PROGRAM)
        elif isinstance(source, ast.Name) and isinstance(changes, tuple):
            self._join(self._base(source), changes)
        elif isinstance(source, (ast.Name, ast.Attribute, ast.Subscript, ast.Starred)):
            self._change(source)
        elif isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute):
            if (name := source.func.attr) in ("items", "values"):
                item = _parts(_item(changes), 2)[1] if name == "items" else _item(changes)
                self._pour(source.func.value, ("dict", NONE, item))
        elif isinstance(source, ast.Call) and (name := _called(source)) in ("zip", "enumerate", *SAME):
            items = _parts(_item(changes), len(source.args)) if name == "zip" else [_item(changes)]
            for part, item in zip(source.args, _parts(items[0], 2)[1:] if name == "enumerate" else items):
                self._pour(part, ("list", item))

    def _change(self, expression):
        name = self._base(expression)
        if name and name not in self._names and name not in ("self", "cls") and name not in self._scalars:
            self._changed.add(name)

    def _change_arguments(self, expression):
        for call in ast.walk(expression):
            if isinstance(call, ast.Call) and self.touches(call.func):
                for argument in call.args:
                    for part in argument.elts if isinstance(argument, (ast.Tuple, ast.List)) else [argument]:
                        self._change(part)

    def _value(self, node):
        if node not in self._named:
            return NONE
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = self._base(node)
            if isinstance(node, ast.Attribute) and not str(name).startswith("self."):
                return _leaf(self._value(node.value))
            if name in self._names or name in self._changed:
                return PROGRAM | _leaf(self._values.get(name, NONE))
            return self._values.get(name, NONE)
        if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
            return self._display(node)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            chosen = NONE.union(*(_leaf(self._value(test)) for one in node.generators for test in one.ifs))
            if isinstance(node, ast.DictComp):
                return ("dict", _joined(self._value(node.key), chosen), _joined(self._value(node.value), chosen))
            return ("list", _joined(self._value(node.elt), chosen))
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, (ast.Starred, ast.NamedExpr, ast.Await)):
            return self._value(node.value)
        if isinstance(node, ast.Call):
            return self._call(node)
        parts = [self._value(part) for part in ast.iter_child_nodes(node)]
        if isinstance(node, (ast.BoolOp, ast.IfExp)) or isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _joined(*parts)
        return NONE.union(*map(_leaf, parts))

    def _display(self, node):
        if isinstance(node, ast.Dict):
            values = [
                self._value(value) if key else _entry(self._value(value)) for key, value in zip(node.keys, node.values)
            ]
            return ("dict", _joined(*(self._value(key) for key in node.keys if key)), _joined(*values))
        parts = [self._value(part) for part in node.elts]
        has_star = any(isinstance(part, ast.Starred) for part in node.elts)
        if len(parts) <= MAX_PARTS and not has_star:
            return ("tuple", *parts)
        return ("list", _joined(*(_item(v) if isinstance(n, ast.Starred) else v for n, v in zip(node.elts, parts))))

    def _subscript(self, node):
        value, index = self._value(node.value), _leaf(self._value(node.slice))
        if index:
            return _leaf(value) | index
        if isinstance(node.slice, ast.Slice):
            return ("list", _item(value)) if isinstance(value, tuple) else value
        number = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(number, int) and isinstance(value, tuple) and value[0] == "tuple" and number < len(value) - 1:
            return value[1 + number]
        return _entry(value)

    def _call(self, node):
        name, arguments = _called(node), [self._value(argument) for argument in node.args]
        every = NONE.union(*map(_leaf, arguments), *(_leaf(self._value(one.value)) for one in node.keywords))
        if isinstance(node.func, ast.Name) and name in self._names:
            function = self._names[name]  # classes begin with a capital, and judge nothing
            return every | {"" if function[:1].isupper() else function}
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value)
            if isinstance(owner, tuple) and name in ("items", "values", "keys", "get", "pop", "copy"):
                pair, entry = ("tuple", _item(owner), _entry(owner)), _joined(_entry(owner), every)
                lists = {"items": pair, "values": _entry(owner), "keys": _item(owner)}
                return ("list", lists[name]) if name in lists else owner if name == "copy" else entry
            every |= _leaf(owner)
        if isinstance(self._functions.get(name), ast.Lambda):
            return every | _leaf(self._value(self._functions[name].body))
        if name in self._functions:
            return _joined(every, self._values.get(f"{name}()", NONE)) if self._is_of_program(name, set()) else every
        if isinstance(node.func, ast.Name):
            every |= _leaf(self._value(node.func))
        if name == "zip" and not any(isinstance(argument, ast.Starred) for argument in node.args):
            return ("list", ("tuple", *map(_item, arguments)))
        if name == "enumerate" and arguments:
            return ("list", ("tuple", NONE, _item(arguments[0])))
        if name in SAME and len(arguments) == 1:
            return arguments[0]
        if name in ("map", "starmap") and node.args and isinstance(node.args[0], ast.Lambda):
            return ("list", self._value(node.args[0].body))
        return every

    def _is_of_program(self, name, seen):
        """Return True for a function of the test whose value comes from the program, whatever it is given."""
        if name in seen:
            return False
        seen.add(name)
        for node in ast.walk(self._functions[name]):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                variable = self._base(node)
                is_local = ":" in variable and not variable.startswith(":")
                if variable in self._names or not is_local and _leaf(self._values.get(variable, NONE)):
                    return True
            if isinstance(node, ast.Attribute) and _leaf(self._values.get(f"self.{node.attr}", NONE)):
                return True
            called = _called(node) if isinstance(node, ast.Call) else None
            if called in self._functions and self._is_of_program(called, seen):
                return True
        return False

    def _judged(self, call):
        """Return the function called and the other one whose value it is given, if both are the program's."""
        if not isinstance(call.func, ast.Name) or call.func.id not in self._names:
            return None
        outer = self._names[call.func.id]
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            for inner in sorted(_leaf(self._value(argument)) - {"", outer}):
                return outer, inner
        return None

    def _evaluated(self, node):
        """Return the name of what would run a text of the program's in the judge's own process, or None."""
        if isinstance(node, ast.Subscript) and self.touches(node.slice):
            name = _called(node.value) if isinstance(node.value, ast.Call) else getattr(node.value, "attr", "")
            return name if name in ("globals", "locals", "vars", "__dict__") else None
        if not isinstance(node, ast.Call):
            return None
        if (name := _called(node)) in ("getattr", "setattr", "attrgetter", "methodcaller"):
            return name if any(map(self.touches, node.args[name.endswith("tattr") :][:1])) else None
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        names = [name for part in (node.func, *node.args) if _is_evaluating(name := self._full_name(part))]
        return names[0] if names and any(map(self.touches, given)) else None

    def _full_name(self, node):
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return ""
        rest = ""
        while isinstance(node, ast.Attribute):
            node, rest = node.value, f".{node.attr}{rest}"
        return self._modules.get(node.id, node.id) + rest if isinstance(node, ast.Name) else rest


def _find_named(node, named):
    """Add a node and all in it that hold names to a set; return True if it is one."""
    holds = isinstance(node, (ast.Name, ast.arg, ast.FunctionDef, ast.alias))
    for child in ast.iter_child_nodes(node):
        holds = _find_named(child, named) or holds
    if holds:
        named.add(node)
    return holds


def _leaf(value):
    return value if isinstance(value, frozenset) else NONE.union(*map(_leaf, value[1:]))


def _item(value):
    """Return what a loop over a value gives."""
    if isinstance(value, frozenset):
        return value
    return _joined(*value[1:]) if value[0] == "tuple" else value[1]


def _entry(value):
    """Return what an index gives."""
    return value[2] if isinstance(value, tuple) and value[0] == "dict" else _item(value)


def _parts(value, number, targets=()):
    has_star = any(isinstance(target, ast.Starred) for target in targets)
    if isinstance(value, tuple) and value[0] == "tuple" and len(value) == number + 1 and not has_star:
        return value[1:]
    return [_item(value)] * number


def _joined(*values):
    result = NONE
    for value in values:
        if not result or not value:
            result = result or value
        elif isinstance(result, frozenset) or isinstance(value, frozenset):
            result = _leaf(result) | _leaf(value)
        elif result[0] == value[0] and len(result) == len(value):
            result = (result[0], *map(_joined, result[1:], value[1:]))
        elif "dict" in (result[0], value[0]):  # filled by index
            result = ("dict", NONE, _joined(_entry(result), _entry(value)))
        else:
            result = ("list", _joined(_item(result), _item(value)))
    return result


def _capped(value, depth):
    if isinstance(value, frozenset) or depth == 0:
        return _leaf(value)
    return (value[0], *(_capped(part, depth - 1) for part in value[1:]))


def _is_scalar(node):
    if isinstance(node, ast.UnaryOp):
        return _is_scalar(node.operand)
    is_number = isinstance(node, ast.Call) and _called(node) in (
        "len",
        "str",
        "int",
        "float",
        "abs",
        "round",
        "ord",
        "chr",
    )
    return isinstance(node, (ast.Constant, ast.JoinedStr)) or is_number


def writes_back(node, keeps_arguments):
    """Return True for a statement after which the test sees what the program did to the lists and dicts it was given.

    Not for what is asserted: a program could empty the list from which the expected value is still to be computed. With
    ``keeps_arguments`` for calls that stand alone only, and do not put the value into another list.
    """
    if not isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign)) or any(map(is_check, ast.walk(node))):
        return False
    is_put = isinstance(node.value, ast.Call) and _called(node.value) in PUTTING
    return not keeps_arguments or isinstance(node, ast.Expr) and not is_put


def _is_evaluating(name):
    return name in EVALUATING or name.partition(".")[0] in EVALUATING_MODULES and "." in name


def _is_class_of(node):
    return (
        _is_plain_call(node) and node.func.id == "type" or isinstance(node, ast.Attribute) and node.attr == "__class__"
    )


def _checked(node):
    """Return what of a node decides that the test fails, or None: of a check, and of an ``if`` above a ``raise``."""
    if isinstance(node, ast.If):
        return node.test if any(isinstance(part, ast.Raise) for part in node.body) else None
    return (node.test if isinstance(node, ast.Assert) else node) if is_check(node) else None


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
