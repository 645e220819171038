"""Timelines of chosen steps: what is recorded, by whom, and that the file is what trace viewers ask for."""

import json
import threading
from types import SimpleNamespace

import pytest
from trace_events import read_trace, spans

from mindrlhf.config.observe import ProfilerSection
from mindrlhf.errors import RunFailure
from mindrlhf.observe.timing import StageTimer
from mindrlhf.system import timeline
from mindrlhf.training.profiling.ranks import ProfiledWorker
from mindrlhf.training.profiling.steps import StepProfiler
from mindrlhf.training.runtime import Rank


@pytest.fixture
def clock(monkeypatch):
    """The steady clock in nanoseconds and the machine's clock beside it, which stand still until they are moved."""
    now = SimpleNamespace(ns=5_000, unix_ns=1_700_000_000_000_000_000)
    monkeypatch.setattr(timeline.time, "monotonic_ns", lambda: now.ns)
    monkeypatch.setattr(timeline.time, "time_ns", lambda: now.unix_ns + now.ns)
    return now


@pytest.fixture(autouse=True)
def no_recording():
    yield
    timeline._recording = None


class Servers:
    def __init__(self):
        self.calls = []

    def profile(self, step):
        self.calls.append(step)


class Team:
    """Calls the workers of all ranks one after the other, in one process: each has a recording of its own."""

    def __init__(self, workers):
        self.workers = workers
        self.recordings = [None] * len(workers)
        self.calls = []

    def call(self, method, **common):
        self.calls.append(method)
        for index, worker in enumerate(self.workers):
            rank_0, timeline._recording = timeline._recording, self.recordings[index]
            if index == 0:
                timeline._recording = rank_0
            getattr(worker, method)(**common)
            if index:
                self.recordings[index], timeline._recording = timeline._recording, rank_0


class Worker:
    size = 7
    model = staticmethod(print)  # what can be called, but is no method, stays what it is

    def __init__(self, clock):
        self.clock = clock

    def update(self, lr):
        self.clock.ns += 3_000_000
        return lr


def run(tmp_path, clock, section, num_ranks=2, num_steps=5):
    """Do steps that each take 1 ms of sampling and 3 ms of work by each rank."""
    servers = Servers()
    ranks = [Rank(index, num_ranks) for index in range(num_ranks)]
    workers = [Worker(clock) for _ in ranks]
    if section.steps:
        workers = [
            ProfiledWorker(one, section, tmp_path, rank, servers if rank.is_rank_0 else None)
            for one, rank in zip(workers, ranks)
        ]
    team = Team(workers)
    profiler, timer = StepProfiler(section, team, tmp_path), StageTimer()
    for step in range(1, num_steps + 1):
        with profiler.step(step):
            with timer.stage("rollout"), timeline.span("generate", "vLLM rollout_0", samples=8):
                clock.ns += 1_000_000
            with timer.stage("update"):
                team.call("update", lr=0.1)
        clock.ns += 500_000
    profiler.close()
    return team, servers


