"""Compiled graphs on disk, so that the next start of a run need not compile them again (CPU).

MindSpore can keep the graphs that it compiles, but finds one by the order of compilations within a process, and sees
changes of the entry script only (https://www.mindspore.cn/docs, "compile cache"). So each graph has a directory of its
own here, named by a digest of everything it is made of: the code and the versions, the config, the cells with their
constants, and the shapes of the inputs. Where anything is in doubt, the graph is compiled.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.graph.api import _get_compile_cache_dep_files

import mindrlhf
from mindrlhf.cpu.training.heads import bind

VARIABLE = "MINDRLHF_GRAPH_CACHE"
MAX_BYTES = 1 << 30
_NEW = ".new-"
_DEPENDENCIES = "compile_dependency.hash"
_GRAPH, _SUM = "graph.mindir", "graph.sha256"


def cache_dir() -> Path | None:
    """Return where graphs are kept: ``MINDRLHF_GRAPH_CACHE``, or below the user's cache; None for "off" or nowhere."""
    named = os.environ.get(VARIABLE)
    if named == "off":
        return None
    if named:
        return Path(named).absolute()
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root, "mindrlhf", "graphs")
    home = os.environ.get("HOME")
    return Path(home, ".cache", "mindrlhf", "graphs") if home else None


class GraphCache:
    """The cached graphs of this process.

    Args:
        root: the directory; made where it is missing. It must be this user's alone, since graphs are run.
        facts: what the graphs depend on beside the cells and the software, such as the config.
        rank: this process; MindSpore keeps the graphs of each rank apart.
    """

    def __init__(self, root: Path, facts: Sequence[str], rank: int = 0):
        root.mkdir(parents=True, exist_ok=True)
        status = root.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{root} can be written by others")
        self._root, self._says = root, rank == 0
        self._keys: set[str] = set()
        # MindSpore looks into the directory that it was told first, whatever it is told later.
        self._place = root / f"{_NEW}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._files = self._place / f"rank_{rank}" / "graph_cache"
        program = os.path.realpath(sys.argv[0])
        if not os.path.isfile(program):
            raise FileNotFoundError(f"the program '{sys.argv[0]}' is no file")
        self._mark = _mark()
        self._common = [_software(), program, *facts, str(rank)]
        role = os.environ.get("MS_ROLE", "")  # of ranks that msrun started, begins the names of MindSpore's files
        self._dependencies = self._files / f"{role}{_DEPENDENCIES}"
        self._graph_name = f"{role}compile_cache_%d.mindir"
        self._num_compiled = 0  # with the cache on: MindSpore numbers its files so
        self.num_found = 0
        _make_room(root)

    def compile(self, cell: nn.Cell, inputs: Sequence[Any], signature: str) -> None:
        """Compile a cell for inputs of new shapes: take the graph from the disk, or leave it there."""
        key = _digest([*self._common, *describe(cell), signature])
        if key in self._keys:
            # Of an equal model that is gone: a graph is read once in a process, which is all that a run needs.
            cell.compile(*inputs)
            return
        self._keys.add(key)
        with self._compiling(key):
            cell.compile(*inputs)

    @contextlib.contextmanager
    def _compiling(self, key: str) -> Iterator[None]:
        kept, number = self._root / key, self._num_compiled
        try:
            self._files.mkdir(parents=True)
            is_found = self._take(kept, number)
        except OSError:  # such as a full disk
            shutil.rmtree(self._place, ignore_errors=True)
            yield
            return
        self._num_compiled += 1
        ms.set_context(enable_compile_cache=True, compile_cache_path=str(self._place))
        try:
            yield
        finally:
            ms.set_context(enable_compile_cache=False)
            if is_found and not self.num_found and self._says:
                print(f"mindrlhf: using cached graphs of {self._root}", flush=True)
            self.num_found += is_found
            if not is_found:
                with contextlib.suppress(OSError):  # as above, or another process was first
                    self._keep(kept, number)
            shutil.rmtree(self._place, ignore_errors=True)

    def _take(self, kept: Path, number: int) -> bool:
        """Copy a graph to where MindSpore looks for its next one; False where there is none, or a damaged one."""
        # Without its mark MindSpore gives up on all further graphs of the process.
        self._dependencies.write_text(self._mark, encoding="utf-8")
        if not kept.exists():
            return False
        content = (kept / _GRAPH).read_bytes()
        if hashlib.sha256(content).hexdigest() != (kept / _SUM).read_text(encoding="utf-8"):
            shutil.rmtree(kept)
            return False
        os.utime(kept)
        (self._files / (self._graph_name % number)).write_bytes(content)
        return True

    def _keep(self, kept: Path, number: int) -> None:
        graph = self._files / (self._graph_name % number)
        (self._files / _SUM).write_text(hashlib.sha256(graph.read_bytes()).hexdigest(), encoding="utf-8")
        graph.rename(self._files / _GRAPH)
        self._dependencies.unlink(missing_ok=True)
        self._files.rename(kept)


