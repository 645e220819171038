"""Joins the right and the wrong answers to the quickstart's problems into preference pairs.

    python make_pairs.py RIGHT.jsonl WRONG.jsonl --out DIR --num-test 300

Both files come from examples/quickstart/problems.py with one seed, RIGHT with --noise 0 and WRONG with --noise 1, so
they hold the same questions in the same order. Writes DIR/train.jsonl and DIR/test.jsonl in the form of Orca's pairs:
{"system": "", "question": ..., "chosen": ..., "rejected": ...} a line. Test takes the last questions.
"""

import argparse
import json
from pathlib import Path


def read_lines(path: str) -> list[dict]:
    """Return the records of a JSONL file."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("right")
    parser.add_argument("wrong")
    parser.add_argument("--out", required=True)
    parser.add_argument("--num-test", type=int, default=300)
    arguments = parser.parse_args()
    pairs = []
    for right, wrong in zip(read_lines(arguments.right), read_lines(arguments.wrong), strict=True):
        if right["question"] != wrong["question"]:
            raise SystemExit(f"the files differ in their questions, first at {right['question']!r}: use one seed")
        pair = {"system": "", "question": right["question"], "chosen": right["answer"], "rejected": wrong["answer"]}
        pairs.append(json.dumps(pair) + "\n")
    if not 0 < arguments.num_test < len(pairs):
        raise SystemExit(f"--num-test is {arguments.num_test}: give 1 to {len(pairs) - 1}")
    directory = Path(arguments.out)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "train.jsonl").write_text("".join(pairs[: -arguments.num_test]), encoding="utf-8")
    (directory / "test.jsonl").write_text("".join(pairs[-arguments.num_test :]), encoding="utf-8")


if __name__ == "__main__":
    main()
