"""Makes the quickstart's data: grade-school arithmetic word problems in GSM8K's form.

    python problems.py --out DIR --num-train 20000 --num-test 500 --seed 0 [--noise 0.4] [--levels 1 2]

writes DIR/train.jsonl and DIR/test.jsonl, one {"question": ..., "answer": ...} a line. An answer is one equation
per step and then a line `#### N`. A third of the problems is of each level: (1) one step, (2) two steps,
(3) two steps with larger numbers or rates. Everything is a function of the arguments.

Test is held out: which numbers a template may use in train and which in test is fixed, whatever the seed, so no
question and no combination of a template with its numbers is in both.

`--noise P` replaces a share P of the train answers (never of the test answers) by what a weak student would write.
Each template has one habitual mistake, so the mistakes can be learned. Such a file is for the supervised warm-up
only: it gives the model something that reinforcement learning on right answers can repair.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mindrlhf.errors import UserError

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ivan", "Julia", "Kevin", "Lena", "Maria",
    "Noah", "Olga",
)  # fmt: skip
ITEMS = (
    "apples", "balls", "books", "cards", "coins", "cookies", "cups", "eggs", "flowers", "hats", "keys", "lemons",
    "marbles", "pencils", "rings", "shells", "spoons", "stamps", "stickers", "toys",
)  # fmt: skip
LEVELS = (1, 2, 3)
MAX_NUMBER = 999
# One combination of numbers in TEST_STRIDE belongs to test.
TEST_STRIDE = 5
# Draws in a row without a new question after which a level counts as exhausted.
MAX_FAILED_DRAWS = 1_000


class Mistake(Enum):
    """What a weak student does in the last step of a template."""

    FORGOT_STEP = "stops before the last step"
    WRONG_OPERATION = "takes another operation, and computes it rightly"
    OFF_BY_ONE = "last result one too large"
    OFF_BY_TEN = "last result ten too small: a carry forgotten"


# Operand of a step: the name of a number, a constant, or the result of the step before.
PREVIOUS = "previous"
Step = tuple[str | int, str, str | int]
SWAPPED_OPERATION = {"+": "-", "-": "+", "*": "+", "/": "-"}


@dataclass(frozen=True)
class Template:
    """A kind of problem.

    Attributes:
        name: key of the split into train and test; renaming one moves its numbers between the two.
        text: the question, with {name}, {friend}, {items} and the keys of ``ranges`` to fill in.
        ranges: smallest and largest value of each number, both included.
        steps: the calculation; the last result is the answer.
        mistake: what goes wrong in noisy answers.
    """

    name: str
    level: int
    text: str
    ranges: Mapping[str, tuple[int, int]]
    steps: tuple[Step, ...]
    mistake: Mistake


SMALL, FACTOR, LARGE = (2, 20), (2, 9), (11, 25)

# fmt: off
TEMPLATES = (
    Template("find", 1, "{name} has {a} {items} and finds {b} more. How many {items} does {name} have now?",
             {"a": SMALL, "b": SMALL}, (("a", "+", "b"),), Mistake.OFF_BY_TEN),
    Template("give", 1, "{name} has {a} {items} and gives {b} of them to {friend}. How many {items} are left?",
             {"a": (5, 30), "b": SMALL}, (("a", "-", "b"),), Mistake.WRONG_OPERATION),
    Template("bags", 1, "There are {a} bags with {b} {items} in each bag. How many {items} are there in all?",
             {"a": FACTOR, "b": FACTOR}, (("a", "*", "b"),), Mistake.WRONG_OPERATION),
    Template("share", 1, "{a} {items} are shared equally by {b} friends. How many {items} does each friend get?",
             {"a": (4, 81), "b": FACTOR}, (("a", "/", "b"),), Mistake.OFF_BY_ONE),
    Template("together", 1, "{name} has {a} {items} and {friend} has {b}. How many {items} do they have together?",
             {"a": SMALL, "b": SMALL}, (("a", "+", "b"),), Mistake.OFF_BY_ONE),
    Template("more_than", 1, "{name} has {a} {items} and {friend} has {b}. How many more {items} does {name} have "
             "than {friend}?",
             {"a": (5, 30), "b": SMALL}, (("a", "-", "b"),), Mistake.WRONG_OPERATION),
    Template("price", 1, "The {items} cost {a} dollars each. How many dollars does {name} pay for {b} of them?",
             {"a": FACTOR, "b": FACTOR}, (("a", "*", "b"),), Mistake.WRONG_OPERATION),
    Template("pages", 1, "A book has {a} pages. {name} reads {b} pages today. How many pages are left to read?",
             {"a": (20, 60), "b": SMALL}, (("a", "-", "b"),), Mistake.OFF_BY_TEN),
    Template("twice", 1, "{name} has {a} {items}. {friend} has twice as many. How many {items} does {friend} have?",
             {"a": (2, 60)}, (("a", "*", 2),), Mistake.OFF_BY_ONE),

    Template("find_give", 2, "{name} has {a} {items}, finds {b} more and then gives {c} to {friend}. How many {items} "
             "does {name} have left?",
             {"a": SMALL, "b": SMALL, "c": SMALL}, (("a", "+", "b"), (PREVIOUS, "-", "c")), Mistake.FORGOT_STEP),
    Template("bags_table", 2, "There are {a} bags with {b} {items} in each bag and {c} more {items} on the table. "
             "How many {items} are there in all?",
             {"a": FACTOR, "b": FACTOR, "c": SMALL}, (("a", "*", "b"), (PREVIOUS, "+", "c")), Mistake.FORGOT_STEP),
    Template("bags_lose", 2, "{name} buys {a} bags with {b} {items} in each bag and loses {c} of the {items}. "
             "How many {items} are left?",
             {"a": FACTOR, "b": FACTOR, "c": SMALL}, (("a", "*", "b"), (PREVIOUS, "-", "c")), Mistake.WRONG_OPERATION),
    Template("more_together", 2, "{name} has {a} {items}. {friend} has {b} more than {name}. How many {items} do they "
             "have together?",
             {"a": SMALL, "b": SMALL}, (("a", "+", "b"), ("a", "+", PREVIOUS)), Mistake.FORGOT_STEP),
    Template("boxes", 2, "{name} has {a} {items} and {friend} has {b}. They put all of them equally into {c} boxes. "
             "How many {items} are in each box?",
             {"a": SMALL, "b": SMALL, "c": FACTOR}, (("a", "+", "b"), (PREVIOUS, "/", "c")), Mistake.FORGOT_STEP),
    Template("change", 2, "{name} buys {a} {items} for {b} dollars each and pays with {c} dollars. How many dollars "
             "does {name} get back?",
             {"a": FACTOR, "b": FACTOR, "c": (10, 99)}, (("a", "*", "b"), ("c", "-", PREVIOUS)), Mistake.FORGOT_STEP),
    Template("earn", 2, "{name} has {a} dollars and sells {b} {items} for {c} dollars each. How many dollars does "
             "{name} have now?",
             {"a": SMALL, "b": FACTOR, "c": FACTOR}, (("b", "*", "c"), ("a", "+", PREVIOUS)), Mistake.FORGOT_STEP),
    Template("times_lose", 2, "{name} has {a} {items}. {friend} has {b} times as many and then loses {c}. How many "
             "{items} does {friend} have left?",
             {"a": FACTOR, "b": FACTOR, "c": SMALL}, (("a", "*", "b"), (PREVIOUS, "-", "c")), Mistake.FORGOT_STEP),
    Template("lose_lose", 2, "{name} has {a} {items}, loses {b} of them on the way and gives {c} to {friend}. How many "
             "{items} does {name} have left?",
             {"a": (10, 60), "b": SMALL, "c": SMALL}, (("a", "-", "b"), (PREVIOUS, "-", "c")),
             Mistake.WRONG_OPERATION),

    Template("train", 3, "A train goes {a} miles in each hour. After {b} hours there are {c} miles left. How many "
             "miles long is the trip?",
             {"a": LARGE, "b": FACTOR, "c": (10, 90)}, (("a", "*", "b"), (PREVIOUS, "+", "c")), Mistake.FORGOT_STEP),
    Template("wage", 3, "{name} earns {a} dollars an hour, works {b} hours and then spends {c} dollars. How many "
             "dollars are left?",
             {"a": LARGE, "b": FACTOR, "c": (10, 90)}, (("a", "*", "b"), (PREVIOUS, "-", "c")), Mistake.FORGOT_STEP),
    Template("machine", 3, "A machine makes {a} {items} every minute. It runs for {b} minutes, but {c} of the {items} "
             "are broken. How many good {items} are there?",
             {"a": LARGE, "b": FACTOR, "c": SMALL}, (("a", "*", "b"), (PREVIOUS, "-", "c")), Mistake.WRONG_OPERATION),
    Template("classes", 3, "A school has {a} classes with {b} students in each class. {c} students are sick today. "
             "How many students are at school?",
             {"a": FACTOR, "b": LARGE, "c": SMALL}, (("a", "*", "b"), (PREVIOUS, "-", "c")), Mistake.FORGOT_STEP),
    Template("reading", 3, "A book has {a} pages. {name} reads {b} pages on each of {c} days. How many pages are left "
             "to read?",
             {"a": (100, 250), "b": LARGE, "c": FACTOR}, (("b", "*", "c"), ("a", "-", PREVIOUS)),
             Mistake.WRONG_OPERATION),
    Template("shop", 3, "A shop sells {a} {items} in the morning and {b} in the evening for {c} dollars each. How many "
             "dollars does the shop get?",
             {"a": (5, 15), "b": (5, 15), "c": FACTOR}, (("a", "+", "b"), (PREVIOUS, "*", "c")), Mistake.FORGOT_STEP),
    Template("savings", 3, "{name} saves {a} dollars every week for {b} weeks. Then {c} friends share the money "
             "equally. How many dollars does each friend get?",
             {"a": LARGE, "b": FACTOR, "c": FACTOR}, (("a", "*", "b"), (PREVIOUS, "/", "c")), Mistake.FORGOT_STEP),
    Template("tank", 3, "A tank holds {a} liters of water and loses {b} liters every hour. How many liters are left "
             "after {c} hours?",
             {"a": (60, 200), "b": SMALL, "c": FACTOR}, (("b", "*", "c"), ("a", "-", PREVIOUS)), Mistake.FORGOT_STEP),
    Template("bus", 3, "There are {a} people on a bus. At the next stop {b} people get off and {c} get on. How many "
             "people are on the bus now?",
             {"a": (30, 99), "b": (5, 29), "c": (5, 29)}, (("a", "-", "b"), (PREVIOUS, "+", "c")),
             Mistake.WRONG_OPERATION),
)
# fmt: on


@dataclass(frozen=True)
class Equation:
    """``left operation right = result``, in whole numbers."""

    left: int
    operation: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left}{self.operation}{self.right}={self.result}"


@dataclass(frozen=True)
class Problem:
    """One problem. ``numbers`` are the template's, in the order of its ranges; ``answer`` is what is written."""

    template: str
    level: int
    numbers: tuple[int, ...]
    question: str
    answer: str


