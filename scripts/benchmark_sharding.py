#!/usr/bin/env python3
"""Throughput of offline sharding against `cp` of the same bytes and against MindSpore's `transform_checkpoints`.

    python scripts/benchmark_sharding.py [--gib 1.5] [--format ckpt] [--rounds 5] [--threads 2] [--dir DIR]

A random model of about that size is written once. Then each round runs, alternated: `cp` of the model's files, sharding
by this package, merging back, and MindSpore's own tool on the same arrays with the same strategy file. MindSpore's tool
wants its own names and layouts, so a user of it first converts the Hugging Face directory; that is measured beside it
("convert"), and the sum is compared too. This package computes checksums, the others do not. It forces its files to the
disk, so the files of the others are forced too, on their clocks. All read from the page cache:
what is compared is work, not the disk's reading. MindSpore is imported before any clock runs. Throughput is the model's
bytes over wall time; processor time counts child processes too. Ratios are taken within a round; their median, least
and greatest are printed.
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
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindrlhf.shards.merge import merge_directory
from mindrlhf.shards.shard import shard_directory
from mindrlhf.shards.verify import verify_directory
from mindrlhf.specs import find_spec
from mindrlhf.system.files import sync
from mindrlhf.weights.convert import export_hf, hf_shapes
from mindrlhf.weights.directories import import_directory

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


@dataclass(frozen=True)
class Measured:
    """Wall and processor time of one action, in seconds."""

    wall_s: float
    cpu_s: float


def measure(work: Path, action: Callable[[Path], None]) -> Measured:
    """Time an action that writes a new directory, which is removed afterwards."""
    target = work / "target"
    started, used = time.perf_counter(), cpu_s()
    action(target)
    measured = Measured(time.perf_counter() - started, cpu_s() - used)
    shutil.rmtree(target)
    return measured


def cpu_s() -> float:
    """Processor time of this process and its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def make_actions(work: Path, options: argparse.Namespace) -> dict[str, Callable[[Path], None]]:
    """What is compared, by name; each fills the directory that it is given."""
    import mindspore

    def shard(target: Path) -> None:
        shard_directory(
            work / "hf",
            target,
            parallel=options.parallel,
            file_format=options.format,
            num_workers=options.threads,
        )

    def transform(target: Path) -> None:
        mindspore.transform_checkpoints(
            str(work / "full"),
            str(target),
            "checkpoint_",
            None,
            str(work / "sharded" / "strategy" / "merged.ckpt"),
            process_num=options.threads,
            output_format=options.format,
        )
        for file in target.rglob(f"*.{options.format}"):
            sync(file)

    return {
        "cp": lambda target: copy_files(work / "hf", target),
        "shard": shard,
        "convert": lambda target: write_whole(work / "hf", target, options.format),
        "merge": lambda target: merge_directory(work / "sharded", target, num_workers=options.threads),
        "transform": transform,
    }


def write_whole(hf_dir: Path, target: Path, file_format: str) -> None:
    """The model in one rank directory under MindFormers names, as `transform_checkpoints` wants it."""
    import mindspore

    import_directory(hf_dir, target / "rank_0")
    if file_format == "ckpt":
        path = target / "rank_0" / "model.safetensors"
        mindspore.save_checkpoint(
            [
                {"name": name, "data": one}
                for name, one in mindspore.load_checkpoint(str(path), format="safetensors").items()
            ],
            str(path.with_suffix(".ckpt")),
        )
        path.unlink()


def run(work: Path, options: argparse.Namespace) -> None:
    """Make the model, run the rounds, print what was measured."""
    size_bytes = make_model(work / "hf", options.gib)
    write_whole(work / "hf", work / "full", options.format)
    actions = make_actions(work, options)
    actions["shard"](work / "sharded")
    print(verify_directory(work / "sharded", against=work / "hf", num_workers=options.threads))
    written = sum(file.stat().st_size for file in (work / "sharded").glob(f"rank_*/*.{options.format}"))
    print(f"model {size_bytes / 2**30:.2f} GiB, shards {written / 2**30:.2f} GiB, {options.threads} threads")
    results: dict[str, list[Measured]] = {name: [] for name in actions}
    for _ in range(options.rounds):
        for name, action in actions.items():
            results[name].append(measure(work, action))
        print(", ".join(f"{name} {found[-1].wall_s:.2f} s" for name, found in results.items()), flush=True)
    for name, found in results.items():
        rate = size_bytes / 2**30 / statistics.median(one.wall_s for one in found)
        print(f"{name:10} {rate:6.2f} GiB/s, processor {statistics.median(one.cpu_s for one in found):.2f} s")
    both = zip(results["convert"], results["transform"])
    results["convert + transform"] = [Measured(a.wall_s + b.wall_s, a.cpu_s + b.cpu_s) for a, b in both]
    pairs = ("shard", "cp"), ("merge", "cp"), ("shard", "transform"), ("shard", "convert + transform")
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for own, other in pairs:
        for what in ("wall_s", "cpu_s"):
            ratios = [getattr(b, what) / getattr(a, what) for a, b in zip(results[own], results[other])]
            spread = f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{own} against {other}, {what.removesuffix('_s')} time: {spread}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.5, help="size of the model")
    parser.add_argument("--parallel", default="dp=1,mp=4,pp=2", help="layout to shard for")
    parser.add_argument("--format", choices=("safetensors", "ckpt"), default="safetensors")
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
