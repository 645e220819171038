"""Learning rates at points worked out by hand."""

import math

import pytest

from mindrlhf.config.training import OptimizerSection

HALF = math.sqrt(0.5)
LINEAR, COSINE = ({"start_lr": 1.0, "end_lr": 0.0, "lr_schedule": name} for name in ("linear", "cosine"))
# The section's keys, and the rates of so many updates.
RATES = {
    "constant": ({"start_lr": 3e-4}, [3e-4] * 4),
    "a warm-up rises in equal steps": ({"start_lr": 8.0, "warmup_steps": 4}, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0]),
    "linear, to the end at the last update": (LINEAR | {"end_lr": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2]),
    "linear after a warm-up": (LINEAR | {"warmup_steps": 2}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]),
    "linear, upwards": (LINEAR | {"start_lr": 0.0, "end_lr": 1.0}, [0.0, 0.5, 1.0]),
    "cosine": (COSINE, [1.0, (1 + HALF) / 2, 0.5, (1 - HALF) / 2, 0.0]),  # (1 + cos(pi k / 4)) / 2
    "cosine to an end above zero": (COSINE | {"end_lr": 0.5, "warmup_steps": 1}, [1.0, 1.0, 0.75, 0.5]),
    "shorter than its warm-up": (COSINE | {"warmup_steps": 10}, [0.1, 0.2, 0.3]),
}


@pytest.mark.parametrize("name", RATES)
def test_rates_by_hand(name):
    keys, rates = RATES[name]
    options = OptimizerSection(**keys)
    assert [options.learning_rate(update, len(rates)) for update in range(len(rates))] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_updates_after_the_last_stay_at_the_end(schedule):
    options = OptimizerSection(start_lr=1.0, end_lr=0.1, lr_schedule=schedule, warmup_steps=2)
    assert options.learning_rate(99, 10) == pytest.approx(0.1)
