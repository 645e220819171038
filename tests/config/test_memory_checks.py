"""The keys of the section `memory`: what they may be, and what goes with them."""

import pytest

from mindrlhf.config.load import load_dpo_config, load_grpo_config, load_reward_model_config, load_sft_config
from mindrlhf.config.memory import MemorySection, check_num_layers
from mindrlhf.errors import UserError

BASE = ["model.path=m", "data.train_file=p", "data.tokenizer_dir=t"]
LOADERS = {"train": load_grpo_config, "sft": load_sft_config, "dpo": load_dpo_config, "rm": load_reward_model_config}
ASCEND = "run.device=ascend"

# The overrides that break a rule, and words of the message.
MISTAKES = {
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
    rewards = ["reward.verifier_function=accuracy_reward"]
    return lambda kind, *overrides: LOADERS[kind](path, [*BASE, *(rewards if kind == "train" else ()), *overrides])


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_the_value(load, kind, mistake):
    overrides, words = MISTAKES[mistake]
    with pytest.raises(UserError) as error:
        load(kind, *overrides)
    for word in words:
        assert word in str(error.value)


def test_a_reward_model_has_no_logits(load):
    assert load("dpo", ASCEND, "memory.logit_tile=512").memory.logit_tile == 512
    with pytest.raises(UserError, match="no logits"):
        load("rm", ASCEND, "memory.logit_tile=512")


def test_offloading_needs_a_generator_on_the_same_devices(load):
    assert load("train", ASCEND, "memory.offload_optimizer=true").memory.offload_optimizer
    ahead = ["rollout.off_policy_steps=1", "rollout.env={ASCEND_RT_VISIBLE_DEVICES: '8'}"]
    for kind, more in (("train", ahead), ("sft", []), ("dpo", []), ("rm", [])):
        with pytest.raises(UserError, match="no generator takes turns"):
            load(kind, ASCEND, "memory.offload_optimizer=true", *more)


def test_layers_are_numbers_and_ranges():
    assert MemorySection(recompute_layers="0-2,7,5-5").layers == {0, 1, 2, 5, 7}
    assert MemorySection().layers == frozenset()
    check_num_layers(MemorySection(recompute_layers="0-7"), 8)
    with pytest.raises(UserError, match="names layer 8, but the model has 8"):
        check_num_layers(MemorySection(recompute_layers="8"), 8)


def test_routed_experts_have_no_activation_of_their_own():
    activation = MemorySection(recompute_operators=("activation",))
    check_num_layers(activation, 8)
    with pytest.raises(UserError, match="routed experts only: take mlp"):
        check_num_layers(activation, 8, has_dense_mlps=False)
