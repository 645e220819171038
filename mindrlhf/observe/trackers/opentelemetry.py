"""OpenTelemetry: the spans of a run, in ``traces.jsonl`` and, where ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set, to there.

Each step is a trace; a process is a service. Lines are those of the SDK's console exporter.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import SpanContext, TraceFlags

from mindrlhf.observe.trackers import TrackedRun
from mindrlhf.system import tracing

FILE_NAME = "traces.jsonl"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracker:
    """The spans of rank 0 and of those it asks; see :class:`mindrlhf.observe.trackers.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        run.directory.mkdir(parents=True, exist_ok=True)
        self._file = (run.directory / FILE_NAME).open("a", encoding="utf-8")
        to_line = lambda span: span.to_json(indent=None) + "\n"  # noqa: E731
        self._exporters: list[SpanExporter] = [ConsoleSpanExporter(out=self._file, formatter=to_line)]
        if any(os.environ.get(name) for name in ENDPOINTS):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            self._exporters.append(OTLPSpanExporter())
        self._run = {"service.namespace": run.project, "mindrlhf.run": run.name, "mindrlhf.run_id": run.run_id}
        self._services: dict[str, Resource] = {}
        tracing.start("rank 0")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the spans that have ended by now."""
        if spans := [self._span(record) for record in tracing.take().get("spans", ())]:
            for exporter in self._exporters:
                exporter.export(spans)

    def _span(self, record: tracing.Record) -> ReadableSpan:
        trace, process = int(record["trace"], 16), record["process"]
        own, above = (
            SpanContext(trace, int(record[name], 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
            if record[name]
            else None
            for name in ("span", "parent")
        )
        if process not in self._services:
            self._services[process] = Resource.create({**self._run, "service.name": process})
        return ReadableSpan(
            record["name"],
            own,
            parent=above,
            resource=self._services[process],
            attributes={name: _attribute(value) for name, value in record["arguments"].items()},
            start_time=record["start_ns"],
            end_time=record["end_ns"],
        )

    def write_samples(self, step: int, samples: Sequence[str]) -> None:
        """Nothing: a trace has no texts."""

    def write_report(self, path: Path) -> None:
        """Nothing: a trace has no files."""

    def close(self, *, is_complete: bool) -> None:
        """Send the rest, and trace no more."""
        self.write(0, {})
        tracing.stop()
        for exporter in self._exporters:
            exporter.shutdown()
        self._file.close()


def _attribute(value: Any) -> str | bool | int | float:
    return value if isinstance(value, (str, bool, int, float)) else str(value)
