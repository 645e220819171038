"""Other stacks' configs as ours: every key is carried over or explained, and the numbers are those of a hand count."""

import inspect
from pathlib import Path

import pytest
import yaml

from mindrlhf.cli import main
from mindrlhf.commands.config import STACK_NAMES
from mindrlhf.commands.launch_script import commands_of
from mindrlhf.config.imports.convert import STACKS, convert
from mindrlhf.config.load import load_grpo_config
from mindrlhf.config.schema import GrpoConfig

FILES = Path(__file__).parent
EXAMPLES = {
    "mindspeed-rl": FILES / "mindspeed_rl.yaml",
    "mindrlhf": FILES / "mindrlhf.yaml",
    "trl": FILES / "trl.yaml",
    "verl": FILES / "verl.yaml",
}


def loaded(tmp_path, stack, text=None, num_processes=0, name="theirs.yaml"):
    """Convert, write, and read what was written as `mindrlhf train` would."""
    source = EXAMPLES[stack]
    if text is not None:
        source = tmp_path / name
        source.write_text(text)
    converted, result = convert(stack, source, run_script=commands_of, num_processes=num_processes)
    ours = tmp_path / "ours.yaml"
    ours.write_text(converted)
    return load_grpo_config(ours, world_size=None), result, converted


@pytest.mark.parametrize("stack", STACKS)
def test_every_known_key_is_carried_over_or_explained(tmp_path, stack):
    _, result, text = loaded(tmp_path, stack)
    given = flat_names(yaml.safe_load(EXAMPLES[stack].read_text()))
    mentioned = {origin for origins in result.origins.values() for origin in origins}
    mentioned |= {*result.without, *result.for_user}
    # A mapping on a command line is told by its keys.
    assert not {name for name in given - mentioned if not any(key.startswith(f"{name}.") for key in mentioned)}
    for name in given:
        assert name in text


def test_every_table_gives_keys_that_there_are():
    keys = {f"{section}.{key}" for section, names in keys_of(GrpoConfig).items() for key in names}
    assert set(STACKS) == set(STACK_NAMES)
    for stack, module in STACKS.items():
        targets = {".".join(key.split(".")[:2]) for key, _ in module.TABLE.values()} - {""}
        assert targets <= keys, stack
        assert len(targets) > 30


def keys_of(config):
    sections = config.__dataclass_fields__.values()
    return {section.name: section.metadata["section"].__dataclass_fields__ for section in sections}


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
    assert (training.sequence_lengths, training.micro_batch_size, training.packing) == ((8192,), 1, "first_fit")
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert (config.algorithm.beta, config.algorithm.kl_in, config.algorithm.kl_estimator) == (0.001, "loss", "k3")
    assert config.algorithm.overlong_buffer == 512 / 2048
    assert (config.optimizer.start_lr, config.optimizer.end_lr, config.optimizer.lr_schedule) == (1e-6, 1e-7, "cosine")
    layout = config.parallel_config
    assert (layout.model_parallel, layout.pipeline_stage, layout.micro_batch_num) == (4, 2, 2)
    assert (layout.use_seq_parallel, layout.enable_parallel_optimizer) == (True, True)
    assert (config.rollout.tensor_parallel, config.rollout.max_response_length, config.rollout.top_k) == (4, 2048, 0)
    assert config.rollout.num_replicas == 16 // 4
    assert config.reward.verifier_function == ("base_acc",) and config.reward.timeout_s == 120
    assert "data build" in result.for_user["megatron_training.data_path"]


@pytest.mark.parametrize("stack", STACKS)
def test_conversions_take_a_value_and_its_source(stack):
    for key, (_, conversion) in STACKS[stack].TABLE.items():
        if callable(conversion) and not isinstance(conversion, type):
            assert inspect.signature(conversion).bind("value", "source"), key


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
    config, _, _ = loaded(tmp_path, "trl", num_processes=4)
    # An update takes 4 x 8 x 4 processes = 128 samples, 16 of 8 steps are drawn at once: 256, 16 prompts of 16 each.
    assert (config.training.chunk_size, config.training.num_minibatches) == (16, 2)
    assert (config.algorithm.loss, config.algorithm.options.get("dual_clip")) == ("dual_clip", 4.0)
    assert (config.algorithm.aggregation, config.algorithm.advantage) == ("sequence_sum", "dr_grpo")
    assert (config.correction.weight, config.correction.max_weight) == ("token", 2.0)
    assert config.optimizer.weight_decay == 0.1 and config.optimizer.beta1 == 0.9
    assert (config.checkpoint.every_steps, config.checkpoint.keep_last) == (25, 3)


