#!/usr/bin/env python3
"""Throughput of offline sharding against `cp` of the same bytes and against MindSpore's `transform_checkpoints`.

    python scripts/benchmark_sharding.py [--gib 1.5] [--parallel dp=1,mp=4,pp=2] [--rounds 5] [--threads 2] [--dir DIR]

A random model of about that size is written once. Then each round runs, alternated: `cp` of the model's files until
they are on the disk (cp, then fsync of each copy); sharding by this package, which ends with fsync as well; every other
round MindSpore's own tool on the same arrays with the same strategy file; merging back. All read from the page
cache, so what is compared is work, not the disk's reading. MindSpore is imported before any clock runs. Throughput is
the model's bytes over wall time; ratios are taken within a round, and their median, least and greatest are printed.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mindrlhf.durable import sync
from mindrlhf.models.spec import find_spec
from mindrlhf.parallel.merging import merge_directory
from mindrlhf.parallel.sharding import shard_directory
from mindrlhf.parallel.verification import verify_directory
from mindrlhf.weights.convert import export_hf, hf_shapes, import_directory

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def make_model(directory: Path, gib: float) -> int:
    """Write a model of random bfloat16 weights of about `gib` GiB; return its bytes."""
    one, two = (num_elements({**CONFIG, "num_hidden_layers": layers}) for layers in (1, 2))
    layers = max(2, round((gib * 2**30 / 2 - one) / (two - one)) + 1)
    config = {**CONFIG, "num_hidden_layers": layers}
    spec = find_spec(config)
    generator = np.random.default_rng(0)
    shapes = hf_shapes(spec, spec.dims(config))
    tensors = ((name, generator.integers(0, 2**15 - 2**8, shape, np.uint16)) for name, shape in shapes.items())
    export_hf(tensors, config, directory, dtype="bfloat16")
    return 2 * num_elements(config)


def num_elements(config: dict) -> int:
    """Parameters of a model."""
    spec = find_spec(config)
    return sum(int(np.prod(shape)) for shape in hf_shapes(spec, spec.dims(config)).values())


def copy_files(source: Path, target: Path) -> None:
    """`cp` the model's files and force them to the disk."""
    target.mkdir()
    files = sorted(source.glob("*.safetensors"))
    subprocess.run(["cp", *map(str, files), str(target)], check=True, timeout=600)
    for file in files:
        sync(target / file.name)


def measure(work: Path, action: Callable[[Path], None]) -> float:
    """Wall time in seconds of an action that writes a new directory, which is removed afterwards."""
    target = work / "target"
    started = time.perf_counter()
    action(target)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def run(work: Path, options: argparse.Namespace) -> None:
    """Make the model, run the rounds, print what was measured."""
    import mindspore

    hf_dir, full, sharded = work / "hf", work / "full", work / "sharded"
    size_bytes = make_model(hf_dir, options.gib)
    import_directory(hf_dir, full / "rank_0")
    shard_directory(hf_dir, sharded, parallel=options.parallel, num_workers=options.threads)
    print(verify_directory(sharded, against=hf_dir, num_workers=options.threads))
    written = sum(file.stat().st_size for file in sharded.glob("rank_*/*.safetensors"))
    print(f"model {size_bytes / 2**30:.2f} GiB, slices {written / 2**30:.2f} GiB, {options.threads} threads")
    actions = {
        "cp": lambda target: copy_files(hf_dir, target),
        "shard": lambda target: shard_directory(hf_dir, target, parallel=options.parallel, num_workers=options.threads),
        "merge": lambda target: merge_directory(sharded, target, num_workers=options.threads),
        "transform": lambda target: mindspore.transform_checkpoints(
            str(full),
            str(target),
            "checkpoint_",
            None,
            str(sharded / "strategy" / "merged.ckpt"),
            process_num=options.threads,
            output_format="safetensors",
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for index in range(options.rounds):
        for name, action in actions.items():
            if name != "transform" or index % 2 == 0:
                times[name].append(measure(work, action))
        print(", ".join(f"{name} {found[-1]:.2f} s" for name, found in times.items()), flush=True)
    for name, found in times.items():
        print(f"{name:10} {size_bytes / 2**30 / statistics.median(found):6.2f} GiB/s")
    report("shard / cp", [copied / own for copied, own in zip(times["cp"], times["shard"])])
    report("merge / cp", [copied / own for copied, own in zip(times["cp"], times["merge"])])
    report(
        "shard / transform_checkpoints", [other / own for other, own in zip(times["transform"], times["shard"][::2])]
    )


def report(what: str, ratios: list[float]) -> None:
    """Print the median and the spread of throughput ratios."""
    print(f"{what}: {statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.5, help="size of the model")
    parser.add_argument("--parallel", default="dp=1,mp=4,pp=2", help="layout to shard for")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="workers of both tools")
    parser.add_argument("--dir", help="where to work; needs about 6 times the size, which is freed afterwards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="benchmark_sharding_") as name:
        free = shutil.disk_usage(name).free
        if free < 7 * options.gib * 2**30:
            print(f"{name} has {free / 2**30:.1f} GiB free, 7 x {options.gib} are needed: use --dir", file=sys.stderr)
            return 2
        run(Path(name), options)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
