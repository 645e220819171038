"""How the cost of packing grows with the samples of a step: processor seconds at x1, x4 and x16, and the exponent.

    python scripts/benchmark_growth.py --samples 4096 --longest 16384

Three distributions of response lengths: log-normal (median an eighth of the longest, sigma 0.8), uniform, and truncated
(three of ten at the limit, the others uniform up to a quarter). Groups of 8 have one prompt of 60 to 1,024 tokens.
"""

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from mindrlhf.data.packing import Row, choose_row_length, plan_rows
from mindrlhf.layout.packing import Piece, RowCost, plan_best_fit

LONGEST_PROMPT, GROUP = 1024, 8
COST = RowCost(per_position=1.0, per_pair=2e-5)


def response_lengths(name: str, count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Return int64 [count], from 1 to ``longest``."""
    drawn = {
        "log-normal": lambda: np.exp(rng.normal(math.log(longest / 8), 0.8, count)),
        "uniform": lambda: rng.uniform(1, longest, count),
        "truncated": lambda: np.where(rng.random(count) < 0.3, longest, rng.uniform(16, longest / 4, count)),
    }[name]()
    return np.clip(drawn, 1, longest).astype(int)


def packers(name: str, count: int, longest: int) -> tuple[int, dict[str, Callable[[], list[Row]]]]:
    """Return the tokens of all samples, and what packs them by each of the ways."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(60, LONGEST_PROMPT, -(-count // GROUP))
    responses = response_lengths(name, count, longest - LONGEST_PROMPT, rng)
    lengths = [int(prompts[number // GROUP] + responses[number]) for number in range(count)]
    row_lengths = choose_row_length((), max(lengths), "the longest sample", "ascend", is_fitted=True)
    alone = [Piece(length, group=number) for number, length in enumerate(lengths)]
    shared = [
        Piece(int(responses[number]), int(prompts[number // GROUP]) - 1, number // GROUP) for number in range(count)
    ]
    ways = {
        "first_fit": lambda: plan_rows(lengths, row_lengths),
        "best_fit": lambda: plan_best_fit(alone, row_lengths, COST),
        "shared_prompts": lambda: plan_best_fit(shared, row_lengths, COST),
    }
    return sum(lengths), ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4096, help="of the first size (default: 4096)")
    parser.add_argument("--longest", type=int, default=16384, help="tokens of a sample at most (default: 16384)")
    arguments = parser.parse_args()
    counts = [arguments.samples * factor for factor in (1, 4, 16)]
    print("| packing | lengths | " + " | ".join(f"{count:,}" for count in counts) + " | exponent | tokens / places |")
    print("|---|---|---|---|---|---|---|")
    for way in ("first_fit", "best_fit", "shared_prompts"):
        for name in ("log-normal", "uniform", "truncated"):
            seconds = []
            for count in counts:
                num_tokens, ways = packers(name, count, arguments.longest)
                start = time.process_time()
                rows = ways[way]()
                seconds.append(time.process_time() - start)
            exponent = math.log(seconds[-1] / seconds[0]) / math.log(counts[-1] / counts[0])
            filled = num_tokens / sum(row.length for row in rows)
            figures = " | ".join(f"{one:.2f}" for one in seconds)
            print(f"| `{way}` | {name} | {figures} | {exponent:.2f} | {filled:.3f} |", flush=True)


if __name__ == "__main__":
    main()