def test_verl_by_hand(tmp_path):
    config, result, _ = loaded(tmp_path, "verl")
    assert (config.training.chunk_size, config.training.num_minibatches, config.training.num_iterations) == (512, 8, 2)
    assert (config.training.sequence_lengths, config.training.micro_batch_size) == ((12288,), 1)
    # verl's plain loss has the second clip, at clip_ratio_c.
    assert (config.algorithm.loss, config.algorithm.options.get("dual_clip")) == ("dual_clip", 10.0)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.26)
    assert (config.algorithm.beta, config.algorithm.kl_estimator, config.algorithm.kl_in) == (0.002, "k3", "loss")
    assert config.algorithm.dynamic_sampling and config.algorithm.num_generations == 8
    assert (config.optimizer.end_lr, config.optimizer.max_grad_norm) == (3e-7, 0.5)
    assert config.rollout.max_response_length == 4096
    assert (config.evaluation.every_steps, config.evaluation.num_samples, config.evaluation.temperature) == (5, 4, 0.7)
    assert config.run.device == "ascend"
    assert "reward.verifier_function" in result.for_user["reward.custom_reward_function.path"]


def test_what_their_file_leaves_out_is_their_default_not_ours(tmp_path):
    text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 8}}\n"
    config, _, text = loaded(tmp_path, "verl", text)
    # verl: 1,024 prompts in updates of 256, both clips 0.2, beta2 0.999, greedy evaluation.
    assert (config.training.chunk_size, config.training.num_minibatches) == (1024, 4)
    assert (config.algorithm.clip_high, config.optimizer.beta2, config.algorithm.beta) == (0.2, 0.999, 0.0)
    assert "(default)" in text
    config, _, _ = loaded(tmp_path, "trl", "num_generations: 4\n")
    # TRL: 8 samples a step, learning rate 1e-6 that falls to 0, sequences off by more than 3 left out only with vLLM.
    assert (config.training.chunk_size, config.optimizer.lr_schedule, config.optimizer.end_lr) == (2, "linear", 0.0)
    assert config.correction.mask == "none"


VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "


def test_a_script_of_verl(tmp_path):
    script = (
        "set -xeuo pipefail\nbs=128  # prompts\nmkdir -p logs\npython3 -m verl.trainer.main_ppo \\\n"
        "  algorithm.adv_estimator=gae critic.model.path=models/critic critic.optim.lr=2e-5 \\\n"
        "  data.train_batch_size=${bs} actor_rollout_ref.actor.ppo_mini_batch_size=32 "
        "actor_rollout_ref.model.path=models/qwen algorithm.use_kl_in_reward=True +trainer.made_up=3 "
        "data.val_files=$HOME/test.parquet trainer.test_freq=5 trainer.default_local_dir=$HOME/x "
        "data.max_response_length=1024 actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.nnodes=2 "
        "trainer.total_training_steps=$2 $@ > logs/log.txt 2>&1 &\n"
    )
    config, result, text = loaded(tmp_path, "verl", script, name="run.sh")
    assert (config.algorithm.advantage, config.critic.path, config.critic.start_lr) == ("gae", "models/critic", 2e-5)
    assert (config.training.chunk_size, config.training.num_minibatches) == (128, 4)
    assert (config.algorithm.kl_in, config.algorithm.kl_estimator, config.algorithm.beta) == ("reward", "k1", 0.001)
    assert "trainer.made_up" in result.without and "trainer.made_up" in text
    # 512 tokens of a prompt are verl's default, as are 8 devices of a node; 16 of them hold 8 servers of 2.
    assert config.training.sequence_lengths == (512 + 1024,) and config.data.tokenizer_dir == "models/qwen"
    assert (config.rollout.tensor_parallel, config.rollout.num_replicas) == (2, 8)
    assert config.parallel_config.enable_parallel_optimizer
    # A path that only the shell knows has a placeholder, and keys that count beside it stay.
    assert (config.data.eval_file, config.evaluation.every_steps) == ("path/to/eval.mindrecord", 5)
    assert config.evaluation.temperature == 0
    advice = result.for_user["trainer.default_local_dir"]
    assert advice == "depends on $HOME, which the importer does not read: set run.output_dir"
    assert result.for_user["trainer.total_training_steps"].endswith("set run.max_steps")


def test_features_of_verl_that_there_are_here_are_carried_over(tmp_path):
    script = VERL + (
        "actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=64 "
        "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj] data.max_response_length=4096 "
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=1024 "
        "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 +reward.reward_kwargs.max_resp_len=4096 "
        "actor_rollout_ref.actor.megatron.router_replay.mode=R3 "
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True "
        'data.apply_chat_template_kwargs.enable_thinking=False trainer.logger=\'["console","swanlab"]\' '
        "trainer.project_name=theirs actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000 "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16\n"
    )
    config, result, _ = loaded(tmp_path, "verl", script, name="run.sh")
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 64.0, ("attention",))
    assert config.algorithm.overlong_buffer == 0.25 and "the penalty is 1 here" in str(result.for_user)
    assert config.training.replay_routing and config.memory.offload_optimizer
    # Tokens of one rank, of which four share a sequence; the number of samples is not read beside them.
    assert (config.training.sequence_lengths, config.training.micro_batch_size) == ((12000,), 1)
    assert (config.observe.sinks, config.observe.project) == (("tensorboard", "swanlab"), "theirs")
    advice = result.for_user["data.apply_chat_template_kwargs.enable_thinking"]
    assert advice.endswith("--template-option enable_thinking=false")


