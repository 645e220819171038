"""Makes the warm-up model of the vision example from nothing, with PyTorch: a few minutes on one core.

    .venv-rollout/bin/python examples/vision/make_checkpoint.py --out DIR [--steps 800] [--noisy-steps 60] [--seed 0]

Made by transformers in the rollout environment, so that what the run starts from owes nothing to what the run shows.
Sizes, tokenizer and image processor are those in `checkpoint/`, the problems those of pictures.py. First the model
learns to see; then, from responses of which a share is off by one, to be unsure, which reinforcement learning undoes.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pictures
import tokenizers
import torch
from safetensors.torch import save_file
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from mindrlhf.images.geometry import PixelLimits, VisionGeometry
from mindrlhf.images.patches import patch_rows
from mindrlhf.images.pixels import decode_image

MODEL = Path(__file__).parent / "checkpoint"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")
IGNORED = -100  # by the loss
BATCH_SIZE, RATE, WARMUP_STEPS, INITIAL_STD = 64, 1.5e-3, 50, 0.08


class MatrixPatchEmbed(torch.nn.Module):
    """The convolution over patches as the matrix product that it is: far faster on a CPU."""

    def __init__(self, convolution: torch.nn.Module):
        super().__init__()
        self.proj = convolution

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(patches, self.proj.weight.flatten(1))


def read_examples(problems: list[pictures.Problem], noise: float, seed: int) -> list[dict]:
    """Return patches, grid, prompt and response of each problem, as `data build` with template plain has them."""
    geometry, limits = VisionGeometry(), PixelLimits(min_pixels=784)
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    off = pictures.offsets(len(problems), noise, seed)
    examples = []
    for problem, difference in zip(problems, off):
        pixels = decode_image(problem.picture, limits)
        rows, columns = geometry.token_grid(*pixels.shape[:2])
        image = "<|vision_start|>" + "<|image_pad|>" * (rows * columns) + "<|vision_end|>"
        examples.append(
            {
                "patches": torch.from_numpy(patch_rows(pixels, geometry)),
                "grid": (1, rows * geometry.merge, columns * geometry.merge),
                "prompt": tokenizer.encode(f"{image}{problem.question}\n").ids,
                "response": tokenizer.encode(f"{problem.answer + difference}<|im_end|>").ids,
            }
        )
    return examples


def forward(model: torch.nn.Module, examples: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `[B, S, V]` and the labels `[B, S]` of the same positions."""
    longest = max(len(example["prompt"]) + len(example["response"]) for example in examples)
    ids = torch.zeros((len(examples), longest), dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(examples):
        tokens = example["prompt"] + example["response"]
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, len(example["prompt"]) : len(tokens)] = torch.tensor(example["response"])
    logits = model(
        input_ids=ids,
        pixel_values=torch.cat([example["patches"] for example in examples]),
        image_grid_thw=torch.tensor([example["grid"] for example in examples]),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        use_cache=False,
    ).logits
    return logits[:, :-1], labels[:, 1:]


def new_model(seed: int) -> torch.nn.Module:
    """Return the model with random weights, large enough that it soon looks at the picture."""
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig.from_pretrained(MODEL)
    for part in (config, config.text_config, config.vision_config):
        part.initializer_range = INITIAL_STD
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.model.visual.patch_embed = MatrixPatchEmbed(model.model.visual.patch_embed.proj)
    return model


@torch.no_grad()
def accuracy(model: torch.nn.Module, examples: list[dict]) -> tuple[float, float]:
    """Return the share of right likeliest responses, and the mean probability of the right one."""
    logits, labels = forward(model, examples)
    counts = labels != IGNORED
    right = ((logits.argmax(-1) == labels) | ~counts).all(1)
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return right.double().mean().item(), (chosen * counts).sum(1).exp().mean().item()


def train(model: torch.nn.Module, stages: list[tuple[list[dict], int]], held_out: list[dict], seed: int) -> None:
    """Train all parameters on random batches, so many steps on each set of examples."""
    batches = [examples for examples, num_steps in stages for _ in range(num_steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.98))
    rng, started = np.random.default_rng([seed, 3]), time.monotonic()
    for step, examples in enumerate(batches, 1):
        logits, labels = forward(model, [examples[number] for number in rng.integers(0, len(examples), BATCH_SIZE)])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, step / WARMUP_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == len(batches):
            likeliest, sampled = accuracy(model, held_out)
            print(
                f"step {step}  loss {loss.item():.3f}  held out: likeliest {likeliest:.3f}, sampled {sampled:.3f}  "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )


def save(model: torch.nn.Module, directory: Path) -> None:
    """Write the model as a checkpoint of transformers, under the names that published ones have."""
    names = {"model.visual.": "visual.", "model.language_model.": "model."}
    tensors = {}
    for name, tensor in model.state_dict().items():
        for long, short in names.items():
            name = name.replace(long, short)
        if name != "lm_head.weight":  # the embedding's own
            tensors[name] = tensor.contiguous()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name in FILES:
        shutil.copy(MODEL / name, directory / name)


def main() -> None:
    """Train and write the warm-up model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--kind", choices=tuple(pictures.KINDS), default="bars")
    parser.add_argument("--num-train", type=int, default=8000, metavar="N")
    parser.add_argument("--steps", type=int, default=800, metavar="N", help="on right responses")
    parser.add_argument("--noisy-steps", type=int, default=60, metavar="N", help="on partly wrong ones")
    parser.add_argument("--noise", type=float, default=0.6, metavar="P", help="share of those that are off by one")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    found = pictures.make(options.kind, options.num_train, options.seed + 100)
    stages = [
        (read_examples(found, 0.0, options.seed), options.steps),
        (read_examples(found, options.noise, options.seed), options.noisy_steps),
    ]
    held_out = read_examples(pictures.make(options.kind, 200, options.seed + 101, is_test=True), 0.0, options.seed)
    model = new_model(options.seed)
    train(model, stages, held_out, options.seed)
    save(model, options.out)


if __name__ == "__main__":
    main()