def test_chosen_steps_of_all_ranks_are_in_one_timeline(tmp_path, clock, capsys):
    team, servers = run(tmp_path, clock, ProfilerSection(steps=(2, 3, 5)))
    assert [call for call in team.calls if call != "update"] == ["begin_profile", "end_profile"] * 2
    assert team.workers[0].size == 7 and team.workers[0].model is print and servers.calls == []
    trace = read_trace(tmp_path / "timeline.json")
    found = [(process, name, round(start), round(end)) for process, _, name, start, end in spans(trace)]
    one_step = [
        ("rank 0", "step", 0, 7000),
        ("rank 0", "rollout", 0, 1000),
        ("vLLM rollout_0", "generate", 0, 1000),
        ("rank 0", "update", 1000, 7000),
        ("rank 0", "update", 1000, 4000),
        ("rank 1", "update", 4000, 7000),
    ]
    expected = [
        (process, f"step {step}" if name == "step" else name, shift + start, shift + end)
        for step, shift in ((2, 0), (3, 7500), (5, 22500))
        for process, name, start, end in one_step
    ]
    waiting = "waiting for rank 0"
    assert sorted(one for one in found if one[1] != waiting) == sorted(expected)
    # Rank 1 waits while rank 0 samples and works, and while the others work after it.
    waits = [(start, end) for process, name, start, end in found if name == waiting and process == "rank 1"]
    assert (0, 4000) in waits and (7000, 11500) in waits
    assert {process for process, name, *_ in found if name == waiting} == {"rank 1"}
    assert f"timeline: {tmp_path / 'timeline.json'}" in capsys.readouterr().out
    # The piece of each process is a trace of its own.
    pieces = sorted(path.relative_to(tmp_path / "profile").as_posix() for path in tmp_path.glob("profile/*/*.json"))
    assert pieces == [f"step_{step}/rank_{rank}.json" for step in (2, 5) for rank in (0, 1)]
    assert all(read_trace(tmp_path / "profile" / piece) for piece in pieces)


def test_all_ranks_are_recorded_and_servers_are_told_the_step(tmp_path, clock):
    _, servers = run(tmp_path, clock, ProfilerSection(steps=(1,), tools=("vllm",)), num_ranks=3)
    processes = {process for process, *_ in spans(read_trace(tmp_path / "timeline.json"))}
    assert processes == {"rank 0", "rank 1", "rank 2", "vLLM rollout_0"}
    assert servers.calls == [1, 0]


def test_a_run_that_records_nothing_makes_no_calls_and_no_files(tmp_path, clock, capsys):
    team, _ = run(tmp_path, clock, ProfilerSection())
    assert team.calls == ["update"] * 5 and list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
    assert timeline.span("a") is timeline.span("b")


def test_steps_that_the_run_does_not_reach_are_named(tmp_path, clock, capsys):
    run(tmp_path, clock, ProfilerSection(steps=(2, 9)), num_steps=2)
    assert "steps 9" in capsys.readouterr().out
    run(tmp_path, clock, ProfilerSection(steps=(5, 6)), num_steps=5)  # ends in the middle of a recording
    assert "step 5" in {name for _, _, name, *_ in spans(read_trace(tmp_path / "timeline.json"))}


def test_an_error_in_a_recorded_step_is_not_replaced_by_another(tmp_path, clock):
    profiler = StepProfiler(ProfilerSection(steps=(1,)), team := Team([Worker(clock)]), tmp_path)
    team.workers[0].begin_profile = lambda step: None
    with pytest.raises(RunFailure, match="rank 1 died"), profiler.step(1):
        raise RunFailure("rank 1 died")
    assert team.calls == ["begin_profile"]


def test_threads_and_processes_have_places_of_their_own_and_what_goes_on_is_cut_off(clock):
    timeline.start("rank 0")
    outer = timeline.span("outer")
    thread = threading.Thread(target=lambda: timeline.span("beside").end(samples=3), name="rollout_0")
    clock.ns += 1_000
    thread.start()
    thread.join()
    timeline.count("samples to come", 5, "vLLM")
    clock.ns += 1_000
    recorded = timeline.stop()
    outer.end()  # too late: it is written down already
    names = {event["args"]["name"] for event in recorded.events if event["ph"] == "M"}
    assert names == {"rank 0", "main", "rollout_0", "vLLM"}
    by_name = {event["name"]: event for event in recorded.events if event["ph"] != "M"}
    assert by_name["outer"]["dur"] == 2.0 and by_name["outer"]["args"] == {"unfinished": True}
    assert by_name["beside"]["args"] == {"samples": 3} and by_name["beside"]["ts"] == 1.0
    assert by_name["samples to come"]["args"] == {"samples to come": 5}
    assert recorded.start_unix_ns == clock.unix_ns + 5_000
    assert json.dumps(recorded.events)
