"""Prometheus: the last step's metrics at http://127.0.0.1:PORT/metrics, and in ``metrics.prom`` for a node exporter.

The text format and its names are those of https://prometheus.io/docs/instrumenting/exposition_formats.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, start_http_server, write_to_textfile

from mindrlhf.observe.trackers import TrackedRun
from mindrlhf.system.ports import find_free_port

FILE_NAME, HOST = "metrics.prom", "127.0.0.1"


class Tracker:
    """An endpoint of a run; see :class:`mindrlhf.observe.trackers.Tracker`."""

    def __init__(self, run: TrackedRun) -> None:
        self._registry, self._gauges = CollectorRegistry(), {}
        self._labels = {"run": run.name, "project": run.project}
        self._file = run.directory / FILE_NAME
        port = int(os.environ.get("MINDRLHF_PROMETHEUS_PORT") or find_free_port(HOST))
        self._server, self._thread = start_http_server(port, addr=HOST, registry=self._registry)
        print(f"mindrlhf: Prometheus: http://{HOST}:{port}/metrics, and {self._file}", flush=True)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the metrics, and the step they are of."""
        for name, value in {"step": step, **metrics}.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                plain = re.sub(r"[^a-zA-Z0-9_]", "_", f"mindrlhf_{name}")
                gauge = Gauge(plain, f"{name} of the last step", list(self._labels), registry=self._registry)
                self._gauges[name] = gauge
            gauge.labels(**self._labels).set(value)
        write_to_textfile(str(self._file), self._registry)

    def write_samples(self, step: int, samples: Sequence[str]) -> None:
        """Ignored: Prometheus has numbers alone."""

    def write_report(self, path: Path) -> None:
        """Ignored: Prometheus has numbers alone."""

    def close(self, *, is_complete: bool) -> None:
        """End the endpoint; the file stays."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
