"""Packages of which a process needs a few modules, imported without the rest of them."""

import importlib.util
import sys
import types
from typing import Any


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