def compute(left: int, operation: str, right: int) -> int | None:
    """Return the result; None when it is not a whole number in 1 ... ``MAX_NUMBER``."""
    if operation == "/":
        result = left // right if right and left % right == 0 else 0
    else:
        result = {"+": left + right, "-": left - right, "*": left * right}[operation]
    return result if 1 <= result <= MAX_NUMBER else None


def solve(template: Template, numbers: tuple[int, ...]) -> tuple[Equation, ...] | None:
    """Return the template's steps for ``numbers``; None when they do not make a sensible problem."""
    named = dict(zip(template.ranges, numbers))
    equations: list[Equation] = []
    for left, operation, right in template.steps:
        values = [_value(operand, named, equations) for operand in (left, right)]
        result = compute(values[0], operation, values[1])
        if result is None:
            return None
        equations.append(Equation(values[0], operation, values[1], result))
    return tuple(equations)


def _value(operand: str | int, numbers: Mapping[str, int], equations: list[Equation]) -> int:
    if operand == PREVIOUS:
        return equations[-1].result
    return operand if isinstance(operand, int) else numbers[operand]


def make_mistake(equations: tuple[Equation, ...], mistake: Mistake) -> tuple[Equation, ...]:
    """Return the steps as a student with that habit writes them; their last result is always a wrong answer."""
    *earlier, last = equations
    changed = last
    if mistake is Mistake.FORGOT_STEP:
        if earlier and earlier[-1].result != last.result:
            return tuple(earlier)
    elif mistake is Mistake.WRONG_OPERATION:
        operation = SWAPPED_OPERATION[last.operation]
        result = compute(last.left, operation, last.right)
        if result is not None:
            changed = Equation(last.left, operation, last.right, result)
    elif mistake is Mistake.OFF_BY_TEN and last.result > 10:
        changed = Equation(last.left, last.operation, last.right, last.result - 10)
    # The habit does not always give a wrong answer (2*2 and 2+2); then the student miscounts.
    if changed.result == last.result:
        changed = Equation(last.left, last.operation, last.right, last.result + 1)
    return (*earlier, changed)


