"""Time GRPO steps of Hugging Face TRL on one CPU thread: the other side of scripts/benchmark.py.

Runs in the environment that scripts/setup_benchmark.sh makes, knows nothing of MindRLHF and downloads nothing:

    .venv-bench/bin/python scripts/benchmark_trl.py --vocab-size 512 --micro-batch 32

The job is the repository's sanity recipe: a random Qwen2 in float32, 4 prompts of 8 tokens with 8 samples of 64
tokens each, temperature 1, no KL term, the reward being the share of lower-case letters in the response, one
AdamW step at learning rate 1e-3 per batch. Settings that slow TRL down without changing the result are off
(gradient checkpointing, which TRL has on by default; logging; checkpoints).

The last line of stdout is one JSON object; everything else goes to stderr. Times are in seconds, of this process
alone; `cpu_s` counts all its threads, so it also holds on a machine that others use at the same time. Exit code 1
with one line on stderr when the job was not the intended one (a short response, a wrong batch).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

NUM_PROMPTS = 4
NUM_GENERATIONS = 8
NUM_SAMPLES = NUM_PROMPTS * NUM_GENERATIONS
PROMPT_LENGTH = 8
RESPONSE_LENGTH = 64
LEARNING_RATE = 1e-3

DEFAULT_MODEL_CONFIG = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "tie_word_embeddings": True,
}


@dataclass
class Clock:
    """Wall and CPU seconds spent so far, each list with one entry per optimiser step."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def measure(self):
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)


def token_strings(vocab_size: int) -> list[str]:
    """One distinct string per token id: the id in 26 letters, lower-case for even ids, upper-case for odd ones."""
    strings = []
    for token_id in range(vocab_size):
        digits, rest = [], token_id
        while rest or not digits:
            digits.append(chr(ord("a") + rest % 26))
            rest //= 26
        word = "".join(reversed(digits))
        strings.append(word if token_id % 2 == 0 else word.upper())
    return strings


def build_tokenizer(strings: list[str]):
    """A word-level tokenizer; its end token has an id past the model's vocabulary, so that no response ends early."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {string: token_id for token_id, string in enumerate([*strings, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=strings[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token=strings[0])


def build_model(model_config: dict, vocab_size: int, generation_clock: Clock):
    """A random float32 Qwen2 whose `generate` is timed."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    class TimedQwen2(Qwen2ForCausalLM):
        def generate(self, *args, **kwargs):
            with generation_clock.measure():
                return super().generate(*args, **kwargs)

    max_length = 2 * (PROMPT_LENGTH + RESPONSE_LENGTH)
    config = Qwen2Config(**{"max_position_embeddings": max_length, **model_config, "vocab_size": vocab_size})
    return TimedQwen2(config).to(torch.float32)


def lowercase_share(text: str) -> float:
    return sum("a" <= character <= "z" for character in text) / max(len(text), 1)


def check_batch(completion_ids: list[list[int]], response_length: int = RESPONSE_LENGTH) -> None:
    """Stop a run that measures something else than what is compared."""
    lengths = sorted({len(ids) for ids in completion_ids})
    if len(completion_ids) != NUM_SAMPLES or lengths != [response_length]:
        raise SystemExit(
            f"benchmark_trl: TRL handed over {len(completion_ids)} responses of lengths {lengths}; the comparison "
            f"needs {NUM_SAMPLES} of {response_length} tokens"
        )


