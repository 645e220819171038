#!/usr/bin/env python3
"""How much must be read to follow one step of GRPO: the files that it goes through, in reading order, with their lines.

    python scripts/reading.py [MODULE:FUNCTION ...] [--functions]

Nothing is run. The sources are parsed and interpreted abstractly: the value of an expression is the set of what it may
be (objects of a class, functions, containers, constants), and sets flow through assignments, attributes, arguments and
results until none grows. Branches are followed as the default config decides them (conditional constant propagation,
Wegman and Zadeck, TOPLAS 13(2), 1991): of `if config.rollout.off_policy_steps:` only what is done at 0.

First the whole run is followed, from ``RUN``, to know what every attribute holds. Then the step is, from ``STEP``, call
after call in the order of the source. A file counts, with all its lines, when a function of it is called or a record of
it is made or read. Methods that are called by their names count (``Team.call("update")``), and what other processes do
for the step does, whose loops are in ``STEP``.

What it does not see: a class or function that is found by text alone (the verifier stands in ``STEP`` therefore), what
happens after an exception, and calls from NumPy, MindSpore and vLLM, unless they were handed the function. What it sees
too much: an attribute of two objects of one class is one. Config, the rest of a run and packages whose names say enough
are in ``SETTINGS``, ``ASSUMED``, ``CUT`` and ``LEFT_OUT``, each with its reason.
"""

import argparse
import ast
import dataclasses
import importlib
import itertools
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mindrlhf"

# Who begins: rank 0, and the processes that it starts by the name of their module.
RUN = (
    "mindrlhf.training.reinforcement:run_rank",
    "mindrlhf.rollout.server.__main__:main",
    "mindrlhf.rewards.worker:main",
)
# Where a step begins on each of them: the life cycle that calls it, and the loops that serve it in other processes.
STEP = (
    "mindrlhf.training.life_cycle:_run_step",
    "mindrlhf.rollout.server.__main__:Server.run",
    "mindrlhf.rollout.server.worker:WorkerExtension.load_weight_buffer",
    "mindrlhf.rewards.worker:_score_batch",
    "mindrlhf.rewards.verifiers.accuracy:accuracy_reward",
)
# What a reader of the step must know of its beginning: who puts its parts together.
READ_FIRST = ("mindrlhf.training.life_cycle", "mindrlhf.training.reinforcement")

# Keys that a run must set.
SETTINGS = {("RewardSection", "verifier_function"): ("accuracy",)}
# Results that neither the sources nor the config decide: function -> value, and why.
ASSUMED: dict[str, tuple[Any, str]] = {
    "mindrlhf.training.runtime:num_nodes_from_environment": (1, "one machine"),
    "mindrlhf.training.runtime:num_ranks_from_environment": (1, "one rank"),
    "mindrlhf.training.reinforcement:ReinforcementTraining._has_multi_node_servers": (False, "one machine"),
    "mindrlhf.rollout.elastic.listener:take_address": (None, "one machine"),
    "mindrlhf.config.training:trains_sharded": (False, "run.device: cpu, data parallelism alone"),
}
# What such a step does not do, although neither sources nor config say so: not followed.
CUT = {
    "mindrlhf.training.nodes:connect_generators": "one machine",
    "mindrlhf.tools.loading": "rollout.engine: vllm",
    "mindrlhf.system.tracing": "observe.sinks: opentelemetry",
    "mindrlhf.training.loop.alarms": "whether the run learns anything",
    "mindrlhf.weights.publish.tcp": "one machine",
    "mindrlhf.weights.publish.sync": "one machine",
    "mindrlhf.weights.publish.collective": "one machine",
    "mindrlhf.training.vision": "a model of text",
    "mindrlhf.models.vision": "a model of text",
    "mindrlhf.images": "a model of text",
    "mindrlhf.models.cpu_windows": "a model without windows",
    "mindrlhf.specs.deepseek": "another family of models",
    "mindrlhf.specs.gemma": "another family of models",
    "mindrlhf.specs.glm": "another family of models",
    "mindrlhf.specs.llama": "another family of models",
    "mindrlhf.data.pictures": "a model of text",
    "mindrlhf.rollout.sent_images": "a model of text",
    "mindrlhf.rollout.server.vision": "a model of text",
    "mindrlhf.training.routing": "training.replay_routing",
    "mindrlhf.rollout.sent_experts": "training.replay_routing",
    "mindrlhf.rollout.server.routing": "training.replay_routing",
    "mindrlhf.training.distillation": "distillation.teachers",
    "mindrlhf.algorithms.chunked_head": "memory.logit_positions",
    "mindrlhf.rollout.server.multi_node": "one machine",
    "mindrlhf.rollout.stop_strings": "rollout.stop",
    "mindrlhf.training.loop.skipped_batches": "all gradients are finite",
    "mindrlhf.training.checkpoints.run:RunCheckpoints.save": "checkpoint.every_steps",
    "mindrlhf.training.checkpoints.run:RunCheckpoints.save_broken_off": "nobody asks the run to end",
    "mindrlhf.training.checkpoints.shards:ShardCheckpoints.settle": "checkpoint.every_steps",
    "mindrlhf.training.loop.trainer:Trainer.evaluate": "data.eval_file",
}
# Followed, but not counted: a reader of the step takes these at their names.
LEFT_OUT = {
    "mindrlhf.errors": "two exceptions",
    "mindrlhf.config": "keys and defaults, which docs/config.md lists",
    "mindrlhf.system": "processes, files and clocks",
    "mindrlhf.observe": "metrics once computed: how they are written and shown",
    "mindrlhf.evaluation": "statistics of held-out prompts",
    "mindrlhf.checkpoint": "the state that a run resumes from",
    "mindrlhf.training.checkpoints": "the state that a run resumes from",
    "mindrlhf.specs": "the parameters of a family of models, by name",
    "mindrlhf.layout": "arithmetic of rows and shards",
    "mindrlhf.sandbox": "limits of processes",
    "mindrlhf.rollout.processes": "the server as a process: whether it lives",
    "mindrlhf.rewards.answers": "whether two answers are equal",
    "mindrlhf.rewards.judges": "what judges took; none is asked",
    "mindrlhf.data.tokenizers": "token ids to text",
    "mindrlhf.weights.hf": "files of weights",
    "mindrlhf.weights.array_file": "files of weights",
    "mindrlhf.weights.file_writer": "files of weights",
    "mindrlhf.weights.direct_file": "files of weights",
    "mindrlhf.weights.safetensors_file": "files of weights",
    "mindrlhf.weights.tensors": "dtypes",
    "mindrlhf.cpu": "makes a CPU fast",
    "mindrlhf.rollout.server.required_slices": "makes a CPU fast",
}
# Part of the step all the same.
COUNTED = ("mindrlhf.system.wire", "mindrlhf.system.messages")

