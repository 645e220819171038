"""Restarts and the report of a failure."""

from types import SimpleNamespace

import pytest

from mindrlhf.launch.failure_report import describe_end, failure_report, is_worth_a_restart, log_name
from mindrlhf.launch.restarts import run_with_restarts


class Runs:
    """Exit codes in turn; a checkpoint is there from some start on."""

    def __init__(self, codes, log_dir, checkpoint_from=99):
        self.codes = list(codes)
        self.log_dir = log_dir
        self.checkpoint_from = checkpoint_from
        self.resumed = []

    def start(self, resume):
        self.resumed.append(resume)
        self.log_dir.mkdir(exist_ok=True)
        (self.log_dir / "worker_0.log").write_text(f"start {len(self.resumed)}")
        return self.codes.pop(0)

    def __call__(self, max_restarts, resume=False):
        can_resume = lambda: len(self.resumed) >= self.checkpoint_from  # noqa: E731
        return run_with_restarts(self.start, can_resume, max_restarts, self.log_dir, resume=resume)


def test_a_failed_run_is_started_again_from_what_there_is(tmp_path, capsys):
    runs = Runs([137, 1, 0], tmp_path / "logs", checkpoint_from=2)
    assert runs(max_restarts=5) == 0
    assert runs.resumed == [False, False, True]
    first, second = capsys.readouterr().err.splitlines()
    assert "restart 1 of 5, from the beginning" in first and str(tmp_path / "logs" / "attempt_1") in first
    assert "restart 2 of 5, from the newest checkpoint" in second
    kept = [(tmp_path / "logs" / name / "worker_0.log").read_text() for name in ("attempt_1", "attempt_2")]
    assert kept == ["start 1", "start 2"]
    assert (tmp_path / "logs" / "worker_0.log").read_text() == "start 3"


def test_no_more_restarts_than_allowed(tmp_path):
    runs = Runs([1, 1, 1, 1], tmp_path / "logs")
    assert runs(max_restarts=2) == 1
    assert len(runs.resumed) == 3
    assert Runs([137], tmp_path / "logs")(max_restarts=0) == 137


@pytest.mark.parametrize("code", [0, 2, 130, 143, 129])
def test_success_mistakes_and_interrupts_are_final(tmp_path, code):
    runs = Runs([code], tmp_path / "logs")
    assert runs(max_restarts=3) == code and len(runs.resumed) == 1
    assert not is_worth_a_restart(code)


def test_a_resumed_start_stays_resumed(tmp_path):
    runs = Runs([1, 0], tmp_path / "logs", checkpoint_from=1)
    assert runs(max_restarts=1, resume=True) == 0
    assert runs.resumed == [True, True]


def test_the_report_says_who_when_how_where_and_what_to_do(tmp_path, monkeypatch):
    log = tmp_path / "worker_1.log"
    noise = "[WARNING] ME(1:2,MainProcess):x deprecated"
    log.write_text("\n".join([*(f"line {i}" for i in range(20)), noise, "", "Killed"]))
    activities = {"rank 1": "update", "rank 0": "step 7: update"}
    what = describe_end(-9)
    text = failure_report("rank 1", what, 61.4, activities, log, "to resume: again", shows_log=True)
    lines = text.splitlines()
    assert lines[0].startswith("rank 1 was killed by SIGKILL (kill -9, or the kernel when memory ran out) at ")
    assert lines[0].endswith(f"after 61 s; its log: {log}")
    assert lines[1:4] == ["  rank 0 was in: step 7: update", "  rank 1 was in: update", "  the log ends:"]
    assert lines[4:-1] == [*(f"    line {i}" for i in range(15, 20)), "    Killed"]
    assert lines[-1] == "  to resume: again"
    assert "line" not in failure_report("rank 1", what, 1, {}, log, "", shows_log=False)
    shown = {"line 19", "Killed"}
    tail = failure_report("rank 1", what, 1, {}, log, "", shows_log=True, shown=shown).splitlines()
    assert tail[-1] == "    line 18", "what the terminal has shown already"
    assert "the log ends" not in failure_report("rank 1", what, 1, {}, tmp_path / "none", "", shows_log=True)
    assert "make room" not in text
    monkeypatch.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=0))
    text = failure_report("rank 1", what, 1, {}, log, "to resume: again", shows_log=False)
    assert text.splitlines()[1:] == [f"  the disk of {tmp_path} is full: make room", "  to resume: again"]
    assert [log_name(name) for name in ("rank 3", "the scheduler")] == ["worker_3.log", "scheduler.log"]


def test_a_run_that_dies_when_it_is_complete_is_not_started_again(tmp_path, capsys):
    runs = Runs([137, 0], tmp_path / "logs")
    code = run_with_restarts(
        runs.start, lambda: True, 5, tmp_path / "logs", resume=False, is_complete=lambda: len(runs.resumed) == 1
    )
    assert code == 0 and runs.resumed == [False]
    assert "was complete when it failed" in capsys.readouterr().err
