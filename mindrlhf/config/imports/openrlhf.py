"""OpenRLHF: the flags of `openrlhf.cli.train_ppo_ray`.

Names and defaults after openrlhf/cli/train_ppo_ray.py of that project (0.10); flags of its earlier versions, which have
no sections, are read as the later ones. A batch for training counts samples there, one for generation prompts.
"""

from typing import Any

from mindrlhf.config.imports.rules import (
    NoCounterpartError,
    Rule,
    Source,
    Values,
    by_hand,
    choice,
    each,
    into,
    to,
    where_given,
    without,
)
from mindrlhf.config.imports.shared import (
    CLIP_KEYS,
    KERNELS,
    LORA_KEYS,
    OVERLONG_KEYS,
    PROMPT_KEYS,
    ROW_KEYS,
    clip,
    flag,
    is_on,
    kl_estimator,
    lora,
    only,
    only_of_gae,
    overlong_buffer,
    positive,
    prompt_length,
    prompts,
    rows_of_tokens,
    schedule,
    warmup_share,
    whole,
)

_ADVANTAGES = {
    "gae": ("ppo", "gae"),
    "reinforce": ("reinforce_pp", "reinforce_pp"),
    "reinforce_baseline": ("reinforce_pp_baseline", "reinforce_pp_baseline"),
    "rloo": ("rloo", "rloo"),
    "group_norm": ("grpo", "grpo"),
    "dr_grpo": ("dr_grpo", "dr_grpo"),
}


def _advantage(value: Any, source: Source) -> Values:
    if str(value) not in _ADVANTAGES:
        raise NoCounterpartError(f"no estimator {value!r}: algorithm.advantage knows those in docs/algorithms.md")
    name, advantage = _ADVANTAGES[value]
    values: Values = {"algorithm.name": name, "algorithm.advantage": advantage}
    if value == "gae":
        # After train_ppo_ray: the reward model where there is one, else the actor.
        names = ("critic.model_name_or_path", "reward.model_name_or_path", "actor.model_name_or_path")
        path = next(filter(None, (source.given.get(name) for name in names)), "path/to/model")
        values["critic.path"] = str(path).split(",")[0]
    return values


def _minibatches(value: Any, source: Source) -> Values:
    samples = int(source.get("rollout.batch_size")) * int(source.get("rollout.n_samples_per_prompt"))
    return {"training.num_minibatches": whole(samples, value, "samples of a step and of an update")}


def _kl(value: Any, source: Source) -> Values:
    values: Values = {
        "algorithm.beta": float(value),
        "algorithm.kl_in": "loss" if is_on(source.get("algo.kl.use_loss")) else "reward",
        "algorithm.kl_estimator": kl_estimator(source.get("algo.kl.estimator", "k1")),
    }
    if float(value) and source.get("algo.kl.target") is not None:
        values["algorithm.kl_target"] = float(source.get("algo.kl.target"))
    return values


def _clip(value: Any, source: Source) -> Values:
    low, high = source.get("actor.eps_clip_low_high") or (value, value)
    return clip(low, high)


def _dual_clip(value: Any, source: Source) -> Values:
    return {"algorithm.loss": "dual_clip", "algorithm.dual_clip": float(value)}


def _longest(value: Any, source: Source) -> Values:
    if source.get("rollout.max_new_tokens") is not None:
        return {}
    raise NoCounterpartError(
        "prompt and response together: rollout.max_response_length is of the response alone",
        {"rollout.max_response_length": int(value)},
    )


def _overlong(value: Any, source: Source) -> Values:
    longest = source.get("rollout.max_new_tokens") or source.get("data.max_len")
    return overlong_buffer(value, longest, source.get("reward.overlong_penalty_factor", 1.0))


def _low_rank(value: Any, source: Source) -> Values:
    return lora(value, source.get("ds.lora.alpha", 16), source.get("ds.lora.target_modules"))


