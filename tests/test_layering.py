"""The rules that keep the package light where it can be: who may import MindSpore, vLLM and PyTorch, and how long a
module may be. Imports are read from the sources, so a rule is checked on every path, whether or not it is run."""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindrlhf"
MAX_LINES = 420

TRAINING_LIBRARIES = {"mindspore", "mindformers"}
ROLLOUT_LIBRARIES = {"vllm", "vllm_ascend", "torch", "torch_npu"}
HEAVY_LIBRARIES = TRAINING_LIBRARIES | ROLLOUT_LIBRARIES
LIGHT_ROOMS = (
    "mindrlhf.config",
    "mindrlhf.data",
    "mindrlhf.rewards",
    "mindrlhf.algorithms.advantages",
    "mindrlhf.checkpoint.manifest",
    "mindrlhf.launch",
    "mindrlhf.layout",
    "mindrlhf.system",
    "mindrlhf.cli",
    "mindrlhf.commands",
    "mindrlhf.doctor",
)
MINDSPORE_ROOMS = ("mindrlhf.models", "mindrlhf.training", "mindrlhf.dryrun", "mindrlhf.algorithms")
SERVER = "mindrlhf.rollout.server"


@dataclass(frozen=True)
class Imports:
    """What one module imports: when it is loaded, and at all (inside functions too)."""

    at_load: frozenset[str]
    anywhere: frozenset[str]


class _ImportCollector(ast.NodeVisitor):
    def __init__(self, module: str, is_package: bool) -> None:
        self._base = module if is_package else module.rpartition(".")[0]
        self._function_depth = 0
        self.at_load: set[str] = set()
        self.anywhere: set[str] = set()

    def visit_FunctionDef(self, node: ast.AST) -> None:
        self._function_depth += 1
        self.generic_visit(node)
        self._function_depth -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._add(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parents = self._base.split(".")[: len(self._base.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*parents, *([node.module] if node.module else [])])
        self._add([source, *(f"{source}.{alias.name}" for alias in node.names)])

    def _add(self, names) -> None:
        for name in names:
            parts = name.split(".")
            # Importing a module loads the packages it lies in.
            loaded = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
            self.anywhere |= loaded
            if not self._function_depth:
                self.at_load |= loaded


def module_name(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def collect_imports(path: Path, module: str) -> Imports:
    collector = _ImportCollector(module, path.name == "__init__.py")
    collector.visit(ast.parse(path.read_text(encoding="utf-8")))
    return Imports(frozenset(collector.at_load), frozenset(collector.anywhere))


@cache
def all_imports() -> dict[str, Imports]:
    return {(name := module_name(path)): collect_imports(path, name) for path in sorted(PACKAGE.rglob("*.py"))}


def import_chains(module: str, imports: dict[str, Imports], libraries: set[str]) -> list[str]:
    """Return, for each of ``libraries`` that loading ``module`` loads, the chain of modules that leads to it."""
    chains, seen, frontier = [], {module}, [[module]]
    while frontier:
        chain = frontier.pop()
        for name in sorted(imports[chain[-1]].at_load - seen):
            seen.add(name)
            if name in libraries:
                chains.append(" -> ".join([*chain, name]))
            elif name in imports:
                frontier.append([*chain, name])
    return chains


def in_rooms(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith((f"{room}.", f"{room}_")) for room in rooms)


def test_the_reader_of_imports_sees_chains_relative_imports_and_functions(tmp_path):
    package = tmp_path / "pack"
    (package / "sub").mkdir(parents=True)
    sources = {
        "__init__.py": "",
        "a.py": "from .sub import b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm\n",
        "sub/__init__.py": "",
        "sub/b.py": "try:\n    from ..c import thing\nexcept ImportError:\n    pass\n",
        "c.py": "import os.path\nimport torch.nn as nn\ndef f():\n    import mindspore\n",
    }
    for name, source in sources.items():
        (package / name).write_text(source)
    imports = {
        (name := module_name(path, tmp_path)): collect_imports(path, name) for path in sorted(package.rglob("*.py"))
    }
    assert import_chains("pack.a", imports, HEAVY_LIBRARIES) == ["pack.a -> pack.sub.b -> pack.c -> torch"]
    assert "mindspore" in imports["pack.c"].anywhere - imports["pack.c"].at_load
    assert "vllm" not in imports["pack.a"].anywhere


@pytest.mark.parametrize("room", LIGHT_ROOMS)
def test_light_rooms_load_neither_mindspore_nor_vllm_nor_torch(room):
    imports = all_imports()
    modules = [module for module in imports if in_rooms(module, (room,))]
    assert [chain for module in modules for chain in import_chains(module, imports, HEAVY_LIBRARIES)] == []


def test_only_rooms_of_the_trainer_import_mindspore_when_loaded():
    importers = {module for module, imports in all_imports().items() if imports.at_load & TRAINING_LIBRARIES}
    assert {module for module in importers if not in_rooms(module, MINDSPORE_ROOMS)} == set()
    assert importers, "no module imports MindSpore: the reader of imports must be broken"


def test_only_the_rollout_server_imports_vllm_and_torch():
    importers = {module for module, imports in all_imports().items() if imports.anywhere & ROLLOUT_LIBRARIES}
    assert {module for module in importers if not in_rooms(module, (SERVER,))} == set()


def test_the_rollout_server_can_live_without_mindspore():
    imports = all_imports()
    anywhere = {module: Imports(found.anywhere, found.anywhere) for module, found in imports.items()}
    servers = [module for module in imports if in_rooms(module, (SERVER,))]
    # Its own functions count as well; of the other modules, what loading them loads.
    graph = imports | {module: anywhere[module] for module in servers}
    assert [chain for module in servers for chain in import_chains(module, graph, TRAINING_LIBRARIES)] == []


def test_the_command_line_starts_without_heavy_libraries():
    code = "import sys; from mindrlhf.cli import build_parser; build_parser(); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    loaded = set(ended.stdout.split())
    assert "mindrlhf.commands.doctor" in loaded
    assert loaded & HEAVY_LIBRARIES == set()


def test_no_module_is_too_long():
    lengths = {module_name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {module: length for module, length in lengths.items() if length > MAX_LINES} == {}


# Put together from parts, or this file would hold what it forbids.
MACHINE_PATHS = re.compile(r"(?<![\w.~}*-])/(" + "|".join(("work", "opt", "root", "home", "Users")) + r")/")
REGISTRIES = re.compile("|".join(("pypi" + r"\.org", "python" + "hosted")))


@pytest.mark.parametrize("forbidden", [MACHINE_PATHS, REGISTRIES], ids=["paths of a machine", "hosts of registries"])
def test_tracked_files_name_no_path_of_a_machine_and_no_registry(forbidden):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        data = path.read_bytes() if path.is_file() else b""
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", errors="replace").splitlines(), 1):
            if forbidden.search(line):
                found.append(f"{name}:{number}: {line.strip()[:120]}")
    assert found == []


@pytest.mark.parametrize(
    "text, is_forbidden",
    [
        ("cd /" + "work/main", True),
        ('"/' + 'opt/wheels"', True),
        ("see ../examples/" + "work/file", False),
        ("https://example.com/" + "opt/", False),
    ],
)
def test_what_counts_as_a_path_of_a_machine(text, is_forbidden):
    assert bool(MACHINE_PATHS.search(text)) == is_forbidden
