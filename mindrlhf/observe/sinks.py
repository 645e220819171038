"""Sinks of the metrics of each step: the console, ``metrics.jsonl``, TensorBoard, and trackers."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.observe.console import ConsoleSink
from mindrlhf.observe.records import JsonlWriter
from mindrlhf.observe.trackers.background import Trackers

NUM_BINS = 30


@dataclass(frozen=True)
class StepDetails:
    """Details of a step beside its metrics."""

    rewards: np.ndarray  # float64 [samples], finite
    lengths: np.ndarray  # of the responses, in tokens, [samples]
    samples: Sequence[str]  # a few, prompt and response as text


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
        self._writer.write({"step": step, **{name: float(value) for name, value in metrics.items()}})

    def close(self) -> None:
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
        self._summary_metadata, self._histogram = summary_pb2.SummaryMetadata, summary_pb2.HistogramProto
        self._directory = Path(directory)
        try:
            self._writer = EventFileWriter(str(directory))
        except OSError as failure:
            raise RunFailure(f"cannot write {directory}: {failure.strerror}") from failure
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(self._event(wall_time=time.time(), step=first_step, session_log=session))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def write_details(self, step: int, details: StepDetails) -> None:
        """Write histograms of reward and response length, and the samples as text."""
        values = [
            self._summary.Value(tag=f"histograms/{name}", histo=self._histogram(**_histogram(numbers)))
            for name, numbers in (("reward", details.rewards), ("response_length", details.lengths))
            if numbers.size
        ]
        values += [self._text(f"samples/{number}", text) for number, text in enumerate(details.samples, start=1)]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def write_text(self, tag: str, text: str) -> None:
        """Write a text of the whole run, such as its config."""
        summary = self._summary(value=[self._text(tag, text)])
        self._add(self._event(wall_time=time.time(), step=0, summary=summary))

    def _text(self, tag: str, text: str):
        from tensorboard.compat.proto import tensor_pb2, types_pb2

        metadata = self._summary_metadata(plugin_data=self._summary_metadata.PluginData(plugin_name="text"))
        # Four spaces at the start of each line: shown as it stands, and no markup of the model's is obeyed.
        plain = "\n".join(f"    {line}" for line in text.splitlines()).encode("utf-8", "backslashreplace")
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[plain])
        return self._summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def close(self) -> None:
        self._writer.close()

    def _add(self, event) -> None:
        try:
            self._writer.add_event(event)
            self._writer.flush()
        except OSError as failure:
            raise RunFailure(f"cannot write {self._directory}: {failure.strerror}") from failure


def _histogram(values: np.ndarray) -> dict[str, Any]:
    """Return the fields of TensorBoard's histogram of finite ``values``, in bins of equal width."""
    counts, edges = np.histogram(values, bins=NUM_BINS)
    return {
        "min": float(values.min()),
        "max": float(values.max()),
        "num": float(values.size),
        "sum": float(values.sum()),
        "sum_squares": float(np.square(values, dtype=np.float64).sum()),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.astype(float).tolist(),
    }


class SinkGroup:
    """Several sinks behind one, and the trackers, which are closed apart: they get the report in the end."""

    def __init__(self, sinks: Sequence[Sink], trackers: Trackers | None = None) -> None:
        self._sinks = tuple(sinks)
        self._trackers = trackers

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)
        if self._trackers is not None:
            self._trackers.write(step, metrics)

    def write_details(self, step: int, details: StepDetails) -> None:
        for sink in self._sinks:
            if isinstance(sink, TensorBoardSink):
                sink.write_details(step, details)
        if self._trackers is not None:
            self._trackers.write_samples(step, details.samples)

    def write_text(self, tag: str, text: str) -> None:
        for sink in self._sinks:
            if isinstance(sink, TensorBoardSink):
                sink.write_text(tag, text)

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
    accuracy: str = "held-out accuracy",
    trackers: Trackers | None = None,
) -> SinkGroup:
    """Open ``metrics.jsonl``, the console and, unless told not to, ``tensorboard/`` of a run.

    Args:
        run_dir: the run's directory, made if needed.
        first_step: the first step this process writes: 0 for a new run, the checkpoint's step + 1 for a resumed one.
            What an earlier process wrote about these steps is removed.
        num_steps: steps of the whole run, for the console.
        accuracy: what the run calls the metric `eval/accuracy`, for the console.
        trackers: those of others, which the caller closes.
    """
    run_dir = Path(run_dir)
    console = ConsoleSink(sys.stdout, num_steps=num_steps, accuracy=accuracy)
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", first_step=first_step)]
    if tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", first_step=first_step))
    return SinkGroup([*sinks, console], trackers)
