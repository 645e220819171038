"""The critic's keys: required with GAE, refused without it, and the preset ppo that puts both together."""

import pytest

from mindrlhf.config.derived import needs_critic
from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.parse import write_config

BASE = ["model.path=m", "data.train_file=p", "data.tokenizer_dir=t", "reward.verifier_function=accuracy_reward"]

@pytest.fixture
def load(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    return lambda *overrides: load_grpo_config(path, [*BASE, *overrides])


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
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.options) == (0.2, 0.2, {})


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
