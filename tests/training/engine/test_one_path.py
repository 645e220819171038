"""No config leads an NPU to other cells than those of sharded graphs, which are what is compiled and executed here."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.config.algorithm import AlgorithmSection
from mindrlhf.config.model import LoraSection, ModelSection
from mindrlhf.config.offline import DpoSection
from mindrlhf.config.reward import RewardSection
from mindrlhf.config.run import DataSection, RunSection
from mindrlhf.config.schema import DpoConfig, GrpoConfig, RewardModelConfig, SftConfig
from mindrlhf.config.training import ParallelSection, trains_sharded

SIZES = st.sampled_from([1, 2, 4])
PARALLEL = st.builds(
    ParallelSection,
    data_parallel=st.sampled_from([0, 1, 2, 8]),
    model_parallel=SIZES,
    pipeline_stage=SIZES,
    context_parallel=SIZES,
    expert_parallel=SIZES,
    micro_batch_num=SIZES,
    enable_parallel_optimizer=st.booleans(),
)
MODEL = {"model": ModelSection(path="model"), "data": DataSection(train_file="data", tokenizer_dir="tokenizer")}


def configs(device):
    """Configs of every kind of training, with and without critic, adapters, reference and reward models."""
    common = {"run": st.just(RunSection(device=device)), "parallel_config": PARALLEL}
    common |= {name: st.just(value) for name, value in MODEL.items()}
    lora = st.sampled_from([LoraSection(), LoraSection(rank=4)])
    algorithms = [AlgorithmSection(beta=beta, advantage=name) for beta in (0.0, 0.1) for name in ("grpo", "gae")]
    rewards = [RewardSection(verifier_function=("accuracy_reward",)), RewardSection(model_path="reward")]
    grpo = st.builds(
        GrpoConfig, **common, lora=lora, algorithm=st.sampled_from(algorithms), reward=st.sampled_from(rewards)
    )
    dpo = st.builds(DpoConfig, **common, lora=lora, dpo=st.just(DpoSection()))
    return st.one_of(grpo, dpo, *(st.builds(kind, **common, lora=lora) for kind in (SftConfig, RewardModelConfig)))


class Asked(Exception):
    pass


@pytest.fixture(scope="module")
def built():
    """Return a function that tells where the first model of a config is built: "whole", or "sharded"."""
    from mindrlhf.training.engine import build, factory

    def asked(kind):
        def stop(*arguments, **options):
            raise Asked(kind)

        return stop

    patched = {
        (build, "build_model"): asked("whole"),
        (build, "WholeEngine"): asked("whole"),
        (build, "start_sharding"): lambda config, rank: config.parallel_config,
        (build, "read_hf_config"): lambda path: {},
        (build, "scorer_config"): lambda hf_config: hf_config,
        (factory, "build_policy"): asked("sharded"),
        (factory, "build_scores"): asked("sharded"),
    }

    def of(config):
        from mindrlhf.training.runtime import Rank

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Asked) as found:
            for (module, name), value in patched.items():
                patch.setattr(module, name, value)
            make = build.build_actor if isinstance(config, GrpoConfig) else build.build_offline
            make(config, (32,), Rank(0, 1))
        return str(found.value)

    return of


@given(config=configs("ascend"))
def test_an_npu_builds_sharded_models_alone(built, config):
    assert trains_sharded(config) and built(config) == "sharded"


@settings(max_examples=50)
@given(config=configs("cpu"))
def test_a_cpu_builds_whole_models_where_data_parallelism_is_all(built, config):
    parallel = config.parallel_config
    sizes = (parallel.model_parallel, parallel.pipeline_stage, parallel.context_parallel, parallel.expert_parallel)
    is_plain = max(sizes) == 1 and not parallel.enable_parallel_optimizer
    assert built(config) == ("whole" if is_plain else "sharded")


@pytest.mark.parametrize("device", ["ascend", "cpu"])
def test_the_ranks_are_seen_as_replicas_where_models_are_sharded(device):
    from mindrlhf.training.replica_team import ReplicaTeam, with_replicas

    config = SimpleNamespace(run=RunSection(device=device), parallel_config=ParallelSection(data_parallel=2))
    team = SimpleNamespace(world_size=2)
    assert isinstance(with_replicas(config, team), ReplicaTeam) == (device == "ascend")
