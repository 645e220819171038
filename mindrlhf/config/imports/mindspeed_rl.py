"""MindSpeed-RL: `megatron_training`, `actor_config`, `ref_config`, `critic_config`, `rl_config`, `generate_config`.

Keys and defaults after mindspeed_rl/config_cls (`rl_config.py`, `megatron_config.py`, `generate_config.py`) and
configs/ of that project. A batch there counts prompts (`global_batch_size`), a mini-batch samples (`mini_batch_size`).
"""

from typing import Any

from mindrlhf.config.imports import shared
from mindrlhf.config.imports.tables import LeftToUserError, Source, Values, each, only, pairs, todo, under

_SAMPLING = "generate_config.sampling_config."
_OF_GAE = shared.only_of_gae("rl_config.adv_estimator")


def _advantage(value: Any, source: Source) -> Values:
    if value == "group_norm":
        return {"algorithm.name": "grpo", "algorithm.advantage": "grpo"}
    if value == "gae":
        path = source.given.get("critic_config.load", "path/to/model")
        return {"algorithm.name": "ppo", "algorithm.advantage": "gae", "critic.path": str(path)}
    raise LeftToUserError(f"no estimator {value!r}: set algorithm.name")


def _kl(value: Any, source: Source) -> Values:
    is_of_reward = source.get("rl_config.adv_estimator") == "gae"
    values: Values = {"algorithm.beta": float(value), "algorithm.kl_in": "reward" if is_of_reward else "loss"}
    if source.get("rl_config.kl_ctrl_type") == "adaptive":
        values["algorithm.kl_target"] = float(source.get("rl_config.kl_target", 100.0))
    return values


def _of_model(source: Source, name: str, default: Any = None) -> Any:
    """A key of `actor_config`, else of `megatron_training`, which it overrides."""
    return source.get(f"actor_config.{name}", source.get(f"megatron_training.{name}", default))


def _minibatches(value: Any, source: Source) -> int:
    prompts = _of_model(source, "global_batch_size")
    if prompts is None:
        raise LeftToUserError("global_batch_size is missing: set training.chunk_size and training.num_minibatches")
    samples = int(prompts) * int(source.get("rl_config.n_samples_per_prompt"))
    return shared.whole(samples, min(int(value), samples), "samples of a step and of an update")


def _clip(value: Any, source: Source) -> Values:
    if not source.get("rl_config.clip_higher_enable"):
        return shared.clip(value, value)
    return shared.clip(*(source.get(f"rl_config.clip_ratio_{side}", value) for side in ("low", "high")))


def _overlong(value: Any, source: Source) -> float | None:
    longest = source.get("rl_config.rollout_max_tokens", source.get(f"{_SAMPLING}max_tokens"))
    penalty = source.get("rl_config.overlong_buffer_penalty_factor", 1.0)
    return shared.overlong_buffer(source.get("rl_config.overlong_buffer", 0), longest, penalty) if value else None


def _packed(value: Any, source: Source) -> Values | None:
    if not value:
        return None
    tokens = source.get("rl_config.max_packing_token_size")
    if tokens is None:
        raise LeftToUserError("max_packing_token_size is missing: set training.sequence_lengths")
    return shared.packed_tokens(int(tokens), source.get(f"{_SAMPLING}max_tokens"))


def _end_rate(value: Any, source: Source) -> float | None:
    return None if source.get("actor_config.lr_decay_style") == "constant" else float(value)


def _sequence_parallel(value: Any, source: Source) -> bool | None:
    return bool(value) if int(_of_model(source, "tensor_model_parallel_size", 1)) > 1 else None


def _servers(value: Any, source: Source) -> Values:
    return shared.servers(value, source.given.get("rl_config.actor_resource.num_npus", ""))


def _low_rank(value: Any, source: Source) -> Values:
    return shared.lora(value, _of_model(source, "lora_alpha", 32), _of_model(source, "lora_target_modules"))


