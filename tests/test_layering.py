"""The rules of the layers: which package may import which, which stay light, and how large a folder, a module and a
function may be. Imports are read from the sources, so a rule is checked on every path, whether or not it is run."""

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mindrlhf"
MAP = ROOT / "CONTRIBUTING.md"

# The packages by layer, from the ground up. An import goes to a lower layer or along its own, never up.
LAYERS = (
    ("errors", "algorithms", "cpu", "system"),
    ("config", "hub", "specs", "observe", "images"),
    ("data", "layout", "launch", "sandbox"),
    ("models", "rewards", "tools", "weights"),
    ("checkpoint", "shards", "rollout"),
    ("debugging", "evaluation"),
    ("training",),
    ("dryrun",),
    ("commands", "doctor", "cli", "__main__"),
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
# The same within training, by folder or module: the loop drives ranks, whose models know nothing of it.
TRAINING_LAYERS = (
    ("broadcast", "runtime", "vision", "routing", "optimizers", "placement"),
    ("team", "batch", "results"),
    ("replica_team", "serving", "nodes", "profiling"),
    ("preflight",),
    ("checkpoints",),
    ("engine",),
    ("facts",),
    ("loop",),
    ("offline", "reinforcement"),
    ("train",),
    ("main",),
)
TRAINING_LAYER_OF = {part: number for number, parts in enumerate(TRAINING_LAYERS) for part in parts}
# What still goes up there: no arrow may be added.
UPWARD_IN_TRAINING = {
    "mindrlhf.training.preflight -> mindrlhf.training.loop.sampling.order",
}
# What one reads in one go.
MAX_MODULES, MAX_LINES, MAX_FUNCTION_LINES = 20, 600, 60
# Under so many lines a module that only one other imports belongs into that one: it is a hop and no part of its own.
MIN_LINES = 40
# Modules that are found by the names of their files.
FOUND_BY_NAME = (
    "mindrlhf.algorithms.advantages",
    "mindrlhf.algorithms.policy_losses",
    "mindrlhf.rewards.verifiers",
    "mindrlhf.training.optimizers",
)

# Modules of these are loaded by the name of their file, or, in a jail, by their path.
LOADED_BY_NAME = tuple(
    f"mindrlhf.{name}."
    for name in (
        *("algorithms.advantages", "algorithms.policy_losses", "rewards.verifiers", "commands", "observe.trackers"),
        *("training.optimizers", "sandbox"),
    )
)

TRAINING_LIBRARIES = {"mindspore", "mindformers"}
# What the rollout environment has no need of, and so lacks.
TRAINING_PACKAGES = {"xxhash", "pyarrow", "jsonlines", "scipy", "tensorboard", "math_verify"}
ROLLOUT_LIBRARIES = {"vllm", "vllm_ascend", "torch", "torch_npu"}
HEAVY_LIBRARIES = TRAINING_LIBRARIES | ROLLOUT_LIBRARIES
# Where loading a module may load MindSpore, vLLM or PyTorch, and what stays light within.
SERVER_PACKAGES = ("mindrlhf.rollout.server", "mindrlhf.cpu.rollout")
MINDSPORE_PACKAGES = (
    "mindrlhf.algorithms",
    "mindrlhf.models",
    "mindrlhf.training",
    "mindrlhf.dryrun.compile",
    "mindrlhf.cpu.training",
)
HEAVY_PACKAGES = (*MINDSPORE_PACKAGES, *SERVER_PACKAGES)
LIGHT_WITHIN = (
    "mindrlhf.algorithms.advantages",
    "mindrlhf.algorithms.optimizers",
    "mindrlhf.cpu.training.vocabulary",
)


@dataclass(frozen=True)
class Imports:
    """What one module imports: when it is loaded, at all (inside functions too), and by name, for type checkers too.

    The first two hold the packages that a module lies in as well, the third holds what the source names.
    """

    at_load: frozenset[str]
    anywhere: frozenset[str]
    named: frozenset[str]


def imports_in(node: ast.AST, is_in_function: bool = False, is_for_types: bool = False) -> Iterator[tuple]:
    """Yield each import below a node, whether it lies in a function, and whether it is for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, is_in_function, is_for_types
        elif isinstance(child, ast.If):
            yield from imports_in(child, is_in_function, is_for_types or "TYPE_CHECKING" in ast.unparse(child.test))
        elif isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield from imports_in(child, is_in_function or is_function, is_for_types)


def imported_names(node: ast.Import | ast.ImportFrom, base: str) -> list[str]:
    """Return the dotted names that an import in a module of the package ``base`` names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    parents = base.split(".")[: len(base.split(".")) - node.level + 1] if node.level else []
    source = ".".join([*parents, *([node.module] if node.module else [])])
    return [source, *(f"{source}.{alias.name}" for alias in node.names)]


def module_name(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def collect_imports(tree: ast.Module, module: str, is_package: bool) -> Imports:
    base = module if is_package else module.rpartition(".")[0]
    at_load, anywhere, named = set(), set(), set()
    for node, is_in_function, is_for_types in imports_in(tree):
        names = imported_names(node, base)
        named.update(names if isinstance(node, ast.Import) else names[1:])
        # Importing a module loads the packages it lies in.
        parts = [name.split(".") for name in names if not is_for_types]
        loaded = {".".join(words[:length]) for words in parts for length in range(1, len(words) + 1)}
        anywhere |= loaded
        at_load |= loaded if not is_in_function else set()
    return Imports(*map(frozenset, (at_load, anywhere, named)))


@cache
def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources().items()}


@cache
def all_imports() -> dict[str, Imports]:
    names = {path: module_name(path) for path in trees()}
    return {names[path]: collect_imports(tree, names[path], path.stem == "__init__") for path, tree in trees().items()}


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


def import_graph(imports: dict[str, Imports]) -> dict[str, set[str]]:
    """Return for each module those of ``imports`` that its source names, wherever it does: every arrow it draws."""
    graph = {}
    for module, found in imports.items():
        # `from a import b` names the module a.b, or something in a.
        targets = {name if name in imports else name.rpartition(".")[0] for name in found.named}
        graph[module] = (targets & imports.keys()) - {module}
    return graph


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the names of a circle of a graph, in order; nothing where there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def num_lines(path: Path) -> int:
    return len(sources()[path].splitlines())


def package_of(module: str) -> str:
    return [*module.split("."), ""][1]


def in_packages(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith((f"{package}.", f"{package}_")) for package in packages)


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
    paths = {module_name(path, tmp_path): path for path in sorted(package.rglob("*.py"))}
    imports = {
        name: collect_imports(ast.parse(path.read_text()), name, path.stem == "__init__")
        for name, path in paths.items()
    }
    assert import_chains("pack.a", imports, HEAVY_LIBRARIES) == ["pack.a -> pack.sub.b -> pack.c -> torch"]
    assert "mindspore" in imports["pack.c"].anywhere - imports["pack.c"].at_load
    assert "vllm" not in imports["pack.a"].anywhere


def test_the_layers_are_those_of_the_package_and_of_the_map_in_contributing():
    packages = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert packages - {"__init__"} == set(LAYER_OF)
    rows = re.findall(r"^\| (\d) \| `mindrlhf/(\w+)(?:\.py)?` \| .+ \|$", MAP.read_text(encoding="utf-8"), re.M)
    assert [(int(layer), package) for layer, package in rows] == [(LAYER_OF[package], package) for package in LAYER_OF]


def test_every_arrow_goes_to_a_lower_layer_or_along_its_own():
    graph = import_graph(all_imports())
    assert graph.pop("mindrlhf") == set(), "the package itself imports a package"
    arrows = [(source, target) for source, targets in graph.items() for target in targets if package_of(target)]
    upward = {
        f"{source} -> {target}"
        for source, target in arrows
        if LAYER_OF[package_of(source)] < LAYER_OF[package_of(target)]
    }
    assert upward == set()
    assert len(arrows) > 500, "hardly any arrows: the reader of imports must be broken"


def test_every_arrow_within_training_goes_to_a_lower_layer_or_along_its_own():
    parts = {module: module.split(".")[2] for module in all_imports() if module.startswith("mindrlhf.training.")}
    assert set(parts.values()) == set(TRAINING_LAYER_OF), "each folder and module of training has a layer"
    graph = import_graph(all_imports())
    arrows = [(source, target) for source in parts for target in graph[source] & parts.keys()]
    upward = {
        f"{source} -> {target}"
        for source, target in arrows
        if TRAINING_LAYER_OF[parts[source]] < TRAINING_LAYER_OF[parts[target]]
    }
    assert upward - UPWARD_IN_TRAINING == set()
    assert len(arrows) > 100, "hardly any arrows: the reader of imports must be broken"


def test_no_small_module_is_there_for_one_other_alone():
    importers = Counter(target for targets in import_graph(all_imports()).values() for target in targets)
    lengths = {module_name(path): num_lines(path) for path in sources() if path.name != "__init__.py"}
    small = {module for module, length in lengths.items() if length < MIN_LINES and importers[module] == 1}
    assert {module for module in small if not in_packages(module, FOUND_BY_NAME)} == set()
    assert any(importers[module] > 1 for module, length in lengths.items() if length < MIN_LINES)


def test_no_files_import_each_other_in_a_circle():
    assert circle_in(import_graph(all_imports())) == []
    assert sorted(circle_in({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()})[1:]) == ["a", "b", "c"]


def test_no_packages_of_a_layer_import_each_other_in_a_circle():
    arrows = {package: set() for package in LAYER_OF}
    for source, targets in import_graph(all_imports()).items():
        for package in {package_of(target) for target in targets} & LAYER_OF.keys():
            if LAYER_OF[package] == LAYER_OF[package_of(source)] and package != package_of(source):
                arrows[package_of(source)].add(package)
    assert circle_in(arrows) == []


@pytest.mark.parametrize("package", LAYER_OF)
def test_light_packages_load_neither_mindspore_nor_vllm_nor_torch(package):
    imports = all_imports()
    modules = [module for module in imports if package_of(module) == package]
    heavy = {module for module in modules if in_packages(module, HEAVY_PACKAGES)}
    light = [module for module in modules if module not in heavy or in_packages(module, LIGHT_WITHIN)]
    assert [chain for module in light for chain in import_chains(module, imports, HEAVY_LIBRARIES)] == []


def test_only_packages_of_the_trainer_import_mindspore_when_loaded():
    importers = {module for module, imports in all_imports().items() if imports.at_load & TRAINING_LIBRARIES}
    assert {module for module in importers if not in_packages(module, MINDSPORE_PACKAGES)} == set()
    assert importers, "no module imports MindSpore: the reader of imports must be broken"


def test_only_the_rollout_server_imports_vllm_and_torch():
    importers = {module for module, imports in all_imports().items() if imports.anywhere & ROLLOUT_LIBRARIES}
    assert {module for module in importers if not in_packages(module, SERVER_PACKAGES)} == set()


@pytest.mark.parametrize("libraries", [TRAINING_LIBRARIES, TRAINING_PACKAGES], ids=["mindspore", "packages"])
def test_the_rollout_server_can_live_without_those_of_the_trainer(libraries):
    imports = all_imports()
    anywhere = {module: Imports(found.anywhere, found.anywhere, found.named) for module, found in imports.items()}
    servers = [module for module in imports if in_packages(module, SERVER_PACKAGES)]
    # Its own functions count as well; of the other modules, what loading them loads.
    graph = imports | {module: anywhere[module] for module in servers}
    assert [chain for module in servers for chain in import_chains(module, graph, libraries)] == []


def test_the_command_line_starts_without_heavy_libraries():
    code = "import sys; from mindrlhf.cli import build_parser; build_parser(); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    loaded = set(ended.stdout.split())
    assert "mindrlhf.commands.doctor" in loaded
    assert loaded & HEAVY_LIBRARIES == set()


def test_no_folder_has_too_many_modules():
    counts = {
        str(folder.relative_to(ROOT)): len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        for folder in [PACKAGE, *PACKAGE.rglob("*/")]
    }
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}
    assert max(counts.values()) > 3


