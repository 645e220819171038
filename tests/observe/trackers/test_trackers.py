"""What trackers are told, by stand-ins: in which order, and what becomes of those that fail or hang."""

import threading

import pytest

from mindrlhf.errors import UserError
from mindrlhf.observe import trackers
from mindrlhf.observe.sinks import StepDetails, open_sinks
from mindrlhf.observe.trackers import background
from mindrlhf.observe.trackers.background import Trackers, open_trackers


class Journal:
    """A tracker that keeps a journal; ``fails_in`` is one of its methods, and ``gate`` holds up its writing."""

    kept: list
    fails_in = ""
    gate = None

    def __init__(self, run):
        self.run = run
        self._note("open", run.run_id)

    def write(self, step, metrics):
        if self.gate is not None:
            self.gate.wait()
        self._note("write", step, metrics)

    def write_samples(self, step, samples):
        self._note("write_samples", step, samples)

    def write_report(self, path):
        self._note("write_report", path)

    def close(self, *, is_complete):
        self._note("close", is_complete)

    def _note(self, method, *arguments):
        if method == self.fails_in:
            raise SystemExit("no\nnetwork")
        self.kept.append((method, *arguments))


@pytest.fixture
def journals(monkeypatch, tmp_path):
    (tmp_path / "report.html").touch()
    classes = {name: type(name, (Journal,), {"kept": []}) for name in trackers.PACKAGES}
    monkeypatch.setattr(background, "load_tracker", lambda name: classes[name])
    return classes


def opened(tmp_path, sinks=("tensorboard", "wandb", "mlflow"), is_resumed=False, config=None):
    return open_trackers(sinks, tmp_path / "run 1", config or {}, project="numbers", is_resumed=is_resumed)


def test_every_tracker_gets_everything_in_order(tmp_path, journals):
    group = opened(tmp_path)
    sinks = open_sinks(tmp_path / "run 1", first_step=0, tensorboard=False, trackers=group)
    sinks.write(1, {"loss": 0.5})
    sinks.write_details(1, StepDetails(rewards=None, lengths=None, samples=["one", "two"]))
    sinks.write_details(2, StepDetails(rewards=None, lengths=None, samples=[]))
    sinks.close()
    group.complete(tmp_path / "report.html")
    group.close()
    group.close()
    run_id = (tmp_path / "run 1" / "trackers" / "run_id").read_text()
    for name in ("wandb", "mlflow"):
        assert journals[name].kept == [
            ("open", run_id),
            ("write", 1, {"loss": 0.5}),
            ("write_samples", 1, ("one", "two")),
            ("write_report", tmp_path / "report.html"),
            ("close", True),
        ]
    assert journals["swanlab"].kept == []


def test_a_run_that_is_not_complete_is_closed_as_such_and_resumed_under_its_id(tmp_path, journals):
    for is_resumed in (False, True, False):
        opened(tmp_path, ["wandb"], is_resumed).close()
    first, second, third = [note[1] for note in journals["wandb"].kept if note[0] == "open"]
    assert first == second != third
    assert len(first) == 21 and set(first) <= set("0123456789abcdef")
    assert [note for note in journals["wandb"].kept if note[0] == "close"] == [("close", False)] * 3


@pytest.mark.parametrize("method", ["open", "write", "write_report", "close"])
def test_one_that_fails_says_so_once_and_the_other_goes_on(tmp_path, journals, capsys, method):
    journals["wandb"].fails_in = method
    group = opened(tmp_path)
    for step in range(3):
        group.write(step, {"loss": 0.5})
    group.complete(tmp_path / "report.html")
    group.close()
    assert capsys.readouterr().err == (
        "mindrlhf: warning: 'observe.sinks': wandb failed and gets nothing more from this run: SystemExit: no network\n"
    )
    assert [note[0] for note in journals["mlflow"].kept] == ["open", *["write"] * 3, "write_report", "close"]


def test_one_that_hangs_holds_nobody_up(tmp_path, journals, capsys):
    journals["wandb"].gate = gate = threading.Event()
    group = Trackers(["wandb"], trackers.TrackedRun("p", "n", "id", tmp_path, {}), close_limit_s=0.05)
    group.write(1, {"loss": 0.5})
    group.close()
    assert "wandb has not taken everything" in capsys.readouterr().err
    assert journals["wandb"].kept == [("open", "id")]
    gate.set()


def test_without_trackers_nothing_is_made(tmp_path):
    opened(tmp_path, ["tensorboard"]).close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_tracker_is_told_of_the_run(tmp_path, journals):
    seen = []
    journals["mlflow"].__init__ = lambda self, run: seen.append(run)
    opened(tmp_path, ["mlflow"], config={"tools": {"names": ("a", "b")}}).close()
    assert (seen[0].project, seen[0].name) == ("numbers", "run 1")
    assert seen[0].config == {"tools": {"names": ["a", "b"]}}


def test_one_that_is_not_installed_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "PACKAGES", {"wandb": "no_such_package", "mlflow": "json", "swanlab": "nor_this"})
    trackers.check_trackers(["tensorboard", "mlflow"])
    with pytest.raises(UserError, match=r"has wandb, which is not installed: pip install 'mindrlhf\[wandb\]', or"):
        trackers.check_trackers(["wandb", "mlflow"])
    with pytest.raises(UserError, match=r"wandb, swanlab, which are not .*'mindrlhf\[wandb,swanlab\]'"):
        trackers.check_trackers(["wandb", "swanlab"])
    # A folder of a tracker's files is no package.
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="has wandb, which"):
        trackers.check_trackers(["wandb"])
