"""The pictures of the vision example: what they show is the answer, and test is held out."""

import io
import re

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from script_files import load_script

pictures = load_script("examples/vision/pictures.py")


def pixels_of(problem):
    return np.asarray(Image.open(io.BytesIO(problem.picture))).astype(int)


def mask(pixels, colour):
    return (pixels == colour).all(-1)


def test_bars_are_as_high_as_the_answer_says():
    for problem in pictures.make("bars", 60, 5):
        heights = {}
        for name, colour in pictures.COLOURS.items():
            rows = np.flatnonzero(mask(pixels_of(problem), colour).any(1))
            if len(rows):
                # A bar ends 6 pixels above the lower edge; nine units fill what 12 pixels leave.
                heights[name] = round((50 - rows.min()) / (44 / 9))
        asked = re.findall("|".join(pictures.COLOURS), problem.question)
        assert problem.answer == sum(heights[name] for name in asked), problem.question


def test_rectangles_are_as_large_as_the_answer_says():
    questions = set()
    for problem in pictures.make("area", 40, 5):
        dark = mask(pixels_of(problem), (0, 0, 0))
        height, width = (np.ptp(np.flatnonzero(dark.any(axis))) // 9 for axis in (1, 0))
        expected = {"area?": height * width, "perimeter?": 2 * (height + width)}
        assert problem.answer == expected[problem.question]
        questions.add(problem.question)
    assert questions == {"area?", "perimeter?"}


def test_triangles_have_whole_sides():
    lengths = {side for triple in pictures.TRIPLES for side in triple}
    assert all(a * a + b * b == c * c for a, b, c in pictures.TRIPLES)
    assert {problem.answer for problem in pictures.make("triangle", 200, 5)} <= lengths


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_test_is_held_out_and_the_arguments_decide_everything(kind):
    train, test = pictures.make(kind, 150, 3), pictures.make(kind, 60, 3, is_test=True)
    assert not set(train) & set(test)
    assert train == pictures.make(kind, 150, 3)
    assert train != pictures.make(kind, 150, 4)
    size = pictures.SIZES[kind]
    assert pixels_of(train[0]).shape == (size, size, 3)


def test_files_have_the_form_of_geometry3k_and_noise_moves_responses_alone(tmp_path):
    found = pictures.make("bars", 300, 3)
    pictures.write(tmp_path / "a.parquet", found, noise=0.5, seed=1)
    rows = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["images"][0]["bytes"] for row in rows] == [problem.picture for problem in found]
    assert [row["problem"] for row in rows] == [f"<image>{problem.question}" for problem in found]
    assert [row["answer"] for row in rows] == [str(problem.answer) for problem in found]
    off = np.array([int(row["response"]) - int(row["answer"]) for row in rows])
    assert set(off.tolist()) == {-1, 0, 1}
    assert 0.4 < (off != 0).mean() < 0.6
    pictures.write(tmp_path / "b.parquet", found)
    rows = pyarrow.parquet.read_table(tmp_path / "b.parquet").to_pylist()
    assert all(row["response"] == row["answer"] for row in rows)


def test_the_control_has_the_same_questions_and_pictures_but_not_together():
    found = pictures.make("bars", 300, 3)
    control = pictures.shuffled(found, 0)
    assert [(one.question, one.answer) for one in control] == [(one.question, one.answer) for one in found]
    assert sorted(one.picture for one in control) == sorted(one.picture for one in found)
    assert sum(one.picture == other.picture for one, other in zip(control, found)) < 10


def test_the_best_guess_without_the_picture_is_the_commonest_answer_to_a_question():
    def problem(question, answer):
        return pictures.Problem(b"", question, answer)

    train = [problem("a", 1), problem("a", 1), problem("a", 2), problem("b", 5)]
    test = [problem("a", 1), problem("a", 2), problem("b", 5), problem("c", 1)]
    assert pictures.best_blind_guess(train, test) == 0.5
