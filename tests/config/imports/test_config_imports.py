"""Other stacks' configs as ours: every key is carried over or explained, and the numbers are those of a hand count."""

from pathlib import Path

import pytest
import yaml

from mindrlhf.cli import main
from mindrlhf.config.imports.convert import STACKS, convert
from mindrlhf.config.load import load_grpo_config
from mindrlhf.errors import UserError

FILES = Path(__file__).parent
EXAMPLES = {
    "mindspeed-rl": FILES / "mindspeed_rl.yaml",
    "mindrlhf": FILES / "mindrlhf.yaml",
    "trl": FILES / "trl.yaml",
    "verl": FILES / "verl.yaml",
}


def loaded(tmp_path, stack, text=None, num_processes=4):
    """Convert, write, and read what was written as `mindrlhf train` would."""
    source = EXAMPLES[stack]
    if text is not None:
        source = tmp_path / "theirs.yaml"
        source.write_text(text)
    converted, result = convert(stack, source, num_processes)
    ours = tmp_path / "ours.yaml"
    ours.write_text(converted)
    return load_grpo_config(ours, world_size=None), result, converted


@pytest.mark.parametrize("stack", STACKS)
def test_every_known_key_is_carried_over_or_explained(tmp_path, stack):
    _, result, text = loaded(tmp_path, stack)
    assert result.unknown == []
    given = flat_names(yaml.safe_load(EXAMPLES[stack].read_text()))
    mentioned = {origin for origins in result.origins.values() for origin in origins}
    missing = given - mentioned - result.dropped.keys() - result.for_user.keys()
    assert not missing
    for name in given:
        assert name in text


def flat_names(content, prefix=""):
    names = set()
    for name, value in content.items():
        if isinstance(value, dict) and value:
            names |= flat_names(value, f"{prefix}{name}.")
        elif value is not None:
            names.add(prefix + name)
    return names


def test_mindspeed_rl_by_hand(tmp_path):
    config, result, _ = loaded(tmp_path, "mindspeed-rl")
    # 64 prompts with 8 samples each are 512 samples; updates of 128 make 4.
    assert (config.training.chunk_size, config.training.num_rollouts, config.training.num_minibatches) == (64, 1, 4)
    training = config.training
    assert (training.sequence_lengths, training.micro_batch_size, training.pack) == ((8192,), 1, True)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert (config.algorithm.beta, config.algorithm.kl_in, config.algorithm.kl_estimator) == (0.001, "loss", "k3")
    assert config.algorithm.overlong_buffer == 512 / 2048
    assert (config.optimizer.start_lr, config.optimizer.end_lr, config.optimizer.lr_schedule) == (1e-6, 1e-7, "cosine")
    layout = config.parallel_config
    assert (layout.model_parallel, layout.pipeline_stage, layout.micro_batch_num) == (4, 2, 2)
    assert (layout.use_seq_parallel, layout.enable_parallel_optimizer) == (True, True)
    assert (config.rollout.tensor_parallel, config.rollout.max_response_length, config.rollout.top_k) == (4, 2048, 0)
    assert config.reward.verifier_function == ("base_acc",) and config.reward.timeout_s == 120
    assert "data build" in result.for_user["megatron_training.data_path"]


def test_mindrlhf_by_hand(tmp_path):
    config, _, _ = loaded(tmp_path, "mindrlhf")
    training = config.training
    assert (training.chunk_size, training.num_rollouts, training.sequence_lengths) == (2, 4, (8192,))
    assert (config.run.device, config.run.deterministic, config.run.seed) == ("ascend", False, 3)
    layout = config.parallel_config
    assert (layout.data_parallel, layout.model_parallel, layout.pipeline_stage, layout.micro_batch_num) == (1, 4, 2, 2)
    assert config.algorithm.sync_ref_model and config.algorithm.ref_model_sync_steps == 50
    assert (config.rollout.temperature, config.rollout.top_p, config.rollout.top_k) == (0.8, 0.8, 20)
    assert (config.rollout.num_replicas, config.rollout.tensor_parallel) == (2, 4)
    assert config.reward.verifier_weight == (1.0, 0.5)
    assert (config.optimizer.start_lr, config.optimizer.end_lr, config.optimizer.warmup_steps) == (5e-7, 1e-10, 10)


def test_trl_by_hand(tmp_path):
    config, _, _ = loaded(tmp_path, "trl")
    # An update takes 4 x 8 x 4 processes = 128 samples, 16 of 8 steps are drawn at once: 256, 16 prompts of 16 each.
    assert (config.training.chunk_size, config.training.num_minibatches) == (16, 2)
    assert (config.algorithm.loss, config.algorithm.dual_clip) == ("dual_clip", 4.0)
    assert (config.algorithm.aggregation, config.algorithm.scale_rewards) == ("sequence_sum", False)
    assert (config.correction.weight, config.correction.max_weight) == ("token", 2.0)
    assert config.optimizer.weight_decay == 0.1 and config.optimizer.beta1 == 0.9
    assert (config.checkpoint.every_steps, config.checkpoint.keep_last) == (25, 3)


