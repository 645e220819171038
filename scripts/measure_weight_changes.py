"""How many bfloat16 weights an update of AdamW changes, and what sending the changes takes, at several learning rates.

    python scripts/measure_weight_changes.py MODEL_DIR [--lr 1e-6 1e-5 1e-4] [--updates 20]

The weights are those of a model; the gradients are made up, in two ways between which a run's own lie: "noise",
independent from update to update, whose mean AdamW keeps small, and "drift", the same in every update, which moves each
weight by the learning rate each time. The last update is measured.
"""

import argparse
import time

import numpy as np

from mindrlhf.weights.open import open_tensors
from mindrlhf.weights.publish.tcp import find_changes
from mindrlhf.weights.tensors import convert_dtype

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--updates", type=int, default=20)
    arguments = parser.parse_args()
    tensors = open_tensors(arguments.model_dir)
    names = list(tensors.names())
    print("gradients     lr  changed elements  bytes of the whole  processor seconds per GB to find them")
    for kind in ("noise", "drift"):
        for lr in arguments.lr:
            changed = size = sent = 0
            seconds = 0.0
            for seed, name in enumerate(names):
                start = convert_dtype(tensors.read(name), tensors.info(name).dtype, "float32").reshape(-1)
                old, new = last_two(start, lr, arguments.updates, kind, seed)
                begin_s = time.process_time()
                changes = find_changes(old, new)
                seconds += time.process_time() - begin_s
                changed += int((old != new).sum())
                size += new.nbytes
                sent += new.nbytes if changes is None else sum(array.nbytes for array in changes.values())
            share = changed / (size // 2)
            print(f"{kind:9} {lr:6.0e}  {share:16.2%}  {sent / size:18.2%}  {seconds / size * 1e9:37.2f}")


def last_two(start: np.ndarray, lr: float, num_updates: int, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bfloat16 bits of weights before and after the last update."""
    random = np.random.default_rng(seed)
    weights = start.astype(np.float32)
    gradient = random.standard_normal(weights.size, np.float32)
    mean, square, old = np.zeros_like(weights), np.zeros_like(weights), None
    for update in range(1, num_updates + 1):
        if kind == "noise":
            gradient = random.standard_normal(weights.size, np.float32)
        mean = BETA1 * mean + (1 - BETA1) * gradient
        square = BETA2 * square + (1 - BETA2) * gradient * gradient
        step = mean / (1 - BETA1**update) / (np.sqrt(square / (1 - BETA2**update)) + EPSILON)
        old = convert_dtype(weights, "float32", "bfloat16")
        weights = weights - np.float32(lr) * step
    return old, convert_dtype(weights, "float32", "bfloat16")


if __name__ == "__main__":
    main()
