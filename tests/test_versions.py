"""The packages of Ascend runs have what the rollout server uses of them, and fit one another."""

import os
import subprocess
import sys
from pathlib import Path

import check_versions
import pytest
from slow_tests import RUNS_SLOW_TESTS

ROOT = Path(__file__).resolve().parents[1]

# A directory with both wheels (about 300 MB), where there is one.
WHEELS_VARIABLE = "MINDRLHF_ASCEND_WHEELS"
SOURCES = {
    "vllm/__init__.py": 'TABLE = {\n    "Engine": ".engine:Engine",\n}\n',
    "vllm/engine/__init__.py": "try:\n    import numpy\nexcept ImportError:\n    numpy = None\n",
    "vllm/engine/core.py": "from vllm.base import (\n    Base,\n)\nclass Core(Base):\n    ...\nlimit: int = 3\n",
}


@pytest.mark.parametrize(
    ("module", "name", "is_there"),
    [
        ("vllm", "Engine", True),
        ("vllm", "engine", True),
        ("vllm.engine", "numpy", True),
        ("vllm.engine", "core", True),
        ("vllm.engine.core", "Base", True),
        ("vllm.engine.core", "Core", True),
        ("vllm.engine.core", "limit", True),
        ("vllm", "Motor", False),
        ("vllm.engine.core", "numpy", False),
        ("vllm.gone", "Engine", False),
    ],
)
def test_a_name_is_looked_up_in_its_module(module, name, is_there):
    assert check_versions.has_name(SOURCES, module, name) is is_there


@pytest.fixture(scope="session", params=range(2))
def wheels(request, tmp_path_factory):
    if os.environ.get(WHEELS_VARIABLE):
        return Path(os.environ[WHEELS_VARIABLE])
    if not RUNS_SLOW_TESTS:
        pytest.skip(f"{WHEELS_VARIABLE} names no directory with the wheels, and MINDRLHF_SLOW_TESTS is not set")
    directory = tmp_path_factory.mktemp("wheels")
    pairs = check_versions.VERSIONS.items()
    names = [f"{name.replace('_', '-')}=={versions[request.param]}" for name, versions in pairs]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(directory), *names]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if finished.returncode:
        pytest.skip(f"the wheels cannot be had: {finished.stderr.strip().splitlines()[-1]}")
    return directory


def test_the_wheels_have_what_the_server_uses(wheels):
    sources = check_versions.read_wheels(wheels)
    assert check_versions.missing(sources) == []
    assert not check_versions.has_name(sources, "vllm", "LLMMotor")
    assert {"model", "seed", "kv_cache_memory_bytes"} <= set(check_versions.engine_arguments())
    assert ("vllm", "LLMEngine") in set(check_versions.imports())
