"""What jobs share: their inputs, commands that are cleaned up, and the run that nobody disturbed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import fault_jobs
import pytest
import sanity_inputs
from fault_jobs import RECIPE, FaultJob
from launch_jobs import Job
from machine_jobs import one_machine, start_machines  # noqa: F401 (fixtures)

_TIMEOUT_S = 400  # generous: other work may load the machine


@pytest.fixture(scope="session")
def sanity_dir(rollout_python) -> Path:
    """The model and the prompts of most runs: one place, since checkpoints name it and are compared."""
    return sanity_inputs.made_once("fault_inputs", sanity_inputs.make)


@pytest.fixture(scope="session")
def pairs_dir(rollout_python) -> Path:
    """A model, and the same pairs as records to imitate and as preferences."""

    def make(directory: Path) -> None:
        sanity_inputs.make(directory)
        sanity_inputs.make_pairs(directory)

    return sanity_inputs.made_once("pairs", make)


@pytest.fixture(scope="session")
def start_job(sanity_dir, tmp_path_factory):
    """Start a job: ``start_job(output_dir, options...)``; keyword arguments change the recipe."""
    jobs = []
    segments = fault_jobs.shared_memory()

    def start(output_dir: Path, *options: object, environment: dict[str, str] | None = None, **changes) -> FaultJob:
        recipe = {**RECIPE, "data__eval_file": sanity_dir / "prompts.mindrecord", **changes}
        arguments = [*sanity_inputs.overrides(sanity_dir, output_dir, **recipe), *options]
        jobs.append(FaultJob(tmp_path_factory.mktemp("job"), output_dir, arguments, environment))
        return jobs[-1]

    yield start
    for job in jobs:
        job.clean_up()
    fault_jobs.check_no_shared_memory_was_left(segments)


@pytest.fixture(scope="session")
def undisturbed_run(start_job):
    """Return the output directory of the run that nobody disturbed: ``undisturbed_run(world_size)``."""

    def find(world_size: int) -> Path:
        def run(directory: Path) -> None:
            job = start_job(directory / "run", "--workers", world_size)
            assert job.wait(_TIMEOUT_S) == 0, job.text()
            assert job.leftovers() == []

        return sanity_inputs.made_once(f"undisturbed_{world_size}", run) / "run"

    return find


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Job]]:
    """Starts a job of two workers, or another number of them."""
    jobs = []

    def start_job(worker: str, num_workers: int = 2, **options: object) -> Job:
        jobs.append(Job(tmp_path, worker, num_workers, **options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.clean_up()
