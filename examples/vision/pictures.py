"""Makes the data of the vision example: drawn pictures with a question each, in the form of Geometry3K.

    python pictures.py --out DIR --num-train 4000 --num-test 300 --seed 0 [--kind bars] [--noise 0.6] [--shuffle-images]

writes DIR/train.parquet and DIR/test.parquet with the columns images, problem, answer and response. Everything is a
function of the arguments. Test is held out: whether a picture with its question belongs to train or test is fixed.

    bars      three coloured bars of 1 to 9 units; the height of one, or the sum of two
    area      a rectangle on squared paper; its area or its perimeter
    triangle  a right triangle with whole sides, two of them labelled; the third one

`--noise P` makes a share P of the train *responses* off by one (answers stay right). Such a file is for the supervised
warm-up only: a model that saw them knows the right answer and its neighbours, and takes any of them.

`--shuffle-images` deals the pictures of train out to other questions. A model that learns from such a file looks at
nothing: it is the control.
"""

import argparse
import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from mindrlhf.errors import UserError

COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 70, 220), "black": (20, 20, 20)}
TRIPLES = ((3, 4, 5), (6, 8, 10), (5, 12, 13), (8, 15, 17), (9, 12, 15), (7, 24, 25), (12, 16, 20), (20, 21, 29))
SIZES = {"bars": 56, "area": 84, "triangle": 84}  # pixels, multiples of 28
# One problem in TEST_STRIDE belongs to test.
TEST_STRIDE = 5


@dataclass(frozen=True)
class Problem:
    """A picture (PNG), a question about it and the answer, a whole number."""

    picture: bytes
    question: str
    answer: int

    @property
    def is_test(self) -> bool:
        """Whether it belongs to test."""
        return hashlib.sha256(self.picture + self.question.encode()).digest()[0] % TEST_STRIDE == 0


