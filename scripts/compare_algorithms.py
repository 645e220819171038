#!/usr/bin/env python3
"""Train the quickstart's model by several recipes with several seeds, and tabulate the held-out accuracy.

    bash examples/quickstart/make_data.sh
    OMP_NUM_THREADS=1 .venv/bin/python scripts/compare_algorithms.py > table.md
    OMP_NUM_THREADS=1 .venv/bin/python scripts/compare_algorithms.py --recipes GRPO DAPO --seeds 0 1
    OMP_NUM_THREADS=1 .venv/bin/python scripts/compare_algorithms.py --table schedules

The tables: each algorithm's recipe; when samples are drawn (docs/async.md); all weights and adapters (docs/lora.md);
AdamW and Muon; further presets of docs/algorithms.md (three seeds each: 30 runs); a model with experts that are routed
anew or as the generator did (examples/experts); a teacher's verdict on the sampled token, its top-k tokens, and rewards
(examples/distill).
One run of one rank after another. A finished run stays in its directory and is read, not repeated, the next time; when
its config is no longer the recipe's, that is an error. A run that was broken off starts again. The Markdown table goes
to stdout, progress to stderr.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.observe.records import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
_QUICKSTART = "examples/quickstart/config.yaml"
# The quickstart itself takes 100 steps of one update.
_SHORT = ("run.max_steps=12", "training.num_minibatches=4", "evaluation.every_steps=6")
# Recipe -> its config and what is changed in it.
_GRPO = {"GRPO": (_QUICKSTART, _SHORT)}
_ALGORITHMS = {
    **_GRPO,
    "DAPO": ("examples/dapo/config.yaml", ()),
    "GSPO": ("examples/gspo/config.yaml", ()),
    "RLOO": ("examples/rloo/config.yaml", ()),
    "REINFORCE++": ("examples/reinforce_pp/config.yaml", ()),
    "PPO": ("examples/ppo/config.yaml", ()),
}
# When samples are drawn is compared by the quickstart itself, to where its curve is flat.
_SCHEDULES = {
    "in step": (_QUICKSTART, ()),
    "off-policy by 1": (_QUICKSTART, ("rollout.off_policy_steps=1",)),
    "off-policy by 2": (_QUICKSTART, ("rollout.off_policy_steps=2",)),
    "partial rollout": (_QUICKSTART, ("rollout.segment_tokens=16", "rollout.in_flight=2")),
    "asynchronous": (
        _QUICKSTART,
        ("rollout.asynchronous=true", "rollout.off_policy_steps=2", "rollout.segment_tokens=8"),
    ),
}
_ADAPTERS = {
    **_GRPO,
    "rank 8": (_QUICKSTART, (*_SHORT, "lora.rank=8", "optimizer.start_lr=2e-3")),
    "rank 32": (_QUICKSTART, (*_SHORT, "lora.rank=32", "optimizer.start_lr=2e-3")),
}
# A model that examples/experts makes first. The generator's rounding is what may send a token to another expert.
_QWEN3_MOE = "model.path=runs/experts/qwen3_moe"
_REPLAYED, _ROUNDED = "training.replay_routing=true", "rollout.dtype=bfloat16"
_EXPERTS = {
    "own routing": (_QUICKSTART, (_QWEN3_MOE,)),
    "replayed routing": (_QUICKSTART, (_QWEN3_MOE, _REPLAYED)),
    "own routing, bfloat16": (_QUICKSTART, (_QWEN3_MOE, _ROUNDED)),
    "replayed routing, bfloat16": (_QUICKSTART, (_QWEN3_MOE, _REPLAYED, _ROUNDED)),
}
_DISTILL = "examples/distill/config.yaml"
_DISTILLATION = {
    "sampled word": (_DISTILL, ()),
    "rewards": (_QUICKSTART, ("run.max_steps=50", "evaluation.every_steps=10")),
}
_OPTIMIZERS = {**_GRPO, "Muon": (_QUICKSTART, (*_SHORT, "optimizer.type=muon"))}
# The presets that are one key away, by the quickstart's model from the same start and for as long as GRPO.
_PRESETS = {
    **_GRPO,
    **{
        name: (_QUICKSTART, (*_SHORT, f"algorithm.name={name}"))
        for name in ("dppo", "gmpo", "luspo", "vespo", "maxrl", "gdpo", "lite_ppo", "clip_cov")
    },
    "off-policy mask": (_QUICKSTART, (*_SHORT, "correction.off_policy_mask=0.5")),
}
TABLES = {
    "presets": _PRESETS,
    "algorithms": _ALGORITHMS,
    "schedules": _SCHEDULES,
    "adapters": _ADAPTERS,
    "optimizers": _OPTIMIZERS,
    "experts": _EXPERTS,
    "distillation": _DISTILLATION,
}
RECIPES = _PRESETS | _ALGORITHMS | _SCHEDULES | _ADAPTERS | _OPTIMIZERS | _EXPERTS | _DISTILLATION


@dataclass(frozen=True)
class Run:
    """One recipe with one seed."""

    recipe: str
    seed: int
    parent: Path  # holds the directories of all runs

    @property
    def directory(self) -> Path:
        """Directory of the finished run."""
        return self.parent / f"{self.recipe.lower().replace(',', '').replace(' ', '_')}_seed{self.seed}"

    @property
    def unfinished_directory(self) -> Path:
        """Directory of the run until it is finished."""
        return self.directory.with_name(f".{self.directory.name}.partial")

    def command_arguments(self, output_dir: Path) -> list[str]:
        """Return the config and its overrides, as `mindrlhf train` takes them."""
        path, overrides = RECIPES[self.recipe]
        return [path, *overrides, f"run.seed={self.seed}", f"run.output_dir={output_dir}"]

    def config(self) -> GrpoConfig:
        """Return the config that the recipe has now."""
        path, *overrides = self.command_arguments(self.directory)
        return load_grpo_config(path, overrides)

    def is_finished(self) -> bool:
        """Return whether a result exists.

        Raises:
            UserError: it was made with another config.
        """
        if not (self.directory / "summary.json").is_file():
            return False
        # Read as a config: a key that is newer than the run has the default, which the run had too.
        used = load_grpo_config(self.directory / "config.yaml", [f"run.output_dir={self.directory}"])
        used, wanted = dataclasses.asdict(used), dataclasses.asdict(self.config())
        differing = [f"{name}.{key}" for name in wanted for key in wanted[name] if used[name][key] != wanted[name][key]]
        if differing:
            raise UserError(
                f"{self.directory} was made with another config ({', '.join(differing)}): remove it, or give another "
                "--output-dir"
            )
        return True

    def result(self) -> dict[str, Any]:
        """Return `summary.json`: accuracies before and after, and their paired difference, each with its interval."""
        return json.loads((self.directory / "summary.json").read_text(encoding="utf-8"))

    def num_samples(self) -> int:
        """Return how many responses were sampled for training."""
        steps = list(read_jsonl(self.directory / "metrics.jsonl"))
        if "samples/total_generated" in steps[-1]:
            return int(steps[-1]["samples/total_generated"])
        config = self.config()
        num_prompts = config.training.chunk_size * config.training.num_rollouts
        return steps[-1]["step"] * num_prompts * config.algorithm.num_generations


def train(run: Run) -> None:
    """Run the recipe to its end and give its directory the final name.

    Raises:
        RunFailure: the run failed.
    """
    shutil.rmtree(run.unfinished_directory, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    log_path = run.directory.with_suffix(".log")
    command = [sys.executable, "-m", "mindrlhf.cli", "train", *run.command_arguments(run.unfinished_directory)]
    start_s = time.monotonic()
    with log_path.open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            exit_code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    # A run that was asked to end early saves its state and ends well, but has no summary.
    if exit_code != 0 or not (run.unfinished_directory / "summary.json").is_file():
        raise RunFailure(f"{run.recipe}, seed {run.seed}: `mindrlhf train` ended with {exit_code}; see {log_path}")
    os.rename(run.unfinished_directory, run.directory)
    say(f"{run.recipe}, seed {run.seed}: {change(run.result())} in {(time.monotonic() - start_s) / 60:.1f} minutes")


def change(result: dict[str, Any]) -> str:
    """Return accuracies before and after in percent, and the paired difference in points with its interval."""
    before, after = (100 * result[name]["accuracy"] for name in ("before", "after"))
    mean, low, high = (100 * result["difference"][name] for name in ("mean", "low", "high"))
    return f"{before:.1f} to {after:.1f} ({mean:+.1f}; {low:+.1f} to {high:+.1f})"


def table(recipes: list[str], seeds: list[int], parent: Path) -> str:
    """Return the Markdown table, a row for each recipe and a column for each seed."""
    titles = ["recipe", "config", "steps", "samples", *(f"seed {seed}" for seed in seeds), "mean change"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for recipe in recipes:
        runs = [Run(recipe, seed, parent) for seed in seeds]
        folder = Path(RECIPES[recipe][0]).parent.name
        samples = sorted({run.num_samples() for run in runs})
        results = [run.result() for run in runs]
        cells = [
            recipe,
            f"[{folder}](../{RECIPES[recipe][0]})",
            str(runs[0].config().run.max_steps),
            f"{samples[0]:,}" if len(samples) == 1 else f"{samples[0]:,} to {samples[-1]:,}",
            *map(change, results),
            f"{100 * statistics.mean(result['difference']['mean'] for result in results):+.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Make the runs that are missing, then print the table."""
    parser = argparse.ArgumentParser(description="compare recipes on the quickstart's problems")
    parser.add_argument("--table", choices=TABLES, default="algorithms", help="default: algorithms")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, help="default: all of the table")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/algorithms"), help="default: runs/algorithms")
    arguments = parser.parse_args()
    recipes = arguments.recipes or list(TABLES[arguments.table])
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the run under way too
    # Seeds outside: what is finished when someone stops the script compares all recipes.
    runs = [Run(recipe, seed, arguments.output_dir) for seed in arguments.seeds for recipe in recipes]
    try:
        missing = [run for run in runs if not run.is_finished()]
        say(f"{len(runs) - len(missing)} of {len(runs)} runs are finished in {arguments.output_dir}")
        for run in missing:
            train(run)
    except (UserError, RunFailure) as error:
        say(f"compare_algorithms: {error}")
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(table(recipes, arguments.seeds, arguments.output_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