def test_a_command_line_of_trl(tmp_path):
    line = (
        "accelerate launch --num_processes 4 --config_file deepspeed.yaml grpo.py --model_name_or_path models/base "
        "--learning_rate ${LR:-2e-5} --use_peft --lora_r 32 --lora_alpha 64 --lora_target_modules q_proj v_proj "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_generations 16 --output_dir $OUT "
        "--report_to wandb --run_name first --bf16 true"
    )
    config, result, _ = loaded(tmp_path, "trl", line, name="run.sh")
    # 4 samples in 8 steps on 4 processes are 128, 8 prompts of 16 each.
    assert (config.training.chunk_size, config.training.num_minibatches) == (8, 1)
    assert (config.lora.rank, config.lora.alpha, config.optimizer.start_lr) == (32, 64.0, 2e-5)
    assert config.lora.targets == ("attention",) and "q_proj, v_proj" in result.for_user["use_peft"]
    assert config.observe.sinks == ("tensorboard", "wandb")
    assert "run.output_dir" in result.for_user["run_name"]
    assert result.for_user["output_dir"] == "depends on $OUT, which the importer does not read: set run.output_dir"


def test_lora_of_mindspeed_rl(tmp_path):
    text = (
        "megatron_training: {global_batch_size: 32, lora_r: 128, lora_alpha: 256, "
        "lora_target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}\n"
        "rl_config: {n_samples_per_prompt: 8, mini_batch_size: 32}\ngenerate_config: {offload_train_optimizer: true}\n"
    )
    config, _, _ = loaded(tmp_path, "mindspeed-rl", text)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (128, 256.0, ())
    assert config.memory.offload_optimizer


@pytest.mark.parametrize(
    ("stack", "text", "name", "words"),
    [
        ("verl", "algorithm: {adv_estimator: opo}", "algorithm.adv_estimator", "no estimator 'opo'"),
        ("verl", "actor_rollout_ref: {actor: {ppo_mini_batch_size: 100}}", None, "1024 is no multiple of 100"),
        ("verl", "actor_rollout_ref: {actor: {policy_loss: {loss_mode: clip_cov}}}", None, "clip_cov has no"),
        ("verl", "actor_rollout_ref: {rollout: {name: sglang}}", "actor_rollout_ref.rollout.name", "vLLM"),
        ("verl", "actor_rollout_ref: {actor: {grad_clip: '${.x}'}}", None, "depends on ${.x}, which the importer"),
        ("trl", "loss_type: newest", "loss_type", "no loss 'newest'"),
        ("trl", "scale_rewards: batch", "scale_rewards", "no counterpart"),
        ("mindspeed-rl", "rl_config: {kl_penalty: full}", "rl_config.kl_penalty", "full has no counterpart"),
        ("mindrlhf", "context: {device_target: GPU}", "context.device_target", "knows ascend, cpu"),
    ],
)
def test_what_cannot_be_carried_over_is_left_to_the_user_by_name(tmp_path, stack, text, name, words):
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    converted, result = convert(stack, file, run_script=commands_of)
    ((key, advice),) = [item for item in result.for_user.items() if words in item[1]]
    assert name in (None, key) and key in converted and advice in converted


def test_the_command(tmp_path, capsys):
    output = tmp_path / "ours.yaml"
    assert main(["config", "import", "--from", "trl", str(EXAMPLES["trl"]), "--output", str(output)]) == 0
    assert "mindrlhf config: max_prompt_length: give it to mindrlhf data build" in capsys.readouterr().err
    assert main(["config", "import", "--from", "trl", str(EXAMPLES["trl"])]) == 0
    assert capsys.readouterr().out == output.read_text()
    for words in ([str(EXAMPLES["verl"]), "trainer.seed=5"], ["algorithm.adv_estimator=grpo", "trainer.seed=5"]):
        assert main(["config", "import", "--from", "verl", *words]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["run"]["seed"] == 5
    (tmp_path / "bad.yaml").mkdir()
    for name, content, words in (
        ("a.yaml", "- 1\n", "no keys"),
        ("b.yaml", "a: [", "no config in YAML"),
        ("c.yaml", "x: 1\n", "reinforcement learning is read"),
        ("sft.sh", "torchrun -m verl.trainer.sft_trainer model.path=m optim.lr=1e-4", "reinforcement learning is read"),
        ("moved.sh", "echo This example has moved >&2\nexit 1\n", "no key of verl is there"),
        ("train.py", "GRPOConfig()", "is a program"),
        ("bad.yaml", None, "cannot be read"),
        ("missing.yaml", None, "cannot be read"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        assert main(["config", "import", "--from", "verl", str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
