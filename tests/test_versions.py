"""What the rollout server uses of vLLM and vLLM-Ascend exists in the versions that Ascend runs install."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from slow_tests import RUNS_SLOW_TESTS

from mindrlhf.doctor.ascend import CANN_PIN
from mindrlhf.doctor.diagnosis import TRAINING_PINS
from mindrlhf.models.context import INSTALL_MINDFORMERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "evidence" / "versions.md"
# A directory with both wheels (about 300 MB), where there is one.
WHEELS_VARIABLE = "MINDRLHF_ASCEND_WHEELS"


def load(name):
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        specification = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return module


wheel_sources = load("wheel_sources")
check_versions = load("check_versions")

SOURCES = {
    "lib/__init__.py": 'TABLE = {"Engine": ".engine.core:Engine"}\nfrom .tools import helper as aid\n',
    "lib/envs.py": 'environment_variables = {"LIB_FAST": lambda: 1}\n',
    "lib/tools.py": "try:\n    import numpy\nexcept ImportError:\n    numpy = None\ndef helper(a, *, b=1): ...\n",
    "lib/engine/__init__.py": "",
    "lib/engine/core.py": """
from lib.engine.base import Base as Parent
class Engine(Parent):
    size: int = 3
    def __init__(self, name): self.started = name
    def stop(self, *, hard=False): ...
