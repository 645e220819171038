"""What several test modules need: the order of tests, shared data, the rollout interpreter."""

import os
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SYSTEM_TESTS = Path(__file__).parent / "jobs"


def pytest_configure(config: pytest.Config) -> None:
    """Give the runs of one test run compiled graphs and inputs of their own, which all its processes share."""
    for variable, name in (("MINDRLHF_GRAPH_CACHE", "graphs"), ("MINDRLHF_TEST_INPUTS", "inputs")):
        if not hasattr(config, "workerinput") and variable not in os.environ:
            directory = tempfile.TemporaryDirectory(prefix=f"mindrlhf-test-{name}-")
            os.environ[variable] = directory.name
            config.add_cleanup(directory.cleanup)


# Files that take longest begin first, so that no process is left with one of them at the end.
LONGEST = (
    *("test_fault_matrix.py", "test_start_msrun.py", "test_parallel_execution.py", "test_random_kills.py"),
    *("test_resume_exact.py", "test_compile_matrix.py", "test_vllm_server.py", "test_train_ranks.py"),
    *("test_ahead_runs.py", "test_shared_execution.py", "test_divided_update.py", "test_rollout_parity.py"),
    *("test_offline_resume.py", "test_replaced_data.py", "test_run_diff.py", "test_nodes.py", "test_two_runs.py"),
    *("test_qwen_vl.py", "test_lora.py", "test_cheats.py", "test_causal_lm.py", "test_routing_replay.py"),
    *("test_shared_prompts.py", "test_offline_adapters.py", "test_critic.py", "test_vision_actor.py"),
    *("test_preference.py", "test_policy_losses.py", "test_losses.py", "test_link.py", "test_on_machines.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick tests before the jobs, so that a plain mistake shows early, and of each those that take longest."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (SYSTEM_TESTS in item.path.parents, places.get(item.path.name, len(places))))


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