def make_config(arguments: argparse.Namespace, output_dir: str, *, response_length: int, micro_batch: int):
    """TRL's settings for one update a step without KL, as examples/sanity has ours."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=output_dir,
        seed=arguments.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=arguments.warmup_steps + arguments.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=NUM_SAMPLES // micro_batch,
        num_generations=NUM_GENERATIONS,
        max_completion_length=response_length,
        temperature=1.0,
        top_p=1.0,
        use_vllm=False,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def build_trainer(arguments: argparse.Namespace, output_dir: str, generation: Clock, mean_rewards: list[float]):
    from datasets import Dataset
    from trl import GRPOTrainer

    strings = token_strings(arguments.vocab_size)
    num_steps = arguments.warmup_steps + arguments.steps
    draw = random.Random(arguments.seed)
    prompts = [" ".join(draw.choices(strings, k=PROMPT_LENGTH)) for _ in range(NUM_PROMPTS * num_steps)]

    def reward(completions: list[str], completion_ids: list[list[int]], **_) -> list[float]:
        check_batch(completion_ids)
        rewards = [lowercase_share(text) for text in completions]
        mean_rewards.append(statistics.fmean(rewards))
        return rewards

    config = make_config(arguments, output_dir, response_length=RESPONSE_LENGTH, micro_batch=arguments.micro_batch)
    return GRPOTrainer(
        model=build_model(arguments.model_config, arguments.vocab_size, generation),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=build_tokenizer(strings),
    )


def time_steps(trainer) -> Clock:
    """Train to the end. A step lasts from the end of the one before (the first: from the start of training)."""
    from transformers import TrainerCallback

    steps = Clock()

    class StepTimer(TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.wall, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *_, **__):
            wall, cpu = time.perf_counter(), time.process_time()
            steps.wall_s.append(wall - self.wall)
            steps.cpu_s.append(cpu - self.cpu)
            self.wall, self.cpu = wall, cpu

    trainer.add_callback(StepTimer())
    trainer.train()
    return steps


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def run(arguments: argparse.Namespace) -> dict:
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(arguments.seed)

    generation, mean_rewards = Clock(), []
    with tempfile.TemporaryDirectory(prefix="benchmark_trl_") as output_dir:
        trainer = build_trainer(arguments, output_dir, generation, mean_rewards)
        num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        rss_before_training = peak_rss_bytes()
        steps = time_steps(trainer)

    num_steps = arguments.warmup_steps + arguments.steps
    counts = {"steps": len(steps.wall_s), "generations": len(generation.wall_s), "reward calls": len(mean_rewards)}
    if set(counts.values()) != {num_steps}:
        raise SystemExit(f"benchmark_trl: expected {num_steps} of each, counted {counts}")

    def measured(clock: Clock) -> dict:
        return {name: values[arguments.warmup_steps :] for name, values in asdict(clock).items()}

    return {
        "trainer": "trl",
        "vocab_size": arguments.vocab_size,
        "num_parameters": num_parameters,
        "micro_batch": arguments.micro_batch,
        "num_samples": NUM_SAMPLES,
        "prompt_length": PROMPT_LENGTH,
        "response_length": RESPONSE_LENGTH,
        "num_threads": torch.get_num_threads(),
        "warmup_steps": arguments.warmup_steps,
        "step": measured(steps),
        "generation": measured(generation),
        "median_step_wall_s": statistics.median(measured(steps)["wall_s"]),
        "median_step_cpu_s": statistics.median(measured(steps)["cpu_s"]),
        "median_generation_wall_s": statistics.median(measured(generation)["wall_s"]),
        "mean_rewards": mean_rewards,
        "rss_before_training_bytes": rss_before_training,
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")},
    }


def read_model_config(path: str) -> dict:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read a model config from '{path}': {error}") from error
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"'{path}' must hold a JSON object of Qwen2Config keys")
    return {**DEFAULT_MODEL_CONFIG, **config}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time GRPO steps of Hugging Face TRL on one CPU thread.")
    parser.add_argument("--model-config", type=read_model_config, default=DEFAULT_MODEL_CONFIG, metavar="FILE",
                        help="JSON file with Qwen2Config keys to change (default: 4 layers, hidden 128)")  # fmt: skip
    parser.add_argument("--vocab-size", type=int, default=512, help="entries of the vocabulary (default 512)")
    parser.add_argument("--micro-batch", type=int, default=NUM_SAMPLES,
                        help=f"samples per backward pass, a divisor of {NUM_SAMPLES} (default all)")  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, help="steps to measure (default 10)")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps before those (default 3)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.micro_batch < 1 or NUM_SAMPLES % arguments.micro_batch:
        parser.error(f"--micro-batch {arguments.micro_batch} does not divide {NUM_SAMPLES}; use 1, 2, 4, 8, 16 or 32")
    if arguments.vocab_size < 2:
        parser.error(f"--vocab-size {arguments.vocab_size} is too small; use 2 or more")
    if arguments.steps < 1 or arguments.warmup_steps < 0:
        parser.error("--steps must be 1 or more and --warmup-steps 0 or more")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    # Both are read when torch and the Hugging Face libraries are first imported.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    try:
        import trl  # noqa: F401
    except ImportError as error:
        print(f"benchmark_trl: {error}; make the environment with scripts/setup_benchmark.sh", file=sys.stderr)
        return 2
    with contextlib.redirect_stdout(sys.stderr):
        report = run(arguments)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
