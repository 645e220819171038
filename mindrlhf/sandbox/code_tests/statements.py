"""Parsed Python tests, as far as their text shows: read once, before any program is there.

Data sets write tests in many forms, each for a harness of its own: statements that run from top to bottom, functions
that pytest collects, classes of unittest, a ``check(candidate)`` that HumanEval's harness calls, a script below
``if __name__ == "__main__"``. ``read_test`` finds what the harness would run, and refuses what would test nothing.
Standard library only: the judge's process has this text as well.
"""

import ast
import builtins
import importlib
import sys
import warnings

# The module that a test may import the program from, as KodCode's do.
PROGRAM_MODULE = "solution"
# Names of the standard library that tests use without importing them: data sets run them beside a solution that does.
MODULES = (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "inspect"),
    *("itertools", "json", "math", "operator", "os", "random", "re", "statistics", "string", "sys", "time", "typing"),
)
FROM_MODULES = {
    name: module
    for module, names in {
        "collections": "Counter OrderedDict defaultdict deque namedtuple",
        "math": "ceil factorial floor gcd inf isclose isnan nan pi sqrt",
        "copy": "deepcopy",
        "decimal": "Decimal",
        "fractions": "Fraction",
        "itertools": "chain permutations product",
        "typing": "Any Callable Dict Iterable List Optional Sequence Set Tuple Union",
    }.items()
    for name in names.split()
}
# Classes of these modules say what a value is; nobody asks a program for one of that name where another is called.
TYPES = {name for name, value in vars(builtins).items() if isinstance(value, type)}
TYPES |= {"Counter", "OrderedDict", "defaultdict", "deque", "namedtuple", "Decimal", "Fraction"}
# What the judge gives beside the standard library.
STAND_INS = ("pytest",)
# Builtin functions that tests call and nobody is asked to write.
NOT_ASKED_FOR = (
    "print",
    "isinstance",
    "super",
    "type",
    "open",
    "input",
    "exit",
    "quit",
    "getattr",
    "setattr",
    "hasattr",
)
# Calls and assignments that do not reach a program in another process, by full names or their beginnings.
_FILES = ("mkdir", "makedirs", "listdir", "remove", "chdir", "putenv", "path.exists", "path.isfile", "path.isdir")
_CALLS_ELSEWHERE = ("tempfile.", "shutil.", "contextlib.redirect_", "unittest.mock.patch", "mock.patch")
_CALLS_ELSEWHERE += ("os.environ.update", "os.environ.setdefault", *(f"os.{name}" for name in _FILES))
_SET_ELSEWHERE = ("sys.stdin", "sys.stdout", "sys.stderr", "sys.argv", "os.environ", "builtins.")
_FILE_METHODS = ("write_text", "write_bytes", "read_text", "read_bytes")
_ENDINGS = ("exit", "_exit", "quit", "fail", "abort", "wasSuccessful")


class NothingTested(ValueError):
    """The text tests nothing, or cannot be run as it is; the message says why."""