def write_answer(equations: Iterable[Equation]) -> str:
    """Return the worked answer: one equation a line, then ``#### N``."""
    lines = [str(equation) for equation in equations]
    final = lines[-1].rpartition("=")[2]
    return "\n".join([*lines, f"#### {final}"])


def belongs_to_test(template: Template, numbers: tuple[int, ...]) -> bool:
    """Return whether a template may use these numbers in test (else: in train). No seed has a say in it."""
    key = f"{template.name}:{','.join(map(str, numbers))}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % TEST_STRIDE == 0


def make_problems(
    split: str, num_problems: int, seed: int, noise: float = 0.0, levels: Sequence[int] = LEVELS
) -> list[Problem]:
    """Return distinct problems, their levels equally frequent (to within one) and in random order.

    Args:
        split: "train" or "test".
        num_problems: how many.
        seed: the questions depend on it and on the split alone, so noise changes nothing but answers.
        noise: share, in [0, 1], of answers with the template's mistake (rounded to a whole number of problems).
        levels: the levels to draw from.

    Raises:
        UserError: more problems wanted than there are, or a value out of range.
    """
    if split not in ("train", "test"):
        raise UserError(f"unknown split {split!r}; choose train or test")
    if num_problems < 1:
        raise UserError(f"cannot make {num_problems} {split} problems; ask for 1 or more")
    if not 0 <= noise <= 1:
        raise UserError(f"noise {noise} is not a share; choose a value from 0 to 1")
    draw = random.Random(f"{split}/{seed}")
    level_of_each = [levels[index % len(levels)] for index in range(num_problems)]
    draw.shuffle(level_of_each)
    noise_draw = random.Random(f"noise/{split}/{seed}")
    noisy = set(noise_draw.sample(range(num_problems), round(noise * num_problems)))
    numbers = numbers_by_template(split)
    problems: list[Problem] = []
    questions: set[str] = set()
    for index, level in enumerate(level_of_each):
        for _ in range(MAX_FAILED_DRAWS):
            template = draw.choice([template for template in TEMPLATES if template.level == level])
            problem = _draw_problem(draw, template, draw.choice(numbers[template.name]), index in noisy)
            if problem.question not in questions:
                break
        else:
            raise UserError(
                f"there are not {num_problems} different {split} problems: level {level} gave out after "
                f"{len(problems)}; ask for fewer"
            )
        questions.add(problem.question)
        problems.append(problem)
    return problems


