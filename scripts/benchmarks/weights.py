"""The weight buffer against a plain copy of the same bytes, and weights into vLLM within a run.

"write" fills a buffer and commits it, "verify" reads it with its sums; both in turns with the copy. "to vLLM" is
`timing/reshard_to_infer` of steps of a run: the write, and the server's verify and load.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from harness import MEDIUM, make_sanity, train

from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer


def measure(directory: Path, smallest: bool, repeats: int) -> Iterator[dict]:
    for num_tensors in (16,) if smallest else (16, 128):
        infos = [TensorInfo(f"tensor {number}", "float32", (1024, 1024)) for number in range(num_tensors)]
        arrays = [
            np.random.default_rng(number).standard_normal((1024, 1024), np.float32) for number in range(num_tensors)
        ]
        copies = [np.empty_like(array) for array in arrays]
        with WeightBuffer.create(infos) as buffer:

            def copy(version: int, arrays=arrays, copies=copies) -> None:
                for array, target in zip(arrays, copies):
                    np.copyto(target, array)

            def write(version: int, buffer=buffer, infos=infos, arrays=arrays) -> None:
                buffer.begin(version)
                for info, array in zip(infos, arrays):
                    buffer.write(info.name, array)
                buffer.commit()

            actions = {"copy": copy, "write": write, "verify": buffer.verify}
            yield from _rows(actions, sum(array.nbytes for array in arrays), repeats)
    make_sanity(directory, *((512, {}) if smallest else (32_000, MEDIUM)))
    steps = train(directory, directory / "run", 2 * repeats, warm_up=2, training__micro_batch_size=8)
    seconds = statistics.median(step["timing/reshard_to_infer"] for step in steps)
    yield {
        "MB": "of a run",
        "action": "to vLLM",
        "ms": 1000 * seconds,
        "GB/s": float("nan"),
        "times copy": float("nan"),
    }


def _rows(actions: dict[str, Callable[[int], object]], num_bytes: int, repeats: int) -> Iterator[dict]:
    """Time the actions in turns, so that a slow moment of the machine falls on all; the first turn is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for version in range(repeats + 1):
        for name, action in actions.items():
            start = time.perf_counter()
            action(version)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    for name, median in medians.items():
        rate, slower = num_bytes / median / 1e9, median / medians["copy"]
        yield {"MB": num_bytes // 10**6, "action": name, "ms": 1000 * median, "GB/s": rate, "times copy": slower}
