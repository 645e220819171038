"""Recording of chosen steps on each rank: its timeline, and MindSpore's and vLLM's profilers."""

import functools
import inspect
import json
from pathlib import Path
from typing import Any, Protocol

from mindrlhf.config.observe import ProfilerSection
from mindrlhf.system import timeline
from mindrlhf.system.files import write_file
from mindrlhf.training.runtime import Rank


class Servers(Protocol):
    """The rollout servers of a run: :class:`mindrlhf.rollout.pool.ServerPool`."""

    def profile(self, step: int) -> None:
        """Have vLLM's profiler record what follows as a step's, from 1; 0 ends it."""


def profile_dir(output_dir: str | Path) -> Path:
    """Return where the profiles of a run go."""
    return Path(output_dir) / "profile"


class ProfiledWorker:
    """Stands for the worker of a rank in a run that records steps: what it is called for becomes a span."""

    def __init__(
        self, worker: Any, section: ProfilerSection, output_dir: Path, rank: Rank, servers: Servers | None
    ) -> None:
        self._worker = worker
        self._directory = profile_dir(output_dir)
        self._name = f"rank_{rank.index}"
        self._is_rank_0 = rank.is_rank_0
        self._runs_mindspore = "mindspore" in section.tools
        self._mindspore: Any = None
        self._servers = servers if "vllm" in section.tools else None
        self._step = 0
        self._waiting = timeline.span("")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._worker, name)
        return self._timed(value) if inspect.ismethod(value) else value

    def begin_profile(self, step: int) -> None:
        """Record what follows, of a step from 1 and those after it, until ``end_profile``."""
        self._step = step
        if self._servers is not None:
            self._servers.profile(step)
        if self._runs_mindspore:
            self._mindspore = _start_mindspore(self._directory / f"step_{step}" / "mindspore" / self._name)
        timeline.start(self._name.replace("_", " "))
        self._wait()

    def end_profile(self) -> None:
        """Write down what was recorded."""
        _write_piece(self._directory / f"step_{self._step}", self._name, timeline.stop())
        if self._mindspore is not None:
            self._mindspore.stop()
            self._mindspore = None
        if self._servers is not None:
            self._servers.profile(0)

    def _timed(self, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._waiting.end()
            with timeline.span(function.__name__):
                result = function(*arguments, **options)
            self._wait()
            return result

        return timed

    def _wait(self) -> None:
        if not self._is_rank_0:
            self._waiting = timeline.span("waiting for rank 0")


def _start_mindspore(directory: Path) -> Any:
    """Start MindSpore's profiler, which writes and analyses its traces in ``directory`` when it is stopped."""
    from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

    directory.mkdir(parents=True, exist_ok=True)
    started = profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.NPU],
        on_trace_ready=tensorboard_trace_handler(str(directory)),
        start_profile=False,
    )
    started.start()
    return started


def _write_piece(directory: Path, process: str, recorded: timeline.Recorded) -> None:
    """Write what one process has recorded as a trace of its own; :mod:`mindrlhf.training.profiling.merge` reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    trace = {
        "traceEvents": recorded.events,
        "displayTimeUnit": "ms",
        "otherData": {"start_unix_ns": recorded.start_unix_ns},
    }
    write_file(directory / f"{process}.json", json.dumps(trace))