def test_verl_by_hand(tmp_path):
    config, result, _ = loaded(tmp_path, "verl")
    assert (config.training.chunk_size, config.training.num_minibatches, config.training.num_iterations) == (512, 8, 2)
    assert (config.training.sequence_lengths, config.training.micro_batch_size) == ((12288,), 1)
    # verl's plain loss has the second clip, at clip_ratio_c.
    assert (config.algorithm.loss, config.algorithm.dual_clip) == ("dual_clip", 10.0)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.26)
    assert (config.algorithm.beta, config.algorithm.kl_estimator, config.algorithm.kl_in) == (0.002, "k3", "loss")
    assert config.algorithm.dynamic_sampling and config.algorithm.num_generations == 8
    assert (config.optimizer.end_lr, config.optimizer.max_grad_norm) == (3e-7, 0.5)
    # A reference to another key is followed.
    assert config.rollout.max_response_length == 4096
    assert (config.evaluation.every_steps, config.evaluation.num_samples, config.evaluation.temperature) == (5, 4, 0.7)
    assert config.run.device == "ascend"
    assert "my.py:score" in result.for_user["reward.custom_reward_function.path"]


def test_what_their_file_leaves_out_is_their_default_not_ours(tmp_path):
    text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 8}}\n"
    config, _, text = loaded(tmp_path, "verl", text)
    # verl: 1,024 prompts in updates of 256, both clips 0.2, beta2 0.999, greedy evaluation.
    assert (config.training.chunk_size, config.training.num_minibatches) == (1024, 4)
    assert (config.algorithm.clip_high, config.optimizer.beta2, config.algorithm.beta) == (0.2, 0.999, 0.0)
    assert "(default)" in text
    config, _, _ = loaded(tmp_path, "trl", "num_generations: 4\n", num_processes=1)
    # TRL: 8 samples a step, learning rate 1e-6 that falls to 0, sequences off by more than 3 left out only with vLLM.
    assert (config.training.chunk_size, config.optimizer.lr_schedule, config.optimizer.end_lr) == (2, "linear", 0.0)
    assert config.correction.mask == "none"


def test_a_script_with_overrides_is_read(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "set -x\nbs=128  # prompts\npython3 -m verl.trainer.main_ppo \\\n"
        "  algorithm.adv_estimator=gae critic.model.path=models/critic critic.optim.lr=2e-5 \\\n"
        "  data.train_batch_size=${bs} actor_rollout_ref.actor.ppo_mini_batch_size=32 "
        "actor_rollout_ref.model.path=models/qwen algorithm.use_kl_in_reward=True +trainer.made_up=3 $@\n"
    )
    text, result = convert("verl", script)
    (tmp_path / "ours.yaml").write_text(text)
    config = load_grpo_config(tmp_path / "ours.yaml", world_size=None)
    assert (config.algorithm.advantage, config.critic.path, config.critic.start_lr) == ("gae", "models/critic", 2e-5)
    assert (config.training.chunk_size, config.training.num_minibatches) == (128, 4)
    assert (config.algorithm.kl_in, config.algorithm.kl_estimator, config.algorithm.beta) == ("reward", "k1", 0.001)
    assert result.unknown == ["trainer.made_up"] and "trainer.made_up" in text


@pytest.mark.parametrize(
    ("stack", "text", "name", "words"),
    [
        ("verl", "algorithm: {adv_estimator: opo}", "algorithm.adv_estimator", "no estimator 'opo'"),
        ("verl", "actor_rollout_ref: {actor: {ppo_mini_batch_size: 100}}", None, "1024 is no multiple of 100"),
        ("verl", "actor_rollout_ref: {actor: {policy_loss: {loss_mode: clip_cov}}}", None, "clip_cov has no"),
        ("verl", "actor_rollout_ref: {rollout: {name: sglang}}", "actor_rollout_ref.rollout.name", "vLLM"),
        ("trl", "loss_type: luspo", "loss_type", "no loss 'luspo'"),
        ("trl", "scale_rewards: batch", "scale_rewards", "no counterpart"),
        ("trl", "num_generations: [1]", "num_generations", None),
        ("mindspeed-rl", "rl_config: {kl_penalty: full}", "rl_config.kl_penalty", "no estimate 'full'"),
        ("mindrlhf", "context: {device_target: GPU}", "context.device_target", "neither Ascend nor CPU"),
    ],
)
def test_what_cannot_be_carried_over_is_left_to_the_user_by_name(tmp_path, stack, text, name, words):
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    converted, result = convert(stack, file)
    if words is None:  # the value itself is refused by the check of ours
        (tmp_path / "ours.yaml").write_text(converted)
        with pytest.raises(UserError, match=name):
            load_grpo_config(tmp_path / "ours.yaml", world_size=None)
    else:
        ((key, advice),) = [item for item in result.for_user.items() if words in item[1]]
        assert name in (None, key) and key in converted and advice in converted


def test_the_command(tmp_path, capsys):
    output = tmp_path / "ours.yaml"
    assert main(["config", "import", "--from", "trl", str(EXAMPLES["trl"]), "--output", str(output)]) == 0
    assert "mindrlhf config: max_prompt_length: give it to mindrlhf data build" in capsys.readouterr().err
    assert main(["config", "import", "--from", "trl", str(EXAMPLES["trl"])]) == 0
    assert capsys.readouterr().out == output.read_text()
    for content, words in (("- 1\n", "no config"), ("a: [", "no YAML"), ("x: 1\n", "no key of verl")):
        (tmp_path / "bad.yaml").write_text(content)
        assert main(["config", "import", "--from", "verl", str(tmp_path / "bad.yaml")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
