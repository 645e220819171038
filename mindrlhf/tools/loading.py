"""Functions and classes of a user's file, and the rollout engine that is one."""

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError


def load_named(path: Path, name: str, kind: str = "tool") -> Callable[..., Any]:
    """Run a user's file and return the function or class ``name`` of it.

    Args:
        kind: what it is for, to be named in errors.

    Raises:
        UserError: the file does not load, or has no such function or class.
    """
    specification = importlib.util.spec_from_file_location(f"mindrlhf_user_{kind}", path)
    if specification is None:
        raise UserError(f"{kind} file {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(specification)
    # Last, so that a helper beside the user's file or in the working directory is found but shadows nothing.
    sys.path.extend([str(path.resolve().parent), os.getcwd()])
    try:
        specification.loader.exec_module(module)
    except BaseException as error:
        raise UserError(f"{kind} file {path} does not load: {type(error).__name__}: {error}") from error
    tool = getattr(module, name, None)
    if not callable(tool):
        tests = (inspect.isfunction, inspect.isclass)
        defined = [key for key, value in vars(module).items() if key[0] != "_" and any(test(value) for test in tests)]
        raise UserError(f"{kind} file {path} has no function '{name}'; it has {', '.join(defined) or 'none'}")
    return tool


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
