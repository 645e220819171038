"""Rank 0 has chosen steps recorded on all ranks, and puts what they recorded into one timeline."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from mindrlhf.config.observe import ProfilerSection
from mindrlhf.system import timeline
from mindrlhf.system.workers import Workers
from mindrlhf.training.profiling.merge import TIMELINE_NAME, merge
from mindrlhf.training.profiling.ranks import ProfiledWorker, profile_dir
from mindrlhf.training.team import Team


class StepProfiler:
    """Records the steps that the config names; steps in a row are one recording. It does nothing when there are none.
    """

    def __init__(self, section: ProfilerSection, team: Team, output_dir: Path) -> None:
        self._steps = frozenset(section.steps)
        self._unreached = set(section.steps)
        self._workers: ProfiledWorker = Workers(team.call)
        self._output_dir = output_dir
        self._is_recording = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Return a context around a step, from 1, and what follows it. An error in it ends the run unrecorded."""
        if number not in self._steps:
            with timeline.span(f"step {number}"):
                yield
            return
        self._unreached.discard(number)
        if not self._is_recording:
            self._workers.begin_profile(step=number)
            self._is_recording = True
        with timeline.span(f"step {number}"):
            yield
        if number + 1 not in self._steps:
            self._end()

    def close(self) -> None:
        """End what is being recorded, and say which steps the run did not reach."""
        if self._is_recording:
            self._end()
        if self._unreached:
            steps = ", ".join(map(str, sorted(self._unreached)))
            print(f"mindrlhf: not recorded, since this run did not do them: steps {steps} (profiler.steps)", flush=True)

    def _end(self) -> None:
        self._is_recording = False
        self._workers.end_profile()
        try:
            path = merge(profile_dir(self._output_dir), self._output_dir / TIMELINE_NAME)
        except OSError as error:  # a full disk; the run is worth more than its timeline
            print(f"warning: the timeline cannot be written: {error}", file=sys.stderr, flush=True)
            return
        print(f"mindrlhf: timeline: {path} (open it in https://ui.perfetto.dev)", flush=True)
