"""What the launcher says about stages, and how lines look on a terminal."""

import io
import threading
import time

import pytest

from mindrlhf.launch import logs, stages
from mindrlhf.launch.logs import LogFollower, coloured, has_colours
from mindrlhf.launch.stages import SILENCE_LIMIT_S, StageLines, duration, signs_of_life
from mindrlhf.system.heartbeat import STARTING


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [100.0]
    monkeypatch.setattr(stages.time, "monotonic", lambda: now[0])
    return now


def said(out: io.StringIO) -> list[str]:
    return [" ".join(line.removeprefix("mindrlhf:").split()) for line in out.getvalue().splitlines()]


def test_each_stage_is_said_as_it_begins_and_steps_speak_for_themselves(clock):
    lines = StageLines(out := io.StringIO())
    building = "building the model"
    for moved_s, activity in ((0, ""), (1, STARTING), (1, building), (1, building), (62, "step 1: data")):
        clock[0] += moved_s
        lines.update(activity, has_news=False)
    assert said(out) == ["0 s starting Python", "1 s loading the trainer", "2 s building the model"]


def test_what_comes_between_two_steps_is_said_of_the_one_before_it(clock):
    lines = StageLines(out := io.StringIO())
    activities = ("step 1: evaluation", "step 1: rollout", "step 7: evaluation", "step 7: checkpoint", "step 7: pack")
    for activity in activities:
        lines.update(activity, has_news=False)
    assert said(out) == ["0 s evaluating before training", "0 s evaluating after step 6"]
    lines.update("step 7: checkpoint", has_news=False)
    clock[0] += SILENCE_LIMIT_S
    lines.update("step 7: checkpoint", has_news=False)
    assert said(out)[2:] == ["8 s step 6: checkpoint (for 8 s)"]


def test_no_silence_is_longer_than_the_limit_at_first_and_later_they_may_be(clock):
    lines = StageLines(out := io.StringIO())
    lines.update("step 1: rollout", has_news=False)
    spoken_at_s = []
    for _ in range(int(1200 / 0.5)):
        clock[0] += 0.5
        before = out.tell()
        lines.update("step 1: rollout", has_news=False)
        if out.tell() > before:
            spoken_at_s.append(clock[0] - 100.0)
    assert SILENCE_LIMIT_S < 10
    early = [end - start for start, end in zip([0, *spoken_at_s], spoken_at_s) if end <= 300]
    late = [end - start for start, end in zip(spoken_at_s, spoken_at_s[1:]) if start > 400]
    assert set(early) == {SILENCE_LIMIT_S} and len(early) > 30
    assert set(late) == {60.0}
    assert said(out)[0] == "8 s step 1: rollout (for 8 s)"


def test_lines_of_the_run_count_as_signs_of_life(clock):
    lines = StageLines(out := io.StringIO())
    lines.update("step 1", has_news=False)
    for _ in range(20):
        clock[0] += 5.0
        lines.update("step 1", has_news=True)
    assert out.getvalue() == ""


def test_a_follower_tells_the_stages_of_news(tmp_path, clock):
    out = io.StringIO()
    follower = LogFollower({0: tmp_path / "worker_0.log"}, out, StageLines(out))
    follower.poll(activity="starting")
    clock[0] += 7
    (tmp_path / "worker_0.log").write_text("   1/3   0.5\n")
    follower.poll(activity="starting")
    clock[0] += 7
    follower.poll(activity="starting")
    assert said(out) == ["0 s loading the trainer", "1/3 0.5"]
    clock[0] += 2
    follower.poll(activity="starting")
    assert said(out)[2] == "16 s loading the trainer (for 16 s)"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (125, "2 min 5 s"), (7500, "2 h 5 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_colours_are_for_terminals_and_not_for_those_who_want_none(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colours(Terminal()) and not has_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours(Terminal())


def test_colours_do_not_change_the_text(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    head, broken, plain = "  step    reward     loss", "   1/3     0.500       nan", "   2/3     0.5     0.1"
    lines = [head, broken, "mindrlhf: warning: slow", plain]
    shown = [coloured(line) for line in lines]
    assert [line != plain for line, plain in zip(shown, lines)] == [True, True, True, False]
    assert [logs.re.sub("\033\\[[0-9;]*m", "", line) for line in shown] == lines
    path = tmp_path / "worker_0.log"
    path.write_text("\n".join(lines) + "\n")
    out = Terminal()
    LogFollower({0: path}, out).poll()
    assert out.getvalue().splitlines() == shown and path.read_text().splitlines() == lines


def test_long_work_gives_signs_of_life_and_short_work_none():
    out = io.StringIO()
    with signs_of_life("sharding", out):
        pass
    assert out.getvalue() == ""
    with signs_of_life("sharding", out, limit_s=0.01):
        while not out.getvalue():
            time.sleep(0.005)
    assert out.getvalue().splitlines()[0] == "mindrlhf: sharding, for 0 s"
    assert not [thread for thread in threading.enumerate() if thread.name == "signs of life"]


def test_on_a_terminal_the_signs_of_life_are_one_line_with_how_much_is_done(tmp_path, clock):
    log, out = tmp_path / "worker_0.log", Terminal()
    follower = LogFollower({0: log}, out, StageLines(out))
    follower.poll(activity="step 2: reshard_to_infer")
    for done in ("", "3 of 12 samples", "9 of 12 samples"):
        clock[0] += 1
        follower.poll(activity="step 2: rollout" if done else "step 2: reshard_to_infer", done=done)
        clock[0] += 1
        follower.poll(activity="step 2: rollout" if done else "step 2: reshard_to_infer", done=done)
    log.write_text("   2/3   0.5\n")
    follower.poll(activity="step 3: data")
    shown = out.getvalue()
    assert shown.count("\n") == 1 and shown.endswith("\r\033[K   2/3   0.5\n")
    words = [" ".join(part.split()) for part in shown.split("\r\033[K")]
    assert "mindrlhf: 1 s step 2: weight sync (for 1 s)" in words
    assert "mindrlhf: 4 s step 2: rollout (3 of 12 samples, for 1 s)" in words
    assert "mindrlhf: 6 s step 2: rollout (9 of 12 samples, for 3 s)" in words