Atom = tuple
Value = frozenset
UNKNOWN: Atom = ("unknown",)
NOTHING: Value = frozenset()
ANYTHING: Value = frozenset([UNKNOWN])
MAX_CONSTANTS = 24
# Functions of the language, and of the standard library as the package names them, which are known here.
COLLECTING = {"list", "tuple", "sorted", "set", "frozenset", "iter", "reversed", "deque", "chain", "islice"}
BUILTINS = {*COLLECTING, "zip", "enumerate", "map", "filter", "next", "max", "min", "dict", "isinstance", "getattr"}
BUILTINS |= {"super", "len", "str", "int", "float", "bool", "repr", "print", "hash", "id", "range", "abs", "round"}
BUILTINS |= {"open", "any", "all", "sum", "type", "hasattr"}
STANDARD = {"dataclasses.replace", "partial", "functools.partial", "cast", "importlib.import_module"}
STANDARD |= {"itertools.chain", "itertools.islice", "itertools.chain.from_iterable"}
ADDING = {"append", "appendleft", "add", "put", "insert", "put_nowait"}
JOINING = {"extend", "update"}
TAKING = {"pop", "popleft", "get", "setdefault", "copy", "get_nowait", "popitem"}
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def constant(value: Any) -> Value:
    return frozenset([("constant", type(value).__name__, value)])


NONE = constant(None)
NOT_A_KEY = object()


class Scope:
    """A function, a class or a module: what names are its own, and where the others are looked up."""

    def __init__(self, name: str, node: ast.AST, module: str, outer: "Scope | None", owner: str | None = None):
        self.name, self.node, self.module, self.outer, self.owner = name, node, module, outer, owner
        self.is_class = isinstance(node, ast.ClassDef)
        self.is_function = isinstance(node, FunctionNode)
        self.names: set[str] = set()
        self.is_generator = False
        self.dispatches_on: str | None = None  # a parameter that names what is called
        if self.is_function:
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            self.names |= {one.arg for one in every if one}
        body = node.body if isinstance(node.body, list) else [node.body]
        for statement in body:
            self._collect(statement)

    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.names.add(node.name)
            return
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            self.names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            self.names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self.names.add(node.name)
        elif isinstance(node, (ast.Yield, ast.YieldFrom)):
            self.is_generator = True
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and self.is_function:
            self._note_dispatch(ast.unparse(node.args[1]))
        for child in ast.iter_child_nodes(node):
            self._collect(child)

    def _note_dispatch(self, name: str) -> None:
        if any(parameter.arg == name for parameter in parameters_of(self)):
            self.dispatches_on = name

    def decorators(self) -> set[str]:
        found = (ast.unparse(one) for one in getattr(self.node, "decorator_list", ()))
        return {one.partition("(")[0].rpartition(".")[2] for one in found}

    def is_stub(self) -> bool:
        """Whether it is a signature only, as those of protocols and abstract classes are."""
        if isinstance(self.node, ast.Lambda):
            return False
        body = [
            one for one in self.node.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
        ]
        return all(isinstance(one, ast.Pass) for one in body) or "abstractmethod" in self.decorators()


