"""The sinks: what they write is read back by the tools that users read it with."""

import io
import json

import numpy as np
import pytest

from mindrlhf.errors import RunFailure
from mindrlhf.observe.console import HEADER_EVERY, PLAIN_WIDTH, ConsoleSink
from mindrlhf.observe.sinks import StepDetails, TensorBoardSink, open_sinks
from mindrlhf.system.terminal import GREEN, RED, RESET, coloured, verdict_coloured

FULL = {
    "reward/mean": 0.5,
    "reward/std": 0.25,
    "reward/groups_without_signal": 0.125,
    "response_length/mean": 63.6,
    "response_length/cut_fraction": 0.02,
    "loss": -0.000123,
    "kl": 0.0123,
    "entropy": 1.25,
    "grad_norm": 123.4,
    "lr": 1e-6,
    "rollout_diff/mean_abs": 8e-6,
    "e2e_tps": 2900.0,
    "timing/all": 1.284,
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def printed(steps, **options):
    stream = io.StringIO()
    sink = ConsoleSink(stream, **options)
    for step, metrics in steps:
        sink.write(step, metrics)
    sink.close()
    return stream.getvalue().splitlines()


def test_console_line_under_its_header():
    metrics = {"reward/mean": 0.5, "loss": -0.0123, "timing/all": 1.284, "unknown": 1.0}
    header, line = printed([(3, metrics)], num_steps=100)
    assert header == "   step    reward      loss     time    left"
    assert line == "  3/100     0.500   -0.0123    1.28s       -"


def test_console_columns_align_within_the_width():
    header, line = printed([(12345, FULL)])
    assert len(header) == len(line) <= PLAIN_WIDTH
    assert "reward" in header and "time" in header
    assert "lr" not in header.split(), "the least important column makes room"
    assert (header + line).isascii() and "\033" not in header + line


def test_console_header_returns_and_adapts():
    lines = printed([(step, {"loss": 1.0}) for step in range(HEADER_EVERY + 1)])
    assert [number for number, line in enumerate(lines) if "loss" in line] == [0, HEADER_EVERY + 1]
    lines = printed([(1, {"loss": 1.0}), (2, {"loss": 1.0, "lr": 1e-6}), (3, {"loss": 1.0})])
    assert [line.split() for line in lines] == [
        ["step", "loss"], ["1", "1.000"], ["step", "loss", "lr"], ["2", "1.000", "1.0e-06"], ["3", "1.000", "-"],
    ]  # fmt: skip


def test_console_evaluation_has_its_own_line():
    evaluation = {"eval/accuracy": 0.314, "eval/accuracy_low": 0.262, "eval/accuracy_high": 0.368}
    assert printed([(0, evaluation)]) == ["     0  held-out accuracy 31.4% (95% interval 26.2% to 36.8%)"]


def test_console_shows_numbers_that_are_not_finite():
    _, line = printed([(1, {"loss": float("nan"), "grad_norm": float("inf"), "timing/all": 1.0})])
    assert line.split() == ["1", "nan", "inf", "1.00s"]


def test_console_styles_terminals_and_fits_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    ConsoleSink(stream).write(1, FULL | {"loss": float("nan")})
    header, line = stream.getvalue().splitlines()
    assert header.startswith("\033[1m") and "\033[31m" in line
    assert len(header.removeprefix("\033[1m").removesuffix("\033[0m")) <= 40


def read_events(directory, **options):
    # Half a second, which only the worker that runs this file is to pay.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory), **options).Reload()


def scalars(directory):
    events = read_events(directory)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_the_values_before_close(tmp_path):
    sink = TensorBoardSink(tmp_path, first_step=0)
    sink.write(0, {"eval/accuracy": 0.25})
    sink.write(1, {"loss": 0.5, "eval/accuracy": 0.75})
    assert scalars(tmp_path) == {"eval/accuracy": [(0, 0.25), (1, 0.75)], "loss": [(1, 0.5)]}
    sink.close()
    sink.close()


def test_tensorboard_forgets_steps_that_are_run_again(tmp_path):
    for first_step, value in ((0, 1.0), (3, 2.0)):
        sink = TensorBoardSink(tmp_path, first_step=first_step)
        for step in range(first_step, 5):
            sink.write(step, {"loss": value})
        sink.close()
    assert scalars(tmp_path) == {"loss": [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]}


def test_tensorboard_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailure, match="cannot write"):
        TensorBoardSink(tmp_path / "file" / "tensorboard", first_step=0)


