"""Held-out evaluation: the numbers by hand, and the same random streams every time."""


import numpy as np
import pytest
from made_samples import make_sample, with_prompt
from saved_progress import through_json

from mindrlhf.data.mindrecord import Prompt
from mindrlhf.evaluation.heldout import Evaluation, HeldOut
from mindrlhf.rollout.samples import Sample
from mindrlhf.rollout.types import SamplingParams


def answered(group: int, correct: float, style: float, length: int) -> Sample:
    return make_sample(
        [1],
        [0] * length,
        correct + 2 * style,
        {"correct": correct, "style": style},
        group=group,
        prompt=f"question {group}",
        response=f"answer {group} of {length}",
        answer="42",
    )


CORRECT = np.array([[1, 0], [1, 1], [0, 0], [0, 1], [1, 0]], np.float64)
SAMPLES = [answered(i, CORRECT[i, j], 0.5, 1 + i + j) for i in range(5) for j in range(2)]


@pytest.fixture
def evaluation():
    return Evaluation.of(3, "correct", SAMPLES, 2)


def test_scores_are_those_of_the_verifier_that_counts(evaluation):
    np.testing.assert_array_equal(evaluation.scores, CORRECT)
    np.testing.assert_array_equal(evaluation.rewards["style"], np.full((5, 2), 0.5))
    assert (evaluation.step, evaluation.num_prompts, evaluation.num_samples) == (3, 5, 2)


def test_metrics_by_hand(evaluation):
    metrics = evaluation.metrics()
    assert metrics["eval/accuracy"] == pytest.approx(0.5)
    assert metrics["eval/correct/mean"] == pytest.approx(0.5)
    assert metrics["eval/style/mean"] == pytest.approx(0.5)
    assert metrics["eval/response_length"] == pytest.approx(np.mean([1, 2, 2, 3, 3, 4, 4, 5, 5, 6]))
    assert 0.0 <= metrics["eval/accuracy_low"] < 0.5 < metrics["eval/accuracy_high"] <= 1.0
    assert all(type(value) is float for value in metrics.values())


def test_the_first_answers_to_the_first_questions_are_shown(evaluation):
    first = [shown["completion"] for shown in evaluation.shown[:3]]
    assert first == ["answer 0 of 1", "answer 1 of 2", "answer 2 of 3"]
    assert evaluation.shown[0] == {
        "prompt": "question 0",
        "completion": "answer 0 of 1",
        "answer": "42",
        "reward": 2.0,
    }


def test_an_evaluation_survives_json(evaluation):
    back = through_json(evaluation)
    assert back.metrics() == evaluation.metrics()
    np.testing.assert_array_equal(back.scores, evaluation.scores)
    assert back.shown == evaluation.shown and back.step == 3 and back.verifier == "correct"


def test_evaluations_are_comparable_on_the_same_prompts_by_the_same_verifier(evaluation):
    def of(samples, verifier="correct", num_samples=2):
        return Evaluation.of(9, verifier, samples, num_samples)

    others = [answered(i, 0.0, 0.25, 3) for i in range(5) for _ in range(4)]
    assert of(others, num_samples=4).is_comparable(evaluation)
    assert through_json(evaluation).is_comparable(evaluation)
    assert not of(SAMPLES, "style").is_comparable(evaluation)
    assert not of(SAMPLES[:-2]).is_comparable(evaluation)
    assert not of([*SAMPLES[2:], *SAMPLES[:2]]).is_comparable(evaluation)
    assert not of([with_prompt(sample, answer="43") for sample in SAMPLES]).is_comparable(evaluation)


def test_every_evaluation_samples_from_the_same_streams():
    calls = []

    class Recorder:
        def sample(self, *arguments):
            calls.append(arguments)
            return SAMPLES

    records = [Prompt(np.array([1], np.int32), np.zeros(0, np.int32), "42", f"s:{i}") for i in range(5)]
    sampling = SamplingParams(max_tokens=8, temperature=0.5)
    held_out = HeldOut(records, 2, "correct", sampling, seed=9)
    first, second = held_out.run(Recorder(), step=0), held_out.run(Recorder(), step=50)
    assert (first.step, second.step) == (0, 50)
    assert calls[0] == calls[1]
    assert calls[0][:3] == (records, 2, sampling)
    HeldOut(records, 2, "correct", sampling, seed=10).run(Recorder(), step=0)
    seed_paths = [arguments[3] for arguments in calls]
    assert seed_paths[2] != seed_paths[0]
    # Training samples step s from (seed, s): no step of a run meets the streams of its evaluations.
    assert all(path[1] > 1_000_000 for path in seed_paths)


def test_a_verifier_is_averaged_over_the_prompts_it_applies_to():
    samples = [answered(i // 2, correct, 0.5, 3) for i, correct in enumerate((1.0, 0.0, 0.0, 0.0, 1.0, 1.0))]
    for sample in samples[2:4]:
        del sample.reward.parts["correct"]
    for sample in samples[:2]:
        sample.reward.parts["other"] = 0.25
    evaluation = Evaluation.of(0, "correct", samples, 2)
    assert evaluation.scores.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    metrics = through_json(evaluation).metrics()
    assert metrics["eval/accuracy"] == metrics["eval/correct/mean"] == 0.75
    assert (metrics["eval/style/mean"], metrics["eval/other/mean"]) == (0.5, 0.25)
