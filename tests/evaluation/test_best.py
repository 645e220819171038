"""The best evaluation: on the prompts of the last one only."""

import numpy as np

from mindrlhf.evaluation.heldout import Evaluation, best_step


def evaluations(*scores, first_step=0, questions="a"):
    return [
        Evaluation(10 * step, "accuracy", {"accuracy": np.array([[score, 0.0]])}, 5.0, [], questions)
        for step, score in enumerate(scores, start=first_step)
    ]


def test_the_first_of_equals_is_best_and_the_start_does_not_count():
    assert best_step([]) is None and best_step(evaluations(0.9)) is None
    for scores, best in [((0.9, 0.1), 10), ((0, 0.5, 0.5, 0.4), 10), ((0, 0.5, 0.4, 0.6), 30)]:
        assert best_step(evaluations(*scores)) == best


def test_evaluations_on_other_prompts_do_not_count():
    both = evaluations(0.9, 0.8, first_step=1, questions="a") + evaluations(0.2, 0.1, first_step=3, questions="b")
    assert best_step(both) == 30