def test_all_sinks_of_a_run_resume_together(tmp_path, capsys):
    for first_step, value in ((0, 1.0), (2, 5.0)):
        capsys.readouterr()
        sinks = open_sinks(tmp_path, first_step=first_step, num_steps=3)
        for step in range(first_step, 4):
            sinks.write(step, {"loss": value})
        sinks.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "loss": 1.0}, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 5.0}, {"step": 3, "loss": 5.0},
    ]  # fmt: skip
    assert scalars(tmp_path / "tensorboard")["loss"] == [(0, 1.0), (1, 1.0), (2, 5.0), (3, 5.0)]
    table = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert table == [["step", "loss"], ["2/3", "5.000"], ["3/3", "5.000"]]


def test_tensorboard_gets_histograms_and_texts(tmp_path):
    sinks = open_sinks(tmp_path, first_step=0)
    rewards, lengths = np.array([0.0, 1.0, 1.0, 0.25]), np.array([3, 9, 4, 4])
    sinks.write_text("config", "run:\n  seed: 3")
    sinks.write_details(2, StepDetails(rewards, lengths, ["1+1?\n<b>2</b>"]))
    sinks.close()
    events = read_events(tmp_path / "tensorboard", size_guidance={"tensors": 0})
    assert set(events.Tags()["histograms"]) == {"histograms/reward", "histograms/response_length"}
    (event,) = events.Histograms("histograms/reward")
    found = event.histogram_value
    assert (event.step, found.num, found.sum, found.min, found.max) == (2, 4, 2.25, 0, 1)
    assert sum(found.bucket) == 4 and found.bucket[-1] == 2 and found.sum_squares == 2.0625
    assert set(events.Tags()["tensors"]) == {"config", "samples/1"}
    assert events.Tensors("config")[0].tensor_proto.string_val == [b"    run:\n      seed: 3"]
    assert events.SummaryMetadata("samples/1").plugin_data.plugin_name == "text"


def test_the_console_says_how_long_the_rest_takes(monkeypatch):
    clock = iter([300.0, 400.0, 460.0, 520.0, 580.0])
    monkeypatch.setattr("mindrlhf.observe.console.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    console = ConsoleSink(stream, num_steps=100)
    console.write(0, {"eval/accuracy": 0.5})
    for step in (1, 2, 3):
        console.write(step, {"loss": 1.0})
    console.write(4, {"eval/accuracy": 0.5})
    table = [line.split()[-2:] for line in stream.getvalue().splitlines()[1:5]]
    assert table[0][1] == "left" and table[1][1] == "-", "the first step compiles"
    assert table[2:] == [["2.7", "h"], ["2.2", "h"]]  # 98 steps of 100 s, 97 of 160 / 2
    silent = ConsoleSink(io.StringIO())
    silent.write(1, {"loss": 1.0})
    silent.write(2, {"eval/accuracy": 0.5})
    assert "left" not in silent._stream.getvalue()


@pytest.mark.parametrize(("variable", "shown"), [("", True), ("NO_COLOR", False), ("NO_COLOUR", False)])
def test_verdicts_and_errors_have_colours_where_they_are_wanted(variable, shown, monkeypatch):
    for name in ("NO_COLOR", "NO_COLOUR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if variable:
        monkeypatch.setenv(variable, "1")
    verdicts = {"+4 points: better": GREEN, "-4 points: worse": RED, "+0.1 points: no clear difference": ""}
    for text, colour in verdicts.items():
        painted = verdict_coloured(text, Terminal())
        assert painted.replace(colour or "\0", "").replace(RESET, "") == text
        assert (painted != text) == (shown and bool(colour))
        assert verdict_coloured(text, io.StringIO()) == text
    assert coloured("error:", RED, Terminal()) == (f"{RED}error:{RESET}" if shown else "error:")