class Sources:
    """All modules of the package: their scopes by name."""

    def __init__(self, package: Path) -> None:
        self.scopes: dict[str, Scope] = {}
        self.of_node: dict[int, Scope] = {}
        self.paths: dict[str, Path] = {}
        self._imports: dict[str, dict[str, str]] = {}
        for path in sorted(package.rglob("*.py")):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
            self.paths[module] = path
            self._add(f"{module}:", ast.parse(path.read_text(encoding="utf-8")), module, None)

    def class_of(self, node: ast.AST, scope: Scope | None) -> str | None:
        """Return the class of the package that an annotation or a base names; None for every other."""
        if isinstance(node, ast.Attribute):
            module = self._imports_of(scope.module).get(ast.unparse(node.value))
            return self._class_in(module, node.attr) if module in self.paths else None
        while scope is not None and isinstance(node, ast.Name):
            separator = "" if scope.name.endswith(":") else "."
            found = self.scopes.get(f"{scope.name}{separator}{node.id}")
            if found is not None and found.is_class:
                return found.name
            if scope.outer is None:
                module, _, name = self._imports_of(scope.module).get(node.id, "").rpartition(".")
                return self._class_in(module, name)
            scope = scope.outer
        return None

    def _class_in(self, module: str, name: str) -> str | None:
        scope = self.scopes.get(f"{module}:")
        return self.class_of(ast.Name(name), scope) if scope is not None else None

    def _imports_of(self, module: str) -> dict[str, str]:
        """Return what the names of a module stand for that it imports, at its top or within functions."""
        if module not in self._imports:
            found = self._imports[module] = {}
            for node in ast.walk(self.scopes[f"{module}:"].node):
                if isinstance(node, ast.ImportFrom):
                    found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                elif isinstance(node, ast.Import):
                    found |= {alias.asname or alias.name: alias.name for alias in node.names}
        return self._imports[module]

    def _add(self, name: str, node: ast.AST, module: str, outer: Scope | None) -> None:
        owner = outer.name if outer is not None and outer.is_class else None
        scope = self.scopes[name] = self.of_node[id(node)] = Scope(name, node, module, outer, owner)
        self._add_within(node, scope)

    def _add_within(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                separator = "" if scope.name.endswith(":") else "."
                name = f"{scope.name}{separator}{getattr(child, 'name', f'<lambda {child.lineno}:{child.col_offset}>')}"
                while name in self.scopes:  # a property and its setter, or two branches
                    name += "'"
                self._add(name, child, scope.module, scope)
            else:
                self._add_within(child, scope)


class Walk:
    """An abstract run from some entries, with what it has learnt of attributes from an earlier one."""

    def __init__(self, sources: Sources, learnt: "Walk | None" = None):
        self.sources = sources
        self.values: dict[tuple, Value] = {}
        self.instances: set[str] = set()
        self.boxes: dict[str, set[Any]] = {}
        if learnt is not None:
            kept = (key for key, value in learnt.values.items() if not self._is_of_a_call(key))
            self.values = {key: learnt.values[key] for key in kept}
            self.instances = set(learnt.instances)
            self.boxes = {name: set(keys) for name, keys in learnt.boxes.items()}
        self.readers: dict[tuple, dict[str, None]] = {}  # in the order of their first look
        self.uses: dict[str, list[str]] = {}  # by scope: the scopes that it calls or reads, in order
        self._waiting: deque[str] = deque()
        self._current: Scope | None = None
        sys.setrecursionlimit(10000)
        self._trusts_annotations = learnt is not None
        self._mros: dict[str, tuple[str, ...]] = {}
        self._members: dict[tuple, Scope | None] = {}
        self._crowded: set[tuple] = set()  # keys with too many constants to tell apart

    def _is_of_a_call(self, key: tuple) -> bool:
        return key[0] == "return" or (key[0] == "local" and self.sources.scopes[key[1]].is_function)

    # The state: sets that only grow, and who must look again when one does.

    def read(self, *key: Any) -> Value:
        if self._current is not None:
            self.readers.setdefault(key, {})[self._current.name] = None
        return self.values.get(key, NOTHING)

    def write(self, value: Value, *key: Any) -> None:
        old = self.values.get(key, NOTHING)
        new = old | value
        if key in self._crowded or sum(atom[0] == "constant" for atom in new) > MAX_CONSTANTS:
            self._crowded.add(key)
            new = frozenset(atom for atom in new if atom[0] != "constant") | ANYTHING
        if new == old:
            return
        self.values[key] = new
        self._wake(key)

    def _wake(self, key: tuple) -> None:
        for reader in self.readers.get(key, ()):
            if reader not in self._waiting:
                self._waiting.append(reader)

    def reach(self, name: str) -> None:
        """Have a scope interpreted."""
        if name not in self.uses and not is_cut(name):
            self.uses[name] = []
            self._waiting.append(name)

    def solve(self, entries: Iterable[str]) -> None:
        for entry in entries:
            scope = self.sources.scopes.get(entry)
            if scope is None:
                sys.exit(f"reading: there is no {entry!r}: name MODULE:FUNCTION or MODULE:CLASS.METHOD")
            self.enter(scope, object_of(scope.owner) if scope.owner else None)
        self._settle()
        if not self._trusts_annotations:
            # What nothing was seen to flow into is now taken to be what its annotation says.
            self._trusts_annotations = True
            self._waiting.extend(name for name in self.uses if name not in self._waiting)
            self._settle()

    def _settle(self) -> None:
        while self._waiting:
            self._interpret(self.sources.scopes[self._waiting.popleft()])

    def _interpret(self, scope: Scope) -> None:
        self._current = scope
        self.uses[scope.name] = []
        Interpreter(self, scope).run()
        self._current = None

    def enter(self, scope: Scope, receiver: Value | None) -> None:
        """Reach a function whose caller is unknown."""
        self.reach(scope.name)
        parameters = parameters_of(scope)
        if receiver is not None and parameters and "staticmethod" not in scope.decorators():
            self.write(receiver, "local", scope.name, parameters.pop(0).arg)
        for parameter in parameters:
            self.write(self.annotated(parameter.annotation, scope), "local", scope.name, parameter.arg)

    def use(self, name: str) -> None:
        if self._current is not None and name not in self.uses[self._current.name]:
            self.uses[self._current.name].append(name)

    # Containers: a box holds values by position, by key, or (None) anywhere.

    def box(self, name: str, items: Mapping[Any, Value] = {}) -> Value:
        self.boxes.setdefault(name, set())
        for key, value in items.items():
            self.put(name, key, value)
        return frozenset([("box", name)])

    def put(self, box: str, key: Any, value: Value) -> None:
        if key not in self.boxes[box]:
            self.boxes[box].add(key)
            self._wake(("keys", box))
        self.write(value, "item", box, key)

    def keys_of(self, box: str) -> list[Any]:
        self.read("keys", box)
        return sorted(self.boxes.get(box, ()), key=repr)

    def items(self, value: Value, key: Any = None) -> Value:
        """Return what a container may hold, at ``key`` if it is known."""
        found = NOTHING
        for atom in ordered(value):
            if atom[0] == "box":
                keys = self.keys_of(atom[1])
                chosen = [one for one in keys if one in (key, None)] if key is not None and key in keys else keys
                found = found.union(*(self.read("item", atom[1], one) for one in chosen))
            elif atom[0] == "constant" and isinstance(atom[2], (tuple, list)):
                found = found.union(*(constant(one) for one in atom[2]))
            elif atom[0] == "object":
                name = "__getitem__" if key is not None else "__iter__"
                results = self.call(self.attribute(frozenset([atom]), name), [ANYTHING] if key is not None else [])
                found |= self.items(results) if name == "__iter__" else results
            elif atom == UNKNOWN:
                found |= ANYTHING
        return found

    # Classes.

    def mro(self, cls: str) -> tuple[str, ...]:
        """Return a class and the package's classes that it is derived from, nearest first."""
        if cls not in self._mros:
            scope, found = self.sources.scopes[cls], [cls]
            for base in scope.node.bases:
                base = base.value if isinstance(base, ast.Subscript) else base
                if derived_from := self.sources.class_of(base, scope.outer):
                    found += [one for one in self.mro(derived_from) if one not in found]
            self._mros[cls] = tuple(found)
        return self._mros[cls]

    def member(self, cls: str, name: str, *, after: str | None = None) -> Scope | None:
        """Return a method of a class or of those it is derived from."""
        key = (cls, name, after)
        if key not in self._members:
            self._members[key] = self._find_member(cls, name, after)
        return self._members[key]

    def _find_member(self, cls: str, name: str, after: str | None) -> Scope | None:
        mro = self.mro(cls)
        if after is not None:
            mro = mro[mro.index(after) + 1 :] if after in mro else ()
        stub = None
        for one in mro:
            scope = self.sources.scopes.get(f"{one}.{name}")
            if scope is not None and scope.is_function:
                if not scope.is_stub():
                    return scope
                stub = stub or scope
        return stub

    def fields(self, cls: str) -> dict[str, ast.AnnAssign]:
        """Return the annotated attributes of a class, those of its bases first."""
        found = {}
        for one in reversed(self.mro(cls)):
            for statement in self.sources.scopes[one].node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    found[statement.target.id] = statement
        return found

    def is_protocol(self, cls: str) -> bool:
        return any(ast.unparse(base).startswith("Protocol") for base in self.sources.scopes[cls].node.bases)

    def implementations(self, cls: str) -> Value:
        """Return the objects that an annotation of ``cls`` may mean: of those classes that have any."""
        self.read("instances")
        if self.is_protocol(cls):
            methods = {one.name for one in self.sources.scopes[cls].node.body if isinstance(one, ast.FunctionDef)}
            found = [
                one
                for one in self.instances
                if not self.is_protocol(one) and all(self.member(one, name) for name in methods)
            ]
        else:
            found = [one for one in self.instances if cls in self.mro(one)]
        return frozenset(("object", one) for one in found) or object_of(cls)

    def attribute(self, value: Value, name: str) -> Value:
        found = NOTHING
        for atom in ordered(value):
            if atom[0] == "object":
                found |= self._attribute_of_object(atom[1], name)
            elif atom[0] == "class":
                found |= self._attribute_of_class(atom[1], name)
            elif atom[0] == "module":
                found |= self.global_name(atom[1], name)
            elif atom[0] == "super":
                method = self.member(atom[1], name, after=atom[2])
                found |= frozenset([("method", method.name, atom[1])]) if method else ANYTHING
            elif atom[0] == "box":
                found |= frozenset([("of box", atom[1], name)])
            elif atom == UNKNOWN:
                found |= ANYTHING
        return found

    def _attribute_of_object(self, cls: str, name: str) -> Value:
        method = self.member(cls, name)
        if method is not None:
            decorators = method.decorators()
            if decorators & {"property", "cached_property"}:
                return self.call(frozenset([("method", method.name, cls)]), [])
            if "staticmethod" in decorators:
                return frozenset([("function", method.name)])
            return frozenset([("method", method.name, cls)])
        if name == "__call__" and (construct := self.member(cls, "construct")):
            return frozenset([("method", construct.name, cls)])
        if name.startswith("__") and name != "__class__":
            return NOTHING
        self.use(cls)
        settled = config_default(cls, name)
        if settled is not NOT_A_KEY:
            return self._as_value(settled)
        found = NOTHING.union(*(self.read("attribute", one, name) for one in self.mro(cls)))
        if found or not self._trusts_annotations:
            return found
        field = self.fields(cls).get(name)
        if field is not None:
            return self.annotated(field.annotation, self.sources.scopes[cls])
        return ANYTHING

    def _as_value(self, default: Any) -> Value:
        if dataclasses.is_dataclass(default):
            return object_of(f"{default.__module__}:{default.__name__}")
        if isinstance(default, (dict, list)):
            return constant(tuple(default))
        return constant(default) if default is not dataclasses.MISSING else ANYTHING

    def _attribute_of_class(self, cls: str, name: str) -> Value:
        method = self.member(cls, name)
        if method is not None:
            return frozenset([("method" if "classmethod" in method.decorators() else "function", method.name, cls)][:1])
        self.reach(cls)
        return NOTHING.union(*(self.read("attribute", one, name) for one in self.mro(cls))) or ANYTHING

    def global_name(self, module: str, name: str) -> Value:
        if module not in self.sources.paths:
            return ANYTHING
        if f"{module}.{name}" in self.sources.paths and name not in self.sources.scopes[f"{module}:"].names:
            return frozenset([("module", f"{module}.{name}")])
        self.reach(f"{module}:")
        if name not in self.sources.scopes[f"{module}:"].names:
            return constant(module) if name == "__name__" else ANYTHING
        return self.read("local", f"{module}:", name)

    # Annotations.

    def annotated(self, node: ast.AST | None, scope: Scope) -> Value:
        """Return what may be behind an annotation."""
        if node is None:
            return ANYTHING
        if isinstance(node, ast.Constant):
            if node.value is None:
                return NONE
            return (
                self.annotated(ast.parse(node.value, mode="eval").body, scope)
                if isinstance(node.value, str)
                else ANYTHING
            )
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left, scope) | self.annotated(node.right, scope)
        if isinstance(node, ast.Subscript):
            return self._annotated_container(node, scope)
        if isinstance(node, (ast.Name, ast.Attribute)):
            cls = self.sources.class_of(node, scope)
            return self.implementations(cls) if cls else ANYTHING
        return ANYTHING

    def refined(self, value: Value, annotation: ast.AST | None, scope: Scope) -> Value:
        """Return a value with what is unknown of it replaced by what its annotation says."""
        return (value - ANYTHING) | self.annotated(annotation, scope) if UNKNOWN in value else value

    def _annotated_container(self, node: ast.Subscript, scope: Scope) -> Value:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        kind = ast.unparse(node.value).rpartition(".")[2]
        name = f"{scope.name}[{ast.unparse(node)}]"
        if kind in ("Callable", "Literal"):
            return ANYTHING
        if kind == "Optional":
            return self.annotated(parts[0], scope) | NONE
        if kind == "tuple" and not (len(parts) == 2 and ast.unparse(parts[1]) == "..."):
            return self.box(name, {index: self.annotated(part, scope) for index, part in enumerate(parts)})
        last = parts[0] if kind in ("tuple", "Generator") else parts[-1]
        return self.box(name, {None: self.annotated(last, scope)})

    # Calls.

    def call(
        self, callees: Value, arguments: Sequence[Value], named: Mapping[str, Value] = {}, rest: Value = NOTHING
    ) -> Value:
        """Return what calling may return; ``rest`` are arguments whose places are unknown."""
        found = NOTHING
        for atom in ordered(callees):
            if atom[0] == "function":
                found |= self._call_function(self.sources.scopes[atom[1]], arguments, named, rest)
            elif atom[0] == "method":
                scope = self.sources.scopes[atom[1]]
                kind = "class" if "classmethod" in scope.decorators() else "object"
                found |= self._call_function(scope, [frozenset([(kind, atom[2])]), *arguments], named, rest)
            elif atom[0] == "class":
                found |= self._construct(atom[1], arguments, named, rest)
            elif atom[0] == "object":
                if method := self.attribute(frozenset([atom]), "__call__"):
                    found |= self.call(method, arguments, named, rest)
            elif atom[0] == "of box":
                found |= self._call_box(atom[1], atom[2], arguments)
            elif atom == UNKNOWN:
                found |= ANYTHING | self._call_unknown([*arguments, *named.values(), rest])
        return found

    def _call_unknown(self, arguments: Sequence[Value]) -> Value:
        """What is handed out of the package may be called there, with anything; callables may come back."""
        found = NOTHING
        for atom in ordered(NOTHING.union(*arguments)):
            if atom[0] in ("function", "method"):
                scope = self.sources.scopes[atom[1]]
                self.use(scope.name)
                kind = "class" if "classmethod" in scope.decorators() else "object"
                self.enter(scope, frozenset([(kind, atom[2])]) if atom[0] == "method" else None)
                found |= frozenset([atom])
            elif atom[0] == "object" and self.member(atom[1], "construct"):
                found |= frozenset([atom])
        return found

    def _call_box(self, box: str, name: str, arguments: Sequence[Value]) -> Value:
        value = frozenset([("box", box)])
        if name in ADDING:
            self.put(box, None, arguments[-1] if arguments else NOTHING)
            return NONE
        if name in JOINING:
            for one in arguments:
                self.put(box, None, self.items(one))
            return NONE
        if name == "items":
            pair = self.box(f"{box}.items()", {0: ANYTHING, 1: self.items(value)})
            return self.box(f"{box}.items", {None: pair})
        if name == "values":
            return self.box(f"{box}.values", {None: self.items(value)})
        if name == "copy":
            return value
        if name in TAKING:
            key = next((atom[2] for one in arguments[:1] for atom in one if atom[0] == "constant"), None)
            return self.items(value, key).union(*arguments[1:]) | (NONE if name == "get" else NOTHING)
        return ANYTHING

    def _construct(self, cls: str, arguments: Sequence[Value], named: Mapping[str, Value], rest: Value) -> Value:
        if is_cut(cls):
            return NOTHING
        self.use(cls)
        self.reach(cls)
        if cls not in self.instances:
            self.instances.add(cls)
            self._wake(("instances",))
        made = object_of(cls)
        init = self.member(cls, "__init__")
        if init is not None:
            self._call_function(init, [made, *arguments], named, rest)
        elif any("dataclass" in self.sources.scopes[one].decorators() for one in self.mro(cls)):
            self._fill(cls, arguments, named, rest)
        if post := self.member(cls, "__post_init__"):
            self._call_function(post, [made], {}, NOTHING)
        return made

    def _fill(self, cls: str, arguments: Sequence[Value], named: Mapping[str, Value], rest: Value) -> None:
        """Set the fields of a new dataclass."""
        fields = self.fields(cls)
        given = dict(zip(fields, arguments)) | dict(named)
        for name, field in fields.items():
            if name in given:
                value = given[name]
            elif field.value is not None and not rest:
                value = self._default(field.value, cls)
            else:
                value = rest
            value = self.refined(value, field.annotation, self.sources.scopes[cls])
            self.write(value, "attribute", cls, name)

    def _default(self, node: ast.AST, cls: str) -> Value:
        interpreter = Interpreter(self, self.sources.scopes[cls])
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("field"):
            for keyword in node.keywords:
                if keyword.arg == "default":
                    return interpreter.value(keyword.value)
                if keyword.arg == "default_factory":
                    if ast.unparse(keyword.value) in ("dict", "list", "set"):
                        return self.box(f"{cls}:{node.lineno}")
                    return self.call(interpreter.value(keyword.value), [])
            return ANYTHING
        return interpreter.value(node)

    def _call_function(
        self, scope: Scope, arguments: Sequence[Value], named: Mapping[str, Value], rest: Value
    ) -> Value:
        if is_cut(scope.name):
            return NOTHING
        if scope.name in ASSUMED:
            return self._as_value(ASSUMED[scope.name][0])
        results = [
            self._call_scope(one, list(arguments), dict(named), rest) for one in self._variants(scope, arguments, named)
        ]
        return NOTHING.union(*results)

    def _variants(self, scope: Scope, arguments: Sequence[Value], named: Mapping[str, Value]) -> list[Scope]:
        """Return a copy of a function for each name that it is to look up, so that their results stay apart."""
        if scope.dispatches_on is None:
            return [scope]
        given = dict(zip([one.arg for one in parameters_of(scope)], arguments)) | dict(named)
        chosen = [atom[2] for atom in given.get(scope.dispatches_on, NOTHING) if atom[0] == "constant"]
        if len(chosen) != 1:
            return [scope]
        name = f"{scope.name}[{chosen[0]}]"
        if name not in self.sources.scopes:
            self.sources.scopes[name] = Scope(name, scope.node, scope.module, scope.outer, scope.owner)
        return [self.sources.scopes[name]]

    def _call_scope(self, scope: Scope, arguments: list[Value], named: dict[str, Value], rest: Value) -> Value:
        self.use(scope.name)
        self.reach(scope.name)
        self._bind(scope, arguments, named, rest)
        if scope.is_stub():
            return self.annotated(scope.node.returns, scope)
        found = self.read("return", scope.name)
        return self.refined(found, getattr(scope.node, "returns", None), scope)

    def _bind(self, scope: Scope, arguments: list[Value], named: dict[str, Value], rest: Value) -> None:
        node = scope.node.args
        positional = [*node.posonlyargs, *node.args]
        defaults = dict(zip([one.arg for one in positional[::-1]], node.defaults[::-1]))
        defaults |= {one.arg: value for one, value in zip(node.kwonlyargs, node.kw_defaults) if value is not None}
        for index, parameter in enumerate([*positional, *node.kwonlyargs]):
            if index < len(positional) and index < len(arguments):
                value = arguments[index]
            elif parameter.arg in named:
                value = named.pop(parameter.arg)
            elif parameter.arg in defaults and not rest:
                value = Interpreter(self, scope.outer).value(defaults[parameter.arg])
            else:
                value = rest
            value = self.refined(value, parameter.annotation, scope)
            self.write(value, "local", scope.name, parameter.arg)
        if node.vararg:
            more = NOTHING.union(*arguments[len(positional) :]) | rest
            self.write(self.box(f"{scope.name}*", {None: more} if more else {}), "local", scope.name, node.vararg.arg)
        if node.kwarg:
            items = named | ({None: rest} if rest else {})
            self.write(self.box(f"{scope.name}**", items), "local", scope.name, node.kwarg.arg)