class Statements:
    """A text of tests, ready to run.

    tree: the parsed text, without its imports of the program; ``solution.f`` is the name ``solution.f`` there.
    imported: names of the test that stand for names of the program, such as ``g`` of ``from solution import f as g``.
    functions, classes, cases: what pytest and unittest collect, by name, in order.
    is_script: nothing is collected, so the text runs as ``__main__``.
    """

    def __init__(self, text, entry_point="", setup=""):
        self.tree = _parse(text)
        self.given = _defined(setup)  # by the data set, in the program's sandbox
        self.imported = {}
        self._take_imports()
        self._collect()
        if entry_point:
            self._call_check(entry_point)
        self.is_script = not (self.functions or self.classes or self.cases)
        self.taken, self.loaded = names_from_elsewhere(self.tree)
        self.mentions = _words(self.tree)

    def candidates(self):
        """Return Python's own functions that the program may be asked for: the most unusual kind there is.

        A name of the standard library that is not imported can only be the program's. A builtin function may be, more
        likely than a type.
        """
        if self.asked_names():
            return set()
        named = self.taken & self.loaded
        library = {name for name in named if name in MODULES or _is_library_function(name)}
        functions = {name for name in named if name not in NOT_ASKED_FOR and _is_builtin_function(name)}
        return library - TYPES or functions - TYPES or library | functions

    def program_names(self):
        """Return the names that only the program can define."""
        return {name for name in self.taken if not is_pythons(name)} | set(self.imported)

    def asked_names(self):
        """Return those of them that the data set's own setup does not define."""
        return self.program_names() - self.given

    def reason(self):
        """Return why the text tests nothing, or None."""
        if not self.asked_names() and not self.candidates():
            return "it asks nothing of the program"
        if name := next(filter(None, map(self._elsewhere, ast.walk(self.tree))), None):
            return f"'{name}' does not reach the program, which runs in a process and a directory of its own"
        programs = self.program_names()
        if not any(is_check(node) and _owner(node) not in programs for node in _reached(self)):
            return "nothing that it runs asserts anything"
        return None

    def _elsewhere(self, node):
        """Return the name by which a node would change what surrounds the program, or see it; or None."""
        if isinstance(node, ast.Call):
            name = self.full_name(node.func)
            is_file = name in ("open", "io.open") or name.rpartition(".")[2] in _FILE_METHODS
            return name if is_file or name.startswith(_CALLS_ELSEWHERE) else None
        for target in node.targets if isinstance(node, (ast.Assign, ast.Delete)) else ():
            name = self.full_name(target.value if isinstance(target, ast.Subscript) else target)
            if name.startswith(_SET_ELSEWHERE):
                return name
        return None

    def full_name(self, node):
        """Return the name of a function or module, by imports of the text."""
        first, dot, rest = ast.unparse(node).partition(".")
        return self.modules.get(first, first) + dot + rest

    def _call_check(self, entry_point):
        """Add the call of HumanEval's harness, unless the text calls its ``check`` itself."""
        if _waiting_check(self.tree) == "check":
            self.tree.body += ast.parse(f"check({entry_point})").body

    def _take_imports(self):
        defined = {node.name for node in ast.walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        if PROGRAM_MODULE not in defined:
            self.tree = ast.fix_missing_locations(_Imports(self.imported).visit(self.tree))
        attempts = [part for node in ast.walk(self.tree) if isinstance(node, ast.Try) for part in node.body]
        tried = {node for part in attempts for node in ast.walk(part)}
        self.modules = {}
        for node in ast.walk(self.tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                self.modules.update((alias.asname, alias.name) for alias in node.names if alias.asname)
            elif isinstance(node, ast.ImportFrom):
                names = ["." * node.level + (node.module or "")]
                self.modules.update((one.asname or one.name, f"{node.module}.{one.name}") for one in node.names)
            for name in names:
                module = name.partition(".")[0]
                if module not in sys.stdlib_module_names and module not in STAND_INS and node not in tried:
                    raise NothingTested(f"it imports '{name}', which the sandbox does not have")

    def _collect(self):
        self.functions, self.classes, self.cases, self.fixtures = [], [], [], []
        called = {
            node.func.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        for node in self.tree.body:
            if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
                raise NothingTested(f"'{node.name}' is asynchronous, which only plugins of pytest run")
            if isinstance(node, ast.FunctionDef):
                if _is_marked(node, "fixture"):
                    self.fixtures.append(node.name)
                elif node.name.startswith("test") and node.name not in called and not _is_left_out(node):
                    self.functions.append(node.name)
            elif isinstance(node, ast.ClassDef) and not _is_left_out(node):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if bases & {"TestCase", "IsolatedAsyncioTestCase", *self.cases}:
                    self.cases.append(node.name)
                elif node.name.startswith("Test") and node.name not in called:
                    self.classes.append(node.name)
        for node, given in self._collected():
            known = {*self.fixtures, *given, *_parametrized(node), "self", "cls"}
            for parameter in node.args.args[: len(node.args.args) - len(node.args.defaults)]:
                if parameter.arg not in known:
                    raise NothingTested(f"'{node.name}' wants '{parameter.arg}', which is no fixture of the text")

    def _collected(self):
        """Yield the functions that pytest runs, and the parameters that their class gives values to."""
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in self.functions:
                yield node, ()
            if isinstance(node, ast.ClassDef) and node.name in self.classes:
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name.startswith("test") and not _is_left_out(part):
                        yield part, _parametrized(node)


def read_test(text, entry_point="", setup=""):
    """Return the text, read.

    Raises:
        NothingTested: it tests nothing.
    """
    test = Statements(text, entry_point, setup)
    if name := _waiting_check(test.tree):
        raise NothingTested(f"'{name}' is not called: give JSON with 'test' and 'entry_point', or add {name}(NAME)")
    if reason := test.reason():
        raise NothingTested(reason)
    return test


def is_pythons(name):
    return hasattr(builtins, name) or name in MODULES or name in FROM_MODULES or name in ("__file__", "__name__")


def names_from_elsewhere(tree):
    """Return the names that a test takes from elsewhere (the program, the standard library, Python), and which of them
    it loads for themselves, not for what belongs to them (as ``math`` of ``math.gcd``)."""
    stored, loaded, for_themselves, owners = set(), set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owners.add(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
            if node not in owners:
                for_themselves.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            stored.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            stored |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if any(alias.name == "*" for alias in node.names) and node.module in sys.stdlib_module_names:
                stored |= _public_names(node.module)
    return loaded - stored, for_themselves


def is_check(node):
    """Return True for a node of the tree that can fail the test by what it sees."""
    if isinstance(node, (ast.Assert, ast.Raise)):
        return True
    if isinstance(node, ast.ExceptHandler):
        return node.type is not None and ast.unparse(node.type) not in ("Exception", "BaseException")
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name.startswith("assert") or name in _ENDINGS or name in ("raises", "warns")


def _owner(node):
    """Return the name that a call begins with: what asserts by the program's own means asserts nothing."""
    node = node.func if isinstance(node, ast.Call) else None
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return getattr(node, "id", None)


def _parse(text):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NothingTested(f"it is no Python: {error}") from None


class _Imports(ast.NodeTransformer):
    """Takes out imports of the program, and names what is taken from the module."""

    def __init__(self, imported):
        self._imported = imported
        self._modules = {}

    def visit_Import(self, node):
        kept = []
        for alias in node.names:
            if alias.name == PROGRAM_MODULE:
                self._modules[alias.asname or alias.name] = alias.name
            else:
                kept.append(alias)
        if len(kept) == len(node.names):
            return node
        return ast.copy_location(ast.Import(kept) if kept else ast.Pass(), node)

    def visit_ImportFrom(self, node):
        if node.module != PROGRAM_MODULE or node.level > 1:
            return node
        for alias in node.names:
            if alias.name != "*":
                self._imported[alias.asname or alias.name] = alias.name
        return ast.copy_location(ast.Pass(), node)

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id in self._modules:
            name = f"{PROGRAM_MODULE}.{node.attr}"
            self._imported[name] = node.attr
            return ast.copy_location(ast.Name(name, node.ctx), node)
        return node


def _defined(setup):
    """Return the names that a text defines at its top level."""
    names = set()
    for node in _parse(setup).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.For, ast.With)):
            names |= {
                part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
    return names


def _is_marked(node, *marks):
    return any(mark in ast.unparse(decorator) for decorator in node.decorator_list for mark in marks)


def _is_left_out(node):
    return _is_marked(node, "mark.skip", "mark.xfail", "unittest.skip", "expectedFailure")


def _parametrized(node):
    """Return the parameters that decorators of pytest give values to."""
    names = set()
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize") and decorator.args:
            for part in ast.walk(decorator.args[0]):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    names |= {name.strip() for name in part.value.split(",")}
    return names


def _waiting_check(tree):
    """Return the name of a HumanEval ``check`` that nobody calls."""
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body:
        is_waiting = isinstance(node, ast.FunctionDef) and node.name.startswith("check") and node.name not in loaded
        if is_waiting and len(node.args.args) - len(node.args.defaults) == 1:
            return node.name
    return None


def _reached(test):
    """Return the nodes of what the text runs: module level, what is collected, and what these name."""
    definitions, frontier = {}, []
    for node in ast.walk(test.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            definitions.setdefault(node.name, []).append(node)
    for node in test.tree.body:
        is_definition = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if not is_definition or node.name in (*test.functions, *test.classes, *test.cases, *test.fixtures):
            frontier.append(node)
    reached, seen = [], set()
    while frontier:
        node = frontier.pop()
        for part in _without_definitions(node):
            reached.append(part)
            name = part.id if isinstance(part, ast.Name) else getattr(part, "attr", None)
            if name in definitions and name not in seen:
                seen.add(name)
                frontier += definitions[name]
    return reached


def _without_definitions(root):
    """Walk a tree; of what it defines within, only classes' methods, not functions that may never be called."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if not is_function or isinstance(node, ast.ClassDef) or isinstance(child, ast.Lambda):
                stack.append(child)


def _words(tree):
    """Return the names, attributes and texts of a test in small letters."""
    words = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id.lower())
        elif isinstance(node, ast.Attribute):
            words.add(node.attr.lower())
        elif isinstance(node, ast.alias):
            words.add(node.name.lower())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value.strip().lower().lstrip("+-"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value in (1e400, -1e400):
            words.add("inf")
    return words


def _is_library_function(name):
    module = FROM_MODULES.get(name, "typing")
    return module != "typing" and callable(getattr(importlib.import_module(module), name))


def _is_builtin_function(name):
    value = getattr(builtins, name, None)
    return callable(value) and not (isinstance(value, type) and issubclass(value, BaseException))


def _public_names(module):
    if module not in MODULES:
        return set()
    found = importlib.import_module(module)
    return set(getattr(found, "__all__", None) or [name for name in vars(found) if not name.startswith("_")])
