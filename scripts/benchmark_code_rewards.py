"""Scores per second of programs under test, by kind of unit test, in one process.

    python scripts/benchmark_code_rewards.py [--scores 40]
"""

import argparse
import json
import time

from mindrlhf.rewards.registry import resolve

FUNCTION = "```python\ndef add(a, b):\n    return a + b\n```"
SCRIPT = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```"
CASES = {
    "calls": (FUNCTION, {"fn_name": "add", "inputs": [[1, 2], [3, 4], [5, 6]], "outputs": [3, 7, 11]}),
    "statements": (FUNCTION, ["assert add(1, 2) == 3", "assert add(3, 4) == 7", "assert add(0, 0) == 0"]),
    "streams, one": (SCRIPT, {"inputs": ["1 2"], "outputs": ["3"]}),
    "streams, three": (SCRIPT, {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scores", type=int, default=40)
    num_scores = parser.parse_args().scores
    verifier = resolve("code_execution", {"time_limit_s": "30"})
    for name, (completion, answer) in CASES.items():
        verifier(completion, json.dumps(answer), {})
        start_s = time.perf_counter()
        for _ in range(num_scores):
            if verifier(completion, json.dumps(answer), {}) != 1.0:
                raise SystemExit(f"{name}: a right program does not earn 1")
        elapsed_s = time.perf_counter() - start_s
        print(f"{name:16s} {num_scores / elapsed_s:8.1f} scores/s {1000 * elapsed_s / num_scores:8.1f} ms")


if __name__ == "__main__":
    main()