_cache: GraphCache | None = None
_seen: WeakKeyDictionary[nn.Cell, set] = WeakKeyDictionary()  # the signatures of inputs that each cell was compiled for


def open_graph_cache(facts: Sequence[str], rank: int = 0) -> None:
    """Keep the graphs that :func:`run_graph` compiles from now on; a directory that cannot be used is passed over."""
    global _cache
    root = cache_dir()
    try:
        _cache = GraphCache(root, facts, rank) if root else None
    except OSError as error:
        _cache = None
        print(f"mindrlhf: compiled graphs are not kept: {error}", flush=True)


def run_graph(cell: nn.Cell, *inputs: Any) -> Any:
    """Call a cell in graph mode, with the weights of its heads where they lie now and its graph from an open cache."""
    bind(cell)
    signature, seen = ", ".join(map(_signature, inputs)), _seen.setdefault(cell, set())
    if signature not in seen:
        seen.add(signature)
        if _cache is None:
            cell.compile(*inputs)
        else:
            _cache.compile(cell, inputs, signature)
        _give_back_memory()
    return cell(*inputs)


def _give_back_memory() -> None:
    """Give the system what the compiler has freed, before the run asks for more: glibc keeps pieces of its heap."""
    with contextlib.suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


def describe(cell: nn.Cell) -> Iterator[str]:
    """Yield what a graph takes from its cells: their classes, settings, constants and parameters, without values."""
    usual = vars(nn.Cell()).keys() | {"current_phase"}  # of MindSpore itself
    for name, part in cell.cells_and_names():
        kind = type(part)
        yield f"{name} {kind.__module__}.{kind.__qualname__} {part.training}"
        for key, value in sorted(vars(part).items()):
            if key not in usual and not isinstance(value, ms.Parameter | nn.Cell):
                yield f"{key} {_describe_value(value)}"
    for parameter in cell.get_parameters():
        yield f"{parameter.name} {parameter.shape} {parameter.dtype} {parameter.requires_grad}"


def _signature(value: Any) -> str:
    """Return what a graph takes from an input: dtype and shape of a tensor; all of what is a constant to MindSpore."""
    if isinstance(value, tuple | list):
        if not getattr(value, "__ms_mutable__", False):
            return _describe_value(value)
        return f"({', '.join(map(_signature, value))})"
    return f"{value.dtype} {value.shape}" if isinstance(value, ms.Tensor) else repr(value)


def _describe_value(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, ms.Parameter):
        return value.name
    if isinstance(value, ms.Tensor):
        value = value.asnumpy()
        return f"{value.dtype} {value.shape} {hashlib.sha256(np.ascontiguousarray(value)).hexdigest()}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_describe_value, value))}]"
    if isinstance(value, dict):
        return _describe_value([item for pair in sorted(value.items(), key=repr) for item in pair])
    if isinstance(value, ops.Primitive):
        return f"{value.name} {_describe_value(value.attrs)}"
    return getattr(value, "__qualname__", type(value).__qualname__)


def _software() -> str:
    sources = sorted(Path(mindrlhf.__file__).parent.rglob("*.py"))
    versions = [version(name) for name in ("mindspore", "mindformers", "numpy")]
    return _digest([*versions, os.uname().machine, *(path.read_text(encoding="utf-8") for path in sources)])


def _digest(parts: Sequence[str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(part.encode(errors="surrogateescape") + b"\0")
    return state.hexdigest()[:40]


def _mark() -> str:
    """Return what MindSpore knows the program by that compiled: a digest of the digests of its script and of all that
    this one imports from places that are not on the path, in the order of their names."""
    digests = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in sorted(_get_compile_cache_dep_files())]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _make_room(root: Path) -> None:
    """Delete the graphs that were not used for longest, beyond ``MAX_BYTES``, and what killed processes left."""
    total = 0
    entries = [(entry.stat().st_mtime, Path(entry)) for entry in os.scandir(root) if entry.is_dir()]
    newest = max((time for time, _ in entries), default=0.0)
    for time, path in sorted(entries, reverse=True):
        total += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        is_left = path.name.startswith(_NEW) and time < newest - 3600
        if total > MAX_BYTES or is_left:
            shutil.rmtree(path, ignore_errors=True)
