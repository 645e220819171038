"""What an update costs and how it grows: with ranks, samples, response length. No generator, nothing but updates.

    .venv/bin/python scripts/benchmark_update.py [--case small|medium|large ...] [--row base ranks ...] [--updates 4]

Each row of the table is a run of its own: ranks with one core each, started as those of a run are, update a random
model from random samples. Prompts have 8 tokens, responses 64, and there are 32 samples, unless the row says
otherwise. Given are, of the slowest rank: the median seconds of an update after the first two, its parts
(gradients; optimiser with the sum over the ranks), the processor seconds and the peak memory of a rank; and the
exponent of growth against "base", log(seconds / base) / log(factor).

MindSpore computes elementwise work on a second thread however few it is allowed, so a rank that may use any core takes
up to 1.5 of them. With ``--any-core`` it may. Run nothing beside it.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.cpu.training.vocabulary import MAX_KEPT_BYTES
from mindrlhf.launch.launch import launch

PROMPT_LENGTH, RESPONSE_LENGTH, NUM_SAMPLES = 8, 64, 32
NUM_WARM_UPS = 2


@dataclass(frozen=True)
class Case:
    """A model, as keys of its config.json, and the rows of a micro-batch."""

    model: dict
    micro_batch: int


SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
MEDIUM = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "intermediate_size": 2048}
CASES = {
    "small": Case({**SMALL, "vocab_size": 512}, 16),
    "medium": Case({**MEDIUM, "vocab_size": 32_000}, 8),
    "large": Case({**SMALL, "vocab_size": 151_936}, 8),
}
# name -> ranks, factor of samples, factor of response length
ROWS = {
    "base": (1, 1, 1),
    "ranks": (2, 1, 1),
    "samples2": (1, 2, 1),
    "samples4": (1, 4, 1),
    "length2": (1, 1, 2),
    "length4": (1, 1, 4),
}


def hf_config(case: Case) -> dict:
    """Return the config.json of a Qwen2."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        **case.model,
    }


def arithmetic(case: Case, num_samples: int, response_length: int) -> float:
    """Return the operations of an update in 1e12: matrix products alone, of rows without padding.

    Three times those of a forward pass, two for each weight and token; attention computes whole squares; the
    projection to the vocabulary, of response tokens alone, is computed once more in the backward pass where the
    vocabulary kernels do not keep it.
    """
    model = case.model
    hidden, inner, heads = model["hidden_size"], model["intermediate_size"], model["num_attention_heads"]
    kv_size = 2 * hidden // heads
    length = PROMPT_LENGTH + response_length
    weights = 2 * hidden * hidden + 2 * hidden * kv_size + 3 * hidden * inner
    per_token = model["num_hidden_layers"] * (3 * 2 * weights + 3 * 4 * length * hidden)
    kept_bytes = 4 * case.micro_batch * response_length * model["vocab_size"]
    vocabulary = (3 if kept_bytes <= MAX_KEPT_BYTES else 4) * 2 * hidden * model["vocab_size"]
    return num_samples * (length * per_token + response_length * vocabulary) / 1e12


