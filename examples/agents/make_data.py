"""Multiplication problems for examples/agents: the warm-up of examples/tools, and questions as an agent gets them."""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.make_data import held_out, problems, turns  # noqa: E402


def main() -> None:
    """Write sft.jsonl, train.jsonl and test.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    draw = random.Random(1)
    sets = {"sft": [record for pair in problems(3000, 2) for record in turns(*pair, draw, 0.3)]}
    for name, pairs in (("train", problems(2000, 3)), ("test", held_out(100))):
        sets[name] = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a, b in pairs]
    out.mkdir(parents=True, exist_ok=True)
    for name, records in sets.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


if __name__ == "__main__":
    main()
