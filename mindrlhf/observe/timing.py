"""Time of the stages of a step, and memory."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mindrlhf.system import timeline


class StageTimer:
    """Wall time of the stages of one training step, on the monotonic clock.

    The step begins when the timer is made or when ``finish_step`` returns. A stage may be entered several
    times (its times add up) but not inside another one, so that the stages of a step never count a second twice
    and what they leave of ``timing/all`` is time that no stage owns.
    """

    def __init__(self, on_stage: Callable[[str], None] = lambda name: None) -> None:
        self._on_stage = on_stage
        self._running: str | None = None
        self._elapsed_s: dict[str, float] = {}
        self._step_start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as ``timing/<name>``, also when it raises."""
        assert self._running is None, f"stage {name!r} starts inside stage {self._running!r}"
        assert name != "all", "'all' is the whole step, not a stage"
        self._running = name
        self._on_stage(name)
        start = time.perf_counter()
        try:
            with timeline.span(name):
                yield
        finally:
            self._elapsed_s[name] = self._elapsed_s.get(name, 0.0) + time.perf_counter() - start
            self._running = None

    def finish_step(self) -> dict[str, float]:
        """Return ``timing/<stage>`` of each stage seen and ``timing/all``, in seconds, and begin the next step."""
        assert self._running is None, f"the step ends inside stage {self._running!r}"
        now = time.perf_counter()
        timings = {f"timing/{name}": elapsed for name, elapsed in self._elapsed_s.items()}
        timings["timing/all"] = now - self._step_start
        self._elapsed_s = {}
        self._step_start = now
        return timings


def throughput(
    timings: Mapping[str, float],
    *,
    mean_prompt_length: float,
    mean_response_length: float,
    num_prompts: int,
    num_samples: int,
    world_size: int,
) -> dict[str, float]:
    """Return tokens per second and device of the whole step, the update and the rollout.

    Each is (mean response + mean prompt tokens) * num_prompts * num_samples / world_size / time, with the time
    of ``timing/all`` (``e2e_tps``), ``timing/update`` (``update_tps``) and ``timing/rollout`` (``vllm_tps``).
    A stage that the step did not have gives no number.
    """
    assert world_size > 0, "world_size must be positive"
    tokens_per_device = (mean_response_length + mean_prompt_length) * num_prompts * num_samples / world_size
    stages = {"e2e_tps": "timing/all", "update_tps": "timing/update", "vllm_tps": "timing/rollout"}
    return {name: tokens_per_device / timings[stage] for name, stage in stages.items() if timings.get(stage, 0.0) > 0}


def peak_rss_gb() -> float:
    """Return the largest resident memory that this process had so far, in GB (1e9 bytes).

    It is the kernel's VmHWM, not ``getrusage``: ``ru_maxrss`` survives exec, so a process started by a large
    parent reports the parent's memory as its own peak.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9
