"""The keys of adapters: what they may be, and what goes with them."""

import pytest

from mindrlhf.config.load import load_dpo_config, load_grpo_config, load_reward_model_config, load_sft_config
from mindrlhf.errors import UserError

BASE = ["model.path=m", "data.train_file=p", "data.tokenizer_dir=t"]
GRPO = [*BASE, "reward.verifier_function=accuracy_reward"]
LOADERS = {"train": load_grpo_config, "sft": load_sft_config, "dpo": load_dpo_config, "rm": load_reward_model_config}

# The overrides that break a rule, and words of the message.
MISTAKES = {
    "rank 0": (["lora.rank=0"], ["'lora.rank' is 0", "at least 1"]),
    "rank of a half": (["lora.rank=0.5"], ["'lora.rank' must be", "0.5"]),
    "negative alpha": (["lora.rank=8", "lora.alpha=-16"], ["'lora.alpha' is -16", "greater than 0"]),
    "unknown target": (["lora.rank=8", "lora.targets=[attention, mpl]"], ["mpl", "did you mean 'mlp'?"]),
    "a target twice": (["lora.rank=8", "lora.targets=[mlp, mlp]"], ["'lora.targets' names a role twice"]),
    "alpha without rank": (["lora.alpha=32"], ["'lora.alpha' is set, but read only with lora.rank"]),
    "a path without rank": (["lora.path=adapter"], ["'lora.path' is set, but read only with lora.rank"]),
}


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return lambda kind, *overrides: LOADERS[kind](path, [*(GRPO if kind == "train" else BASE), *overrides])


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_the_value(load, kind, mistake):
    overrides, words = MISTAKES[mistake]
    with pytest.raises(UserError) as error:
        load(kind, *overrides)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_scale_follows_rank_and_alpha(load, kind):
    assert load(kind).lora.options is None
    assert load(kind, "lora.rank=8").lora.options.scale == 2.0
    assert load(kind, "lora.rank=16", "lora.alpha=8", "lora.rank_stabilised=true").lora.options.scale == 2.0


def test_a_reference_that_follows_the_policy_needs_weights_of_its_own(load):
    with pytest.raises(UserError, match="'algorithm.sync_ref_model' is true, but with lora.rank"):
        load("train", "lora.rank=8", "algorithm.beta=0.1", "algorithm.sync_ref_model=true")


def test_keys_that_are_given_as_they_are_by_default_load(load):
    """As in the config.yaml that a run writes."""
    given = ["lora.rank=null", "lora.alpha=16", "lora.targets=[]", "lora.rank_stabilised=false", "lora.path=''"]
    assert load("train", *given).lora == load("train").lora