def _dynamic_rows(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {}
    tokens = int(source.get("train.max_tokens_per_gpu")) * int(source.get("ds.ring_attn_size", 1))
    longest = source.get("rollout.max_new_tokens") or source.get("data.max_len")
    return rows_of_tokens(tokens, longest)


def _micro_batch(value: Any, source: Source) -> Values:
    return {} if is_on(source.get("train.dynamic_batch_enable")) else {"training.micro_batch_size": int(value)}


def _correction(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {"correction.weight": "none"}
    low, high = map(float, source.get("algo.advantage.is_correction_threshold"))
    kind = source.get("algo.advantage.is_correction_type", "tis")
    if kind == "tis":
        return {"correction.weight": "token", "correction.max_weight": high}
    masks = {"icepop": "token", "seq-mask-tis": "geometric"}
    if str(kind) not in masks:
        raise NoCounterpartError(f"no correction {kind!r}: set correction.weight or mask")
    weight = "none" if kind == "icepop" else "token"
    return {
        "correction.weight": weight,
        "correction.mask": masks[kind],
        "correction.mask_low": low,
        "correction.mask_high": high,
    }


def _end_rate(value: Any, source: Source) -> Values:
    if schedule(source.get("actor.lr_scheduler")) == "constant":
        return {}
    return {"optimizer.end_lr": float(f"{float(source.get('actor.adam.lr')) * float(value):.6g}")}


def _end_rate_of_critic(value: Any, source: Source) -> Values:
    is_falling = schedule(source.get("actor.lr_scheduler")) != "constant"
    if not is_falling or source.get("algo.advantage.estimator") != "gae":
        return {}
    return {"critic.end_lr": float(f"{float(source.get('critic.adam.lr', 9e-6)) * float(value):.6g}")}


def _filter(value: Any, source: Source) -> Values:
    return {"algorithm.dynamic_sampling": True} if is_on(value) else {}


DEFAULTS = {
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.adam.weight_decay": 0.0,
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.eps_clip": 0.2,
    "algo.advantage.estimator": "gae",
    "algo.advantage.gamma": 1.0,
    "algo.advantage.lambd": 1.0,
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.kl.init_coef": 0.01,
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "critic.min_lr_ratio": 0.1,
    "data.max_len": 2048,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.max_tokens_per_gpu": 16192,
    "train.seed": 42,
    "ckpt.save_steps": -1,
    "eval.steps": -1,
    "eval.n_samples_per_prompt": 4,
    "eval.temperature": 0.6,
    "vllm.gpu_memory_utilization": 0.95,
    "ds.param_dtype": "bf16",
}

_HARDWARE = "the command says it: --workers ranks on each node, --nodes"
_COLOCATED = "ranks and servers share the devices"
_DATA = "decided when the data is built: docs/tutorial.md"
_DEEPSPEED = "see `parallel_config`"
_VLLM = "vLLM's own default, or what the servers need, is used"

RULES: dict[str, Rule] = {
    "actor.model_name_or_path": to("model.path", str),
    "actor.gradient_checkpointing_enable": to("model.recompute", is_on),
    "actor.gradient_checkpointing_reentrant": without("whole layers are recomputed"),
    "actor.adam.lr": to("optimizer.start_lr", float),
    "actor.adam.betas": into(
        lambda value, source: {"optimizer.beta1": float(value[0]), "optimizer.beta2": float(value[1])},
        "optimizer.beta1",
        "optimizer.beta2",
    ),
    "actor.adam.eps": to("optimizer.epsilon", float),
    "actor.adam.weight_decay": to("optimizer.weight_decay", float),
    "actor.max_norm": to("optimizer.max_grad_norm", float),
    "actor.optim": choice("optimizer.type", {"adam": "adamw", "muon": "muon"}),
    "actor.muon.*": by_hand("optimizer.start_lr, optimizer.momentum: Muon's updates have the size of AdamW's here"),
    "actor.lr_scheduler": to("optimizer.lr_schedule", schedule),
    "actor.lr_warmup_ratio": into(warmup_share),
    "actor.min_lr_ratio": into(_end_rate, "optimizer.end_lr"),
    "actor.eps_clip": into(_clip, *CLIP_KEYS),
    "actor.eps_clip_low_high": without("goes with eps_clip: `algorithm.clip_low`, `algorithm.clip_high`"),
    "actor.dual_clip": into(_dual_clip, "algorithm.loss", "algorithm.dual_clip"),
    "actor.policy_loss_type": into(
        lambda value, source: (
            {"algorithm.loss": {"ppo": "ppo_clip", "gspo": "gspo"}[value]}
            if source.get("actor.dual_clip") is None
            else {}
        ),
        "algorithm.loss",
    ),
    "actor.entropy_coef": to("algorithm.entropy_coefficient", float),
    "actor.aux_loss_coef": without("experts are not balanced by a loss"),
    "actor.freeze_visual_encoder": to("model.train_vision", lambda value: "none" if is_on(value) else "all"),
    **each("", "*.num_nodes *.num_gpus_per_node", without(_HARDWARE)),
    "algo.advantage.estimator": into(_advantage, "algorithm.name", "algorithm.advantage", "critic.path"),
    "algo.advantage.gamma": only_of_gae("algo.advantage.estimator", "algorithm.gamma"),
    "algo.advantage.lambd": only_of_gae("algo.advantage.estimator", "algorithm.gae_lambda"),
    "algo.advantage.no_std_norm": flag("algorithm.scale_rewards", False),
    "algo.advantage.is_correction_enable": into(
        _correction,
        "correction.weight",
        "correction.max_weight",
        "correction.mask",
        "correction.mask_low",
        "correction.mask_high",
    ),
    "algo.advantage.is_correction_*": without("goes with is_correction_enable: `correction`"),
    "algo.kl.init_coef": into(
        _kl, "algorithm.beta", "algorithm.kl_in", "algorithm.kl_estimator", "algorithm.kl_target"
    ),
    "algo.kl.horizon": without("`algorithm.kl_gain` says how fast the weight follows"),
    "algo.kl.*": without("goes with init_coef: `algorithm.beta`"),
    "algo.dynamic_filtering_enable": into(_filter, "algorithm.dynamic_sampling"),
    "algo.dynamic_filtering_range": without("a group counts as long as its rewards differ"),
    "critic.model_name_or_path": without("goes with the estimator gae: `critic.path`"),
    "critic.adam.lr": only_of_gae("algo.advantage.estimator", "critic.start_lr"),
    "critic.min_lr_ratio": into(_end_rate_of_critic, "critic.end_lr"),
    "critic.value_clip": only_of_gae("algo.advantage.estimator", "critic.clip_range"),
    "critic.freezing_steps": into(
        lambda value, source: (
            {"critic.warmup_steps": int(value)}
            if int(value) > 0 and source.get("algo.advantage.estimator") == "gae"
            else {}
        ),
        "critic.warmup_steps",
    ),
    "critic.*": without("the critic has the actor's layout, batches and options"),
    "reward.model_name_or_path": to("reward.model_path", str),
    "reward.remote_url": by_hand("a function in a file: reward.verifier_function: path/to/file.py:function"),
    "reward.overlong_buffer_len": into(_overlong, *OVERLONG_KEYS),
    "reward.overlong_penalty_factor": without("goes with overlong_buffer_len: `algorithm.overlong_penalty`"),
    "reward.stop_properly_penalty_coef": by_hand("see algorithm.overlong_filter and overlong_buffer"),
    "reward.normalize_enable": without("advantages are normalised by their estimator"),
    "reward.clip_range": without("rewards are taken as the verifiers give them"),
    "reward.*": without("a reward model runs on the training ranks"),
    "ref.*": without("the reference model has the actor's layout and batches"),
    "rollout.batch_size": into(lambda value, source: prompts(value), *PROMPT_KEYS),
    "rollout.n_samples_per_prompt": to("algorithm.num_generations", int),
    "rollout.max_new_tokens": to("rollout.max_response_length", int),
    "rollout.temperature": to("rollout.temperature", float),
    "rollout.top_p": to("rollout.top_p", float),
    "rollout.vllm_generate_batch_size": by_hand("see algorithm.max_oversampling"),
    "rollout.*": without("`training.micro_batch_size` is for all passes"),
    "train.batch_size": into(_minibatches, "training.num_minibatches"),
    "train.micro_batch_size": into(_micro_batch, "training.micro_batch_size"),
    "train.dynamic_batch_enable": into(_dynamic_rows, *ROW_KEYS),
    "train.max_tokens_per_gpu": without("goes with dynamic_batch_enable: `training.sequence_lengths`"),
    "train.max_epochs": to("training.num_iterations", int),
    "train.num_episodes": to("training.epochs", int),
    "train.seed": to("run.seed", int),
    "train.full_determinism_enable": to("run.deterministic", is_on),
    "train.async_enable": by_hand("set rollout.off_policy_steps, or asynchronous with segment_tokens: docs/async.md"),
    "train.async_queue_size": without("goes with async_enable: `rollout.off_policy_steps`"),
    "train.partial_rollout_enable": by_hand("set rollout.segment_tokens: docs/async.md"),
    "train.colocate_*": without(_COLOCATED),
    "train.agent_func_path": by_hand("tools.agent, tools.names or tools.environment: docs/agents.md"),
    "train.*ema*": by_hand("no average of the weights is kept"),
    "data.prompt_dataset": by_hand("build it: mindrlhf data build --output train.mindrecord; then set data.train_file"),
    "data.max_len": into(_longest, "rollout.max_response_length"),
    "data.prompt_max_len": into(prompt_length),
    "data.max_samples": without("build a file of so many records"),
    "data.*": without(_DATA),
    "eval.dataset": by_hand(
        "build it: mindrlhf data build --output eval.mindrecord; then set data.eval_file",
        {"data.eval_file": "path/to/eval.mindrecord"},
    ),
    "eval.steps": to("evaluation.every_steps", lambda value: max(int(value), 0)),
    "eval.temperature": to("evaluation.temperature", float),
    "eval.n_samples_per_prompt": to("evaluation.num_samples", int),
    "eval.split": without(_DATA),
    "ckpt.output_dir": to("run.output_dir", str),
    "ckpt.path": to("checkpoint.save_dir", str),
    "ckpt.save_steps": to("checkpoint.every_steps", lambda value: max(int(value), 0)),
    "ckpt.max_num": to("checkpoint.keep_last", int),
    "ckpt.best_metric_key": to("checkpoint.keep_best", lambda value: str(value) not in ("", "none")),
    "ckpt.load_enable": without("the command says it: --resume"),
    "ckpt.*": without("checkpoints hold all that a resume needs"),
    "vllm.num_engines": positive("rollout.num_replicas"),
    "vllm.tensor_parallel_size": to("rollout.tensor_parallel", int),
    "vllm.gpu_memory_utilization": to("rollout.gpu_memory_utilization", float),
    "vllm.*": without(_VLLM),
    "ds.zero_stage": to("parallel_config.enable_parallel_optimizer", lambda value: int(value) > 0),
    "ds.tensor_parallel_size": to("parallel_config.model_parallel", int),
    "ds.ring_attn_size": to("parallel_config.context_parallel", int),
    "ds.ring_attn_head_stride": without(KERNELS),
    "ds.param_dtype": choice("model.compute_dtype", {"bf16": "bfloat16"}),
    "ds.adam_offload": flag("memory.offload_optimizer"),
    "ds.packing_samples": to("training.pack", is_on),
    "ds.lora.rank": into(_low_rank, *LORA_KEYS),
    "ds.lora.dropout": without("adapters have no dropout"),
    "ds.lora.*": without("goes with lora.rank"),
    "ds.load_in_4bit": only(False, otherwise="weights are float32 or bfloat16: model.param_dtype"),
    "ds.*": without(_DEEPSPEED),
    "logger.wandb.key": where_given({"observe.sinks": ["tensorboard", "wandb"]}),
    "logger.wandb.project": to("observe.project", str),
    "logger.wandb.run_name": to("observe.run_name", str),
    "logger.tensorboard_dir": where_given({"observe.tensorboard": True}),
    "logger.*": without("every step is logged: metrics.jsonl"),
    **each("", "local_rank use_ms", without(_HARDWARE)),
}

# Flags of versions before the sections.
ALIASES = {
    "pretrain": "actor.model_name_or_path",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "actor_learning_rate": "actor.adam.lr",
    "learning_rate": "actor.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "max_norm": "actor.max_norm",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "entropy_loss_coef": "actor.entropy_coef",
    "aux_loss_coef": "actor.aux_loss_coef",
    "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "critic_num_nodes": "critic.num_nodes",
    "critic_num_gpus_per_node": "critic.num_gpus_per_node",
    "ref_num_nodes": "ref.num_nodes",
    "ref_num_gpus_per_node": "ref.num_gpus_per_node",
    "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node",
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "critic_pretrain": "critic.model_name_or_path",
    "critic_learning_rate": "critic.adam.lr",
    "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps",
    "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "ref_reward_offload": "ref.offload",
    "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes",
    "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable",
    "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "agent_func_path": "train.agent_func_path",
    "enable_ema": "train.enable_ema",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "prompt_split": "data.prompt_split",
    "prompt_max_len": "data.prompt_max_len",
    "max_len": "data.max_len",
    "max_samples": "data.max_samples",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_steps": "eval.steps",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_sync_backend": "vllm.sync_backend",
    "vllm_sync_with_ray": "vllm.sync_with_ray",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "enforce_eager": "vllm.enforce_eager",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "zero_stage": "ds.zero_stage",
    "zpg": "ds.zpg",
    "bf16": "ds.bf16",
    "flash_attn": "ds.flash_attn",
    "adam_offload": "ds.adam_offload",
    "packing_samples": "ds.packing_samples",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "load_in_4bit": "ds.load_in_4bit",
    "overlap_comm": "ds.overlap_comm",
    "logging_steps": "logger.logging_steps",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "use_tensorboard": "logger.tensorboard_dir",
}
