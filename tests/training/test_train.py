"""The life of a run on rank 0: what is called when, and what is on disk by then."""

import contextlib
import dataclasses
import json
import signal
from types import SimpleNamespace

import pytest
from configs import grpo_config

from mindrlhf.config.observe import ObserveSection
from mindrlhf.data.stream import PromptStream
from mindrlhf.errors import RunFailure
from mindrlhf.observe.trackers import background
from mindrlhf.training import train as train_module
from mindrlhf.training.checkpoints.shards import SavesState
from mindrlhf.training.preflight.output import newest_checkpoint
from mindrlhf.training.runtime import Rank

NUM_STEPS = 3


class Fake(SavesState):
    """A kind of training that keeps a journal; ``fails_at`` and ``ends_at`` are steps."""

    shown_steps, num_steps, accuracy = None, NUM_STEPS, "accuracy"

    def __init__(self, output_dir, fails_at=0, ends_at=0):
        super().__init__()
        self.output_dir = output_dir
        self.fails_at, self.ends_at = fails_at, ends_at
        self.journal = []
        self.order = PromptStream(10, seed=0)

    def start_early(self, stack):
        self.note("start early")
        stack.callback(self.note, "closed")

    def build_worker(self, rank):
        self.note("build worker")
        return self

    def connect(self, worker, connections, requests, stack):
        self.note("connect")
        self.requests = requests
        self.team = SimpleNamespace(rank_0=self, call=lambda method, directory: self.note(method))

    def open(self, progress, checkpoints, first_step, stack):
        self.note(f"open {first_step}")
        self.progress = progress
        return self

    def begin(self):
        self.note("begin")

    def step(self):
        self.progress.step += 1
        self.note(f"step {self.progress.step}")
        self.requests.stop = self.progress.step == self.ends_at
        return {"loss": 0.5}

    def evaluate(self):
        return {"eval/loss": 0.25} if self.progress.step in (0, NUM_STEPS) else {}

    def details(self):
        return None

    def check(self):
        self.note("check")
        if self.progress.step == self.fails_at:
            raise RunFailure("the guards demand it")

    @contextlib.contextmanager
    def saving(self):
        self.note("saving")
        yield

    def finish(self, worker, progress):
        assert worker is self and progress.step == NUM_STEPS
        self.note("finish")

    def state_size_bytes(self):
        return 10

    def state_writer(self, hold):
        return lambda directory: {}

    def note(self, what):
        """Write down what is done."""
        self.journal.append(what)

    def metrics(self):
        return [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "start_runtime", lambda section, log_dir: Rank(0, 1))
    monkeypatch.setattr(train_module, "connect", lambda rank: [])
    monkeypatch.setattr(train_module, "data_fingerprint", lambda data: {"train_file": {"checksum": data["train_file"]}})
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    config = grpo_config(
        run={"output_dir": str(tmp_path / "run")},
        checkpoint={"every_steps": 2},
        observe={"sinks": ()},
    )

    def run_one(resume=False, observe=config.observe, max_steps=0, **options):
        training = Fake(tmp_path / "run", **options)
        run_section = dataclasses.replace(config.run, max_steps=max_steps)
        with contextlib.nullcontext() if not training.fails_at else pytest.raises(RunFailure):
            train_module.train(dataclasses.replace(config, run=run_section, observe=observe), training, resume=resume)
        return training, newest_checkpoint(config)

    yield run_one
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_whole_run_in_order(run):
    training, checkpoint = run()
    assert training.journal == [
        *("start early", "build worker", "connect", "open 0", "begin"),
        *("step 1", "check", "step 2", "check", "saving", "step 3", "check"),
        *("finish", "closed"),
    ]
    assert checkpoint.name == "step_00000002"
    assert training.metrics() == [
        {"step": 0, "eval/loss": 0.25},
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 0.5, "eval/loss": 0.25},
    ]


def test_a_run_that_used_up_its_data_before_max_steps_says_so_at_its_end(run, capsys):
    run(max_steps=3)
    assert "used up" not in capsys.readouterr().out
    run(resume=True, max_steps=12)
    said = "run.max_steps is 12, but with training.epochs=1 the data are used up after step 3: raise training.epochs"
    assert capsys.readouterr().out.count(f"ended after step 3: {said} to about 4 ") == 1


def test_a_run_that_is_asked_to_end_saves_and_is_resumed(run, capsys):
    training, checkpoint = run(ends_at=1)
    assert training.journal[5:] == ["step 1", "check", "saving", "closed"], "no model is exported"
    assert checkpoint.name == "step_00000001"
    resumed, _ = run(resume=True)
    assert "mindrlhf: resumed after step 1\n" in capsys.readouterr().out
    assert resumed.journal[2:7] == ["connect", "restore", "open 2", "begin", "step 2"]
    assert resumed.journal[-2:] == ["finish", "closed"]
    assert [line["step"] for line in resumed.metrics()] == [0, 1, 2, 3]


def test_the_step_that_fails_a_run_is_reported_and_not_saved(run):
    training, checkpoint = run(fails_at=2)
    assert training.journal[-3:] == ["step 2", "check", "closed"] and checkpoint is None
    assert training.metrics()[-1]["step"] == 2


def test_a_tracker_hears_of_the_run_from_its_config_to_its_report(run, monkeypatch):
    heard = []

    class Tracker:
        def __init__(self, run):
            heard.append((run.project, run.name, run.config["checkpoint"]["every_steps"]))

        def __getattr__(self, method):
            return lambda *arguments, **options: heard.append((method, *arguments, *options.values()))

    monkeypatch.setattr(background, "load_tracker", lambda name: Tracker)
    observe = ObserveSection(sinks=("wandb",), project="numbers")
    training, _ = run(observe=observe, ends_at=1)
    directory = training.output_dir
    assert heard == [
        ("numbers", directory.name, 2),
        ("write", 0, {"eval/loss": 0.25}),
        ("write", 1, {"loss": 0.5}),
        ("close", False),
    ]
    assert not (directory / "tensorboard").exists()
    heard.clear()
    run(resume=True, observe=observe)
    assert heard[0] == ("numbers", directory.name, 2) and [step[1] for step in heard if step[0] == "write"] == [2, 3]
    assert heard[-2:] == [("write_report", directory / "report.html"), ("close", True)]


def test_each_evaluation_has_the_page_written_anew_and_a_page_that_cannot_be_is_a_warning(run, monkeypatch, capsys):
    written = []

    def render(runs, *, is_running):
        written.append((len((runs[0].directory / "metrics.jsonl").read_text().splitlines()), is_running))
        raise RunFailure("the disk is full")

    monkeypatch.setattr("mindrlhf.observe.report.render_report", render)
    monkeypatch.setattr(Fake, "evaluate", lambda self: {"eval/loss": 0.25} if self.progress.step != 1 else {})
    run()
    assert written == [(1, True), (3, True)], "before the first step and after the second; the last is the report's"
    assert capsys.readouterr().err.count("warning: no report: the disk is full") == 2