def run_rank(directory: Path, case: Case, row: tuple[int, int, int], updates: int, any_core: bool) -> None:
    """Be one rank: write the measurements of its updates."""
    import numpy as np

    from mindrlhf.config.model import ModelSection
    from mindrlhf.config.reward import RewardSection
    from mindrlhf.config.run import DataSection, RunSection
    from mindrlhf.config.schema import GrpoConfig
    from mindrlhf.data.packing import TokenSequence, choose_row_length
    from mindrlhf.observe.timing import peak_rss_gb
    from mindrlhf.training.batch import RowOptions, make_batch
    from mindrlhf.training.engine.build import Models, build_policy_engine
    from mindrlhf.training.runtime import start_runtime

    num_ranks, samples, response_length = row[0], NUM_SAMPLES * row[1], RESPONSE_LENGTH * row[2]
    config = GrpoConfig(
        run=RunSection(output_dir=str(directory)),
        model=ModelSection(path=str(directory / "model"), random_init=True),
        data=DataSection(train_file="none", tokenizer_dir="none"),
        reward=RewardSection(verifier_function=("none",)),
    )
    rank = start_runtime(config.run, directory / "logs")
    if not any_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank.index % len(cores)]})
    (row_length,) = choose_row_length((), PROMPT_LENGTH + response_length, "a sample", "cpu")
    models = Models(config, (row_length,), config.training.micro_batch_size, rank)
    updater = build_policy_engine(models, config.model.path)[1].updater
    stream = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return stream.integers(0, case.model["vocab_size"], count).astype(np.int32)

    def values() -> dict[str, np.ndarray]:
        advantages = np.full(response_length, stream.standard_normal(), np.float32)
        return {"advantages": advantages, "weights": np.ones(response_length, np.float32)}

    sequences = [TokenSequence(ids(PROMPT_LENGTH), ids(response_length), values()) for _ in range(samples)]
    batch = make_batch(sequences, RowOptions((row_length,), case.micro_batch, num_ranks, False))
    share = batch.part_of(rank.index, num_ranks)
    measured: dict[str, list[float]] = {"all": [], "apply": [], "cpu": []}
    apply = updater.apply

    def timed_apply(*arguments, **options) -> float:
        start = time.perf_counter()
        norm = apply(*arguments, **options)
        measured["apply"].append(time.perf_counter() - start)
        return norm

    updater.apply = timed_apply
    norms = []
    for _ in range(NUM_WARM_UPS + updates):
        start, cpu = time.perf_counter(), time.process_time()
        norms.append(updater.update(share, 1e-4, 0.0).grad_norm)
        measured["all"].append(time.perf_counter() - start)
        measured["cpu"].append(time.process_time() - cpu)
    found = {name: statistics.median(times[NUM_WARM_UPS:]) for name, times in measured.items()}
    found |= {"memory": peak_rss_gb(), "norms": norms}
    (directory / f"rank_{rank.index}.json").write_text(json.dumps(found))


def measure(name: str, row_name: str, updates: int, any_core: bool) -> dict:
    """Run the ranks of one row and return what the slowest measured."""
    case, row = CASES[name], ROWS[row_name]
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory) / "model"
        model_dir.mkdir()
        (model_dir / "config.json").write_text(json.dumps(hf_config(case)))
        command = [__file__, "--rank-of", directory, "--case", name, "--row", row_name, "--updates", str(updates)]
        command += ["--any-core"] * any_core
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            code = launch(command, row[0], Path(directory) / "logs", env={"OMP_NUM_THREADS": "1"}, out=nowhere)
        if code:
            sys.exit(f"benchmark_update: {name} {row_name} ended with exit code {code}")
        ranks = [json.loads((Path(directory) / f"rank_{index}.json").read_text()) for index in range(row[0])]
    return max(ranks, key=lambda rank: rank["all"])


def print_case(name: str, rows: list[str], updates: int, any_core: bool) -> dict:
    """Measure and print the rows of one case."""
    print(f"\n{name}: {json.dumps(CASES[name].model)}, micro-batches of {CASES[name].micro_batch}")
    columns = "update  gradients optimiser  processor    memory  exponent"
    print(f"  row        ranks samples response    TFLOP    {columns}")
    results = {}
    for row in rows:
        ranks, samples, length = ROWS[row]
        found = results[row] = measure(name, row, updates, any_core)
        work = arithmetic(CASES[name], NUM_SAMPLES * samples, RESPONSE_LENGTH * length)
        exponent, factor = "", ranks * samples * length
        if "base" in results and factor > 1:
            growth = math.log(found["all"] / results["base"]["all"]) / math.log(factor)
            exponent = f"{growth:9.2f}"
        print(
            f"  {row:10s} {ranks:5d} {NUM_SAMPLES * samples:7d} {RESPONSE_LENGTH * length:8d} {work:8.3f} "
            f"{found['all']:7.3f} s {found['all'] - found['apply']:8.3f} s {found['apply']:7.3f} s "
            f"{found['cpu']:8.3f} s "
            f"{found['memory']:6.2f} GB {exponent}",
            flush=True,
        )
    return results


def main() -> None:
    """Run the chosen rows of the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--row", choices=ROWS, nargs="+", default=list(ROWS), help="default: all")
    parser.add_argument("--updates", type=int, default=4, help="updates that are measured (default 4)")
    parser.add_argument("--any-core", action="store_true", help="do not hold each rank to one core")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        case, row = CASES[arguments.case[0]], ROWS[arguments.row[0]]
        run_rank(arguments.rank_of, case, row, arguments.updates, arguments.any_core)
        return
    results = {
        name: print_case(name, arguments.row, arguments.updates, arguments.any_core)
        for name in arguments.case or CASES
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