REGISTRY = Engine("x")
""",
    "lib/engine/base.py": "class Base:\n    def ping(self): ...\nclass Options(Base):\n    speed: int\n",
    "lib-1.0.dist-info/METADATA": "Name: lib\nRequires-Dist: torch==2.1\nRequires-Dist: zen==1; extra == 'z'\n",
}


@pytest.fixture
def library(tmp_path):
    with zipfile.ZipFile(tmp_path / "lib-1.0-py3-none-any.whl", "w") as archive:
        for name, text in SOURCES.items():
            archive.writestr(name, text)
    return wheel_sources.Library.open(tmp_path, {"lib": "1.0"})


def test_names_are_found_through_imports_tables_and_branches(library):
    for name in ("lib.Engine", "lib.aid", "lib.tools.numpy", "lib.engine.core", "lib.engine.core.Parent.ping"):
        assert library.find(name) is not None, name
    assert library.find("lib.Engine").module == "lib.engine.core"
    assert library.find("lib.Engine.ping").module == "lib.engine.base"
    for name in ("lib.Motor", "lib.engine.core.Engine.pong", "lib.gone.Engine", "other.Engine"):
        assert library.find(name) is None, name


def test_members_arguments_variables_and_requirements_are_read(library):
    engine = library.find("lib.Engine")
    assert all(library.has_member(engine, name) for name in ("ping", "stop", "size", "started"))
    assert not library.has_member(engine, "run")
    assert library.has_member(library.find("lib.engine.core.REGISTRY"), "ping")
    assert library.takes(library.find("lib.engine.core.REGISTRY.stop"), "hard")
    assert library.takes(engine, "name") and not library.takes(engine, "size")
    assert library.takes(library.find("lib.engine.base.Options"), "speed")
    assert library.takes(library.find("lib.aid"), "b") and not library.takes(library.find("lib.aid"), "c")
    assert library.environment_variables() == {"LIB_FAST"}
    assert library.exact_requirements("lib") == {"torch": "2.1"}


def test_the_server_is_read(tmp_path):
    uses = {(use.kind, use.name, use.member) for use in check_versions.all_uses()}
    expected = {
        ("import", "vllm.LLMEngine", ""),
        ("attribute", "vllm.LLMEngine", "reset_prefix_cache"),
        ("argument", "vllm.EngineArgs", "kv_cache_memory_bytes"),
        ("argument", "vllm.LLMEngine.sleep", "level"),
        ("argument", "vllm.SamplingParams", "top_k"),
        ("argument", "vllm.SamplingParams", "detokenize"),
        ("argument", "vllm_ascend.worker.model_runner_v1.NPUModelRunner.reload_weights", "weights_iterator"),
        ("variable", "VLLM_ASCEND_ENABLE_NZ", ""),
    }
    assert expected <= uses
    assert ("argument", "vllm.EngineArgs", "ir_op_priority") not in uses, "of the CPU only"


def test_the_page_has_every_use_and_the_pins_of_setup():
    """A use that is new makes the page old: it is made again with the wheels, and so looked up."""
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| `(.+)` \| (.+) \|$", page, flags=re.MULTILINE)
    assert [row[:2] for row in rows] == [(use.kind, use.shown) for use in check_versions.all_uses()]
    assert {row[2] for row in rows} == {"yes"}
    pins = re.findall(r'"(mindspore|vllm|vllm-ascend)==([\w.]+)"', (ROOT / "setup.py").read_text())
    assert {"mindspore", "vllm-ascend"} <= {name for name, _ in pins}
    for name, version in [*pins, *TRAINING_PINS.items()]:
        assert f"{name} {version}" in page
    assert TRAINING_PINS["mindspore"] == dict(pins)["mindspore"]
    commands = (ROOT / "scripts" / "setup.sh").read_text() + (ROOT / "docs" / "install.md").read_text()
    installed = set(re.findall(r"mindformers==([\d.]+)", commands + INSTALL_MINDFORMERS))
    assert installed == {TRAINING_PINS["mindformers"]}


def test_mindformers_requirements_are_ours_but_for_the_one_that_no_index_has():
    """It is installed without them (setup.py)."""
    listed = dict(re.findall(r'^    "([\w-]+)([^"]*)",$', (ROOT / "setup.py").read_text(), flags=re.MULTILINE))
    asked = importlib.metadata.requires("mindformers")
    for text in asked:
        name, bound = re.fullmatch(r"([\w-]+)(.*)", text).groups()
        if name != "hyper-parallel" and name != "mindspore":
            assert bound in listed[name].split(","), text
    assert "hyper-parallel~=1.0.0" in asked and "hyper-parallel" not in listed


def test_both_environments_ask_for_one_cann():
    folder = Path(importlib.util.find_spec("mindformers").origin).parent
    releases = json.loads((folder / "VERSION_MAP.json").read_text())
    mindspore = releases["mf"][TRAINING_PINS["mindformers"]]["prefer"]
    assert mindspore == TRAINING_PINS["mindspore"]
    assert releases["ms"][mindspore]["prefer"] == f"{CANN_PIN}.0"
    page = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"\| (\d+\.\d+\.\d+) \| [\d.]*", page.partition("## CANN")[2].partition("##")[0])) == {
        f"{CANN_PIN}.0"
    }


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    if os.environ.get(WHEELS_VARIABLE):
        return Path(os.environ[WHEELS_VARIABLE])
    if not RUNS_SLOW_TESTS:
        pytest.skip(f"{WHEELS_VARIABLE} names no directory with the wheels, and MINDRLHF_SLOW_TESTS is not set")
    directory = tmp_path_factory.mktemp("wheels")
    names = [f"{name.replace('_', '-')}=={version}" for name, version in check_versions.WHEELS.items()]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(directory), *names]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if finished.returncode:
        pytest.skip(f"the wheels cannot be had: {finished.stderr.strip().splitlines()[-1]}")
    return directory


def test_the_wheels_have_everything_and_the_page_is_theirs(wheels):
    library = wheel_sources.Library.open(wheels, check_versions.WHEELS)
    uses = check_versions.all_uses()
    assert [use.shown for use in uses if not check_versions.is_there(library, use)] == []
    for invented in (
        check_versions.Use("import", "vllm.LLMMotor", "", ""),
        check_versions.Use("attribute", "vllm.LLMEngine", "doze", ""),
        check_versions.Use("argument", "vllm.EngineArgs", "kv_cache_bytes", ""),
        check_versions.Use("variable", "VLLM_FASTER", "", ""),
        check_versions.Use("value", "vllm.model_executor.model_loader.LoadFormats", "magic", ""),
    ):
        assert not check_versions.is_there(library, invented)
    assert check_versions.page(library, uses) == PAGE.read_text(encoding="utf-8")
