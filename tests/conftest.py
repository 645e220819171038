"""What several test modules need: tiers and order of tests, shared data, the rollout interpreter.

Every test is in one of two tiers: `jobs` (tests/jobs: real `msrun` jobs, vLLM, compilation for Ascend) or `unit` (all
others). `nightly` is what is too slow for every day: tests that say so (``slow_tests.SLOW``), and files with more cases
or larger models at night (``slow_tests.RUNS_SLOW_TESTS``). `-m unit`, `-m jobs` and `-m nightly` run one; without `-m`
all but `nightly` run, and with ``MINDRLHF_SLOW_TESTS=1`` that too.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from slow_tests import RUNS_SLOW_TESTS, THINNED

TESTS = Path(__file__).parent
REPOSITORY, SYSTEM_TESTS = TESTS.parent, TESTS / "jobs"


# Directories of a test run that all its processes share. MindFormers logs to the last, or to ./output, where it is
# imported without `prepare_mindformers`.
_SHARED = {"MINDRLHF_GRAPH_CACHE": "graphs", "MINDRLHF_TEST_INPUTS": "inputs", "LOCAL_DEFAULT_PATH": "mindformers"}
# How long an example takes depends on what else the machine does; the rest stays as the profile in force has it.
_HEALTH_CHECKS = {*hypothesis.settings().suppress_health_check, hypothesis.HealthCheck.too_slow}
# The same tree gives the same verdict: examples are random in the nightly tier alone.
hypothesis.settings.register_profile(
    "any_load",
    hypothesis.settings(),
    max_examples=300 if RUNS_SLOW_TESTS else 60,
    deadline=None,
    suppress_health_check=_HEALTH_CHECKS,
    derandomize=not RUNS_SLOW_TESTS,
)
hypothesis.settings.load_profile("any_load")


def pytest_configure(config: pytest.Config) -> None:
    """Give the test run directories of its own, and remove those of runs that were killed."""
    for variable, name in _SHARED.items():
        if not hasattr(config, "workerinput") and variable not in os.environ:
            prefix = f"mindrlhf-test-{name}-"
            for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
                if (pid := left.name.removeprefix(prefix).split("-")[0]).isdigit() and not Path("/proc", pid).exists():
                    shutil.rmtree(left, ignore_errors=True)
            directory = tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-")
            os.environ[variable] = directory.name
            config.add_cleanup(directory.cleanup)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files of the other tier when one alone is asked for: importing them takes long."""
    if config.option.markexpr == "unit" and collection_path == SYSTEM_TESTS:
        return True
    if config.option.markexpr == "jobs" and collection_path.parent == TESTS and collection_path != SYSTEM_TESTS:
        return True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tiers; run `unit` before `jobs`, so that a plain mistake shows early, and long files of each first.

    How long a file may take its `timeout` says. With the longest at the end a process would be left alone with it.
    """
    _thin_out(items)
    for item in items:
        item.add_marker(pytest.mark.jobs if SYSTEM_TESTS in item.path.parents else pytest.mark.unit)
        if RUNS_SLOW_TESTS and _grows_at_night(item.path):
            item.add_marker(pytest.mark.nightly)
        elif not RUNS_SLOW_TESTS and item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="nightly"))
    longest: dict[Path, float] = {}
    for item in items:
        timeout = item.get_closest_marker("timeout")
        runs = item.get_closest_marker("skip") is None
        longest[item.path] = max(longest.get(item.path, 0.0), timeout.args[0] if timeout and runs else 0.0)
    items.sort(key=lambda item: (SYSTEM_TESTS in item.path.parents, -longest[item.path]))


def _thin_out(items: list[pytest.Item]) -> None:
    """Mark as nightly what ``slow_tests.THINNED`` leaves for the night."""
    counts: dict[str, int] = {}
    for item in items:
        name = f"{item.path.relative_to(TESTS).as_posix()}::{item.originalname}"
        if name in THINNED:
            number = counts[name] = counts.get(name, -1) + 1
            if not THINNED[name] or number % THINNED[name]:
                item.add_marker(pytest.mark.nightly)


@cache
def _grows_at_night(path: Path) -> bool:
    """Whether a test module, or a helper that it imports, has other cases at night."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    named |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    reads = [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    helpers = [sys.modules.get(name) for name in named if name and name != "slow_tests"]
    return "RUNS_SLOW_TESTS" in reads or any(hasattr(helper, "RUNS_SLOW_TESTS") for helper in helpers)


@pytest.fixture(scope="session")
def mindformers(tmp_path_factory) -> None:
    """MindFormers as runs on a CPU import it."""
    from mindrlhf.models.context import prepare_mindformers

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))


@pytest.fixture(scope="session")
def rollout_python() -> str:
    """The interpreter that has vLLM: ``MINDRLHF_ROLLOUT_PYTHON``, else ``.venv-rollout`` of the repository."""
    path = Path(os.environ.get("MINDRLHF_ROLLOUT_PYTHON", REPOSITORY / ".venv-rollout" / "bin" / "python"))
    if not path.exists():
        pytest.skip(f"no rollout interpreter at {path}: run bash scripts/setup.sh")
    return str(path)


@pytest.fixture(scope="session")
def run_in_rollout(rollout_python) -> Callable[..., str]:
    """Return what the rollout interpreter prints on one thread: ``run_in_rollout(script, arguments..., given=)``."""

    def run(*command: object, given: str = "", **environment: str) -> str:
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        options = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 500}
        ended = subprocess.run([rollout_python, *map(str, command)], input=given, **options)
        assert ended.returncode == 0, ended.stderr[-2000:]
        return ended.stdout

    return run