@functools.cache
def numbers_by_template(split: str) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return, per template name, the combinations of numbers that make a sensible problem and belong to ``split``."""
    return {template.name: tuple(_numbers_of(template, split)) for template in TEMPLATES}


def _numbers_of(template: Template, split: str) -> Iterator[tuple[int, ...]]:
    values = (range(smallest, largest + 1) for smallest, largest in template.ranges.values())
    for numbers in itertools.product(*values):
        if belongs_to_test(template, numbers) == (split == "test") and solve(template, numbers) is not None:
            yield numbers


def _draw_problem(draw: random.Random, template: Template, numbers: tuple[int, ...], is_noisy: bool) -> Problem:
    name, friend = draw.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "items": draw.choice(ITEMS)}
    equations = solve(template, numbers)
    assert equations is not None, f"{template.name} has no solution for {numbers}"
    if is_noisy:
        equations = make_mistake(equations, template.mistake)
    question = template.text.format(**dict(zip(template.ranges, numbers)), **words)
    return Problem(template.name, template.level, numbers, question, write_answer(equations))


def vocabulary() -> set[str]:
    """Return every word that a question can hold."""
    texts = [re.sub(r"{\w+}", " ", template.text) for template in TEMPLATES]
    return {*NAMES, *ITEMS, *re.findall(r"[A-Za-z]+", " ".join(texts))}


def write_jsonl(problems: Iterable[Problem], path: Path) -> None:
    """Write question and answer of each problem. The file appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            for problem in problems:
                file.write(json.dumps({"question": problem.question, "answer": problem.answer}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make arithmetic word problems in GSM8K's form.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.jsonl and test.jsonl")
    parser.add_argument("--num-train", type=int, default=20_000)
    parser.add_argument("--num-test", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0, help="share of wrong train answers, 0 to 1 (default 0)")
    parser.add_argument("--levels", type=int, nargs="+", choices=LEVELS, default=LEVELS, help="default: all")
    arguments = parser.parse_args(argv)
    try:
        train = make_problems("train", arguments.num_train, arguments.seed, arguments.noise, arguments.levels)
        test = make_problems("test", arguments.num_test, arguments.seed, levels=arguments.levels)
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_jsonl(train, arguments.out / "train.jsonl")
        write_jsonl(test, arguments.out / "test.jsonl")
    except (UserError, OSError) as error:
        print(f"problems.py: error: {error}", file=sys.stderr)
        return UserError.exit_code
    num_wrong = round(arguments.noise * arguments.num_train)
    print(f"{arguments.out}: {len(train)} train problems ({num_wrong} with a wrong answer), {len(test)} test problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
