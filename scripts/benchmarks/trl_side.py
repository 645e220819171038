"""TRL's side of the case `trl`: times GRPO steps on one CPU thread; knows nothing of MindRLHF, downloads nothing.

    .venv-bench/bin/python scripts/benchmarks/trl_side.py MODEL_CONFIG VOCAB_SIZE MICRO_BATCH STEPS WARM_UP_STEPS

The job is the sanity example: a random Qwen2 in float32, 4 prompts of 8 tokens with 8 samples of 64 tokens each,
temperature 1, no KL, the share of lower-case letters as reward, one AdamW step at 1e-3 per batch. What slows TRL down
without changing the result is off: gradient checkpointing, logging, checkpoints. The last line of stdout is JSON:
median seconds of a step and of its generation, and peak memory.
"""

import contextlib
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

# Both are read when torch and the Hugging Face libraries are first imported.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUM_PROMPTS, NUM_GENERATIONS, PROMPT_LENGTH, RESPONSE_LENGTH = 4, 8, 8, 64
MODEL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"intermediate_size": 512, "tie_word_embeddings": True, "max_position_embeddings": 144}


def token_strings(vocab_size: int) -> list[str]:
    """Return one distinct string per token id: letters of its number, lower-case for even ids, upper-case for odd."""
    strings = []
    for token_id in range(vocab_size):
        digits, rest = [], token_id
        while rest or not digits:
            digits.append(chr(ord("a") + rest % 26))
            rest //= 26
        word = "".join(reversed(digits))
        strings.append(word if token_id % 2 == 0 else word.upper())
    return strings


def build_tokenizer(strings: list[str]) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer whose end token is no entry of the model, so that no response ends early."""
    vocabulary = {string: token_id for token_id, string in enumerate([*strings, "<|endoftext|>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=strings[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token=strings[0])


def make_config(output_dir: str, micro_batch: int, num_steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=output_dir,
        seed=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=num_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=NUM_PROMPTS * NUM_GENERATIONS // micro_batch,
        num_generations=NUM_GENERATIONS,
        max_completion_length=RESPONSE_LENGTH,
        temperature=1.0,
        top_p=1.0,
        use_vllm=False,
        beta=0.0,
        learning_rate=1e-3,
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


class StepTimer(TrainerCallback):
    """A step lasts from the end of the one before, the first from the start of training."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_, **__):
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())


def measure(config_path: str, vocab_size: int, micro_batch: int, num_steps: int, warm_up: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(0)
    strings, draw = token_strings(vocab_size), random.Random(0)
    prompts = [" ".join(draw.choices(strings, k=PROMPT_LENGTH)) for _ in range(NUM_PROMPTS * (warm_up + num_steps))]
    model_config = {**MODEL, **json.loads(Path(config_path).read_text(encoding="utf-8")), "vocab_size": vocab_size}
    model = Qwen2ForCausalLM(Qwen2Config(**model_config)).to(torch.float32)
    generations, generate = [], model.generate

    def timed_generate(*args, **kwargs):
        start = time.perf_counter()
        output = generate(*args, **kwargs)
        generations.append(time.perf_counter() - start)
        return output

    def reward(completions: list[str], completion_ids: list[list[int]], **_) -> list[float]:
        assert {len(ids) for ids in completion_ids} == {RESPONSE_LENGTH}, "a response ended early"
        assert len(completion_ids) == NUM_PROMPTS * NUM_GENERATIONS
        return [sum("a" <= letter <= "z" for letter in text) / max(len(text), 1) for text in completions]

    model.generate, timer = timed_generate, StepTimer()
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=make_config(output_dir, micro_batch, warm_up + num_steps),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=build_tokenizer(strings),
            callbacks=[timer],
        )
        trainer.train()
    steps = [end - start for start, end in zip(timer.ends, timer.ends[1:])]
    assert len(steps) == len(generations) == warm_up + num_steps
    return {
        "step_s": statistics.median(steps[warm_up:]),
        "generation_s": statistics.median(generations[warm_up:]),
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        figures = measure(sys.argv[1], *map(int, sys.argv[2:]))
    print(json.dumps(figures))
