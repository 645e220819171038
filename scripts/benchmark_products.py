#!/usr/bin/env python3
"""How fast a rollout server on this CPU multiplies by its weights, in each way that it could (cpu/rollout/linear.py).

    .venv-rollout/bin/python scripts/benchmark_products.py [--weights OUTxIN ...] [--rows 4 16 32 64]
        [--rounds 7] [--threads 1]

Of each weight there are as many as take 256 MiB: a model's weights come from memory, not from a cache near the core. In
each round every way multiplies by all of its own, in turn. Milliseconds of a product are medians; "ratio" compares the
way that the server takes ("taken") with PyTorch's product by columns, within a round: median, least and greatest.
"pack" is what a packed copy takes, with the first product of one row, once for each update of the weights. The default
weights are those of Qwen2.5-0.5B: queries, keys and values; output; gate and up; down; head.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mindrlhf.cpu.rollout.linear import PlainLinear, Way, Ways  # noqa: E402

BYTES_OF_A_KIND = 256 << 20
DEFAULT_WEIGHTS = ["1152x896", "896x896", "9728x896", "896x4864", "151936x896"]


def shape_of(text: str) -> tuple[int, int]:
    """Read "OUTxIN"."""
    try:
        num_out, num_in = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no OUTxIN, such as 4096x512") from None
    if min(num_out, num_in) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' has a size below 1")
    return num_out, num_in


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(shape: tuple[int, int], rows: list[int], num_rounds: int) -> None:
    """Print the lines of one weight."""
    num_out, num_in = shape
    num = max(1, BYTES_OF_A_KIND // (4 * num_out * num_in))
    weights = [torch.randn(shape) for _ in range(num)]
    columns = [weight.t().contiguous().t() for weight in weights]
    linears = {way: [PlainLinear(w, way) for w in (columns if way is Way.COLUMNS else weights)] for way in Way}
    products = {way: [linear.of_rows(None) for linear in linears[way]] for way in Way}
    taken = Ways().of(torch.nn.Module(), weights[0])
    one = torch.randn(1, num_in)
    pack_s = seconds(lambda: [product(one) for product in products[Way.PACKED]]) / num
    for num_rows in rows:
        x = torch.randn(num_rows, num_in)
        times: dict[Way, list[float]] = {way: [] for way in Way}
        for turn in range(num_rounds + 1):
            for way in Way:
                taking = seconds(lambda: [product(x) for product in products[way]])  # noqa: B023
                if turn:  # the first makes what is kept for this number of rows
                    times[way].append(taking / num)
        ratios = [mine / other for mine, other in zip(times[taken], times[Way.COLUMNS], strict=True)]
        each = " ".join(f"{statistics.median(times[way]) * 1e3:9.2f}" for way in Way)
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{num_out:>7,} x {num_in:<6,} {num_rows:>4} {each}   {taken.name:8} {spread:21} {pack_s * 1e3:7.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", nargs="+", type=shape_of, default=list(map(shape_of, DEFAULT_WEIGHTS)))
    parser.add_argument("--rows", nargs="+", type=int, default=[4, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    for name in ("rows", "rounds", "threads"):
        if np.min(getattr(arguments, name)) < 1:
            parser.error(f"--{name} {getattr(arguments, name)}: to be 1 or more")
    torch.set_num_threads(arguments.threads)
    print(f"milliseconds of a product, threads: {arguments.threads}")
    names = " ".join(f"{way.name:>9}" for way in Way)
    print(f"{'weight':>16} {'rows':>5} {names}   {'taken':8} {'ratio':21} {'pack':>7}")
    with torch.inference_mode():
        for shape in arguments.weights:
            measure(shape, arguments.rows, arguments.rounds)


if __name__ == "__main__":
    main()