class Interpreter:
    """Interprets one scope once, with what is known by now."""

    def __init__(self, walk: Walk, scope: Scope):
        self._walk = walk
        self._scope = scope

    def run(self) -> None:
        node = self._scope.node
        if isinstance(node, ast.Lambda):
            self._return(self.value(node.body))
            return
        falls_off = not self._block(node.body)
        if self._scope.is_function and falls_off and not self._scope.is_generator:
            self._return(NONE)

    def _return(self, value: Value) -> None:
        self._walk.write(value, "return", self._scope.name)

    # Statements; each returns whether nothing after it in its block is reached.

    def _block(self, statements: Sequence[ast.stmt]) -> bool:
        return any(self._statement(statement) for statement in statements)

    def _statement(self, node: ast.stmt) -> bool:
        method = getattr(self, f"_on_{type(node).__name__}", None)
        if method is not None:
            return bool(method(node))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return False

    def _on_FunctionDef(self, node: ast.FunctionDef) -> None:
        scope = self._walk.sources.of_node[id(node)]
        for decorator in node.decorator_list:
            self.value(decorator)
        if not self._scope.is_class:
            self._store(node.name, frozenset([("function", scope.name)]))

    _on_AsyncFunctionDef = _on_FunctionDef

    def _on_ClassDef(self, node: ast.ClassDef) -> None:
        scope = self._walk.sources.of_node[id(node)]
        self._store(node.name, frozenset([("class", scope.name)]))
        self._walk.reach(scope.name)

    def _on_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self._store(alias.asname or name, self._module(name))

    def _on_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert not node.level, "the package imports by full names"
        for alias in node.names:
            self._store(alias.asname or alias.name, self._walk.attribute(self._module(node.module), alias.name))

    def _module(self, name: str) -> Value:
        return frozenset([("module", name)]) if name in self._walk.sources.paths else ANYTHING

    def _on_Return(self, node: ast.Return) -> bool:
        self._return(self.value(node.value) if node.value else NONE)
        return True

    def _on_Raise(self, node: ast.Raise) -> bool:
        return True  # a step that fails is another story

    def _on_Continue(self, node: ast.Continue) -> bool:
        return True

    _on_Break = _on_Continue

    def _on_If(self, node: ast.If) -> bool:
        may_be = self.truth(self.value(node.test))
        ends = [self._block(body) for choice, body in ((True, node.body), (False, node.orelse)) if choice in may_be]
        return bool(ends) and all(ends)

    def _on_While(self, node: ast.While) -> bool:
        if True in self.truth(self.value(node.test)):
            self._block(node.body)
        return False

    def _on_For(self, node: ast.For) -> bool:
        if items := self._iterated(node.iter):
            self._assign(node.target, items)
            self._block(node.body)
        self._block(node.orelse)
        return False

    def _iterated(self, node: ast.expr) -> Value:
        value = self.value(node)
        return self._walk.items(value) or (ANYTHING if any(atom[0] == "object" for atom in value) else NOTHING)

    def _on_With(self, node: ast.With) -> bool:
        for item in node.items:
            entered = self._entered(self.value(item.context_expr))
            if item.optional_vars is not None:
                self._assign(item.optional_vars, entered)
        return self._block(node.body)

    def _entered(self, value: Value) -> Value:
        """Return what a context gives, and have it left as well."""
        found = NOTHING
        for atom in ordered(value):
            one = frozenset([atom])
            if atom[0] == "object":
                found |= self._walk.call(self._walk.attribute(one, "__enter__"), [])
                self._walk.call(self._walk.attribute(one, "__exit__"), [NONE, NONE, NONE])
            else:
                found |= self._walk.items(one)
        return found

    def _on_Try(self, node: ast.Try) -> bool:
        ended = self._block(node.body) or self._block(node.orelse)
        self._block(node.finalbody)
        return ended

    def _on_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._assign(target, self.value(node.value), node.value)

    def _on_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is None or (self._scope.is_class and "dataclass" in self._scope.decorators()):
            return
        value = self.value(node.value)
        self._assign(node.target, self._walk.refined(value, node.annotation, self._scope))

    def _on_AugAssign(self, node: ast.AugAssign) -> None:
        self._assign(
            node.target, self._sum(self.value(ast.copy_location(as_load(node.target), node)), self.value(node.value))
        )

    def _assign(self, target: ast.expr, value: Value, source: ast.expr | None = None) -> None:
        walk = self._walk
        if isinstance(target, ast.Name):
            self._store(target.id, value)
        elif isinstance(target, ast.Attribute):
            for atom in ordered(self.value(target.value)):
                if atom[0] == "object":
                    walk.write(value, "attribute", atom[1], target.attr)
        elif isinstance(target, ast.Subscript):
            keys = [atom[2] for atom in self.value(target.slice) if atom[0] == "constant"]
            for atom in ordered(self.value(target.value)):
                if atom[0] == "box":
                    walk.put(atom[1], keys[0] if len(keys) == 1 else None, value)
                elif atom[0] == "object":
                    walk.call(walk.attribute(frozenset([atom]), "__setitem__"), [ANYTHING, value])
        elif isinstance(target, (ast.Tuple, ast.List)):
            for index, one in enumerate(target.elts):
                if isinstance(one, ast.Starred):
                    self._assign(one.value, walk.box(self._place(one), {None: walk.items(value)}))
                else:
                    self._assign(one, walk.items(value, index))

    def _store(self, name: str, value: Value) -> None:
        kind = "attribute" if self._scope.is_class else "local"
        self._walk.write(value, kind, self._scope.name, name)

    def _place(self, node: ast.AST) -> str:
        return f"{self._scope.name}@{node.lineno}:{node.col_offset}"

    # Expressions.

    def value(self, node: ast.expr) -> Value:
        method = getattr(self, f"_of_{type(node).__name__}", None)
        if method is not None:
            return method(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
        return ANYTHING

    def _of_Constant(self, node: ast.Constant) -> Value:
        return constant(node.value)

    def _of_Name(self, node: ast.Name) -> Value:
        scope = self._scope
        while scope is not None and node.id not in scope.names:
            scope = scope.outer
            while scope is not None and scope.is_class:
                scope = scope.outer
        if scope is None:
            return self._walk.global_name(self._scope.module, node.id) if node.id == "__name__" else ANYTHING
        if scope.name.endswith(":"):
            return self._walk.global_name(scope.module, node.id)
        return self._walk.read("attribute" if scope.is_class else "local", scope.name, node.id)

    def _of_Attribute(self, node: ast.Attribute) -> Value:
        return self._walk.attribute(self.value(node.value), node.attr)

    def _of_Lambda(self, node: ast.Lambda) -> Value:
        return frozenset([("function", self._walk.sources.of_node[id(node)].name)])

    def _of_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self._store(node.target.id, value)
        return value

    def _of_IfExp(self, node: ast.IfExp) -> Value:
        may_be = self.truth(self.value(node.test))
        return NOTHING.union(
            *(self.value(one) for choice, one in ((True, node.body), (False, node.orelse)) if choice in may_be)
        )

    def _of_BoolOp(self, node: ast.BoolOp) -> Value:
        found, goes_on = NOTHING, isinstance(node.op, ast.And)
        for index, one in enumerate(node.values):
            value = self.value(one)
            kept = value if index == len(node.values) - 1 else self._with_truth(value, not goes_on)
            found |= kept
            if goes_on not in self.truth(value):
                break
        return found

    def _with_truth(self, value: Value, wanted: bool) -> Value:
        return frozenset(atom for atom in value if wanted in self.truth(frozenset([atom])))

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return NOTHING.union(*(constant(not one) for one in self.truth(value)))
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return constant(-node.operand.value)
        return ANYTHING

    def _of_BinOp(self, node: ast.BinOp) -> Value:
        return self._sum(self.value(node.left), self.value(node.right))

    def _sum(self, left: Value, right: Value) -> Value:
        return frozenset(atom for atom in left | right if atom[0] == "box") | ANYTHING

    def _of_Compare(self, node: ast.Compare) -> Value:
        values = [self.value(one) for one in (node.left, *node.comparators)]
        if len(values) != 2 or not all(values):
            return ANYTHING if all(values) else NOTHING
        left, right = values
        if isinstance(node.ops[0], (ast.Is, ast.IsNot)) and right == NONE and UNKNOWN not in left:
            same = {atom == next(iter(NONE)) for atom in left}
            return NOTHING.union(*(constant(one == isinstance(node.ops[0], ast.Is)) for one in same))
        if len(left) * len(right) > MAX_CONSTANTS or any(atom[0] != "constant" for atom in left | right):
            return ANYTHING
        return NOTHING.union(*(compared(node.ops[0], a[2], b[2]) for a, b in itertools.product(left, right)))

    def _of_JoinedStr(self, node: ast.JoinedStr) -> Value:
        parts = []
        for one in node.values:
            value = self.value(one.value if isinstance(one, ast.FormattedValue) else one)
            parts.append(value)
        known = [[atom[2] for atom in value if atom[0] == "constant"] for value in parts]
        texts = ["".join(map(str, words)) for words in itertools.islice(itertools.product(*known), MAX_CONSTANTS)]
        return NOTHING.union(*map(constant, texts)) | (
            ANYTHING if any(UNKNOWN in value for value in parts) else NOTHING
        )

    def _of_Tuple(self, node: ast.Tuple) -> Value:
        if any(isinstance(one, ast.Starred) for one in node.elts):
            return self._of_List(node)
        values = [self.value(one) for one in node.elts]
        if all(len(value) == 1 and next(iter(value))[0] == "constant" for value in values):
            return constant(tuple(next(iter(value))[2] for value in values))
        return self._walk.box(self._place(node), dict(enumerate(values)))

    def _of_List(self, node: ast.List | ast.Set | ast.Tuple) -> Value:
        items = NOTHING
        for one in node.elts:
            items |= self._walk.items(self.value(one.value)) if isinstance(one, ast.Starred) else self.value(one)
        return self._walk.box(self._place(node), {None: items} if items else {})

    _of_Set = _of_List

    def _of_Dict(self, node: ast.Dict) -> Value:
        box = self._walk.box(self._place(node))
        for key, one in zip(node.keys, node.values):
            value = self.value(one)
            if key is None:
                for name, item in self._expanded(value):
                    self._walk.put(self._place(node), name, item)
                continue
            keys = [atom[2] for atom in self.value(key) if atom[0] == "constant"]
            self._walk.put(self._place(node), keys[0] if len(keys) == 1 else None, value)
        return box

    def _expanded(self, value: Value) -> Iterator[tuple[Any, Value]]:
        """Yield what ``**value`` gives, by name; None for what has no known one."""
        for atom in ordered(value):
            if atom[0] == "box":
                for key in self._walk.keys_of(atom[1]):
                    yield key, self._walk.read("item", atom[1], key)
            elif atom == UNKNOWN:
                yield None, ANYTHING

    def _of_Subscript(self, node: ast.Subscript) -> Value:
        value, keys = self.value(node.value), self.value(node.slice)
        if isinstance(node.slice, ast.Slice):
            return value
        known = [atom[2] for atom in keys if atom[0] == "constant"]
        return self._walk.items(value, known[0] if len(known) == 1 else "?")

    def _of_Slice(self, node: ast.Slice) -> Value:
        for one in (node.lower, node.upper, node.step):
            if one is not None:
                self.value(one)
        return ANYTHING

    def _of_Starred(self, node: ast.Starred) -> Value:
        return self._walk.items(self.value(node.value))

    def _comprehension(self, node: Any, *elements: ast.expr) -> Value:
        for generator in node.generators:
            items = self._iterated(generator.iter)
            if not items:
                return self._walk.box(self._place(node))
            self._assign(generator.target, items)
            if any(True not in self.truth(self.value(test)) for test in generator.ifs):
                return self._walk.box(self._place(node))
        values = [self.value(one) for one in elements]
        return self._walk.box(self._place(node), {None: values[-1]})

    def _of_ListComp(self, node: ast.ListComp) -> Value:
        return self._comprehension(node, node.elt)

    _of_SetComp = _of_GeneratorExp = _of_ListComp

    def _of_DictComp(self, node: ast.DictComp) -> Value:
        return self._comprehension(node, node.key, node.value)

    def _of_Yield(self, node: ast.Yield) -> Value:
        value = self.value(node.value) if node.value else NONE
        self._return(self._walk.box(f"{self._scope.name}:yield", {None: value}))
        return ANYTHING

    def _of_YieldFrom(self, node: ast.YieldFrom) -> Value:
        self._return(self._walk.box(f"{self._scope.name}:yield", {None: self._walk.items(self.value(node.value))}))
        return ANYTHING

    def _of_Call(self, node: ast.Call) -> Value:
        arguments, named, rest = [], {}, NOTHING
        special = self._builtin(node)
        if special is not None:
            return special
        callees = self.value(node.func)
        for one in node.args:
            if isinstance(one, ast.Starred):
                rest |= self._walk.items(self.value(one.value)) or NOTHING
            elif not rest:
                arguments.append(self.value(one))
            else:
                rest |= self.value(one)
        for keyword in node.keywords:
            if keyword.arg is not None:
                named[keyword.arg] = self.value(keyword.value)
                continue
            for name, item in self._expanded(self.value(keyword.value)):
                if isinstance(name, str):
                    named[name] = named.get(name, NOTHING) | item
                else:
                    rest |= item
        return self._walk.call(callees, arguments, named, rest)

    def _builtin(self, node: ast.Call) -> Value | None:
        """Return what a function of the language or of the standard library gives, None for every other."""
        text = ast.unparse(node.func)
        name = text.rpartition(".")[2]
        is_own = isinstance(node.func, ast.Name) and not any(name in scope.names for scope in self._outward())
        is_known = is_own if name in BUILTINS else text in STANDARD
        if not (is_known or name == "enter_context"):
            return None
        if name == "super":
            return self._super()
        arguments = [one.value if isinstance(one, ast.Starred) else one for one in node.args]
        values = [self.value(one) for one in arguments]
        if len(values) == 1 and isinstance(node.args[0], ast.Starred):
            values = [self._walk.items(values[0])]
        named = {one.arg: self.value(one.value) for one in node.keywords if one.arg}
        if name in COLLECTING:
            return self._collected(node, values, named)
        method = getattr(self, f"_call_{name}", None)
        return method(node, values, named) if method is not None and values else ANYTHING

    def _super(self) -> Value:
        method = next(scope for scope in self._outward() if scope.owner is not None)
        receiver = self._walk.read("local", method.name, parameters_of(method)[0].arg)
        return frozenset(("super", atom[1], method.owner) for atom in receiver if atom[0] in ("object", "class"))

    def _collected(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        walk = self._walk
        items = NOTHING.union(*map(walk.items, values))
        walk.call(named.get("key", NOTHING), [items])
        return walk.box(self._place(node), {None: items} if items else {})

    def _call_getattr(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        names = sorted(atom[2] for atom in values[1] if atom[0] == "constant")
        if UNKNOWN in values[1] and not names:
            return ANYTHING
        return NOTHING.union(*(self._walk.attribute(values[0], one) for one in names), *values[2:])

    def _call_enter_context(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        return self._entered(values[0])

    def _call_replace(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        for atom in ordered(values[0]):
            if atom[0] == "object":
                self._walk.use(atom[1])
                for field, value in named.items():
                    self._walk.write(value, "attribute", atom[1], field)
        return values[0]

    def _call_partial(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        self._walk.call(values[0], values[1:], named)
        return values[0]

    def _call_cast(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        return values[1]

    def _call_import_module(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        names = [atom[2] for atom in values[0] if atom[0] == "constant"]
        return NOTHING.union(*map(self._module, names)) if names else ANYTHING

    def _call_zip(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        items = [self._walk.items(value) for value in values]
        pair = self._walk.box(f"{self._place(node)}[]", dict(enumerate(items)))
        return self._walk.box(self._place(node), {None: pair} if all(items) else {})

    def _call_enumerate(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        return self._call_zip(node, [self._walk.box("count()", {None: ANYTHING}), values[0]], named)

    def _call_map(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        items = [self._walk.items(value) for value in values[1:]]
        return self._walk.box(self._place(node), {None: self._walk.call(values[0], items)} if all(items) else {})

    def _call_filter(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        self._call_map(node, values, named)
        return values[1]

    def _call_next(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        return self._walk.items(values[0]).union(*values[1:])

    def _call_max(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        items = self._walk.items(values[0]) if len(values) == 1 else NOTHING.union(*values)
        self._walk.call(named.get("key", NOTHING), [items])
        if len(values) == 1 and items and all(atom[0] == "constant" and atom[1] in ("int", "float") for atom in items):
            return constant((max if ast.unparse(node.func) == "max" else min)(atom[2] for atom in items))
        return frozenset(atom for atom in items if atom[0] != "constant") | ANYTHING

    _call_min = _call_max

    def _call_dict(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        found = self._walk.box(self._place(node), named)
        for value in values:
            self._walk.put(self._place(node), None, self._walk.items(self._walk.items(value)))
        return found

    def _call_isinstance(self, node: ast.Call, values: list[Value], named: dict[str, Value]) -> Value:
        classes = [atom[1] for atom in values[1] | self._walk.items(values[1]) if atom[0] == "class"]
        if UNKNOWN in values[0] or UNKNOWN in values[1] or not classes:
            return ANYTHING
        found = {atom[0] == "object" and any(one in self._walk.mro(atom[1]) for one in classes) for atom in values[0]}
        return NOTHING.union(*map(constant, found))

    def _outward(self) -> Iterator[Scope]:
        scope: Scope | None = self._scope
        while scope is not None:
            yield scope
            scope = scope.outer

    def truth(self, value: Value) -> set[bool]:
        """Return whether a value may be true, false or both; of nothing known yet, neither."""
        if not value and self._walk._trusts_annotations:
            return {True, False}
        found: set[bool] = set()
        for atom in ordered(value):
            if atom[0] == "constant":
                found.add(bool(atom[2]))
            elif atom[0] == "box":
                found |= {True, False} if self._walk.keys_of(atom[1]) else {False}
            elif atom[0] == "object":
                sized = self._walk.member(atom[1], "__len__") or self._walk.member(atom[1], "__bool__")
                found |= {True, False} if sized else {True}
            elif atom == UNKNOWN:
                found |= {True, False}
            else:
                found.add(True)
        return found


def ordered(value: Value) -> Sequence[Atom]:
    """Return what a value may be in an order that does not change from run to run."""
    return sorted(value, key=str) if len(value) > 1 else list(value)


def compared(operator: ast.cmpop, left: Any, right: Any) -> Value:
    tests = {
        ast.Eq: lambda: left == right,
        ast.NotEq: lambda: left != right,
        ast.Lt: lambda: left < right,
        ast.LtE: lambda: left <= right,
        ast.Gt: lambda: left > right,
        ast.GtE: lambda: left >= right,
        ast.In: lambda: left in right,
        ast.NotIn: lambda: left not in right,
        ast.Is: lambda: left is right,
        ast.IsNot: lambda: left is not right,
    }
    try:
        return constant(tests[type(operator)]())
    except TypeError:
        return ANYTHING


def as_load(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def object_of(cls: str) -> Value:
    return frozenset([("object", cls)])


def parameters_of(scope: Scope) -> list[ast.arg]:
    return [*scope.node.args.posonlyargs, *scope.node.args.args, *scope.node.args.kwonlyargs]


def is_cut(name: str) -> bool:
    return any(within(name, one) for one in CUT)


def within(name: str, prefix: str) -> bool:
    return name == prefix or (name.startswith(prefix) and name[len(prefix)] in ".:")


def config_default(cls: str, name: str) -> Any:
    """Return the default of a key of the config, MISSING where it has none; NOT_A_KEY for other attributes."""
    module, _, class_name = cls.partition(":")
    if not module.startswith(f"{PACKAGE}.config."):
        return NOT_A_KEY
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if (class_name, name) in SETTINGS:
        return SETTINGS[class_name, name]
    section = getattr(importlib.import_module(module), class_name, None)
    if not dataclasses.is_dataclass(section):
        return NOT_A_KEY
    for field in dataclasses.fields(section):
        if field.name == name:
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                factory = field.default_factory
                default = factory if dataclasses.is_dataclass(factory) else factory()
            return default
    return NOT_A_KEY


def reading_order(walk: Walk, entries: Sequence[str]) -> list[str]:
    """Return the scopes of a walk as one meets them: each call is followed where it stands, and once."""
    order: dict[str, None] = {}
    frontier = list(reversed(entries))
    while frontier:
        name = frontier.pop()
        if name in order or is_cut(name):
            continue
        order[name] = None
        frontier += reversed(walk.uses.get(name, []))
    return list(order)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is to be read.

    Attributes:
        functions: by module, in reading order: what of it the step calls, makes or reads.
        lines: of each module.
        left_out: lines that are reached but not counted, by the entry of ``LEFT_OUT``.
    """

    functions: dict[str, list[str]]
    lines: dict[str, int]
    left_out: dict[str, int]

    @property
    def num_lines(self) -> int:
        """All of them."""
        return sum(self.lines.values())


def read_step(entries: Sequence[str] = STEP) -> Reading:
    """Follow the step of the default config."""
    sources = Sources(ROOT / PACKAGE)
    run = Walk(sources)
    run.solve(RUN)
    step = Walk(sources, run)
    step.solve(entries)
    reached: dict[str, list[str]] = {module: [] for module in READ_FIRST} if entries == STEP else {}
    for name in reading_order(step, entries):
        reached.setdefault(sources.scopes[name].module, []).append(name.partition(":")[2])
    lines = {module: len(sources.paths[module].read_text(encoding="utf-8").splitlines()) for module in reached}
    left_out: dict[str, int] = {}
    for module in lines.keys() - COUNTED:
        for prefix in LEFT_OUT:
            if within(module, prefix):
                left_out[prefix] = left_out.get(prefix, 0) + lines.pop(module)
                del reached[module]
    return Reading(reached, {module: lines[module] for module in reached}, left_out)


def main() -> None:
    parser = argparse.ArgumentParser(description="The files that one step of GRPO goes through, in reading order.")
    parser.add_argument("entries", nargs="*", help="MODULE:FUNCTION or MODULE:CLASS.METHOD in place of the step's")
    parser.add_argument("--functions", action="store_true", help="show what is called in each")
    arguments = parser.parse_args()
    reading = read_step(tuple(arguments.entries) or STEP)
    total = 0
    for module, lines in reading.lines.items():
        total += lines
        print(f"{lines:5d} {total:6d}  {module}")
        if arguments.functions:
            print(
                textwrap.fill(
                    ", ".join(reading.functions[module]), 110, initial_indent=" " * 14, subsequent_indent=" " * 14
                )
            )
    print(f"{len(reading.lines)} files, {total} lines")
    left_out = sorted(reading.left_out.items(), key=lambda item: -item[1])
    print(f"taken at their names, {sum(reading.left_out.values())} lines more:")
    for prefix, lines in left_out:
        print(f"{lines:5d}  {prefix}: {LEFT_OUT[prefix]}")


if __name__ == "__main__":
    main()
