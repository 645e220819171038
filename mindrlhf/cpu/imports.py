"""Importing large libraries in less time, and without what nobody calls."""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Iterator


@contextlib.contextmanager
def quick_imports(unused: Collection[str] = ()) -> Iterator[None]:
    """Have the body, which imports large libraries, take less time and memory.

    Args:
        unused: packages that these libraries import and nobody here calls; see :func:`left_out`.
    """
    with lasting_objects(), left_out(unused):
        yield


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


@contextlib.contextmanager
def left_out(packages: Collection[str]) -> Iterator[None]:
    """Have imports of ``packages`` that the body makes give placeholders, unless a package is loaded already.

    A dotted name leaves out that part of a package. What is taken from a placeholder raises ImportError when it is
    called. After the body the packages can be imported as ever; only modules that were loaded in it keep placeholders.
    """
    finder = _PlaceholderFinder(frozenset(packages) - sys.modules.keys())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Placeholder)]:
            placeholder = sys.modules.pop(name)
            parent, _, last = name.rpartition(".")
            whole = sys.modules.get(parent)
            if whole is not None and vars(whole).get(last) is placeholder:
                delattr(whole, last)


class _Placeholder(types.ModuleType):
    """A module that has everything."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        whole_name = f"{self.__name__}.{name}"

        def refuse(*arguments, **options):
            raise ImportError(f"{whole_name} was left out of the import that asked for it")

        return type(name, (), {"__new__": refuse})


class _PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]):
        self._packages = packages

    def find_spec(self, fullname, path, target=None):
        parts = fullname.split(".")
        if not any(".".join(parts[:length]) in self._packages for length in range(1, len(parts) + 1)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Placeholder(spec.name)

    def exec_module(self, module):
        """There is nothing to run."""
