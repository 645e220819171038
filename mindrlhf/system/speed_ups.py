"""Optional hooks into ``mindrlhf.cpu``.

Nothing imports that package, and everything works without it, slower. What a kind of process can ask of it are the
public functions of one module: ``training/hooks.py`` for ranks, ``rollout/hooks.py`` for rollout servers,
``launcher.py`` for launchers, and ``imports.py`` for all.
"""

import contextlib
import importlib
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parents[1] / "cpu"
MISSING = "mindrlhf: the CPU speed-ups (mindrlhf/cpu) are not there: training and sampling are slower"


def of_rank(device: str) -> ModuleType | None:
    """Return the speed-ups of a rank; None on other devices than "cpu", and without the package."""
    return _find("training.hooks") if device == "cpu" else None


def of_server(device: str) -> ModuleType | None:
    """Return the speed-ups of a rollout server; None on other devices than "cpu", and without the package."""
    return _find("rollout.hooks") if device == "cpu" else None


def of_launcher() -> ModuleType | None:
    """Return the speed-ups of a launcher and of the scheduler that it starts; None without the package."""
    return _find("launcher")


@contextlib.contextmanager
def quick_imports(unused: Collection[str] = ()) -> Iterator[None]:
    """Have the body, which imports large libraries, take less time and memory.

    Args:
        unused: packages that these libraries import and nobody here calls; without the speed-ups they are imported.
    """
    imports = _find("imports")
    if imports is None:
        yield
        return
    with imports.lasting_objects(), imports.left_out(unused) if unused else contextlib.nullcontext():
        yield


def _find(name: str) -> ModuleType | None:
    # The finder of an editable install would also find the package of another copy than this one.
    return importlib.import_module(f"mindrlhf.cpu.{name}") if (_FOLDER / "__init__.py").is_file() else None