def test_no_two_test_modules_have_one_name():
    # pytest imports them by that name alone, as their folders are no packages, and then collects one of the two.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name, count in names.items() if count > 1} == set()
    assert len(names) > 100


def test_no_module_is_too_long():
    lengths = {module_name(path): num_lines(path) for path in sources()}
    assert {module for module, length in lengths.items() if length > MAX_LINES} == set()


# Calls that change something: without assertions (python -O) it would not be done.
CHANGING = {"setdefault", "pop", "append", "add", "update", "remove", "discard", "next", "extend", "register"}


def changes_something(assertion: ast.Assert) -> bool:
    inner = list(ast.walk(assertion.test))
    called = {getattr(node.func, "attr", getattr(node.func, "id", "")) for node in inner if isinstance(node, ast.Call)}
    return bool(called & CHANGING) or any(isinstance(node, ast.NamedExpr) for node in inner)


def test_no_function_is_too_long_and_no_assertion_changes_anything():
    lengths, changing = {}, []
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths[f"{module_name(path)}.{node.name}", node.lineno] = node.end_lineno - node.lineno + 1
            elif isinstance(node, ast.Assert) and changes_something(node):
                changing.append(f"{path}:{node.lineno}")
    assert changing == []
    too_long = {
        f"{name} (line {line}): {length} lines"
        for (name, line), length in lengths.items()
        if length > MAX_FUNCTION_LINES
    }
    assert too_long == set()
    assert max(lengths.values()) > 30


def test_nothing_in_the_product_is_used_by_tests_alone():
    words = Counter(word for text in sources().values() for word in re.findall(r"\w+", text))
    modules = {name for imports in all_imports().values() for name in imports.named}
    modules |= {name.rpartition(".")[0] for name in modules}
    quoted = {name for text in sources().values() for name in re.findall(r"\"(mindrlhf(?:\.\w+)+)", text)}
    modules |= quoted | {name.rpartition(".")[0] for name in quoted}
    unused = []
    for path, tree in trees().items():
        module = module_name(path)
        if module.startswith(LOADED_BY_NAME) or path.stem in ("__init__", "__main__"):
            continue
        unused += [module] if module not in modules and '"__main__"' not in sources()[path] else []
        definitions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        unused += [f"{module}.{node.name}" for node in definitions if words[node.name] == 1 and not node.decorator_list]
    assert not unused, f"only tests use {', '.join(unused)}: move it there, or delete it"


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
