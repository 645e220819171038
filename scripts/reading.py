#!/usr/bin/env python3
"""Print what one step of GRPO makes one read: the import closure of its modules, in reading order, with their lines.

    python scripts/reading.py [MODULE ...]

Imports inside functions, of what only some runs do, and for type checkers do not count: they are in the second sum. The
packages of ``LEFT_OUT`` are in neither.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The processes of a step: rank 0, another rank, the rollout server, a verifier.
STEP = (
    "mindrlhf.training.loop.trainer",
    "mindrlhf.training.engine.actor",
    "mindrlhf.rollout.server.engine",
    "mindrlhf.rewards.worker",
)
LEFT_OUT = (
    "mindrlhf.errors",  # two exceptions
    "mindrlhf.config",  # keys and defaults, which docs/config.md lists
    "mindrlhf.system",  # processes, files and clocks
    "mindrlhf.observe",  # metrics once computed: how they are written and shown
    "mindrlhf.evaluation",  # statistics of held-out prompts
    "mindrlhf.checkpoint",  # the state that a run resumes from
    "mindrlhf.training.checkpoints",  # the same
    "mindrlhf.specs",  # the parameters of a family of models, by name
    "mindrlhf.layout",  # arithmetic of rows and shards
    "mindrlhf.images",  # what only models with images do
    "mindrlhf.data",  # files to prompts
    "mindrlhf.sandbox",  # limits of processes
    "mindrlhf.tools",  # what a model calls between turns
    "mindrlhf.launch",  # how ranks are started
    "mindrlhf.cpu",  # kernels of a CPU
    "mindrlhf.rewards.answers",  # whether two answers are equal
    "mindrlhf.rewards.judges",  # models as judges
)


def file_of(module: str) -> Path | None:
    """Return the file of a module or package, or None for a name that is neither."""
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def imports_of(file: Path, *, anywhere: bool = False) -> list[str]:
    """Return the modules of the package that a file imports at its top, or ``anywhere``, in its order."""
    names: list[str] = []
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if file_of(name) else node.module for name in inner]
    return [name for name in names if name.startswith("mindrlhf.") and file_of(name)]


def closure(modules: tuple[str, ...], *, anywhere: bool = False) -> dict[str, int]:
    """Return each module that is reached from ``modules``, with its number of lines."""
    lines: dict[str, int] = {}
    waiting = list(modules)
    while waiting:
        module = waiting.pop(0)
        if module in lines or any(f"{module}.".startswith(f"{package}.") for package in LEFT_OUT):
            continue
        file = file_of(module)
        if file is None:
            sys.exit(f"reading: no module {module}")
        lines[module] = len(file.read_text(encoding="utf-8").splitlines())
        waiting = imports_of(file, anywhere=anywhere) + waiting
    return lines


if __name__ == "__main__":
    modules = tuple(sys.argv[1:]) or STEP
    step, whole = closure(modules), closure(modules, anywhere=True)
    for module, count in step.items():
        print(f"{count:6,}  {module}")
    print(f"{sum(step.values()):6,} lines in {len(step)} files")
    print(f"{sum(whole.values()):6,} lines in {len(whole)} files with what is imported at need, or for type checkers")
