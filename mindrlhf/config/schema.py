"""The two kinds of run, and the one function that gives a checked config."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.config import checks, sections
from mindrlhf.config.keys import section
from mindrlhf.config.loader import load, root_config
from mindrlhf.config.presets import apply_preset


@root_config
@dataclass(frozen=True)
class GrpoConfig:
    """A `mindrlhf train` run: reinforcement learning against verifiers."""

    model: sections.ModelSection = section(sections.ModelSection, "the model")
    data: sections.DataSection = section(sections.DataSection, "the prompts")
    reward: sections.RewardSection = section(sections.RewardSection, "the rewards")
    run: sections.RunSection = section(sections.RunSection, "the run")
    rollout: sections.RolloutSection = section(sections.RolloutSection, "the generator")
    algorithm: sections.AlgorithmSection = section(sections.AlgorithmSection, "the objective")
    correction: sections.CorrectionSection = section(sections.CorrectionSection, "the off-policy correction")
    training: sections.TrainingSection = section(sections.TrainingSection, "the batches")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    evaluation: sections.EvaluationSection = section(sections.EvaluationSection, "the evaluation")
    checkpoint: sections.CheckpointSection = section(sections.CheckpointSection, "the checkpoints")
    observe: sections.ObserveSection = section(sections.ObserveSection, "the reports")


@root_config
@dataclass(frozen=True)
class SftConfig:
    """A `mindrlhf sft` run: supervised fine-tuning on the same cells."""

    model: sections.ModelSection = section(sections.ModelSection, "the model")
    data: sections.DataSection = section(sections.DataSection, "the records")
    run: sections.RunSection = section(sections.RunSection, "the run")
    supervised: sections.SupervisedSection = section(sections.SupervisedSection, "the batches")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    observe: sections.ObserveSection = section(sections.ObserveSection, "the reports")


def load_grpo_config(path: str | Path, overrides: Iterable[str] = (), *, world_size: int | None = 1) -> GrpoConfig:
    """Read and check a `mindrlhf train` config for a number of ranks; None leaves out what depends on it.

    Raises:
        UserError: any mistake that can be seen before a device is touched.
    """
    config, given = load(GrpoConfig, path, overrides)
    config = apply_preset(config, given)
    checks.check_grpo(config, given, world_size)
    return config


def load_sft_config(path: str | Path, overrides: Iterable[str] = (), *, world_size: int = 1) -> SftConfig:
    """Read and check a `mindrlhf sft` config for a number of ranks; raises UserError like the other."""
    config, given = load(SftConfig, path, overrides)
    checks.check_sft(config, given, world_size)
    return config
