"""One step of GRPO with pictures side by side: MindRLHF against Hugging Face TRL, one thread each, in one run.

    bash scripts/setup.sh && bash scripts/setup_benchmark.sh
    .venv/bin/python scripts/benchmark_vision.py [--case small|large ...] [--repeats 3] [--out benchmark_vision.json]

Both train all of the same random Qwen2.5-VL, the tower too, on the same drawn pictures with the same questions: 4
prompts x 8 samples x 32 tokens, no KL, one micro-batch and one update a step. "small" has the sizes of examples/vision:
2 layers of width 128 and 4 image tokens; "large" 4 layers of width 256, a tower of 4 blocks of width 192 and 64 image
tokens. Turns and ratios are as in benchmark.py.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmark import BENCH_PYTHON, ROOT, Turn, read_trl, run, run_cases, take_turns, train

EXAMPLE = ROOT / "examples" / "vision"
NUM_PROMPTS, NUM_SAMPLES, RESPONSE_LENGTH = 4, 32, 32
# As `--template plain` writes a prompt; TRL needs a chat template for pictures.
TEMPLATE = (
    "{% for part in messages[0]['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '\\n' }}"
)


@dataclass(frozen=True)
class Case:
    """Sizes: changes to the example's config.json, and the pixels that a picture is brought to."""

    pixels: int
    num_steps: int
    num_warmup_steps: int
    text: dict = field(default_factory=dict)
    vision: dict = field(default_factory=dict)


CASES = {
    "small": Case(56 * 56, 12, 3),
    "large": Case(
        224 * 224, 4, 2,
        {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8},
        {"hidden_size": 192, "intermediate_size": 576, "num_heads": 4, "depth": 4, "fullatt_block_indexes": [3],
         "out_hidden_size": 256, "window_size": 112},
    ),
}  # fmt: skip


def prepare(case: Case, directory: Path) -> None:
    """Make model, tokenizer and prompts of a case; there is no end token, so every response has the full length."""
    model = directory / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "config.json"):
        text = (EXAMPLE / "checkpoint" / name).read_text(encoding="utf-8")
        (model / name).write_text(text.replace("<|im_end|>", "<|never|>"), encoding="utf-8")
    change(model / "preprocessor_config.json", min_pixels=case.pixels, max_pixels=case.pixels)
    change(model / "tokenizer_config.json", eos_token=None, chat_template=TEMPLATE)
    parts = json.loads((model / "config.json").read_text())
    decoder = parts["text_config"] | case.text | {"eos_token_id": None}
    change(model / "config.json", text_config=decoder, vision_config=parts["vision_config"] | case.vision)
    run([str(BENCH_PYTHON), "scripts/benchmark_trl_vision.py", "--make-model", str(model)])
    num_problems = NUM_PROMPTS * (case.num_steps + case.num_warmup_steps)
    run([sys.executable, "examples/vision/pictures.py", "--out", str(directory)]
        + ["--num-train", str(num_problems), "--num-test", "1"])  # fmt: skip
    run([sys.executable, "-m", "mindrlhf.cli", "data", "build", "--input", f"{directory}/train.parquet"]
        + ["--output", f"{directory}/prompts.mindrecord", "--tokenizer", str(model), "--handler", "geo3k"]
        + ["--template", "plain", "--max-prompt-length", "96"])  # fmt: skip


def change(path: Path, **values: object) -> None:
    """Set keys of a JSON file; None removes one."""
    fields = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}, indent=1))


def measure_mindrlhf(case: Case, directory: Path, turn: int) -> Turn:
    """Run `mindrlhf train` and read its own timings."""
    output = directory / f"run_{turn}"
    settings = {
        "run.output_dir": output,
        "run.max_steps": case.num_steps + case.num_warmup_steps,
        "model.path": directory / "model",
        "model.random_init": "false",
        "model.train_vision": "all",
        "data.train_file": directory / "prompts.mindrecord",
        "data.tokenizer_dir": directory / "model",
        "rollout.max_response_length": RESPONSE_LENGTH,
        "rollout.num_threads": 1,
        "training.chunk_size": NUM_PROMPTS,
        "training.micro_batch_size": NUM_SAMPLES,
    }
    return train(settings, case.num_warmup_steps, RESPONSE_LENGTH)


def measure_trl(case: Case, directory: Path) -> Turn:
    """Run scripts/benchmark_trl_vision.py in its own environment."""
    command = [str(BENCH_PYTHON), "scripts/benchmark_trl_vision.py", "--model", str(directory / "model")]
    command += ["--data", str(directory / "train.parquet"), "--response-length", str(RESPONSE_LENGTH)]
    command += ["--steps", str(case.num_steps), "--warmup-steps", str(case.num_warmup_steps)]
    return read_trl(command)


def compare(name: str, repeats: int) -> dict:
    """Measure a case and print its table."""
    case = CASES[name]
    sizes = f"{case.pixels // 784} tokens a picture, medians of {case.num_steps} steps"

    def measure(directory: Path, turn: int) -> tuple[Turn, Turn]:
        return measure_mindrlhf(case, directory, turn), measure_trl(case, directory)

    return take_turns(name, sizes, repeats, lambda directory: prepare(case, directory), measure)


if __name__ == "__main__":
    run_cases(__doc__.splitlines()[0], list(CASES), compare)
