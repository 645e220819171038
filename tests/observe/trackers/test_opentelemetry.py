"""Spans of rank 0 and of the processes it asks as OpenTelemetry has them: in the file, and received by OTLP."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra opentelemetry is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mindrlhf.observe.trackers import TrackedRun, check_trackers
from mindrlhf.observe.trackers.opentelemetry import FILE_NAME, Tracker
from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput
from mindrlhf.system import timeline, tracing


@pytest.fixture
def collector(monkeypatch):
    """A receiver of OTLP over HTTP."""
    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        yield received
        server.shutdown()


def opened(tmp_path) -> Tracker:
    return Tracker(TrackedRun("numbers", "a run", "a" * 21, tmp_path, {}))


def a_step(verifier: str = "accuracy_reward") -> None:
    samples = [RewardInput(index, f"#### {index}", "1", f"{index}?", "stop") for index in range(3)]
    with timeline.span("step 1"), timeline.span("rewards"):
        with RewardPool(Selection((verifier,), (1.0,)), num_workers=1) as pool:
            pool.score(samples)


def lines(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]


def above(spans: list[dict], span: dict) -> list[str]:
    """The names of a span and of those that it is in."""
    by_id = {one["context"]["span_id"]: one for one in spans}
    names = [span["name"]]
    while span["parent_id"]:
        span = by_id[span["parent_id"]]
        names.append(span["name"])
    return names


def test_a_step_is_one_trace_of_all_its_processes(tmp_path, collector):
    before_ns = time.time_ns()
    tracker = opened(tmp_path)
    a_step()
    tracker.write(1, {"loss": 1.0})
    tracker.close(is_complete=True)
    spans = lines(tmp_path)
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    verified = [span for span in spans if span["name"] == "accuracy_reward"]
    assert [above(spans, span) for span in verified] == [["accuracy_reward", "score", "step 1"]] * 3
    assert sorted(span["attributes"]["sample"] for span in verified) == [0, 1, 2]
    services = {span["name"]: span["resource"]["attributes"]["service.name"] for span in spans}
    assert services["step 1"] == services["rewards"] == "rank 0"
    assert services["accuracy_reward"] == services["score"] == "verifiers"
    ((path, request),) = collector
    assert path == "/v1/traces"
    sent = [span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans]
    assert {f"0x{span.span_id.hex()}" for span in sent} == {span["context"]["span_id"] for span in spans}
    assert {f"0x{span.parent_span_id.hex()}" for span in sent if span.parent_span_id} == {
        span["parent_id"] for span in spans if span["parent_id"]
    }
    assert all(before_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns() for span in sent)
    (step,) = (span for span in sent if span.name == "step 1")
    inner = [span for span in sent if span.name == "accuracy_reward"]
    assert all(step.start_time_unix_nano <= span.start_time_unix_nano for span in inner)
    assert all(span.end_time_unix_nano <= step.end_time_unix_nano for span in inner)


def test_a_collector_that_is_away_costs_no_span_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    tracker = opened(tmp_path)
    with timeline.span("step 1"):
        pass
    tracker.close(is_complete=True)
    assert [span["name"] for span in lines(tmp_path)] == ["step 1"]


def test_nothing_is_traced_without_it(tmp_path):
    a_step()
    assert tracing.take() == {} and tracing.context() == {}
    tracker = opened(tmp_path)
    tracker.close(is_complete=True)
    a_step()
    assert lines(tmp_path) == [] and tracing.take() == {}


FORGERY = """
import sys
from mindrlhf.system import tracing

def forger(completion, answer):
    tracing._tracing._kept.append({forged})
    return 1.0
"""
SPAN = {"name": "n", "trace": "a" * 32, "span": "b" * 16, "parent": "c" * 16, "start_ns": 1, "end_ns": 2}
SPAN |= {"process": "rank 0", "arguments": {}}


@pytest.mark.parametrize(
    "changed",
    [{"trace": "x" * 32}, {"span": ""}, {"parent": 5}, {"end_ns": 0}, {"end_ns": 1 << 70}, {"name": 1}]
    + [{"arguments": [1]}, {"start_ns": "soon"}],
    ids=lambda changed: "".join(changed),
)
@pytest.mark.timeout(120)
def test_a_verifier_that_forges_spans_loses_its_samples_and_writes_none(tmp_path, changed):
    (tmp_path / "forger.py").write_text(FORGERY.replace("{forged}", repr(SPAN | changed)))
    tracker = opened(tmp_path)
    selection = Selection((f"{tmp_path}/forger.py:forger",), (1.0,))
    with timeline.span("step 1"), RewardPool(selection, num_workers=1) as pool:
        (result,) = pool.score([RewardInput(0, "a", "a", "a", "stop")])
    tracker.close(is_complete=True)
    assert list(result.failures.values()) == ["worker broken: it wrote to its worker's pipes"]
    assert {span["name"] for span in lines(tmp_path)} <= {"step 1", "start", "score"}


def test_spans_of_a_verifier_are_of_the_verifiers_whatever_they_say(tmp_path):
    tracing.start("rank 0")
    tracing.add({"spans": [SPAN]}, "verifiers")
    (kept,) = tracing.take()["spans"]
    tracing.stop()
    assert kept == SPAN | {"process": "verifiers"}


def test_without_the_package_it_is_refused(monkeypatch):
    import importlib.util

    def none(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", none)
    with pytest.raises(Exception, match=r"opentelemetry, which is not installed: pip install 'mindrlhf\[opentelemetry"):
        check_trackers(["opentelemetry"])
