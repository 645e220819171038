"""When reward and held-out accuracy part ways, and when they do not."""

import numpy as np
import pytest

from mindrlhf.evaluation.divergence import MIN_STEPS, RewardWatch
from mindrlhf.evaluation.heldout import Evaluation

NUM_PROMPTS = 100


def evaluation(step: int, num_right: int, questions: str = "same") -> Evaluation:
    scores = np.zeros((NUM_PROMPTS, 1))
    scores[:num_right] = 1.0
    return Evaluation(step, "accuracy", {"accuracy": scores}, 10.0, [], questions)


def watch_of(*periods: tuple[float, Evaluation], spread: float = 0.02) -> list[str]:
    """The lines of a run whose steps between evaluations had these mean rewards, give or take ``spread``."""
    watch, rng, lines = RewardWatch(), np.random.default_rng(0), []
    for reward, held_out in periods:
        for _ in range(20):
            watch.note(reward + spread * rng.standard_normal())
        lines.append(watch.review(held_out))
    return lines


def test_reward_up_and_accuracy_down_is_said_in_one_line():
    first, second = watch_of((0.5, evaluation(25, 60)), (0.8, evaluation(50, 40)))
    assert first == ""
    assert "step 50: the reward rose from 0.496 to 0.801" in second and "fell by 20.0% since step 25" in second
    assert "\n" not in second


@pytest.mark.parametrize(
    "periods",
    [
        ((0.5, evaluation(25, 60)), (0.8, evaluation(50, 70))),  # both up
        ((0.5, evaluation(25, 60)), (0.5, evaluation(50, 40))),  # accuracy alone
        ((0.5, evaluation(25, 60)), (0.8, evaluation(50, 59))),  # one prompt is chance
        ((0.5, evaluation(25, 60)), (0.8, evaluation(50, 40, questions="others"))),
    ],
)
def test_what_may_be_chance_or_cannot_be_compared_is_not_said(periods):
    assert watch_of(*periods)[-1] == ""


def test_noisy_rewards_need_more_than_a_small_rise():
    assert watch_of((0.5, evaluation(25, 60)), (0.52, evaluation(50, 40)), spread=0.3)[-1] == ""


def test_a_slow_decline_is_measured_from_the_best():
    lines = watch_of(
        (0.5, evaluation(25, 60)), (0.6, evaluation(50, 57)), (0.7, evaluation(75, 54)), (0.8, evaluation(100, 48))
    )
    assert "since step 25" in lines[-1]


def test_few_steps_say_nothing():
    watch = RewardWatch()
    for num_right in (60, 40):
        for _ in range(MIN_STEPS - 1):
            watch.note(float(num_right))
        assert watch.review(evaluation(5, num_right)) == ""
