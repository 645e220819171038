"""A checkpoint's cost in a run: steps with one being written, and without, in turns.

Every other step is saved: the step after it waits for the copy, which counts to that step, and then shares the
processor with the writing. All responses have the same length, so that steps do the same work.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path

from harness import make_sanity, train

MODEL = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 6}
MODEL |= {"intermediate_size": 3072}
WARM_UP = 3  # the first step compiles; the next two save for the first time, into memory that is new


def measure(directory: Path, smallest: bool, repeats: int) -> Iterator[dict]:
    make_sanity(directory, 512, {} if smallest else MODEL)
    settings = {"training__micro_batch_size": 8, "checkpoint__every_steps": 2, "checkpoint__keep_last": 1}
    settings |= {"optimizer__start_lr": 1e-5}
    steps = train(directory, directory / "run", 4 if smallest else 12 * repeats, warm_up=WARM_UP, **settings)
    saved = [step["timing/all"] for step in steps if "timing/checkpoint" in step]
    others = [step["timing/all"] for step in steps if "timing/checkpoint" not in step]
    delay_s, step_s = statistics.mean(saved) - statistics.mean(others), statistics.mean(others)
    yield {
        "steps": len(steps),
        "step s": step_s,
        "delay s": delay_s,
        "+- s": sum(statistics.variance(times) / len(times) for times in (saved, others)) ** 0.5,
        "blocking s": statistics.median(step["timing/checkpoint"] for step in steps if "timing/checkpoint" in step),
        "% every 10": 10 * delay_s / step_s,
        "% every 100": delay_s / step_s,
    }
