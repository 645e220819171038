"""Importing large libraries in less time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def lasting_objects() -> Iterator[None]:
    """Spare the garbage collector what the body makes: modules, functions and classes that live as long as the process.

    Looking through them again and again takes a tenth (MindSpore) to a third (vLLM) of the time of the imports, and of
    every full collection that these libraries ask for afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
