"""Short sums in plain English, and their reward.

    python examples/real_model/sums.py --out runs/real_model

writes train.jsonl and test.jsonl there, the same ones each time. A pair of numbers is in one of the two only: 3 + 5 and
5 + 3 are held out together.
"""

import argparse
import json
import random
import re
from pathlib import Path

LARGEST, NUM_TEST = 30, 200
_NUMBER = re.compile(r"-?\d+")


def last_number(completion: str, answer: str, *, finish_reason: str) -> float:
    """1 where the response ended by itself, and the last number in it is the right one.

    A response that was cut at the limit has stated no answer, however many numbers it mentions.
    """
    numbers = _NUMBER.findall(completion)
    return float(finish_reason == "stop" and numbers[-1:] == [answer])


def make_problems() -> tuple[list[dict], list[dict]]:
    """Return the problems to train on, and 200 held-out ones, in GSM8K's form."""
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, a + 1)]
    random.Random(0).shuffle(pairs)
    problems = []
    for a, b in pairs:
        sums = {f"{a} - {b}": a - b, f"{a} + {b}": a + b, f"{b} + {a}": a + b}
        for text, value in sums.items():
            question = f"What is {text}? Answer with the number only."
            problems.append({"question": question, "answer": f"#### {value}"})
    # The first that is left belongs to another pair than the last that is held out.
    cut = next(i for i in range(NUM_TEST, len(problems)) if " - " in problems[i]["question"])
    return problems[cut:], problems[:NUM_TEST]


def main() -> None:
    parser = argparse.ArgumentParser(description="make the sums")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, problems in zip(("train", "test"), make_problems(), strict=True):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems), encoding="utf-8")
        print(f"{out / name}.jsonl: {len(problems)} problems")


if __name__ == "__main__":
    main()
