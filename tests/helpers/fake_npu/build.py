"""Makes a directory in which the rollout interpreter takes this machine for one with NPUs.

    PYTHONPATH=. python tests/helpers/fake_npu/build.py WHEELS DIRECTORY ROLLOUT_PYTHON

WHEELS holds wheels (``VERSIONS``, ``OTHERS``: pip download --no-deps); what of vLLM is C++ for a device is left out.
``DIRECTORY/python`` then takes the interpreter's place (``rollout.python``). It needs a C compiler.
"""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from mindrlhf.dryrun.compile.elf import read_dynamic_symbols

HERE = Path(__file__).resolve().parent
VERSIONS = {"vllm": "0.23.0", "vllm_ascend": "0.23.0", "torch_npu": "2.13.0"}
OTHERS = {"gguf": "0.19.0", "scipy": "1.17.1"}  # imported by these, and not in the rollout environment of a CPU
# torch_npu asks for these by name when they are needed, and for others at its start.
_KINDS = rb"acl(?:rt|mdl|op|sys|prof|dump|[A-Z])|Hccl|[Hh]com|rt[A-Z]|Msprof"
_ASKED_BY_NAME = re.compile(rb"(?<=\0)(?:%s)\w{2,60}(?=\0)" % _KINDS)
_RUNTIMES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0", "librt.so.1")


def build(wheels: Path, directory: Path, python: str) -> None:
    """Make ``directory`` for the interpreter ``python``, whose torch is that of torch-npu's version."""
    packages, libraries = directory / "packages", directory / "cann" / "lib64"
    cann = directory / "cann"
    for part in (packages, libraries, cann / "opp", cann / "runtime", cann / "compiler", cann / "python" / "acl"):
        part.mkdir(parents=True)
    for name in VERSIONS | OTHERS:
        _unpack(_wheel(wheels, name), packages, with_libraries=not name.startswith("vllm"))
    query = "import json, sysconfig, torch; print(json.dumps([torch.__path__[0], sysconfig.get_path('include')]))"
    answer = subprocess.run([python, "-c", query], check=True, capture_output=True, text=True).stdout
    torch, include = json.loads(answer)
    _build_cann(packages / "torch_npu", Path(torch) / "lib", libraries)
    suffix = next(packages.glob("torch_npu/_C.*.so")).name.removeprefix("_C")
    extension = packages / "vllm_ascend" / f"vllm_ascend_C{suffix}"
    _compile(extension, HERE / "allocator.c", f"-I{include}", f"-L{libraries}", "-lascendcl")
    (directory / "cann" / "python" / "acl" / "__init__.py").write_text("")
    (directory / "cann" / "python" / "acl" / "rt.py").write_text(_ACL_RT)
    (packages / "sitecustomize.py").write_text("import fake_npu_start\n")
    for name in ("start", "kernels", "operators", "graphs", "rules"):
        (packages / f"fake_npu_{name}.py").symlink_to(HERE / f"{name}.py")
    script = directory / "python"
    script.write_text(_SCRIPT.format(cann=directory / "cann", packages=packages, python=python))
    script.chmod(0o755)


_ACL_RT = """
import ctypes

def memcpy(to, room, source, size, kind):
    ctypes.memmove(to, source, size)
    return 0
"""
_SCRIPT = """#!/usr/bin/env bash
# What CANN's set_env.sh sets, and the packages that are not the interpreter's own.
export ASCEND_HOME_PATH={cann} ASCEND_OPP_PATH={cann}/opp
export LD_LIBRARY_PATH={cann}/lib64:{packages}/torch_npu/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
export PYTHONPATH={packages}${{PYTHONPATH:+:$PYTHONPATH}}
exec {python} "$@"
"""


def _wheel(wheels: Path, name: str) -> Path:
    found = sorted(wheels.glob(f"{name}-[0-9]*.whl"))  # another version than that of ``VERSIONS`` may be tried
    if not found:
        raise FileNotFoundError(f"{wheels} holds no wheel of {name}")
    return found[0]


def _unpack(wheel: Path, target: Path, *, with_libraries: bool) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if with_libraries or not (name.endswith(".so") or "_cann_ops_custom" in name):
                archive.extract(name, target)


def _build_cann(torch_npu: Path, torch_lib: Path, target: Path) -> None:
    """Compile cann.c and, of what else the libraries of torch_npu want, functions that return 0."""
    own = [*(torch_npu / "lib").glob("lib*.so"), *torch_npu.glob("_C.*.so")]
    own = [path for path in own if path.name != "libop_plugin_atb.so"]  # NNAL's
    symbols = [read_dynamic_symbols(path) for path in own]
    there = set().union(*(one.defined for one in symbols), *(_defined(path) for path in torch_lib.glob("*.so*")))
    wanted = set().union(*(one.undefined for one in symbols)) - there
    wanted |= {name.decode() for one in symbols for name in _ASKED_BY_NAME.findall(one.data)}
    first = target / "libascendcl.so"
    _compile(first, HERE / "cann.c", "-ldl")
    names = sorted(wanted - read_dynamic_symbols(first).defined - _of_the_system(wanted))
    names = [name for name in names if re.fullmatch(r"\w+", name) and not name.startswith(("Py", "_Py", "aclnn"))]
    source = target / "returns_0.c"
    source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names))
    _compile(first, HERE / "cann.c", source, "-fno-builtin", "-w")
    for name in {"libatb.so"}.union(*(one.needed for one in symbols)):
        if name.startswith(("libatb", "libhccl", "libacl_", "libge_", "libgraph")):
            (target / name).symlink_to(first.name)


def _defined(path: Path) -> frozenset[str]:
    try:
        return read_dynamic_symbols(path).defined
    except (KeyError, ValueError):  # a script of the linker, or a file without dynamic symbols
        return frozenset()


def _of_the_system(names: set[str]) -> set[str]:
    import ctypes

    libraries = [ctypes.CDLL(name) for name in _RUNTIMES]
    return {name for name in names if any(hasattr(library, name) for library in libraries)}


def _compile(target: Path, *arguments: str | Path) -> None:
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(target), *map(str, arguments)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    build(*(Path(word).absolute() for word in sys.argv[1:3]), str(Path(sys.argv[3]).absolute()))
