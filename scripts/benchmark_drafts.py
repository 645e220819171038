"""Seconds of generation with guessed tokens (`rollout.draft_tokens`), against the same server without, in turns.

    .venv/bin/python scripts/benchmark_drafts.py CONFIG [section.key=value ...] [--draft-tokens 4]
        [--in-flight 1,4,16,64] [--samples 64] [--repeats 5] [--out figures.json]

CONFIG is one of `mindrlhf train`: its model, prompts and sampling are used, so give it a trained model by
`model.path`. Two servers of one thread each take turns on the same prompts and seeds, and so give the same samples.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.rollout.replicas import find_rollout_python
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.rollout.vllm import VllmGenerator
from mindrlhf.rollout.vllm_options import VllmOptions


@dataclasses.dataclass(frozen=True)
class Turn:
    """One generation: seconds, steps of the model, and guesses."""

    seconds: float
    num_steps: int
    num_tokens: int
    drafted: int
    accepted: int


def start(config: GrpoConfig, max_model_len: int, draft_tokens: int, log_path: Path) -> VllmGenerator:
    """Start a server with the config's model."""
    return VllmGenerator.start(
        VllmOptions(
            python=find_rollout_python(config.rollout.python),
            model_dir=str(Path(config.model.path).resolve()),
            log_path=str(log_path),
            load_format="auto",
            max_model_len=max_model_len,
            max_num_seqs=config.rollout.max_num_seqs,
            draft_tokens=draft_tokens,
        )
    )


def measure(generator: VllmGenerator, batches: list[list[GenerationRequest]], sampling: SamplingParams) -> Turn:
    """Generate one batch after the other."""
    before, start_s = generator.stats(), time.perf_counter()
    for batch in batches:
        for _ in generator.generate(batch, sampling):
            pass
    seconds, after = time.perf_counter() - start_s, generator.stats()
    counts = {name: int(after[name] - before[name]) for name in ("num_steps", "num_tokens")}
    guesses = {name: after.get(name, 0) - before.get(name, 0) for name in ("drafted", "accepted")}
    return Turn(seconds, **counts, **guesses)


def batches_of(requests: list[GenerationRequest], num_samples: int) -> list[list[GenerationRequest]]:
    """Cut ``requests`` into batches of ``num_samples`` samples, in their order."""
    flat = [
        dataclasses.replace(request, num_samples=min(num_samples, request.num_samples), request_id=number)
        for number, request in enumerate(requests)
    ]
    each = max(1, num_samples // flat[0].num_samples)
    return [flat[first : first + each] for first in range(0, len(flat), each)]


def main() -> None:
    """Take the turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--in-flight", default="1,4,16,64", help="samples generated at once (default 1,4,16,64)")
    parser.add_argument("--samples", type=int, default=64, help="samples in a turn (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of turns (default 5)")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    arguments = parser.parse_intermixed_args()
    config = load_grpo_config(arguments.config, arguments.overrides, world_size=None)
    prompts = PromptFile.open(config.data.train_file)
    num_generations = config.algorithm.num_generations
    records = prompts.read(range(max(1, arguments.samples // num_generations)))
    requests = [
        GenerationRequest(number, tuple(record.prompt_ids), num_generations, seed=number)
        for number, record in enumerate(records)
    ]
    ends = tuple(load_tokenizer(config.data.tokenizer_dir).eos_token_ids)
    rollout = config.rollout
    sampling = SamplingParams(rollout.max_response_length, rollout.temperature, rollout.top_p, rollout.top_k, ends)
    max_model_len = prompts.header.longest_prompt + rollout.max_response_length
    found = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        plain, guessing = (
            stack.enter_context(start(config, max_model_len, count, Path(directory, f"{count}.log")))
            for count in (0, arguments.draft_tokens)
        )
        print("  in flight      plain    guessing   times as fast           steps   right guesses")
        for in_flight in map(int, arguments.in_flight.split(",")):
            found[in_flight] = take_turns(plain, guessing, batches_of(requests, in_flight), sampling, arguments.repeats)
            print(row(in_flight, found[in_flight]), flush=True)
    if arguments.out:
        rows = {count: [list(map(dataclasses.asdict, pair)) for pair in pairs] for count, pairs in found.items()}
        arguments.out.write_text(json.dumps({"draft_tokens": arguments.draft_tokens, "pairs": rows}, indent=2))


def take_turns(plain, guessing, batches, sampling: SamplingParams, num_repeats: int) -> list[tuple[Turn, Turn]]:
    """Return pairs of turns, after one that does not count; who goes first alternates."""
    pairs = []
    for repeat in range(num_repeats + 1):
        order = (plain, guessing) if repeat % 2 else (guessing, plain)
        turns = {id(generator): measure(generator, batches, sampling) for generator in order}
        pairs.append((turns[id(plain)], turns[id(guessing)]))
    return pairs[1:]


def row(in_flight: int, pairs: list[tuple[Turn, Turn]]) -> str:
    """One line of the table."""
    ratios = sorted(one.seconds / other.seconds for one, other in pairs)
    plain_s, guessing_s = (statistics.median(pair[side].seconds for pair in pairs) for side in (0, 1))
    one, other = pairs[-1]
    right = f"{other.accepted / other.drafted:7.0%} of {other.drafted}" if other.drafted else "no guesses"
    return (
        f"  {in_flight:9d} {plain_s:8.3f} s {guessing_s:9.3f} s {statistics.median(ratios):7.2f} "
        f"({ratios[0]:.2f} to {ratios[-1]:.2f}) {one.num_steps:6d} -> {other.num_steps:5d} {right:>15}"
    )


if __name__ == "__main__":
    main()
