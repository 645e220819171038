#!/usr/bin/env python
"""Look up in the wheels of the rollout environment on Ascend what the rollout server uses of them.

    pip download --no-deps -d wheels vllm==0.23.0 vllm-ascend==0.23.0
    python scripts/check_versions.py wheels

or vllm 0.26.0 with vllm-ascend 0.26.0rc1. Nothing is installed or run. Looked up are the names that the server imports
from vLLM, the arguments of its engine, and the environment variables that the package sets. Prints what is missing, and
then exits with 1.
"""

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "mindrlhf" / "rollout" / "server"
VERSIONS = {"vllm": ("0.23.0", "0.26.0"), "vllm_ascend": ("0.23.0", "0.26.0rc1")}


def read_wheels(directory: Path) -> dict[str, str]:
    """Return the sources of the wheels by their paths."""
    sources = {}
    for name, versions in VERSIONS.items():
        wheels = [wheel for version in versions for wheel in directory.glob(f"{name}-{version}-*.whl")]
        if not wheels:
            sys.exit(f"check_versions: no wheel of {name} {' or '.join(versions)} in {directory}")
        with zipfile.ZipFile(wheels[0]) as archive:
            paths = [path for path in archive.namelist() if path.endswith(".py")]
            sources |= {path: archive.read(path).decode("utf-8") for path in paths}
    return sources


def imports() -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of vLLM in the server."""
    for path in sorted(SERVER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in VERSIONS:
                yield from ((node.module, alias.name) for alias in node.names)


def engine_arguments() -> Iterator[str]:
    """Yield the arguments of vLLM's engine that ``engine_arguments`` sets."""
    tree = ast.parse((SERVER / "engine.py").read_text(encoding="utf-8"))
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "engine_arguments")
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == "arguments" and isinstance(node.value, ast.Dict):
                yield from (key.value for key in node.value.keys)
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == "arguments":
                yield target.slice.value


def variables() -> set[str]:
    """Return the environment variables of vLLM that the package names."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "mindrlhf").rglob("*.py"))
    return {name for text in texts for name in re.findall(r"\bVLLM_[A-Z0-9_]*[A-Z0-9]\b", text)}


def has_name(sources: dict[str, str], module: str, name: str) -> bool:
    """Return True when ``module`` has the submodule ``name``, or binds that name outside of functions."""
    path = module.replace(".", "/")
    if any(f"{path}/{name}{ending}" in sources for ending in (".py", "/__init__.py")):
        return True
    source = sources.get(f"{path}.py", sources.get(f"{path}/__init__.py", ""))
    bindings = rf"^\s*(?:class|def) {name}\b|^{name}\b.*=|\bimport [^#\n]*\b{name}\b|^\s*\"?{name}\"?\s*[:,]"
    return re.search(bindings, source, flags=re.MULTILINE) is not None


def missing(sources: dict[str, str]) -> list[str]:
    """Return what the server uses and the wheels have not."""
    absent = [f"{module}.{name}" for module, name in imports() if not has_name(sources, module, name)]
    arguments = sources["vllm/engine/arg_utils.py"]
    absent += [f"EngineArgs({name})" for name in engine_arguments() if not re.search(rf"(?m)^    {name}:", arguments)]
    known = sources["vllm/envs.py"] + sources["vllm_ascend/envs.py"]
    return absent + sorted(name for name in variables() if f'"{name}"' not in known)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    absent = missing(read_wheels(Path(sys.argv[1])))
    print("\n".join(f"missing: {name}" for name in absent) or "nothing is missing")
    sys.exit(bool(absent))
