"""The kinds of run, and the one function that gives a checked config."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.config import checks, sections
from mindrlhf.config.keys import section
from mindrlhf.config.loader import load, root_config
from mindrlhf.config.msprobe_section import MsprobeSection
from mindrlhf.config.presets import apply_preset
from mindrlhf.errors import UserError


@root_config
@dataclass(frozen=True)
class GrpoConfig:
    """A `mindrlhf train` run: reinforcement learning against verifiers."""

    model: sections.ModelSection = section(sections.ModelSection, "the model")
    data: sections.DataSection = section(sections.DataSection, "the prompts")
    reward: sections.RewardSection = section(sections.RewardSection, "the rewards")
    run: sections.RunSection = section(sections.RunSection, "the run")
    rollout: sections.RolloutSection = section(sections.RolloutSection, "the generator")
    tools: sections.ToolSection = section(sections.ToolSection, "the tools")
    sandbox: sections.SandboxSection = section(sections.SandboxSection, "the sandbox")
    algorithm: sections.AlgorithmSection = section(sections.AlgorithmSection, "the objective")
    correction: sections.CorrectionSection = section(sections.CorrectionSection, "the off-policy correction")
    training: sections.TrainingSection = section(sections.TrainingSection, "the batches")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    critic: sections.CriticSection = section(sections.CriticSection, "the critic")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    evaluation: sections.EvaluationSection = section(sections.EvaluationSection, "the evaluation")
    checkpoint: sections.CheckpointSection = section(sections.CheckpointSection, "the checkpoints")
    guard: sections.GuardSection = section(sections.GuardSection, "the guards")
    observe: sections.ObserveSection = section(sections.ObserveSection, "the reports")
    msprobe: MsprobeSection = section(MsprobeSection, "precision debugging")


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
    checkpoint: sections.CheckpointSection = section(sections.CheckpointSection, "the checkpoints")
    observe: sections.ObserveSection = section(sections.ObserveSection, "the reports")


@root_config
@dataclass(frozen=True)
class DpoConfig:
    """A `mindrlhf dpo` run: direct preference optimisation on pairs of responses."""

    model: sections.ModelSection = section(sections.ModelSection, "the model")
    data: sections.DataSection = section(sections.DataSection, "the pairs")
    run: sections.RunSection = section(sections.RunSection, "the run")
    preference: sections.PreferenceSection = section(sections.PreferenceSection, "the batches")
    dpo: sections.DpoSection = section(sections.DpoSection, "the objective")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    checkpoint: sections.CheckpointSection = section(sections.CheckpointSection, "the checkpoints")
    observe: sections.ObserveSection = section(sections.ObserveSection, "the reports")


@root_config
@dataclass(frozen=True)
class RewardModelConfig:
    """A `mindrlhf reward-model` run: a model that scores responses, from pairs of them."""

    model: sections.ModelSection = section(sections.ModelSection, "the model")
    data: sections.DataSection = section(sections.DataSection, "the pairs")
    run: sections.RunSection = section(sections.RunSection, "the run")
    preference: sections.PreferenceSection = section(sections.PreferenceSection, "the batches")
    reward_model: sections.RewardModelSection = section(sections.RewardModelSection, "the objective")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    checkpoint: sections.CheckpointSection = section(sections.CheckpointSection, "the checkpoints")
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


def load_dpo_config(path: str | Path, overrides: Iterable[str] = (), *, world_size: int = 1) -> DpoConfig:
    """Read and check a `mindrlhf dpo` config for a number of ranks; raises UserError like the others."""
    config, given = load(DpoConfig, path, overrides)
    checks.check_preference(config, given, world_size)
    checks.check_dpo(config, given)
    return config


def load_reward_model_config(
    path: str | Path, overrides: Iterable[str] = (), *, world_size: int = 1
) -> RewardModelConfig:
    """Read and check a `mindrlhf reward-model` config for a number of ranks; raises UserError like the others."""
    config, given = load(RewardModelConfig, path, overrides)
    checks.check_preference(config, given, world_size)
    if "model.reference_path" in given:
        raise UserError("'model.reference_path' is set, but a reward model is trained without reference: remove it")
    return config


CONFIG_LOADERS = {
    "train": load_grpo_config,
    "sft": load_sft_config,
    "dpo": load_dpo_config,
    "reward-model": load_reward_model_config,
}