DEFAULTS = {
    "rl_config": {
        "adv_estimator": "group_norm",
        "kl_penalty": "kl",
        "init_kl_coef": 0.01,
        "mini_batch_size": 1,
        "epochs": 1,
        "clip_ratio": 0.2,
        "entropy_coeff": 0.001,
        "n_samples_per_prompt": 1,
        "verifier_function": ["base_acc"],
        "verifier_weight": [1.0],
        "verifier_timeout": 30,
    },
    "actor_config": {"lr_decay_style": "linear", "min_lr": 0.0, "adam_beta2": 0.999},
    "generate_config": {
        "sampling_config": {"max_tokens": 128, "top_k": 50, "temperature": 0.2},
        "infer_tensor_parallel_size": 8,
        "dtype": "bfloat16",
    },
}
# Of `megatron_training`, and of the configs of single models, which override it.
_OF_MODELS = (
    pairs("training", "micro_batch_size"),
    each("global_batch_size", shared.prompts),
    pairs("parallel_config", "tensor_model_parallel_size=model_parallel context_parallel_size=context_parallel"),
    pairs("parallel_config", "expert_model_parallel_size=expert_parallel"),
    pairs("parallel_config", "use_distributed_optimizer=enable_parallel_optimizer"),
    pairs("parallel_config", "sequence_parallel=use_seq_parallel", _sequence_parallel),
    each("pipeline_model_parallel_size", shared.pipeline),
    pairs("optimizer", "lr=start_lr weight_decay clip_grad=max_grad_norm adam_beta1=beta1 adam_beta2=beta2"),
    pairs("optimizer", "lr_decay_style=lr_schedule", shared.SCHEDULES),
    pairs("optimizer", "min_lr=end_lr", _end_rate),
    each("lr_warmup_fraction", shared.warmup_share),
    only("optimizer", "adam", "adamw", otherwise="the optimiser is AdamW"),
    pairs("memory", "swap_optimizer=swap_moments", shared.SWITCH),
    pairs("model", "recompute_granularity=recompute", shared.FULL),
    pairs("model", "bf16=compute_dtype", shared.BFLOAT16),
    pairs("lora", "lora_load=path"),
    pairs("lora", "lora_r=rank", _low_rank),
    pairs("data", "tokenizer_name_or_path=tokenizer_dir"),
    pairs("data", "no_shuffle=shuffle", {True: False, False: True}),
    pairs("run", "train_iters=max_steps save=output_dir seed npu_deterministic=deterministic"),
    pairs("checkpoint", "save_interval=every_steps"),
    only("stage", "ray_grpo", "ray_dapo", "ray_ppo", otherwise="another command: sft, dpo or reward-model"),
    todo("data_path", "build it: mindrlhf data build --input FILE --output train.mindrecord; set data.train_file"),
    todo("dataset_additional_keys", "name them in mindrlhf data build --keep; rewards get them by name"),
    todo("prompt_type*", "give the chat template to mindrlhf data build --template"),
    todo("model load", "set model.path to the Hugging Face directory; no conversion is needed"),
)
_OF_RL = (
    pairs("algorithm", "adv_estimator=advantage", _advantage),
    pairs("algorithm", "kl_penalty=kl_estimator", shared.KL_ESTIMATORS),
    pairs("algorithm", "init_kl_coef=beta", _kl),
    pairs("algorithm.options", "gamma lam=gae_lambda advantage_whiten=whiten_advantages", _OF_GAE),
    pairs("algorithm", "n_samples_per_prompt=num_generations entropy_coeff=entropy_coefficient"),
    pairs("algorithm", "filter_groups_enable=dynamic_sampling"),
    pairs("algorithm", "filter_groups_max_batches=max_oversampling", shared.positive),
    pairs("algorithm", "clip_ratio=clip_low", _clip),
    pairs("algorithm", "token_level_loss=aggregation", {True: "token_mean", False: "sequence_mean"}),
    pairs("algorithm", "overlong_buffer_enable=overlong_buffer", _overlong),
    pairs("critic", "cliprange_value=clip_range", _OF_GAE),
    pairs("training", "epochs=num_iterations update_micro_batch_size=micro_batch_size"),
    pairs("training", "use_remove_padding=packing", shared.PACKING),
    pairs("training", "mini_batch_size=num_minibatches", _minibatches),
    pairs("training", "use_dynamic_bsz=sequence_lengths", _packed),
    pairs("reward", "verifier_function verifier_weight verifier_timeout=timeout_s verifier_parallel=num_workers"),
    pairs("observe", "use_tensorboard=sinks", {True: None, False: None}),
    pairs("observe", "use_wandb=sinks", {True: ["tensorboard", "wandb"], False: None}),
    pairs("observe", "use_swanlab=sinks", {True: ["tensorboard", "swanlab"], False: None}),
    pairs("observe", "wandb_project=project swanlab_project=project", str),
    todo("wandb_exp_name swanlab_exp_name", shared.RUN_NAME),
    pairs("tools", "max_tool_calls=max_turns", lambda calls, source: int(calls) + 1),
    pairs("tools", "max_tool_response_length=max_response_tokens"),
    each("max_prompt_length", shared.prompt_length(f"{_SAMPLING}max_tokens", "rl_config.use_dynamic_bsz")),
    only("rule_reward", True, otherwise="set reward.model_path"),
    only("partial_rollout_max_split", 0, 1, otherwise="a step waits for all its samples: `rollout`"),
    only("multi_turn_enable", False, otherwise=shared.TOOLS),
    todo("tool_*", shared.TOOLS),
)
_OF_GENERATION = (
    pairs("rollout", "max_num_seqs dtype gpu_memory_utilization"),
    pairs("rollout", "infer_tensor_parallel_size=tensor_parallel", _servers),
    pairs("rollout", "sampling_config.max_tokens=max_response_length sampling_config.top_p=top_p"),
    pairs("rollout", "sampling_config.temperature=temperature"),
    pairs("rollout", "sampling_config.top_k=top_k", shared.not_negative),
    pairs("data", "tokenizer_name_or_path=tokenizer_dir"),
    pairs("memory", "offload_train_optimizer=offload_optimizer", shared.SWITCH),
    only("infer_*_parallel_size", 1, otherwise="servers have tensor parallelism only"),
    only("sampling_config.min_p", 0, otherwise="set rollout.top_p or rollout.top_k"),
)
TABLE = {
    **under("megatron_training", *_OF_MODELS),
    **under("actor_config", *_OF_MODELS),
    **under("rl_config", *_OF_RL),
    **under("generate_config", *_OF_GENERATION),
    **pairs("critic", "critic_config.lr=start_lr"),
    **todo("ref_config.load", "set model.reference_path where it is not the starting model"),
    **todo("reward_config.load", "set reward.model_path to a Hugging Face directory"),
    **todo("critic_config.load", "set critic.path to a Hugging Face directory"),
    **todo("msprobe_config*", "see `msprobe` in docs/config.md"),
}
