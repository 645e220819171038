"""The best evaluation, and how many came after it: on the prompts of the last one only."""

import numpy as np

from mindrlhf.evaluation.best import best_step, num_since_best
from mindrlhf.evaluation.heldout import Evaluation


def evaluations(*scores, first_step=0, questions="a"):
    return [
        Evaluation(10 * step, "accuracy", {"accuracy": np.array([[score, 0.0]])}, 5.0, [], questions)
        for step, score in enumerate(scores, start=first_step)
    ]


def test_the_first_of_equals_is_best_and_later_ones_are_counted():
    assert (best_step([]), num_since_best([])) == (None, 0)
    # The model before training does not count, however good it is.
    assert (best_step(evaluations(0.9)), num_since_best(evaluations(0.9))) == (None, 0)
    for scores, best, since in [((0.9, 0.1), 10, 0), ((0, 0.5, 0.5, 0.4), 10, 2), ((0, 0.5, 0.4, 0.6), 30, 0)]:
        assert (best_step(evaluations(*scores)), num_since_best(evaluations(*scores))) == (best, since)


def test_evaluations_on_other_prompts_do_not_count():
    both = evaluations(0.9, 0.8, first_step=1, questions="a") + evaluations(0.2, 0.1, first_step=3, questions="b")
    assert (best_step(both), num_since_best(both)) == (30, 1)
