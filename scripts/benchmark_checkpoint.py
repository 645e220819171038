"""What checkpoints cost: updates of a model with a checkpoint, and without, in turns.

    python scripts/benchmark_checkpoint.py [--num-params 100000000] [--steps 2] [--rounds 15] [--no-asynchronous]

A round is one block of steps without a checkpoint and one with a checkpoint after its first step, in an order that
changes from round to round; a block ends when its checkpoint is on the disk. The difference is the delay by one
checkpoint, given with its standard error over the rounds; the share of step time follows for any number of steps
between checkpoints. Threads are those of a run on one rank.
Steps are updates alone: those of a run also sample, which benchmark_checkpoint_run.py measures. Processor time is
that of this process, all threads.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

# Before MindSpore is imported; as mindrlhf.launch.launch sets them.
os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import numpy as np
from benchmark_weight_transfer import model_config

from mindrlhf.config.model import ModelSection
from mindrlhf.config.observe import CheckpointSection
from mindrlhf.config.reward import RewardSection
from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.data.packing import TokenSequence
from mindrlhf.data.stream import PromptStream
from mindrlhf.training.batch import Batch, RowOptions, make_batch
from mindrlhf.training.checkpoints.requests import SaveRequests
from mindrlhf.training.checkpoints.run import Progress, RunCheckpoints
from mindrlhf.training.engine.actor import Actor
from mindrlhf.training.engine.build import Models, build_policy_engine
from mindrlhf.training.runtime import start_runtime
from mindrlhf.training.team import Team

RESPONSE_LENGTH = 64


def make_config(directory: Path, *, asynchronous: bool) -> GrpoConfig:
    return GrpoConfig(
        run=RunSection(output_dir=str(directory / "run")),
        model=ModelSection(path=str(directory / "model"), random_init=True),
        data=DataSection(train_file="none", tokenizer_dir="none"),
        reward=RewardSection(verifier_function=("none",)),
        checkpoint=CheckpointSection(keep_last=1, asynchronous=asynchronous),
    )


def build(config: GrpoConfig, row_length: int) -> Actor:
    rank = start_runtime(config.run, Path(config.run.output_dir) / "logs")
    models = Models(config, (row_length,), config.training.micro_batch_size, rank)
    return Actor(build_policy_engine(models, config.model.path)[1])


def random_batch(vocab_size: int, num_samples: int, row_length: int) -> Batch:
    generator = np.random.default_rng(0)
    sequences = [
        TokenSequence(
            generator.integers(0, vocab_size, row_length - RESPONSE_LENGTH).astype(np.int32),
            generator.integers(0, vocab_size, RESPONSE_LENGTH).astype(np.int32),
            {
                "advantages": np.full(RESPONSE_LENGTH, generator.standard_normal(), np.float32),
                "weights": np.ones(RESPONSE_LENGTH, np.float32),
            },
        )
        for _ in range(num_samples)
    ]
    return make_batch(sequences, RowOptions((row_length,), num_samples, 1, False)).part_of(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-params", type=int, default=100_000_000)
    parser.add_argument("--steps", type=int, default=2, help="steps of a block, long enough for the writing to end")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-samples", type=int, default=8, help="sequences of an update")
    parser.add_argument("--row-length", type=int, default=128, help="tokens of each")
    parser.add_argument("--no-asynchronous", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(json.dumps(measure(Path(directory), arguments), indent=1))


def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, float]:
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(json.dumps(model_config(arguments.num_params)))
    config = make_config(directory, asynchronous=not arguments.no_asynchronous)
    actor = build(config, arguments.row_length)
    checkpoints = RunCheckpoints(config, Team(actor), PromptStream(8, seed=0), SaveRequests())
    batch = random_batch(actor.model.network.dims.vocab_size, arguments.num_samples, arguments.row_length)
    progress, blocking_s = Progress(), []

    def block(saves: bool) -> tuple[float, float]:
        start, cpu_start = time.perf_counter(), time.process_time()
        for index in range(arguments.steps):
            checkpoints.begin_step(progress)
            actor.receive([batch])
            actor.update(batch=0, lr=1e-6, kl_coefficient=0.0)
            progress.step += 1
            if saves and index == 0:
                saving = time.perf_counter()
                checkpoints.save(progress)
                blocking_s.append(time.perf_counter() - saving)
        checkpoints.wait()
        return time.perf_counter() - start, time.process_time() - cpu_start

    block(saves=True)  # compiles, and takes the memory of the copy
    blocking_s.clear()
    blocks: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(arguments.rounds):
        for saves in (False, True) if number % 2 else (True, False):
            blocks[saves].append(block(saves))
    without, with_checkpoint = np.array(blocks[False]), np.array(blocks[True])
    delays_s, cpu_s = (with_checkpoint - without).T
    step_s, delay_s = float(np.mean(without[:, 0])) / arguments.steps, float(np.mean(delays_s))
    return {
        "num_parameters": sum(parameter.size for parameter in actor.model.network.get_parameters()),
        "checkpoint_gb": actor.state_size_bytes() / 1e9,
        "rounds": arguments.rounds,
        "step_without_s": step_s,
        "step_without_std_s": float(np.std(without[:, 0])) / arguments.steps,
        "delay_s": delay_s,
        "delay_standard_error_s": float(np.std(delays_s, ddof=1)) / arguments.rounds**0.5,
        "delay_cpu_s": float(np.mean(cpu_s)),
        "blocking_s": statistics.median(blocking_s),
        "overhead_percent_by_every_steps": {
            every_steps: round(100 * delay_s / (every_steps * step_s), 2) for every_steps in (5, 10, 100)
        },
    }


if __name__ == "__main__":
    main()
