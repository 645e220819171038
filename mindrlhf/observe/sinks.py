"""Where the metrics of each step go: the console, ``metrics.jsonl`` and TensorBoard."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from mindrlhf.errors import RunFailure
from mindrlhf.observe.console import ConsoleSink
from mindrlhf.observe.records import JsonlWriter


class Sink(Protocol):
    """A destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step (0 is before training); they are safe from a kill when it returns.

        A step may be written in parts, for example its evaluation apart from its training.

        Raises:
            RunFailure: the destination cannot be written.
        """

    def close(self) -> None:
        """Give back files and threads; closing twice is harmless."""


class JsonlSink:
    """One JSON object per line: ``step`` and the metrics, non-finite values as null."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Open ``path`` for the steps from ``first_step`` on; see ``JsonlWriter``."""
        self._writer = JsonlWriter(path, first_step=first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line."""
        self._writer.write({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class TensorBoardSink:
    """Scalars in a TensorBoard event file, without TensorFlow or torch.

    The sink must be opened after ``import mindspore``: MindSpore 2.9 refuses to load once protobuf has chosen its
    native implementation, and importing tensorboard makes it choose.
    """

    def __init__(self, directory: Path, *, first_step: int) -> None:
        """Open a new event file in ``directory`` for the steps from ``first_step`` on.

        TensorBoard never edits event files: a session-start event tells its readers to forget what earlier
        files of the directory say about these steps.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._directory = Path(directory)
        try:
            self._writer = EventFileWriter(str(directory))
        except OSError as failure:
            raise RunFailure(f"cannot write {directory}: {failure.strerror}") from failure
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(self._event(wall_time=time.time(), step=first_step, session_log=session))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with a scalar for each metric."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Close the event file and end its writer thread."""
        self._writer.close()

    def _add(self, event) -> None:
        try:
            self._writer.add_event(event)
            self._writer.flush()
        except OSError as failure:
            raise RunFailure(f"cannot write {self._directory}: {failure.strerror}") from failure


class SinkGroup:
    """Several sinks behind one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write to each sink in turn."""
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        """Close every sink, also when one of them fails to close."""
        failures = []
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as failure:
                failures.append(failure)
        if failures:
            raise RunFailure(f"cannot finish the metrics files: {failures[0]}") from failures[0]


def open_sinks(
    run_dir: Path,
    *,
    first_step: int,
    num_steps: int | None = None,
    tensorboard: bool = True,
    stream: TextIO | None = None,
) -> SinkGroup:
    """Open ``metrics.jsonl``, the console and, unless told not to, ``tensorboard/`` of a run.

    Args:
        run_dir: the run's directory, made if needed.
        first_step: the first step this process writes: 0 for a new run, the checkpoint's step + 1 for a resumed one.
            What an earlier process wrote about these steps is removed.
        num_steps: steps of the whole run, for the console.
        stream: console stream, standard output when None.
    """
    run_dir = Path(run_dir)
    console = ConsoleSink(sys.stdout if stream is None else stream, num_steps=num_steps)
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", first_step=first_step)]
    if tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", first_step=first_step))
    return SinkGroup([*sinks, console])
