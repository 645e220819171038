"""Learning rates at points worked out by hand."""

import math

import pytest

from mindrlhf.config.training import OptimizerSection


def rates(options: OptimizerSection, num_updates: int) -> list[float]:
    return [options.learning_rate(update, num_updates) for update in range(num_updates)]


def test_constant():
    assert rates(OptimizerSection(start_lr=3e-4), 4) == [3e-4] * 4


def test_warm_up_rises_in_equal_steps_and_then_holds():
    options = OptimizerSection(start_lr=8.0, warmup_steps=4)
    assert rates(options, 7) == pytest.approx([2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0])


def test_linear_falls_to_the_end_at_the_last_update():
    options = OptimizerSection(start_lr=1.0, end_lr=0.2, lr_schedule="linear")
    assert rates(options, 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_linear_after_a_warm_up():
    options = OptimizerSection(start_lr=1.0, end_lr=0.0, lr_schedule="linear", warmup_steps=2)
    assert rates(options, 7) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine():
    options = OptimizerSection(start_lr=1.0, end_lr=0.0, lr_schedule="cosine")
    # (1 + cos(pi k / 4)) / 2
    half = math.sqrt(0.5)
    assert rates(options, 5) == pytest.approx([1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0])


def test_cosine_to_an_end_above_zero():
    options = OptimizerSection(start_lr=1.0, end_lr=0.5, lr_schedule="cosine", warmup_steps=1)
    assert rates(options, 4) == pytest.approx([1.0, 1.0, 0.75, 0.5])


def test_an_end_above_the_start_is_reached_too():
    options = OptimizerSection(start_lr=0.0, end_lr=1.0, lr_schedule="linear")
    assert rates(options, 3) == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_updates_after_the_last_stay_at_the_end(schedule):
    options = OptimizerSection(start_lr=1.0, end_lr=0.1, lr_schedule=schedule, warmup_steps=2)
    assert options.learning_rate(99, 10) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_shorter_than_its_warm_up_never_reaches_the_start(schedule):
    options = OptimizerSection(start_lr=1.0, end_lr=None if schedule == "constant" else 0.0, lr_schedule=schedule)
    options = OptimizerSection(**{**vars(options), "warmup_steps": 10})
    assert rates(options, 3) == pytest.approx([0.1, 0.2, 0.3])
