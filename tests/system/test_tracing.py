"""Traces over processes: who is inside whom, also over threads and over a link that carries JSON."""

import json
import threading

import pytest

from mindrlhf.system import timeline, tracing


@pytest.fixture(autouse=True)
def traced():
    tracing.start("rank 0")
    yield
    tracing.stop()


def taken() -> dict[str, dict]:
    return {span["name"]: span for span in tracing.take()["spans"]}


def test_spans_of_a_thread_are_inside_each_other_and_of_another_in_the_outermost():
    with timeline.span("step 1"):
        with timeline.span("rollout", samples=3):
            thread = threading.Thread(target=lambda: timeline.span("of a thread").end(ending="well"))
            thread.start()
            thread.join()
            loose = timeline.span("loose", "vLLM rollout_0")
            with timeline.span("inner"):
                pass
        loose.end()
        loose.end()
    with timeline.span("step 2"):
        pass
    spans = taken()
    parents = {name: span["parent"] for name, span in spans.items()}
    step, rollout = spans["step 1"]["span"], spans["rollout"]["span"]
    assert parents == {
        "of a thread": step, "inner": rollout, "rollout": step, "loose": rollout, "step 1": "", "step 2": ""
    }  # fmt: skip
    assert {span["trace"] for name, span in spans.items() if name != "step 2"} == {spans["step 1"]["trace"]}
    assert spans["step 2"]["trace"] != spans["step 1"]["trace"]
    assert spans["of a thread"]["arguments"] == {"ending": "well"} and spans["rollout"]["arguments"] == {"samples": 3}
    assert spans["loose"]["process"] == "vLLM rollout_0" and spans["inner"]["process"] == "rank 0"
    assert spans["step 1"]["start_ns"] <= spans["inner"]["start_ns"] <= spans["inner"]["end_ns"]
    assert tracing.take() == {"spans": []}


def test_a_peer_goes_on_inside_what_asked_and_its_spans_come_back():
    with timeline.span("step 1"):
        asked = timeline.span("generate")
        request = json.loads(json.dumps(asked.carried()))
        here = tracing._tracing
        tracing.answer(request, "rollout server")  # as its process does
        peer = timeline.span("sample")
        peer.part("rollout", tokens=5)
        peer.end()
        answer = json.loads(json.dumps(tracing.take()))
        tracing._tracing = here
        tracing.add(answer, "vLLM rollout_0")
        asked.end()
    spans = taken()
    assert spans["rollout"]["parent"] == spans["sample"]["span"]
    assert spans["sample"]["parent"] == spans["generate"]["span"]
    assert {span["trace"] for span in spans.values()} == {spans["step 1"]["trace"]}
    assert spans["sample"]["process"] == spans["rollout"]["process"] == "vLLM rollout_0"
    assert spans["rollout"]["start_ns"] == spans["sample"]["start_ns"]


def test_a_span_is_in_the_timeline_and_in_the_trace():
    timeline.start("rank 0")
    with timeline.span("both", samples=1) as span:
        assert span.carried()
        span.part("part of the trace")
    events = [event for event in timeline.stop().events if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["both"] and set(taken()) == {"both", "part of the trace"}


def test_a_peer_that_is_not_asked_to_trace_does_not():
    tracing.answer({"kind": "generate"}, "rollout server")
    with timeline.span("sample") as span:
        assert span.carried() == {}
    assert tracing.take() == {}
