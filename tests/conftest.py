"""What several test modules need: the order of tests, shared data, the rollout interpreter."""

import os
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SYSTEM_TESTS = Path(__file__).parent / "jobs"


def pytest_configure(config: pytest.Config) -> None:
    """Give the runs of one test run compiled graphs of their own, which all its processes share."""
    if not hasattr(config, "workerinput") and "MINDRLHF_GRAPH_CACHE" not in os.environ:
        directory = tempfile.TemporaryDirectory(prefix="mindrlhf-test-graphs-")
        os.environ["MINDRLHF_GRAPH_CACHE"] = directory.name
        config.add_cleanup(directory.cleanup)


# Files of jobs that take longest, which begin first, so that no process is left with one of them at the end.
LONGEST = ("test_random_kills.py", "test_fault_matrix.py", "test_parallel_execution.py", "test_resume_exact.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick tests first, so that a plain mistake shows early; of the jobs those that take longest."""
    items.sort(key=lambda item: (SYSTEM_TESTS in item.path.parents, item.path.name not in LONGEST))


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The directory that ``MINDRLHF_SHARED`` names (GSM8K and a real tokenizer in its ``data``); skips when unset."""
    path = os.environ.get("MINDRLHF_SHARED")
    if not path:
        pytest.skip("MINDRLHF_SHARED names no directory of shared data")
    return Path(path)


@pytest.fixture(scope="session")
def rollout_python() -> str:
    """The interpreter that has vLLM: ``MINDRLHF_ROLLOUT_PYTHON``, else ``.venv-rollout`` of the repository."""
    path = Path(os.environ.get("MINDRLHF_ROLLOUT_PYTHON", REPOSITORY / ".venv-rollout" / "bin" / "python"))
    if not path.exists():
        pytest.skip(f"no rollout interpreter at {path}: run bash scripts/setup.sh")
    return str(path)
