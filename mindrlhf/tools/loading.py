"""Functions and classes of a user's file."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError


def load_named(path: Path, name: str) -> Callable[..., Any]:
    """Run a user's file and return the function or class ``name`` of it.

    Raises:
        UserError: the file does not load, or has no such function or class.
    """
    specification = importlib.util.spec_from_file_location("mindrlhf_user_tools", path)
    if specification is None:
        raise UserError(f"tool file {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(specification)
    # Last, so that a helper beside the user's file is found but shadows nothing.
    sys.path.append(str(path.resolve().parent))
    try:
        specification.loader.exec_module(module)
    except BaseException as error:
        raise UserError(f"tool file {path} does not load: {type(error).__name__}: {error}") from error
    tool = getattr(module, name, None)
    if not callable(tool):
        kinds = (inspect.isfunction, inspect.isclass)
        defined = [key for key, value in vars(module).items() if key[0] != "_" and any(kind(value) for kind in kinds)]
        raise UserError(f"tool file {path} has no function '{name}'; it has {', '.join(defined) or 'none'}")
    return tool
