"""The best evaluation of a run so far, and the number of evaluations since."""

from collections.abc import Sequence

from mindrlhf.evaluation.heldout import Evaluation


def best_step(evaluations: Sequence[Evaluation]) -> int | None:
    """Return the step of the best evaluation after training began, the earliest of equals."""
    scores = _scores(evaluations)
    return max(scores, key=scores.__getitem__) if scores else None


def num_since_best(evaluations: Sequence[Evaluation]) -> int:
    """Return how many evaluations came after the best; 0 before the first."""
    steps = list(_scores(evaluations))
    return len(steps) - 1 - steps.index(best_step(evaluations)) if steps else 0


def _scores(evaluations: Sequence[Evaluation]) -> dict[int, float]:
    """Merit by step, of those after training began; only those that are judged like the last one count."""
    trained = [one for one in evaluations if one.step > 0 and one.is_judged_alike(evaluations[-1])]
    return {evaluation.step: evaluation.merit for evaluation in trained}
