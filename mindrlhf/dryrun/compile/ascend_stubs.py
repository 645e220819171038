"""MindSpore's Ascend compilation on machines without CANN, for processes that only compile.

MindSpore's ordinary wheel contains its Ascend plugin. Without CANN it does not load, only because symbols of CANN's
libraries are missing at link time. :func:`activate` defines them: it reads which they are from the installed wheel,
writes small shared libraries that export them (once per wheel, in the user's cache directory), and loads these into
this process before MindSpore. CUDA ships such stub libraries for the same purpose. An installed CANN is used instead.

Real, in simulation (``MS_SIMULATION_LEVEL``): MindSpore's parsing, automatic differentiation, semi-auto-parallel
sharding, pipeline splitting, the communication operators with their groups, strategy files, `mindspore.export` of the
sharded graph and, at level 1, memory planning of the whole graph.

Not real: every function of CANN returns 0 or an empty object. Nothing is computed and nothing communicated; results of
a run are zeros or garbage. Kernels are not compiled, so an operator that CANN would refuse goes unnoticed, and their
workspaces, like HCCL's buffers, are missing from the planned memory: it is a lower bound. No time can be measured.

So the stand-ins must never reach a training process: only the compile children started by
:mod:`mindrlhf.dryrun.compile.request` call :func:`activate`.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
import sys
import tempfile
import types
from pathlib import Path

from mindrlhf.dryrun.compile.elf import read_dynamic_symbols, write_library
from mindrlhf.errors import UserError

# 2.10.0 by every test; 2.9.0 until November 2026.
TESTED_VERSIONS = ("2.9.0", "2.10.0")
LEVEL_COMPILE, LEVEL_PLAN_MEMORY = 0, 1

_PLUGINS = (
    "plugin/libmindspore_ascend.so.2",
    "plugin/libmindspore_ops_ascend.so",
    "plugin/ascend/libmindspore_ascend_res_manager.so",
    "plugin/ascend/libd_collective.so",
    "plugin/ascend/libmindspore_graph_ir.so",
    "plugin/ascend/libhccl_plugin.so",
)
# Loaded by name while MindSpore runs; every one exports all the symbols.
_OPENED_BY_NAME = (
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libacl_tdt_channel.so",
    "libmsprofiler.so",
    "driver/libascend_hal.so",
    "libopapi.so",
    "libnnopbase.so",
    "libruntime.so",
    "libprofapi.so",
    "libacl_tdt_queue.so",
)
_NOT_CANN = re.compile(r"lib(mindspore|d_coll|stdc|m\.|gcc|gomp|pthread|c\.|dl|rt\.|hccl_plugin|ms_)|ld-linux|_c_")
_RUNTIMES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1")
_FETCHED_BY_NAME = re.compile(rb"(?<![A-Za-z0-9_])(acl[a-zA-Z]+\w{2,60})(?=\0)")
_OPERATOR_HELPERS = frozenset(
    (
        "InitHugeMemThreadLocal",
        "UnInitHugeMemThreadLocal",
        "ReleaseHugeMem",
        "InitPTACacheThreadLocal",
        "SetPTAHashKey",
        "CanUsePTACache",
        "PTAGetExecCache",
    )
)


def activate(rank: int, world_size: int, level: int) -> bool:
    """Prepare this process to compile for rank ``rank`` of ``world_size``; call it before MindSpore is imported.

    Args:
        rank, world_size: the rank MindSpore shall believe to be.
        level: ``LEVEL_COMPILE`` or ``LEVEL_PLAN_MEMORY``.

    Returns:
        Whether CANN is simulated; False when the machine has CANN.

    Raises:
        UserError: neither CANN nor its simulation can be used here.
    """
    assert "mindspore" not in sys.modules, "the stand-ins must be loaded before mindspore"
    set_rank(rank, world_size)
    os.environ["MS_SIMULATION_LEVEL"] = str(level)
    if find_cann() is not None:
        return False
    _load(stand_ins())
    return True


def set_rank(rank: int, world_size: int) -> None:
    """Tell MindSpore which rank it is; it reads this when communication is initialised."""
    os.environ.update(RANK_ID=str(rank), RANK_SIZE=str(world_size))


def find_cann() -> Path | None:
    """Return CANN's library directory when its environment is set up, as its set_env.sh does."""
    directories = [
        f"{os.environ[name]}/lib64" for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH") if name in os.environ
    ]
    directories += [name for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    return next((Path(name) for name in directories if os.path.exists(f"{name}/libascendcl.so")), None)


def stand_ins() -> Path:
    """Return the directory of the stand-in libraries for the installed wheel, written if need be.

    Raises:
        UserError: the machine, MindSpore's version or the cache directory does not allow it.
    """
    library_dir = _check_supported()
    wheel = os.stat(library_dir / _PLUGINS[0])
    key = hashlib.sha256(f"{library_dir}\0{wheel.st_size}\0{wheel.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = _private_cache_dir()
    root = cache / f"{importlib.metadata.version('mindspore')}-{key}"
    if not root.exists():
        temporary = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        _write_stand_ins(library_dir, temporary)
        try:
            temporary.rename(root)
        except OSError:
            # Another process was faster; ours is as good as its own.
            if not root.exists():
                raise
    return root


def _check_supported() -> Path:
    machine, system = platform.machine(), platform.system()
    if (machine, system) != ("x86_64", "Linux"):
        raise UserError(
            f"this machine is {system} {machine} without CANN; compiling without CANN works on x86-64 Linux only: "
            "install CANN (its toolkit is enough, no NPU is needed), or run this on an x86-64 machine"
        )
    try:
        version = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("mindspore is not installed in this environment: run scripts/setup.sh") from None
    if version not in TESTED_VERSIONS:
        raise UserError(
            f"mindspore {version} is installed, but compiling without CANN was tested with "
            f"{', '.join(TESTED_VERSIONS)} only: install that version, or CANN"
        )
    library_dir = Path(importlib.util.find_spec("mindspore").origin).parent / "lib"
    if not (library_dir / _PLUGINS[0]).exists():
        raise UserError(
            f"the installed mindspore has no Ascend plugin ({_PLUGINS[0]}): install the package-index wheel"
        )
    return library_dir


def _private_cache_dir() -> Path:
    """Make sure that nobody else can put libraries where this process loads them from."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = base / "mindrlhf" / "ascend-stand-ins"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = directory.stat()
    except OSError as error:
        raise UserError(
            f"{directory} cannot be made ({error.strerror}): set XDG_CACHE_HOME to a directory of yours"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{directory} can be written by others: remove it, or set XDG_CACHE_HOME to a directory of yours"
        )
    return directory


def _write_stand_ins(library_dir: Path, root: Path) -> None:
    symbols, needed = _missing_symbols(library_dir)
    bodies = {name: _body_of(name) for name in symbols}
    # MindSpore finds CANN by the path of aclrtMalloc's library, which must contain "cann".
    libraries = root / "cann" / "lib64"
    (libraries / "driver").mkdir(parents=True)
    (root / "cann" / "opp").mkdir()
    for name in dict.fromkeys((*needed, *_OPENED_BY_NAME)):
        exported = bodies if name in _OPENED_BY_NAME else {"mindrlhf_stand_in": "zero"}
        write_library(libraries / name, os.path.basename(name), exported)


def _missing_symbols(library_dir: Path) -> tuple[set[str], list[str]]:
    """The symbols that CANN would define, and the names of its libraries that MindSpore is linked against."""
    defined: set[str] = set()
    for path in (*library_dir.glob("*.so*"), *library_dir.parent.glob("*.so")):
        defined |= read_dynamic_symbols(path).defined
    undefined: set[str] = set()
    fetched: set[str] = set()
    needed: set[str] = set()
    for name in _PLUGINS:
        if (library_dir / name).exists():
            library = read_dynamic_symbols(library_dir / name)
            needed |= set(library.needed)
            undefined |= library.undefined
            defined |= library.defined
            fetched |= {match.decode() for match in _FETCHED_BY_NAME.findall(library.data)}
    fetched |= {
        f"{name}GetWorkspaceSize"
        for name in fetched
        if name.startswith("aclnn") and not name.endswith("GetWorkspaceSize")
    }
    # Defining a symbol of the C or C++ runtime would shadow the real one: exceptions would no longer work.
    runtimes = [ctypes.CDLL(name) for name in _RUNTIMES]
    missing = {
        name
        for name in undefined - defined
        if not name.startswith(("Py", "_Py")) and not any(hasattr(runtime, name) for runtime in runtimes)
    }
    return missing | fetched | _OPERATOR_HELPERS, sorted(name for name in needed if not _NOT_CANN.match(name))


def _body_of(symbol: str) -> str:
    """Return the body of :data:`mindrlhf.dryrun.compile.elf.BODIES` for a symbol: most return 0, objects are empty.

    Mangled names of the graph engine's namespace (`2ge`) tell what they return.
    """
    if symbol == "_ZN2ge13StatusFactory8InstanceEv":
        return "empty_map"
    if "2ge" not in symbol:
        return "zero"
    if re.search(r"2ge8OperatorC[12]|CreateOperator|GetDimsEv|GetDirectNode|ControlNodes", symbol):
        return "clear24"
    if re.match(r"_ZN2ge\d+\w+?C[12]E", symbol) and "Register" not in symbol:
        return "clear16"
    by_value = r"Get(Origin)?ShapeEv|GetTensorDescEv|GetOutputDesc|Get(In|Out)DataNodes|GetCompiledGraphSummary"
    return "clear16" if re.search(by_value, symbol) else "zero"


def _load(root: Path) -> None:
    libraries = root / "cann" / "lib64"
    os.environ["ASCEND_OPP_PATH"] = str(root / "cann" / "opp")
    # The first library loaded is the one whose path tells where CANN is.
    for path in (libraries / "libascendcl.so", *sorted(libraries.glob("*.so")), *sorted(libraries.glob("driver/*.so"))):
        ctypes.CDLL(str(path))
    # CANN's Python package, of which MindSpore asks the version.
    hccl, sys_version = types.ModuleType("hccl"), types.ModuleType("hccl.sys_version")
    sys_version.__sys_version__ = "8.5"
    hccl.sys_version = sys_version
    sys.modules.update({"hccl": hccl, "hccl.sys_version": sys_version})
