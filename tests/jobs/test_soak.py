"""Nothing grows with steps or evaluations: memory, descriptors, threads and shared memory of each process, and files.

``MINDRLHF_SOAK_STEPS`` and ``MINDRLHF_SOAK_EVALUATIONS`` say how many; ``pytest -s`` shows the slopes.
"""

import collections
import contextlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import sanity_inputs
from fault_jobs import KINDS, FaultJob
from safetensors.numpy import load_file
from slow_tests import SLOW

from mindrlhf.rollout.servers import Server
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm_options import VllmOptions
from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer

NUM_STEPS = int(os.environ.get("MINDRLHF_SOAK_STEPS", 2000))
NUM_EVALUATIONS = int(os.environ.get("MINDRLHF_SOAK_EVALUATIONS", 400))
NUM_PROMPTS = 300
CHECKPOINT = sanity_inputs.REPOSITORY / "examples" / "quickstart" / "checkpoint"  # 1.05 million parameters
WORLD_SIZE = 2
PROCESSES = ("rank", "rollout server", "verifier worker", "launcher")
# What is left of start-up: of the first part of a run nothing is asked.
WARM_UP = 0.4
# Growth over all that comes after it, whatever its length: pieces of memory that the C library does not join, and what
# a run of a few steps has not met yet. And growth for each 100 steps or evaluations.
MIB_ONCE, MIB_PER_100 = 48, 4
COUNTS = ("descriptors", "threads", "segments", "files")
COUNTS_ONCE, COUNTS_PER_100 = 3, 0.2
FILES_ONCE = 12  # of a checkpoint that is being written

pytestmark = [pytest.mark.timeout(900 + 5 * NUM_STEPS + 10 * NUM_EVALUATIONS), SLOW]

Series = dict[tuple[str, str], list[tuple[int, float]]]  # by process and what is counted: (steps so far, value)


def look_at(pid: int) -> dict[str, float]:
    """Return what a process holds now; nothing where it has ended."""
    with contextlib.suppress(OSError):
        root = Path(f"/proc/{pid}")
        status, maps, sums = ((root / name).read_text() for name in ("status", "maps", "smaps_rollup"))
        return {
            "MiB resident": int(re.search(r"^VmRSS:\s+(\d+) kB", status, re.M)[1]) / 1024,
            "MiB anonymous": int(re.search(r"^RssAnon:\s+(\d+) kB", status, re.M)[1]) / 1024,
            "MiB proportional": int(re.search(r"^Pss:\s+(\d+) kB", sums, re.M)[1]) / 1024,
            "threads": int(re.search(r"^Threads:\s+(\d+)", status, re.M)[1]),
            "descriptors": len(os.listdir(root / "fd")),
            "segments": len(
                {line.split()[4] for line in maps.splitlines() if "/dev/shm/" in line or "/memfd:" in line}
            ),
        }
    return {}


def record(series: Series, process: str, now: int, held: Mapping[str, float]) -> None:
    for what, value in held.items():
        series.setdefault((process, what), []).append((now, value))


def growth(points: list[tuple[int, float]], last: int) -> tuple[float, float]:
    """Return by least squares the growth per 100 steps after the warm-up, and over all of them."""
    steps, values = np.array([point for point in points if point[0] >= WARM_UP * last], np.float64).T
    slope = np.polyfit(steps, values, 1)[0]
    return 100 * slope, slope * (steps[-1] - steps[0])


def check(series: Series, last: int, unit: str) -> None:
    grown = []
    for (process, what), points in sorted(series.items()):
        per_100, in_all = growth(points, last)
        print(
            f"{process:20} {what:17} {points[-1][1]:8.1f} {per_100:+8.2f} per 100 {unit}, {in_all:+8.2f} since warm-up"
        )
        once, each = (COUNTS_ONCE, COUNTS_PER_100) if what in COUNTS else (MIB_ONCE, MIB_PER_100)
        once = FILES_ONCE if what == "files" else once
        # Of pages that other processes map as well a part is counted, which is less the more there are.
        if what != "MiB proportional" and in_all > once + each * last / 100:
            grown.append(f"{what} of {process}: {in_all:+.2f}, {per_100:+.2f} per 100 {unit}")
    assert not grown, grown


def seen(job: FaultJob, every: int) -> Iterator[int]:
    """Yield the number of steps done, about once in so many, while a run trains."""
    last = 0
    while job.process.poll() is None:
        if (now := job.num_steps()) >= last + every:
            yield now
            last = now
        time.sleep(0.1)


def test_no_process_of_a_run_grows_with_its_steps(start_job, tmp_path):
    job = start_job(
        tmp_path / "run", "--workers", WORLD_SIZE, run__max_steps=NUM_STEPS, training__epochs=1000,
        evaluation__every_steps=5, checkpoint__every_steps=4, reward__num_workers=2,
    )  # fmt: skip
    series: Series = {}
    for step in seen(job, max(1, NUM_STEPS // 48)):
        numbers = collections.Counter()
        for pid, words in sorted(job.running().items()):
            kind = next((kind for kind in PROCESSES if KINDS[kind] in words), None)
            if kind is not None and (held := look_at(pid)):
                record(series, f"{kind} {numbers[kind]}", step, held)
                numbers[kind] += 1
        files = [
            name for path in (job.temporary_dir, job.output_dir) for _, _, names in os.walk(path) for name in names
        ]
        record(series, "all", step, {"files": len(files)})
    assert job.wait(600) == 0, job.text()
    assert {process.rpartition(" ")[0] for process, _ in series} >= set(PROCESSES)
    check(series, NUM_STEPS, "steps")


def test_a_rollout_server_does_not_grow_with_evaluations(rollout_python, tmp_path):
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(10, 512, length).tolist()) for length in random.integers(30, 100, NUM_PROMPTS)]
    tensors = load_file(CHECKPOINT / "model.safetensors")
    infos = [TensorInfo(name, "float32", tensor.shape) for name, tensor in tensors.items()]
    options = VllmOptions(
        rollout_python, str(CHECKPOINT), str(tmp_path / "log"), max_model_len=160, max_num_seqs=128, kv_cache_gib=0.1
    )
    series: Series = {}
    with WeightBuffer.create(infos) as buffer, Server.start(options) as generator:
        generator.node.servers.buffer_path = buffer.path
        generator.wait_ready()
        for number in range(1, NUM_EVALUATIONS + 1):
            buffer.begin(number)
            for name, tensor in tensors.items():
                buffer.write(name, tensor * np.float32(random.normal(1, 1e-3)))
            buffer.commit()
            generator.update_weights(number)
            seeds = random.integers(1 << 30, size=NUM_PROMPTS).tolist()
            requests = [GenerationRequest(i, prompts[i], 1, seeds[i]) for i in range(NUM_PROMPTS)]
            completions = list(generator.generate(requests, SamplingParams(40, stop_token_ids=tuple(range(10)))))
            assert len(completions) == NUM_PROMPTS
            record(series, "rollout server", number, look_at(generator._pids[0]))
    check(series, NUM_EVALUATIONS, "evaluations")
