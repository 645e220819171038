"""Importing large libraries in less time."""

import contextlib
import gc
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

_HOLLOW_MINDSPORES = ("2.9.0",)


@contextlib.contextmanager
def lasting_objects() -> Iterator[None]:
    """Spare the garbage collector what the body makes: modules, functions and classes that live as long as the process.

    Looking through them again and again took a fifth of vLLM's imports and half of building its engine, which asks for
    full collections; MindSpore asks for one at each graph that it compiles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def hollow_mindspore() -> bool:
    """Have MindSpore's modules imported without the package around them, in a process that needs a few and no more.

    Returns:
        Whether that was tried with the MindSpore that there is; where not, nothing is changed.
    """
    hollow_packages("mindspore")
    if importlib.import_module("mindspore.version").__version__ in _HOLLOW_MINDSPORES:
        return True
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspore"]:
        del sys.modules[name]
    return False


def hollow_packages(*names: str) -> None:
    """Give the program packages that hold nothing, so that their modules can be imported without the rest of them.

    For a process that needs a few modules of a package whose ``__init__`` loads it whole, and for nothing else: it
    lasts as long as the process. A package comes before those inside it.
    """
    for name in names:
        found = importlib.util.find_spec(name)
        package = types.ModuleType(name)
        package.__spec__, package.__path__ = found, list(found.submodule_search_locations)
        _enter(package)


def hollow_module(name: str, **contents: Any) -> None:
    """Put a module of ``contents`` in the place of one that would take long to load; see :func:`hollow_packages`."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    _enter(module)


def _enter(module: types.ModuleType) -> None:
    name = module.__name__
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
