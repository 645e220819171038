"""The kinds of run: which sections each has."""

from dataclasses import dataclass

from mindrlhf.config import offline_sections, sections, watching_sections
from mindrlhf.config.distillation.section import DistillationSection
from mindrlhf.config.evaluation.section import EvaluationSection
from mindrlhf.config.keys import section
from mindrlhf.config.lora_section import LoraSection
from mindrlhf.config.memory.section import MemorySection
from mindrlhf.config.parse import root_config
from mindrlhf.config.watching_sections import CheckpointSection


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
    distillation: DistillationSection = section(DistillationSection, "the teachers")
    correction: sections.CorrectionSection = section(sections.CorrectionSection, "the off-policy correction")
    training: sections.TrainingSection = section(sections.TrainingSection, "the batches")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    lora: LoraSection = section(LoraSection, "the adapters")
    critic: sections.CriticSection = section(sections.CriticSection, "the critic")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    memory: MemorySection = section(MemorySection, "the memory")
    evaluation: EvaluationSection = section(EvaluationSection, "the evaluation")
    checkpoint: CheckpointSection = section(CheckpointSection, "the checkpoints")
    guard: watching_sections.GuardSection = section(watching_sections.GuardSection, "the guards")
    observe: watching_sections.ObserveSection = section(watching_sections.ObserveSection, "the reports")
    profiler: watching_sections.ProfilerSection = section(watching_sections.ProfilerSection, "where time goes")
    msprobe: watching_sections.MsprobeSection = section(watching_sections.MsprobeSection, "precision debugging")


@root_config
@dataclass(frozen=True)
class SftConfig:
    """A `mindrlhf sft` run: supervised fine-tuning on the same cells."""

    model: sections.ModelSection = section(sections.ModelSection, "the model")
    data: sections.DataSection = section(sections.DataSection, "the records")
    run: sections.RunSection = section(sections.RunSection, "the run")
    supervised: offline_sections.SupervisedSection = section(offline_sections.SupervisedSection, "the batches")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    lora: LoraSection = section(LoraSection, "the adapters")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    memory: MemorySection = section(MemorySection, "the memory")
    checkpoint: CheckpointSection = section(CheckpointSection, "the checkpoints")
    observe: watching_sections.ObserveSection = section(watching_sections.ObserveSection, "the reports")
    profiler: watching_sections.ProfilerSection = section(watching_sections.ProfilerSection, "where time goes")


@root_config
@dataclass(frozen=True)
class DpoConfig:
    """A `mindrlhf dpo` run: direct preference optimisation on pairs of responses."""

    model: sections.ModelSection = section(sections.ModelSection, "the model")
    data: sections.DataSection = section(sections.DataSection, "the pairs")
    run: sections.RunSection = section(sections.RunSection, "the run")
    preference: offline_sections.PreferenceSection = section(offline_sections.PreferenceSection, "the batches")
    dpo: offline_sections.DpoSection = section(offline_sections.DpoSection, "the objective")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    lora: LoraSection = section(LoraSection, "the adapters")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    memory: MemorySection = section(MemorySection, "the memory")
    checkpoint: CheckpointSection = section(CheckpointSection, "the checkpoints")
    observe: watching_sections.ObserveSection = section(watching_sections.ObserveSection, "the reports")
    profiler: watching_sections.ProfilerSection = section(watching_sections.ProfilerSection, "where time goes")


@root_config
@dataclass(frozen=True)
class RewardModelConfig:
    """A `mindrlhf reward-model` run: a model that scores responses, from pairs of them."""

    model: sections.ModelSection = section(sections.ModelSection, "the model")
    data: sections.DataSection = section(sections.DataSection, "the pairs")
    run: sections.RunSection = section(sections.RunSection, "the run")
    preference: offline_sections.PreferenceSection = section(offline_sections.PreferenceSection, "the batches")
    reward_model: offline_sections.RewardModelSection = section(offline_sections.RewardModelSection, "the objective")
    optimizer: sections.OptimizerSection = section(sections.OptimizerSection, "the optimiser")
    lora: LoraSection = section(LoraSection, "the adapters")
    parallel_config: sections.ParallelSection = section(sections.ParallelSection, "the layout")
    memory: MemorySection = section(MemorySection, "the memory")
    checkpoint: CheckpointSection = section(CheckpointSection, "the checkpoints")
    observe: watching_sections.ObserveSection = section(watching_sections.ObserveSection, "the reports")
    profiler: watching_sections.ProfilerSection = section(watching_sections.ProfilerSection, "where time goes")
