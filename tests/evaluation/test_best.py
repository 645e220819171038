"""The best evaluation, and how many came after it: on the prompts of the last one only."""


import numpy as np
from saved_progress import through_json

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


def judged(metric, *groups, set_name="hard", questions="h"):
    """Accuracy falls; what counts is a number of a further set, whose rewards [prompts, samples] are given by step."""
    falling = evaluations(*np.linspace(0.9, 0.1, len(groups)), first_step=1)
    sets = [Evaluation(0, "v", {"v": np.array(group, float)}, 5.0, [], questions) for group in groups]
    return [one.judged_on(other, set_name, metric) for one, other in zip(falling, sets)]


# Three steps of two prompts with two samples: 1/4, 2/4 and 2/4 right; 1/2, 1/2 and both prompts solved at least once.
GROUPS = [[[1, 0], [0, 0]], [[1, 1], [0, 0]], [[1, 0], [0, 1]]]


def test_another_number_may_say_what_is_best():
    by_accuracy, by_pass = judged("accuracy", *GROUPS), judged("pass@k", *GROUPS)
    assert [one.merit for one in by_accuracy] == [0.25, 0.5, 0.5] and [one.merit for one in by_pass] == [0.5, 0.5, 1.0]
    assert (best_step(by_accuracy), num_since_best(by_accuracy)) == (20, 1)
    assert (best_step(by_pass), num_since_best(by_pass)) == (30, 0)
    assert by_pass[0].metrics()["eval/accuracy"] == 0.45  # what is reported stays: the mean of 0.9 and 0


def test_only_what_was_judged_like_the_last_counts():
    later = evaluations(0.2, 0.1, first_step=4)
    assert best_step(judged("accuracy", *GROUPS) + later) == 40
    assert best_step(evaluations(0.95, first_step=0) + judged("pass@k", *GROUPS)) == 30
    for other in (judged("accuracy", *GROUPS), judged("pass@k", *GROUPS, questions="x")):
        assert not other[0].is_judged_alike(judged("pass@k", *GROUPS)[0])
    (kept,) = (through_json(one) for one in judged("pass@k", GROUPS[2]))
    assert kept.merit == 1.0 and kept.is_judged_alike(judged("pass@k", *GROUPS)[0])
