"""Reporting to trackers from a thread: their networks are slow and fail, and neither may hold up or end a run."""

import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.observe.trackers import TrackedRun, Tracker, load_tracker
from mindrlhf.system.files import write_file

CLOSE_LIMIT_S = 60.0
RUN_ID_NAME = "run_id"


class Trackers:
    """All trackers of a run; nothing here raises, and nothing but closing waits."""

    def __init__(self, names: Sequence[str], run: TrackedRun, close_limit_s: float = CLOSE_LIMIT_S) -> None:
        """Begin to open the trackers; ``close_limit_s`` is the longest wait for what they have not sent at the end."""
        self._threads = [_TrackerThread(name, lambda name=name: load_tracker(name)(run)) for name in names]
        self._limit_s = close_limit_s
        self._is_complete = False

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._send(lambda tracker: tracker.write(step, values))

    def write_samples(self, step: int, samples: Sequence[str]) -> None:
        if samples:
            self._send(lambda tracker: tracker.write_samples(step, tuple(samples)))

    def complete(self, report: Path) -> None:
        """Pass on the report of the run, which is complete by now, if it has one."""
        self._is_complete = True
        if report.is_file():
            self._send(lambda tracker: tracker.write_report(report))

    def close(self) -> None:
        """End the run in all trackers; closing twice is harmless."""
        is_complete = self._is_complete
        self._send(lambda tracker: tracker.close(is_complete=is_complete))
        for thread in self._threads:
            thread.finish()
        deadline = time.monotonic() + self._limit_s
        for thread in self._threads:
            thread.wait(max(0.0, deadline - time.monotonic()), self._limit_s)
        self._threads = []

    def _send(self, call: Callable[[Tracker], None]) -> None:
        for thread in self._threads:
            thread.send(call)


def open_trackers(
    sinks: Sequence[str], output_dir: Path, config: Mapping[str, Any], *, project: str, is_resumed: bool
) -> Trackers:
    """Open the trackers among ``sinks``.

    Args:
        sinks: `observe.sinks`; TensorBoard is not opened here.
        config: of the whole run, section -> key -> value.
        project: what the run is filed under, by the name of its output directory.
        is_resumed: go on with the run that an earlier process of this output directory has opened.
    """
    name = output_dir.resolve().name
    names = [sink for sink in dict.fromkeys(sinks) if sink != "tensorboard"]
    if not names:
        return Trackers((), TrackedRun(project, name, "", output_dir, config))
    directory = (output_dir / "trackers").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    id_file = directory / RUN_ID_NAME
    if not (is_resumed and id_file.is_file()):
        write_file(id_file, uuid.uuid4().hex[:21])
    plain = json.loads(json.dumps(config))  # tuples become lists
    run = TrackedRun(
        project=project,
        name=name,
        run_id=id_file.read_text(encoding="ascii").strip(),
        directory=directory,
        config=plain,
    )
    return Trackers(names, run)


class _TrackerThread:
    """One tracker in a thread of its own: the first failure is reported, and then it gets nothing more."""

    def __init__(self, name: str, open_one: Callable[[], Tracker]) -> None:
        self._name = name
        self._open = open_one
        self._calls: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        # A daemon, so that one that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, call: Callable[[Tracker], None]) -> None:
        self._calls.put(call)

    def finish(self) -> None:
        self._calls.put(None)

    def wait(self, seconds: float, limit_s: float) -> None:
        """Wait until the thread has ended, at most so long; ``limit_s`` is for the message."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"has not taken everything {limit_s:.0f} s after the end, and is left alone")

    def _work(self) -> None:
        try:
            tracker = self._open()
            while (call := self._calls.get()) is not None:
                call(tracker)
        except (Exception, SystemExit) as failure:  # whatever a package of others raises
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())
            self._warn(f"failed and gets nothing more from this run: {reason[:300]}")

    def _warn(self, what: str) -> None:
        print(f"mindrlhf: warning: 'observe.sinks': {self._name} {what}", file=sys.stderr, flush=True)