def draw_bars(rng: np.random.Generator, draw: ImageDraw.ImageDraw, size: int) -> tuple[str, int]:
    names = list(rng.permutation(list(COLOURS))[:3])
    heights = rng.integers(1, 10, 3).tolist()
    unit, width = (size - 12) / 9, size // 3
    for line in range(10):
        y = size - 6 - line * unit
        draw.line((0, y, size, y), fill=(215, 215, 215))
    for place, (name, height) in enumerate(zip(names, heights)):
        left = place * width + width // 5
        draw.rectangle((left, size - 6 - height * unit, left + 3 * width // 5, size - 6), fill=COLOURS[name])
    first, second = rng.permutation(3)[:2].tolist()
    if rng.random() < 0.5:
        return f"{names[first]} bar?", heights[first]
    return f"{names[first]} plus {names[second]}?", heights[first] + heights[second]


def draw_area(rng: np.random.Generator, draw: ImageDraw.ImageDraw, size: int) -> tuple[str, int]:
    unit = size // 9
    rows, columns = rng.integers(1, 9, 2).tolist()
    left, top = int(rng.integers(0, 10 - columns)), int(rng.integers(0, 10 - rows))
    for line in range(10):
        draw.line((0, line * unit, size, line * unit), fill=(200, 200, 200))
        draw.line((line * unit, 0, line * unit, size), fill=(200, 200, 200))
    box = (left * unit, top * unit, (left + columns) * unit, (top + rows) * unit)
    draw.rectangle(box, fill=(150, 190, 250), outline=(0, 0, 0))
    if rng.random() < 0.5:
        return "area?", rows * columns
    return "perimeter?", 2 * (rows + columns)


def draw_triangle(rng: np.random.Generator, draw: ImageDraw.ImageDraw, size: int) -> tuple[str, int]:
    up, along, slope = TRIPLES[rng.integers(len(TRIPLES))]
    if rng.random() < 0.5:
        up, along = along, up
    margin = size // 5
    scale = (size - 2 * margin) / max(up, along)
    # Its place varies, or there were but a few dozen pictures.
    left, bottom = margin + int(rng.integers(-4, 5)), size - margin + int(rng.integers(-4, 5))
    right, top = left + along * scale, bottom - up * scale
    draw.line(((left, bottom), (right, bottom), (left, top), (left, bottom)), fill=(0, 0, 0), width=1)
    draw.rectangle((left, bottom - 4, left + 4, bottom), outline=(0, 0, 0))
    sides = [up, along, slope]
    hidden = int(rng.integers(3))
    labels = ["x" if place == hidden else str(side) for place, side in enumerate(sides)]
    font = ImageFont.load_default(size=11)
    middle = (left + right) / 2, (bottom + top) / 2
    draw.text((left - 14, middle[1] - 6), labels[0], fill=(200, 0, 0), font=font)
    draw.text((middle[0] - 5, bottom + 2), labels[1], fill=(0, 120, 0), font=font)
    draw.text((middle[0] + 3, middle[1] - 12), labels[2], fill=(0, 0, 200), font=font)
    return "find x", sides[hidden]


KINDS: dict[str, Callable[[np.random.Generator, ImageDraw.ImageDraw, int], tuple[str, int]]] = {
    "bars": draw_bars,
    "area": draw_area,
    "triangle": draw_triangle,
}


def problems(kind: str, seed: int, is_test: bool) -> Iterator[Problem]:
    """Yield problems of train or of test without end."""
    size, number = SIZES[kind], 0
    while True:
        rng = np.random.default_rng([seed, number])
        image = Image.new("RGB", (size, size), (255, 255, 255))
        question, answer = KINDS[kind](rng, ImageDraw.Draw(image), size)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        problem = Problem(buffer.getvalue(), question, answer)
        if problem.is_test == is_test:
            yield problem
        number += 1


def make(kind: str, num_problems: int, seed: int, is_test: bool = False) -> list[Problem]:
    """Return problems of train or of test."""
    source = problems(kind, seed, is_test)
    return [next(source) for _ in range(num_problems)]


def shuffled(found: Sequence[Problem], seed: int) -> list[Problem]:
    """Return the problems with each other's pictures."""
    order = np.random.default_rng([seed, 1]).permutation(len(found))
    return [replace(problem, picture=found[place].picture) for problem, place in zip(found, order)]


def offsets(num_problems: int, noise: float, seed: int) -> list[int]:
    """Return what is added to each answer to make it a response: 1 or -1 for a share ``noise`` of them, else 0."""
    rng = np.random.default_rng([seed, 2])
    return np.where(rng.random(num_problems) < noise, rng.choice((-1, 1), num_problems), 0).tolist()


def write(path: Path, found: Sequence[Problem], noise: float = 0.0, seed: int = 0) -> None:
    """Write problems as Parquet; a share ``noise`` of the responses is off by one."""
    import pyarrow.parquet  # which the rollout environment lacks; make_checkpoint.py draws there

    rows = [
        {
            "images": [{"bytes": problem.picture, "path": None}],
            "problem": f"<image>{problem.question}",
            "answer": str(problem.answer),
            "response": str(problem.answer + difference),
        }
        for problem, difference in zip(found, offsets(len(found), noise, seed))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def best_blind_guess(train: Sequence[Problem], test: Sequence[Problem]) -> float:
    """Return the share of test that the commonest answer of train to the same question gets right."""
    answers: dict[str, list[int]] = {}
    for problem in train:
        answers.setdefault(problem.question, []).append(problem.answer)
    guesses = {question: np.bincount(own).argmax() for question, own in answers.items()}
    return float(np.mean([guesses.get(problem.question) == problem.answer for problem in test]))


def main() -> None:
    """Write the two files and say what can be guessed without looking."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--kind", choices=tuple(KINDS), default="bars")
    parser.add_argument("--num-train", type=int, default=4000, metavar="N")
    parser.add_argument("--num-test", type=int, default=300, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0, metavar="P", help="share of train responses off by one")
    parser.add_argument("--shuffle-images", action="store_true", help="deal the pictures of train out anew")
    options = parser.parse_args()
    if not 0 <= options.noise <= 1 or min(options.num_train, options.num_test) < 1 or options.seed < 0:
        raise UserError("--noise must be 0 to 1, the numbers of problems 1 or more, and --seed 0 or more")
    train = make(options.kind, options.num_train, options.seed)
    test = make(options.kind, options.num_test, options.seed + 1, is_test=True)
    print(f"best guess without the picture: {best_blind_guess(train, test):.1%} of {len(test)} test problems")
    write(options.out / "train.parquet", shuffled(train, options.seed) if options.shuffle_images else train,
          options.noise, options.seed)  # fmt: skip
    write(options.out / "test.parquet", test)


if __name__ == "__main__":
    main()
