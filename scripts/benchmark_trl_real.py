"""Time GRPO steps of Hugging Face TRL on a published model: the other side of scripts/benchmark.py --case smollm2.

    .venv-bench/bin/python scripts/benchmark_trl_real.py --model DIR --problems train.jsonl --steps 2

Runs in the environment that scripts/setup_benchmark.sh makes. All weights in float32, 8 prompts a step with 8 samples
of up to 24 tokens each, and the reward of examples/real_model; settings and last line of stdout as in
scripts/benchmark_trl.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path

import benchmark_trl

NUM_PROMPTS, RESPONSE_LENGTH = 8, 24


def build_trainer(arguments: argparse.Namespace, output_dir: str, generation: benchmark_trl.Clock, means: list[float]):
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    generate = model.generate

    def timed(*args, **kwargs):
        with generation.measure():
            return generate(*args, **kwargs)

    model.generate = timed
    rows = [json.loads(line) for line in arguments.problems.read_text(encoding="utf-8").splitlines()]
    rows = random.Random(arguments.seed).sample(rows, NUM_PROMPTS * (arguments.steps + arguments.warmup_steps))
    prompts = [[{"role": "user", "content": row["question"]}] for row in rows]
    answers = [row["answer"].removeprefix("#### ") for row in rows]

    def reward(completions: list, completion_ids: list[list[int]], answer: list[str], **_) -> list[float]:
        found = [re.findall(r"-?\d+", one[0]["content"])[-1:] for one in completions]
        ended = [len(ids) < RESPONSE_LENGTH or ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        rewards = [float(end and numbers == [right]) for end, numbers, right in zip(ended, found, answer, strict=True)]
        means.append(statistics.fmean(rewards))
        return rewards

    config = benchmark_trl.make_config(
        arguments, output_dir, response_length=RESPONSE_LENGTH, micro_batch=arguments.micro_batch
    )
    config.gradient_accumulation_steps = NUM_PROMPTS * benchmark_trl.NUM_GENERATIONS // arguments.micro_batch
    config.learning_rate = 2e-5
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": answers}),
        processing_class=tokenizer,
    )


def measure(arguments: argparse.Namespace) -> dict:
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(arguments.seed)
    generation, means = benchmark_trl.Clock(), []
    with tempfile.TemporaryDirectory(prefix="benchmark_trl_real_") as output_dir:
        steps = benchmark_trl.time_steps(build_trainer(arguments, output_dir, generation, means))
    first = arguments.warmup_steps
    return {
        "median_step_cpu_s": statistics.median(steps.cpu_s[first:]),
        "median_generation_cpu_s": statistics.median(generation.cpu_s[first:]),
        "mean_rewards": means,
        "peak_rss_bytes": benchmark_trl.peak_rss_bytes(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time GRPO steps of Hugging Face TRL on a published model.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--problems", type=Path, required=True, help="train.jsonl of examples/real_model/sums.py")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warmup-steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with contextlib.redirect_stdout(sys.stderr):
        report = measure(arguments)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
