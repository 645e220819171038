"""Scores per second of the reward pool on GSM8K solutions, and what hostile completions cost.

    python scripts/benchmark_rewards.py --input gsm8k/train.jsonl [--num-workers 2]

The input has JSON lines with ``answer`` (a solution that ends with ``#### 42``).
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import jsonlines

from mindrlhf.rewards.pool import RewardPool
from mindrlhf.rewards.selection import Selection
from mindrlhf.rewards.types import RewardInput

FORK_BOMB = "```python\nimport os\nwhile True:\n    os.fork()\n```"
HOSTILE = {
    "10 MB of digits": ("accuracy_reward", "9" * 10_000_000),
    "10 MB of open braces in a box": ("accuracy_reward", "\\boxed{" + "{" * 10_000_000),
    "100,000 nested boxes": ("accuracy_reward", "\\boxed{" * 100_000 + "1" + "}" * 100_000),
    "9**9**9": ("accuracy_reward", "\\boxed{9**9**9}"),
    "9^{9^{9}}": ("accuracy_reward", "\\boxed{9^{9^{9}}}"),
    "an infinite loop": ("code_execution", "```python\nwhile True: pass\n```"),
    "a fork bomb": ("code_execution", FORK_BOMB),
    "a flood of output": ("code_execution", "```python\nimport os\nwhile True: os.write(1, b'x' * 65536)\n```"),
    "10 GB of memory": ("code_execution", "```python\nx = bytearray(10 << 30)\n```"),
}


def score(pool: RewardPool, samples: Sequence[RewardInput], expected: float) -> float:
    """Return the time it took, in seconds, and print how many rewards are not the expected one."""
    start_s = time.perf_counter()
    results = pool.score(samples)
    elapsed_s = time.perf_counter() - start_s
    wrong = [result.index for result in results if result.total != expected or result.failures]
    print(f"{len(samples) / elapsed_s:8.0f} scores/s, {len(wrong)} of {len(samples)} not {expected:g}: {wrong[:10]}")
    return elapsed_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--num-workers", type=int, default=2)
    arguments = parser.parse_args()
    with jsonlines.open(arguments.input) as records:
        solutions = [record["answer"] for record in records]
    changed, right = [], []
    for index, solution in enumerate(solutions):
        body, _, answer = solution.partition("#### ")
        right.append(RewardInput(index, solution, answer))
        changed.append(RewardInput(index, f"{body}#### {int(answer.replace(',', '')) + 1}", answer))
    with RewardPool(Selection(("accuracy_reward",), (1.0,)), arguments.num_workers) as pool:
        pool.score(right[:100])
        for name, samples, expected in (("reference", right, 1.0), ("number changed", changed, 0.0)):
            print(f"{name:16s}", end="")
            score(pool, samples, expected)
    for name, (verifier, completion) in HOSTILE.items():
        with RewardPool(Selection((verifier,), (1.0,)), 1, timeout_s=5.0) as pool:
            answer = "assert True" if verifier == "code_execution" else "42"
            start_s = time.perf_counter()
            (result,) = pool.score([RewardInput(0, completion, answer)])
            print(f"{time.perf_counter() - start_s:8.2f} s  {name}: {result.total:g} {result.failures or ''}")


if __name__ == "__main__":
    main()
