"""Functions and classes of a user's file: loaded, or read without running it."""

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

from mindrlhf.errors import UserError

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def declared_signature(path: Path, name: str) -> Signature | None:
    """Return the signature of ``function``, or of ``Class.method``, that a file defines at its top.

    Defaults are only known to be there: each is None. What only running the file would tell is None as a whole: a
    function that is imported, made by a call, or decorated.
    """
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    *outer, last = name.split(".")
    for part in outer:
        classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == part]
        nodes = classes[-1].body if classes else []
    found = [node for node in nodes if isinstance(node, _FUNCTIONS) and node.name == last]
    return _signature(found[-1].args) if found and not found[-1].decorator_list else None


def _signature(names: ast.arguments) -> Signature:
    kinds = [(one.arg, Parameter.POSITIONAL_ONLY) for one in names.posonlyargs]
    kinds += [(one.arg, Parameter.POSITIONAL_OR_KEYWORD) for one in names.args]
    first_default = len(kinds) - len(names.defaults)
    parameters = [
        Parameter(name, kind, default=Parameter.empty if place < first_default else None)
        for place, (name, kind) in enumerate(kinds)
    ]
    parameters += [Parameter(names.vararg.arg, Parameter.VAR_POSITIONAL)] if names.vararg else []
    parameters += [
        Parameter(one.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if value is None else None)
        for one, value in zip(names.kwonlyargs, names.kw_defaults, strict=True)
    ]
    return Signature(parameters + ([Parameter(names.kwarg.arg, Parameter.VAR_KEYWORD)] if names.kwarg else []))


def load_named(path: Path, name: str, kind: str = "tool") -> Callable[..., Any]:
    """Run a user's file, once in a process, and return the function or class ``name`` of it.

    Args:
        kind: what it is for, to be named in errors.

    Raises:
        UserError: the file does not load, or has no such function or class.
    """
    module = _load(path, kind)
    function = getattr(module, name, None)
    if not callable(function):
        tests = (inspect.isfunction, inspect.isclass)
        defined = [key for key, value in vars(module).items() if key[0] != "_" and any(test(value) for test in tests)]
        raise UserError(f"{kind} file {path} has no function '{name}'; it has {', '.join(defined) or 'none'}")
    return function


def _load(path: Path, kind: str) -> ModuleType:
    name = f"mindrlhf_user_{kind}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None:
        raise UserError(f"{kind} file {path} is not a Python file: its name must end in .py")
    # Dataclasses and the like look their module up while it is being executed.
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    # Last, so that a helper beside the user's file or in the working directory is found but shadows nothing.
    sys.path.extend([str(path.resolve().parent), os.getcwd()])
    try:
        specification.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise UserError(f"{kind} file {path} does not load: {type(error).__name__}: {error}") from error
    return module


def find_engine(engine: str) -> str:
    """Return `rollout.engine` with an absolute path: "vllm", or a file and its class with the methods of
    :class:`mindrlhf.rollout.server.engine.VllmEngine`.

    Raises:
        UserError: it is neither vllm nor a class of a Python file. The file is read, and not run: what it imports may
            be in the rollout environment alone.
    """
    if engine == "vllm":
        return engine
    path, _, name = engine.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise UserError(f"'rollout.engine' is {engine}: write vllm, or path/to/file.py:Class")
    try:
        tree = ast.parse(Path(path).read_bytes(), path)
    except OSError as error:
        raise UserError(f"'rollout.engine': {path} cannot be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"'rollout.engine': {path} is not Python: {error}") from None
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if name not in classes:
        raise UserError(f"'rollout.engine': {path} has no class '{name}'; it has {', '.join(classes) or 'none'}")
    return f"{Path(path).resolve()}:{name}"
