"""Importing large libraries in less time."""

import contextlib
import gc
from collections.abc import Iterator


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
