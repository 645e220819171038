"""The kinds of run: which sections each has."""

from dataclasses import dataclass

from mindrlhf.config.algorithm import AlgorithmSection, CorrectionSection, CriticSection
from mindrlhf.config.evaluation import EvaluationSection
from mindrlhf.config.keys import section
from mindrlhf.config.memory import MemorySection
from mindrlhf.config.model import LoraSection, ModelSection
from mindrlhf.config.observe import CheckpointSection, GuardSection, MsprobeSection, ObserveSection, ProfilerSection
from mindrlhf.config.offline import (
    DpoSection,
    PairEvaluationSection,
    PreferenceSection,
    RewardModelSection,
    SupervisedSection,
)
from mindrlhf.config.parse import root_config
from mindrlhf.config.reward import RewardSection, SandboxSection, ToolSection
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.config.training import OptimizerSection, ParallelSection, TrainingSection


@root_config
@dataclass(frozen=True)
class GrpoConfig:
    """A `mindrlhf train` run: reinforcement learning against verifiers."""

    model: ModelSection = section(ModelSection, "the model")
    data: DataSection = section(DataSection, "the prompts")
    reward: RewardSection = section(RewardSection, "the rewards")
    run: RunSection = section(RunSection, "the run")
    rollout: RolloutSection = section(RolloutSection, "the generator")
    tools: ToolSection = section(ToolSection, "the tools", read_with="tools.names or tools.environment or tools.agent")
    sandbox: SandboxSection = section(SandboxSection, "the sandbox")
    algorithm: AlgorithmSection = section(AlgorithmSection, "the objective")
    correction: CorrectionSection = section(CorrectionSection, "the off-policy correction")
    training: TrainingSection = section(TrainingSection, "the batches")
    optimizer: OptimizerSection = section(OptimizerSection, "the optimiser")
    lora: LoraSection = section(LoraSection, "the adapters", read_with="lora.rank")
    critic: CriticSection = section(CriticSection, "the critic", read_with="algorithm.advantage=gae")
    parallel_config: ParallelSection = section(ParallelSection, "the layout")
    memory: MemorySection = section(MemorySection, "the memory")
    evaluation: EvaluationSection = section(EvaluationSection, "the evaluation", read_with="data.eval_file")
    checkpoint: CheckpointSection = section(CheckpointSection, "the checkpoints")
    guard: GuardSection = section(GuardSection, "the guards")
    observe: ObserveSection = section(ObserveSection, "the reports")
    profiler: ProfilerSection = section(ProfilerSection, "where time goes", read_with="profiler.steps")
    msprobe: MsprobeSection = section(MsprobeSection, "precision debugging")


@dataclass(frozen=True)
class _OnFixedData:
    model: ModelSection = section(ModelSection, "the model")
    data: DataSection = section(DataSection, "the records")
    run: RunSection = section(RunSection, "the run")
    optimizer: OptimizerSection = section(OptimizerSection, "the optimiser")
    lora: LoraSection = section(LoraSection, "the adapters", read_with="lora.rank")
    parallel_config: ParallelSection = section(ParallelSection, "the layout")
    memory: MemorySection = section(MemorySection, "the memory")
    checkpoint: CheckpointSection = section(CheckpointSection, "the checkpoints")
    observe: ObserveSection = section(ObserveSection, "the reports")
    profiler: ProfilerSection = section(ProfilerSection, "where time goes", read_with="profiler.steps")


@dataclass(frozen=True)
class _OnPairs(_OnFixedData):
    training: PreferenceSection = section(PreferenceSection, "the batches")
    evaluation: PairEvaluationSection = section(
        PairEvaluationSection, "the evaluation", read_with="data.eval_file"
    )


@root_config
@dataclass(frozen=True)
class SftConfig(_OnFixedData):
    """A `mindrlhf sft` run: supervised fine-tuning on the same cells."""

    training: SupervisedSection = section(SupervisedSection, "the batches")


@root_config
@dataclass(frozen=True)
class DpoConfig(_OnPairs):
    """A `mindrlhf dpo` run: direct preference optimisation on pairs of responses."""

    dpo: DpoSection = section(DpoSection, "the objective")


@root_config
@dataclass(frozen=True)
class RewardModelConfig(_OnPairs):
    """A `mindrlhf reward-model` run: a model that scores responses, from pairs of them."""

    reward_model: RewardModelSection = section(RewardModelSection, "the objective")


OfflineConfig = SftConfig | DpoConfig | RewardModelConfig
AnyConfig = GrpoConfig | OfflineConfig
