"""An update, how it grows with ranks and samples, and with linear attention beside softmax attention of that width.

The seconds are `timing/update` of the slowest step's median, the exponent of growth against "base" is
log(seconds / base) / log(factor). Ranks share the machine: give each a core.
"""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from harness import MEDIUM, ROOT, make_sanity, train

# Ranks, factor of prompts; 4 prompts with 8 samples of 64 tokens in "base".
ROWS = {"base": (1, 1), "ranks": (2, 1), "samples2": (1, 2), "samples4": (1, 4)}
LINEAR = json.loads((ROOT / "examples" / "quickstart" / "qwen3_5.json").read_text(encoding="utf-8"))
FAMILIES = {
    "qwen3": (512, {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": LINEAR["head_dim"]}),
    "qwen3.5": (512, LINEAR),
}
MODELS = {"small": (512, {}), **FAMILIES, "medium": (32_000, MEDIUM), "large": (151_936, {})}


def measure(directory: Path, smallest: bool, repeats: int) -> Iterator[dict]:
    for name, (vocab_size, model) in MODELS.items():
        if smallest and name == "medium":
            return
        inputs = directory / name
        make_sanity(inputs, vocab_size, model)
        base_s = 0.0
        num_rows = 1 if name in FAMILIES else 2 if smallest else len(ROWS)
        for row, (ranks, factor) in list(ROWS.items())[:num_rows]:
            settings = {"training__chunk_size": 4 * factor, "training__micro_batch_size": 8}
            settings |= {"training__skip_zero_advantages": "false"}
            steps = train(inputs, inputs / row, 2 * repeats, warm_up=2, ranks=ranks, **settings)
            seconds = statistics.median(step["timing/update"] for step in steps)
            base_s = base_s or seconds
            work = ranks * factor
            yield {
                "model": name,
                "row": row,
                "ranks": ranks,
                "samples": 32 * factor,
                "update s": seconds,
                "tokens/s": statistics.median(step["update_tps"] for step in steps),
                "memory GB": steps[-1]["memory/peak_rss_gb"],
                "exponent": math.log(seconds / base_s) / math.log(work) if work > 1 else float("nan"),
            }
