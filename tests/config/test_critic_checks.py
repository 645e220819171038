"""The critic's keys: required with GAE, refused without it, and the preset ppo that puts both together."""

import pytest

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.parse import write_config
from mindrlhf.errors import UserError

BASE = ["model.path=m", "data.train_file=p", "data.tokenizer_dir=t", "reward.verifier_function=accuracy_reward"]

# The overrides that break a rule; words of the message; overrides that mend it.
RULES = {
    "GAE without a critic": (
        ["algorithm.advantage=gae"],
        ["'critic.path' is empty", "the advantages of gae need a critic", "model.path (m)", "such as grpo"],
        ["critic.path=m"],
    ),
    "PPO without a critic": (
        ["algorithm.name=ppo"],
        ["'critic.path' is empty", "set it to a reward model"],
        ["critic.path=reward"],
    ),
    "a critic that nothing asks": (
        ["critic.path=m"],
        ["'critic.path' is set", "the advantages of grpo use no critic", "set algorithm.name to ppo"],
        ["algorithm.name=ppo"],
    ),
    "a warm-up of no critic": (
        ["algorithm.name=rloo", "critic.warmup_steps=3"],
        ["'critic.warmup_steps' is set", "rloo use no critic"],
        ["critic.warmup_steps=0"],
    ),
    "an end that is not reached": (
        ["algorithm.name=ppo", "critic.path=m", "critic.end_lr=0"],
        ["'critic.end_lr' is 0", "lr_schedule=constant never reaches it"],
        ["optimizer.lr_schedule=linear", "optimizer.end_lr=0"],
    ),
    "GAE under one ratio for a response": (
        ["algorithm.name=ppo", "critic.path=m", "algorithm.loss=gspo"],
        ["'algorithm.loss' is gspo", "the advantages of gae differ from token to token"],
        ["algorithm.loss=gspo_token"],
    ),
}


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return lambda *overrides: load_grpo_config(path, [*BASE, *overrides])


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_explained_and_the_named_fix_mends_it(load, rule):
    overrides, words, fix = RULES[rule]
    with pytest.raises(UserError) as error:
        load(*overrides)
    for word in words:
        assert word in str(error.value)
    load(*overrides, *fix)


def test_ppo_is_gae_with_a_clipped_loss_and_kl_of_each_token_in_the_reward(load):
    config = load("algorithm.name=ppo", "critic.path=m", "algorithm.beta=0.05")
    algorithm = config.algorithm
    assert needs_critic(config)
    assert (algorithm.advantage, algorithm.loss, algorithm.kl_in, algorithm.kl_estimator) == (
        "gae",
        "ppo_clip",
        "reward",
        "k1",
    )
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.gamma, algorithm.gae_lambda) == (0.2, 0.2, 1.0, 0.95)


def test_one_sample_for_each_prompt_is_enough(load):
    assert load("algorithm.name=ppo", "critic.path=m", "algorithm.num_generations=1").algorithm.num_generations == 1


def test_a_written_config_without_critic_loads_again(load, tmp_path):
    """It holds the critic's keys, with their defaults."""
    config = load()
    write_config(config, tmp_path)
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    begin, end = lines.index("critic:"), lines.index("parallel_config:")
    path = tmp_path / "again.yaml"
    path.write_text("\n".join(lines[begin:end]))
    assert load_grpo_config(path, BASE).critic == config.critic
