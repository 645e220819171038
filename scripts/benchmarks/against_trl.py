"""One step of GRPO beside Hugging Face TRL's: the same sizes, one core each, in turns.

Both train a random Qwen2 on 4 prompts x 8 samples x 64 tokens, no KL, one update a step. "small" has 4 layers, hidden
128 and 512 vocabulary entries; "large" has 151,936 entries; "medium" has 12 layers, hidden 512, 32,000 entries. In
these two many samples have no gradient, since all of their group earn the same: ours leaves them out, TRL does not; in
"medium_all" ours computes them too. `bash scripts/setup_benchmark.sh` makes TRL's environment. "ratio" is ours by
theirs, of the median steps of a turn.
"""

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from harness import BENCH_PYTHON, MEDIUM, make_sanity, run, train

ONE_CORE = True
# Vocabulary, rows of a micro-batch, steps, warm-up steps, keys of the model, whether samples without gradient are left
# out.
CASES = {
    "small": (512, 32, 20, 5, {}, True),
    "medium": (32_000, 8, 3, 2, MEDIUM, True),
    "medium_all": (32_000, 8, 3, 2, MEDIUM, False),
    "large": (151_936, 8, 3, 2, {}, True),
}


def measure(directory: Path, smallest: bool, repeats: int) -> Iterator[dict]:
    if not BENCH_PYTHON.exists():
        sys.exit("benchmark: there is no .venv-bench; make it with: bash scripts/setup_benchmark.sh")
    for name, (vocab_size, micro_batch, num_steps, warm_up, model, skips) in CASES.items():
        if smallest and name != "small":
            return
        inputs = directory / name
        make_sanity(inputs, vocab_size, model)
        steps = 3 if smallest else num_steps
        words = [BENCH_PYTHON, "scripts/benchmarks/trl_side.py", inputs / "model_config.json", vocab_size]
        for turn in range(repeats):
            settings = {"training__micro_batch_size": micro_batch, "training__skip_zero_advantages": str(skips).lower()}
            ours = train(inputs, inputs / f"run_{turn}", steps, warm_up=warm_up, **settings)
            theirs = json.loads(run([*words, micro_batch, steps, warm_up]).splitlines()[-1])
            step_s, rollout_s = (
                statistics.median(step[f"timing/{key}"] for step in ours) for key in ("all", "rollout")
            )
            yield {
                "case": name,
                "ours s": step_s,
                "rollout s": rollout_s,
                "memory GB": ours[-1]["memory/peak_rss_gb"],
                "TRL s": theirs["step_s"],
                "TRL gen. s": theirs["generation_s"],
                "TRL GB": theirs["memory_gb"],
                "ratio": step_s / theirs["step_s"],
            }
