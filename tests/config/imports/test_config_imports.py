"""Other stacks' configs as ours: every key is carried over or explained, and the numbers are those of a hand count."""

import re
from pathlib import Path

import pytest
import yaml

from mindrlhf.cli import main
from mindrlhf.config.imports.convert import STACKS, convert
from mindrlhf.config.load import load_grpo_config, load_sft_config
from mindrlhf.errors import UserError

FILES = Path(__file__).parent
EXAMPLES = {
    "mindspeed-rl": FILES / "mindspeed_rl.yaml",
    "mindrlhf": FILES / "mindrlhf.yaml",
    "trl": FILES / "trl.yaml",
    "verl": FILES / "verl.yaml",
    "openrlhf": FILES / "openrlhf.sh",
    "slime": FILES / "slime.sh",
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
    content = EXAMPLES[stack].read_text()
    is_script = EXAMPLES[stack].suffix == ".sh"
    given = names_of_flags(content) if is_script else flat_names(yaml.safe_load(content))
    mentioned = {origin for origins in result.origins.values() for origin in origins}
    mentioned |= result.dropped.keys() | result.for_user.keys()
    # A mapping on a command line is told by its keys.
    assert not {name for name in given - mentioned if not any(one.startswith(f"{name}.") for one in mentioned)}
    for name in given:
        assert name in text


def names_of_flags(script):
    """The flags behind the program, and those of the arrays; not those of `ray job submit`, nor in remarks."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    flags = re.findall(r"(?<!\S)--([a-z][\w.-]*)|\(--([a-z][\w.-]*)", "\n".join(lines))
    names = {(one or other).replace("-", "_") for one, other in flags}
    return names - {"address", "runtime_env_json"}


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
        ("trl", "loss_type: newest", "loss_type", "no loss 'newest'"),
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


def carried_over(tmp_path, stack, text, name="theirs.sh"):
    (tmp_path / name).write_text(text)
    converted, result = convert(stack, tmp_path / name)
    (tmp_path / "ours.yaml").write_text(converted)
    return load_grpo_config(tmp_path / "ours.yaml", world_size=None), result


def test_openrlhf_by_hand(tmp_path):
    config, result, _ = loaded(tmp_path, "openrlhf")
    # 128 prompts with 8 samples each are 1,024 samples; updates of 512 make 2.
    training = config.training
    assert (training.chunk_size, training.num_minibatches, training.epochs, training.num_iterations) == (128, 2, 2, 1)
    # 8,192 tokens on each of the 2 ranks that share a sequence.
    assert (training.sequence_lengths, training.micro_batch_size) == ((16384,), 1)
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.beta, algorithm.kl_in, algorithm.kl_estimator) == ("grpo", 1e-3, "loss", "k3")
    assert (algorithm.overlong_buffer, algorithm.overlong_penalty) == (1024 / 4096, 0.5)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.dynamic_sampling) == (0.2, 0.27, True)
    optimizer = config.optimizer
    assert (optimizer.start_lr, optimizer.end_lr, optimizer.lr_schedule) == (2e-6, 4e-7, "cosine")
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay) == (0.9, 0.98, 0.1)
    assert (config.correction.weight, config.correction.max_weight) == ("token", 4.0)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 64.0, ())
    assert (config.rollout.num_replicas, config.rollout.tensor_parallel) == (4, 2)
    assert config.memory.offload_optimizer and config.parallel_config.enable_parallel_optimizer
    assert (config.observe.sinks, config.observe.project) == (("tensorboard", "wandb"), "theirs")
    assert (config.evaluation.every_steps, config.evaluation.num_samples) == (10, 4)
    assert "verifier_function" in result.for_user["reward.remote_url"]


def test_flags_of_earlier_versions_of_openrlhf_are_read_as_todays(tmp_path):
    earlier = (
        "deepspeed --module openrlhf.cli.train_ppo_ray --pretrain models/policy --micro_train_batch_size 2 "
        "--train_batch_size 64 --rollout_batch_size 16 --n_samples_per_prompt 8 --advantage_estimator group_norm "
        "--actor_learning_rate 3e-6 --init_kl_coef 0 --generate_max_len 512 --prompt_max_len 256 --bf16 "
        "--use_wandb $KEY"
    )
    config, result = carried_over(tmp_path, "openrlhf", earlier)
    assert (config.model.path, config.optimizer.start_lr, config.algorithm.beta) == ("models/policy", 3e-6, 0)
    assert (config.training.num_minibatches, config.training.micro_batch_size) == (2, 2)
    assert result.origins["optimizer.start_lr"] == ["actor_learning_rate"]
    assert result.for_user["prompt_max_len"].endswith("--max-prompt-length 256")
    assert result.unknown == []


def test_slime_by_hand(tmp_path):
    config, result, _ = loaded(tmp_path, "slime")
    training, layout = config.training, config.parallel_config
    assert (training.chunk_size, training.num_minibatches, training.replay_routing) == (64, 2, True)
    assert (training.sequence_lengths, training.micro_batch_size) == ((2 * 9216,), 1)
    assert (layout.model_parallel, layout.pipeline_stage) == (4, 2)
    assert (layout.context_parallel, layout.expert_parallel) == (2, 8)
    assert layout.use_seq_parallel and layout.micro_batch_num == 2
    # 16 devices, which ranks and servers share, are 4 servers of 4.
    assert (config.rollout.num_replicas, config.rollout.tensor_parallel) == (4, 4)
    algorithm = config.algorithm
    assert (algorithm.beta, algorithm.kl_estimator, algorithm.clip_high, algorithm.aggregation) == (
        0.002, "k3", 0.28, "sequence_mean",
    )  # fmt: skip
    assert (config.correction.weight, config.correction.max_weight) == ("token", 3.0)
    assert (config.optimizer.beta2, config.memory.offload_optimizer, config.run.max_steps) == (0.98, True, 300)
    assert config.evaluation.every_steps == 10 and not config.evaluation.before_training
    advice = result.for_user["apply_chat_template_kwargs.enable_thinking"]
    assert advice.endswith("--template-option enable_thinking=false")
    assert "only the shell knows" in result.for_user["${MODEL_ARGS[@]}"]


VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "


def test_features_of_verl_that_there_are_here_are_carried_over(tmp_path):
    config, result = carried_over(
        tmp_path,
        "verl",
        VERL + "actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=64 "
        "actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj] data.max_response_length=4096 "
        "reward.reward_kwargs.overlong_buffer_cfg.enable=True reward.reward_kwargs.overlong_buffer_cfg.len=1024 "
        "+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 +reward.reward_kwargs.max_resp_len=4096 "
        "actor_rollout_ref.actor.megatron.router_replay.mode=R3 "
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True "
        'data.apply_chat_template_kwargs.enable_thinking=False trainer.logger=\'["console","swanlab"]\' '
        "trainer.project_name=theirs actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=3000 "
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16\n",
    )
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (32, 64.0, ("attention",))
    assert (config.algorithm.overlong_buffer, config.algorithm.overlong_penalty) == (0.25, 0.5)
    assert config.training.replay_routing and config.memory.offload_optimizer
    # Tokens of one rank, of which four share a sequence; the number of samples is not read beside them.
    assert (config.training.sequence_lengths, config.training.micro_batch_size) == ((12000,), 1)
    assert (config.observe.sinks, config.observe.project) == (("tensorboard", "swanlab"), "theirs")
    advice = result.for_user["data.apply_chat_template_kwargs.enable_thinking"]
    assert advice.endswith("--template-option enable_thinking=false")
    assert "reward.reward_kwargs.overlong_buffer_cfg.enable" not in result.dropped


@pytest.mark.parametrize(
    ("words", "micro_batch"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", 4),
        # 64 samples on 2 x 8 devices.
        ("actor_rollout_ref.actor.ppo_micro_batch_size=64 trainer.nnodes=2 trainer.n_gpus_per_node=8", 4),
        # 16 devices, of which 4 share a sequence, are 4 ranks.
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size=8 trainer.nnodes=2 trainer.n_gpus_per_node=8 "
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
            2,
        ),
    ],
)
def test_micro_batches_of_verl_are_those_of_one_rank(tmp_path, words, micro_batch):
    config, _ = carried_over(tmp_path, "verl", VERL + words)
    assert config.training.micro_batch_size == micro_batch


def test_two_teachers_of_verl(tmp_path):
    models = "distillation.teacher_models"
    config, _ = carried_over(
        tmp_path,
        "verl",
        VERL + f"distillation.enabled=True distillation.distillation_loss.loss_mode=forward_kl_topk "
        f"distillation.distillation_loss.topk=64 {models}.a.key=gsm8k {models}.a.model_path=teachers/math "
        f"{models}.b.key=geo3k {models}.b.model_path=teachers/geometry",
    )
    assert dict(config.distillation.teachers) == {"gsm8k": "teachers/math", "geo3k": "teachers/geometry"}
    assert (config.algorithm.name, config.algorithm.distill_top_k) == ("distill", 64)


def test_fine_tuning_of_verl_becomes_a_config_of_sft(tmp_path):
    (tmp_path / "sft.sh").write_text(
        'if [ "$#" -lt 2 ]; then echo usage; exit 1; fi\nsave_path=$2\nshift 2\n'
        "torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer data.train_files=$HOME/train.parquet "
        "data.train_batch_size=64 data.micro_batch_size_per_gpu=4 data.max_length=2048 model.path=models/base "
        "model.lora_rank=16 optim.lr=1e-4 optim.betas='[0.9,0.98]' trainer.total_epochs=2 "
        "trainer.default_local_dir=$save_path $@\n"
    )
    text, result = convert("verl", tmp_path / "sft.sh")
    (tmp_path / "ours.yaml").write_text(text)
    config = load_sft_config(tmp_path / "ours.yaml", world_size=4)
    batches = config.supervised
    assert (batches.rows_per_step, batches.micro_batch_size, batches.sequence_lengths) == (64, 4, (2048,))
    assert (batches.pack, batches.epochs, config.model.path) == (False, 2, "models/base")
    assert (config.lora.rank, config.lora.alpha, config.optimizer.beta2) == (16, 16.0, 0.98)
    assert result.for_user["trainer.default_local_dir"] == "only the shell knows $2: set run.output_dir"


def test_trl_on_a_command_line_and_in_a_program(tmp_path):
    line = (
        "accelerate launch --num_processes 4 --config_file deepspeed.yaml grpo.py --model_name_or_path models/base "
        "--learning_rate ${LR:-2e-5} --use_peft --lora_r 32 --lora_alpha 64 --lora_target_modules all-linear "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_generations 16 --output_dir $OUT "
        "--report_to wandb --run_name first --bf16 true"
    )
    config, result = carried_over(tmp_path, "trl", line)
    # 4 samples in 8 steps on 4 processes are 128, 8 prompts of 16 each.
    assert (config.training.chunk_size, config.training.num_minibatches) == (8, 1)
    assert (config.lora.rank, config.lora.alpha, config.optimizer.start_lr) == (32, 64.0, 2e-5)
    assert (config.observe.sinks, config.observe.run_name) == (("tensorboard", "wandb"), "first")
    assert result.for_user["output_dir"] == "only the shell knows $OUT: set run.output_dir"
    program = (
        "from trl import GRPOConfig\nfrom peft import LoraConfig\nRATE = 3e-6\n"
        "args = GRPOConfig(learning_rate=RATE, num_generations=4, output_dir=name(),\n"
        "    generation_kwargs={'top_p': 0.9},\n"
        "    chat_template_kwargs={'enable_thinking': False}, max_completion_length=2048)\n"
        "peft = LoraConfig(r=8, lora_alpha=16, target_modules=['q_proj', 'v_proj'], use_rslora=True)\n"
    )
    config, result = carried_over(tmp_path, "trl", program, "train.py")
    assert (config.optimizer.start_lr, config.algorithm.num_generations, config.rollout.top_p) == (3e-6, 4, 0.9)
    assert (config.lora.rank, config.lora.targets, config.lora.rank_stabilised) == (8, ("attention",), True)
    assert "q_proj, v_proj" in result.for_user["use_peft"]
    assert result.for_user["output_dir"] == "only the program knows name(): set run.output_dir"
    assert result.for_user["chat_template_kwargs"].endswith("--template-option enable_thinking=false")


def test_lora_of_mindspeed_rl(tmp_path):
    text = (
        "megatron_training: {global_batch_size: 32, lora_r: 128, lora_alpha: 256, "
        "lora_target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]}\n"
        "rl_config: {n_samples_per_prompt: 8, mini_batch_size: 32}\ngenerate_config: {offload_train_optimizer: true}\n"
    )
    config, _, _ = loaded(tmp_path, "mindspeed-rl", text)
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (128, 256.0, ())
    assert config.memory.offload_optimizer


def test_interpolations_of_hydra(tmp_path, monkeypatch):
    monkeypatch.setenv("SIZE", "7")  # the environment of this machine is not that of the run
    text = """
defaults: [ppo_trainer, _self_]
hydra: {searchpath: ['file://x']}
names: {one: models, sizes: [16, 32]}
algorithm: {adv_estimator: grpo}
data:
  max_response_length: ${oc.env:LONGEST,${oc.select:names.nothing,4096}}
  train_batch_size: ${oc.decode:${oc.env:PROMPTS,'64'}}
actor_rollout_ref:
  model: {path: "${names.one}/${.size}b", size: 7}
  actor:
    ppo_mini_batch_size: ${names.sizes[1]}
    clip_ratio_high: ${actor_rollout_ref.actor.clip_ratio_low}
    clip_ratio_low: 0.1
    grad_clip: ${.grad_clip}
    entropy_coeff: ${oc.env:ENTROPY}
  rollout: {n: "${oc.env:SIZE,8}", gpu_memory_utilization: "${eval:0.5+0.1}"}
"""
    config, result, converted = loaded(tmp_path, "verl", text)
    assert (config.model.path, config.rollout.max_response_length, config.algorithm.num_generations) == (
        "models/7b", 4096, 8,
    )  # fmt: skip
    assert (config.training.chunk_size, config.training.num_minibatches) == (64, 2)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 0.1)
    assert result.for_user["actor_rollout_ref.actor.entropy_coeff"].startswith("only the shell knows ${oc.env:ENTROPY}")
    assert "${eval:0.5+0.1}" in result.for_user["actor_rollout_ref.rollout.gpu_memory_utilization"]
    assert "does not end" in result.for_user["actor_rollout_ref.actor.grad_clip"]
    assert "$" not in "".join(line for line in converted.splitlines() if not line.startswith("#"))
    assert result.unknown == ["names.one", "names.sizes", "actor_rollout_ref.model.size"]


def test_a_recipe_of_trl_has_no_unknown_key_and_sections_in_the_order_in_which_they_are_read(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: m\ndo_eval: true\noverwrite_output_dir: true\ngradient_checkpointing: true\n"
        "gradient_checkpointing_kwargs:\n  use_reentrant: false\nnum_generations: 8\nlearning_rate: 2.0e-05\n"
        "reward_funcs: [accuracy, format, tag_count]\nreward_weights: [1.0, 0.5, 0.25]\n"
    )
    text, result = convert("trl", recipe)
    assert result.unknown == [] or not list(result.unknown)
    sections = list(yaml.safe_load(text))
    assert sections[:2] == ["run", "model"] and sections.index("data") < sections.index("optimizer")
    assert yaml.safe_load(text)["reward"] == {"verifier_function": ["accuracy_reward"]}
    assert "1.0,0.5,0.25" in result.for_user["reward_weights"]


def test_a_script_without_a_command_names_the_other_stacks_only(tmp_path):
    script = tmp_path / "moved.sh"
    script.write_text("echo This example has moved >&2\nexit 1\n")
    with pytest.raises(UserError, match="no key of verl: is it one of mindspeed-rl, mindrlhf, trl, openrlhf"):
        convert("verl", script)
