"""Time GRPO steps of Hugging Face TRL with pictures on one CPU thread: the other side of scripts/benchmark_vision.py.

Runs in the environment that scripts/setup_benchmark.sh makes and knows nothing of MindRLHF:

    .venv-bench/bin/python scripts/benchmark_trl_vision.py --make-model DIR
    .venv-bench/bin/python scripts/benchmark_trl_vision.py --model DIR --data train.parquet --response-length 32

The first writes random weights beside a config.json. The second trains them, tower and all, in float32: 4 prompts a
step with 8 samples each, settings and last line of stdout as in scripts/benchmark_trl.py. Pictures go through
transformers' own Qwen2.5-VL processor with the image processor that needs no torchvision; videos, which do, are left
out of it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import benchmark_trl
from benchmark_trl import NUM_SAMPLES, Clock, lowercase_share


def make_model(directory: Path) -> None:
    """Write model.safetensors for the directory's config.json."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    config = (directory / "config.json").read_bytes()
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(directory)).float()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_bytes(config)


def load_model(directory: Path, generation_clock: Clock):
    """The model of a directory, whose `generate` is timed."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    generate = model.generate

    def timed(*args, **kwargs):
        with generation_clock.measure():
            return generate(*args, **kwargs)

    model.generate = timed
    return model


def load_processor(directory: Path, vocab_size: int):
    """The processor of a directory; its end token has an id past the model's vocabulary, so no response ends early."""
    from transformers import PreTrainedTokenizerFast, ProcessorMixin
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class PictureProcessor(Qwen2_5_VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, padding_side="left")  # as TRL loads one itself
    tokenizer.add_tokens([f"<|unused {number}|>" for number in range(len(tokenizer), vocab_size)])
    tokenizer.add_special_tokens({"eos_token": "<|beyond|>"})
    assert tokenizer.eos_token_id == vocab_size
    fields = json.loads((directory / "preprocessor_config.json").read_text(encoding="utf-8"))
    images = Qwen2VLImageProcessorPil(**{key: fields[key] for key in fields if key != "image_processor_type"})
    return PictureProcessor(images, tokenizer, chat_template=tokenizer.chat_template)


def read_prompts(path: Path) -> list[dict]:
    """The questions of a Parquet file in the form of Geometry3K as chats, each with its picture."""
    import pyarrow.parquet
    from PIL import Image

    return [
        {
            "prompt": [{"role": "user", "content": row["problem"].replace("<image>", "")}],
            "images": [Image.open(io.BytesIO(row["images"][0]["bytes"]))],
        }
        for row in pyarrow.parquet.read_table(path).to_pylist()
    ]


def build_trainer(arguments: argparse.Namespace, output_dir: str, generation: Clock, mean_rewards: list[float]):
    from datasets import Dataset
    from trl import GRPOTrainer

    model = load_model(arguments.model, generation)
    processor = load_processor(arguments.model, model.config.text_config.vocab_size)

    def reward(completions: list, completion_ids: list[list[int]], **_) -> list[float]:
        benchmark_trl.check_batch(completion_ids, arguments.response_length)
        rewards = [lowercase_share(processor.tokenizer.decode(ids)) for ids in completion_ids]
        mean_rewards.append(statistics.fmean(rewards))
        return rewards

    config = benchmark_trl.make_config(
        arguments, output_dir, response_length=arguments.response_length, micro_batch=NUM_SAMPLES
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(read_prompts(arguments.data)),
        processing_class=processor,
    )


def measure(arguments: argparse.Namespace) -> dict:
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(arguments.seed)
    generation, mean_rewards = Clock(), []
    with tempfile.TemporaryDirectory(prefix="benchmark_trl_vision_") as output_dir:
        trainer = build_trainer(arguments, output_dir, generation, mean_rewards)
        steps = benchmark_trl.time_steps(trainer)
    num_steps = arguments.warmup_steps + arguments.steps
    counts = {"steps": len(steps.wall_s), "generations": len(generation.wall_s), "reward calls": len(mean_rewards)}
    if set(counts.values()) != {num_steps}:
        raise SystemExit(f"benchmark_trl_vision: expected {num_steps} of each, counted {counts}")
    return {
        "trainer": "trl",
        "num_parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "median_step_wall_s": statistics.median(steps.wall_s[arguments.warmup_steps :]),
        "median_step_cpu_s": statistics.median(steps.cpu_s[arguments.warmup_steps :]),
        "median_generation_wall_s": statistics.median(generation.wall_s[arguments.warmup_steps :]),
        "mean_rewards": mean_rewards,
        "peak_rss_bytes": benchmark_trl.peak_rss_bytes(),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make-model", type=Path, metavar="DIR", help="write random weights there and end")
    parser.add_argument("--model", type=Path, metavar="DIR")
    parser.add_argument("--data", type=Path, metavar="FILE", help="Parquet with images and problem")
    parser.add_argument("--response-length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10, help="steps to measure (default 10)")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps before those (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if not arguments.make_model and not (arguments.model and arguments.data):
        parser.error("give --make-model, or --model and --data")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    # Both are read when torch and the Hugging Face libraries are first imported.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with contextlib.redirect_stdout(sys.stderr):
        if arguments.make_model:
            make_model(arguments.make_model)
            return 0
        report = measure(arguments)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
