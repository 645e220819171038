"""Keys of single sections (adapters, memory, critic, rows): what they may be, and what goes with them."""

import pytest

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.load import CONFIG_LOADERS, load_grpo_config
from mindrlhf.config.memory import MemorySection, check_num_layers
from mindrlhf.config.parse import write_config
from mindrlhf.errors import UserError

BASE = ["model.path=m", "data.train_file=p", "data.tokenizer_dir=t"]
GRPO = [*BASE, "reward.verifier_function=accuracy_reward"]
ASCEND = "run.device=ascend"

# The overrides that break a rule of every kind of run, and words of the message.
MISTAKES = {
    "rank 0": (["lora.rank=0"], ["'lora.rank' is 0", "at least 1"]),
    "rank of a half": (["lora.rank=0.5"], ["'lora.rank' must be", "0.5"]),
    "negative alpha": (["lora.rank=8", "lora.alpha=-16"], ["'lora.alpha' is -16", "greater than 0"]),
    "unknown target": (["lora.rank=8", "lora.targets=[attention, mpl]"], ["mpl", "did you mean 'mlp'?"]),
    "a target twice": (["lora.rank=8", "lora.targets=[mlp, mlp]"], ["'lora.targets' names a role twice"]),
    "alpha without rank": (["lora.alpha=32"], ["'lora.alpha' is set, but read only with lora.rank"]),
    "a path without rank": (["lora.path=adapter"], ["'lora.path' is set, but read only with lora.rank"]),
    "tiles on the CPU": (["memory.logit_tile=512"], ["'memory.logit_tile' is 512", "run.device=cpu"]),
    "negative": ([ASCEND, "memory.logit_tile=-1"], ["'memory.logit_tile' is -1", "at least 0"]),
    "swap on the CPU": (["memory.swap_moments=true"], ["run.device=cpu all is on the host"]),
    "offload on the CPU": (["memory.offload_optimizer=true"], ["run.device=cpu all is on the host"]),
    "no numbers": (["memory.recompute_layers=first"], ["'memory.recompute_layers' is 'first'", "such as 0-7,20"]),
    "a range backwards": (["memory.recompute_layers=7-0"], ["'memory.recompute_layers' is '7-0'", "turn it"]),
    "layers twice": (["memory.recompute_layers=0-3", "model.recompute=true"], ["recomputes all", "set that to false"]),
    "operators on the CPU": (["memory.recompute_operators=[mlp]"], ["recomputes whole layers"]),
    "unknown operator": ([ASCEND, "memory.recompute_operators=[norm]"], ["norm", "did you mean 'norms'?"]),
    "an operator twice": ([ASCEND, "memory.recompute_operators=[norms, norms]"], ["names an operator twice"]),
    "activation of mlp": ([ASCEND, "memory.recompute_operators=[mlp, activation]"], ["activation, which is in mlp"]),
}


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return lambda kind, *overrides, **options: CONFIG_LOADERS[kind](
        path, [*(GRPO if kind == "train" else BASE), *overrides], **options
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_the_value(load, mistake):
    overrides, words = MISTAKES[mistake]
    for kind in CONFIG_LOADERS:
        with pytest.raises(UserError) as error:
            load(kind, *overrides)
        assert "\n" not in str(error.value)
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize("kind", CONFIG_LOADERS)
def test_the_scale_follows_rank_and_alpha(load, kind):
    assert load(kind).lora.options is None
    assert load(kind, "lora.rank=8").lora.options.scale == 2.0
    assert load(kind, "lora.rank=16", "lora.alpha=8", "lora.rank_stabilised=true").lora.options.scale == 2.0


def test_keys_that_are_given_as_they_are_by_default_load(load):
    """As in the config.yaml that a run writes."""
    given = ["lora.rank=null", "lora.alpha=16", "lora.targets=[]", "lora.rank_stabilised=false", "lora.path=''"]
    assert load("train", *given).lora == load("train").lora


def test_what_one_kind_of_run_has_not(load):
    with pytest.raises(UserError, match="'algorithm.sync_ref_model' is true, but with lora.rank"):
        load("train", "lora.rank=8", "algorithm.beta=0.1", "algorithm.sync_ref_model=true")
    with pytest.raises(UserError, match="'model.reference_path' is set, but supervised"):
        load("sft", "model.reference_path=r")
    assert load("dpo", ASCEND, "memory.logit_tile=512").memory.logit_tile == 512
    with pytest.raises(UserError, match="no logits"):
        load("reward-model", ASCEND, "memory.logit_tile=512")


def test_offloading_needs_a_generator_on_the_same_devices(load):
    assert load("train", ASCEND, "memory.offload_optimizer=true").memory.offload_optimizer
    ahead = ["rollout.off_policy_steps=1", "rollout.env={ASCEND_RT_VISIBLE_DEVICES: '8'}"]
    for kind, more in (("train", ahead), ("sft", []), ("dpo", []), ("reward-model", [])):
        with pytest.raises(UserError, match="no generator takes turns"):
            load(kind, ASCEND, "memory.offload_optimizer=true", *more)


def test_layers_are_numbers_and_ranges():
    assert MemorySection(recompute_layers="0-2,7,5-5").layers == {0, 1, 2, 5, 7}
    assert MemorySection().layers == frozenset()
    check_num_layers(MemorySection(recompute_layers="0-7"), 8)
    with pytest.raises(UserError, match="names layer 8, but the model has 8"):
        check_num_layers(MemorySection(recompute_layers="8"), 8)
    activation = MemorySection(recompute_operators=("activation",))
    check_num_layers(activation, 8)
    with pytest.raises(UserError, match="routed experts only: take mlp"):
        check_num_layers(activation, 8, has_dense_mlps=False)


def test_ppo_is_gae_with_a_clipped_loss_and_kl_of_each_token_in_the_reward(load):
    config = load("train", "algorithm.name=ppo", "critic.path=m", "algorithm.beta=0.05", "algorithm.num_generations=1")
    algorithm = config.algorithm
    assert needs_critic(config)
    parts = (algorithm.advantage, algorithm.loss, algorithm.kl_in, algorithm.kl_estimator)
    assert parts == ("gae", "ppo_clip", "reward", "k1")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.options) == (0.2, 0.2, {})


def test_a_written_config_without_critic_loads_again(load, tmp_path):
    """It holds the critic's keys, with their defaults."""
    config = load("train")
    write_config(config, tmp_path)
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    begin, end = lines.index("critic:"), lines.index("parallel_config:")
    path = tmp_path / "again.yaml"
    path.write_text("\n".join(lines[begin:end]))
    assert load_grpo_config(path, GRPO).critic == config.critic


def test_what_the_world_size_leaves(load):
    layout = [ASCEND, "parallel_config.model_parallel=2", "parallel_config.pipeline_stage=2"]
    layout += ["parallel_config.micro_batch_num=2", "parallel_config.data_parallel=3"]
    load("train", *layout, world_size=12)
    with pytest.raises(UserError, match="set data_parallel to 2, or start 12 workers"):
        load("train", *layout, world_size=8)
    load("sft", "training.rows_per_step=32", "training.micro_batch_size=8", world_size=4)
    with pytest.raises(UserError, match=r"'training.rows_per_step' is 36, .* = 32: set it to 64"):
        load("sft", "training.rows_per_step=36", "training.micro_batch_size=8", world_size=4)
