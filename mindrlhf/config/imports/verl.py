"""verl's reinforcement learning: `actor_rollout_ref`, `algorithm`, `data`, `critic`, `reward`, `trainer`.

Keys and defaults after verl/trainer/config/_generated_ppo_trainer.yaml of that project (0.7 and 0.8).
"""

from typing import Any

from mindrlhf.config.imports import shared
from mindrlhf.config.imports.shared import KL_ESTIMATORS, Convert, is_on
from mindrlhf.config.imports.tables import LeftToUserError, Source, Values, each, only, pairs, todo, under

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
_ULYSSES = ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size")
_ULYSSES += ("veomni.ulysses_parallel_size",)
_ADVANTAGES = {"reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline"}
_ADVANTAGES |= {name: name for name in ("gae", "grpo", "rloo", "remax", "gdpo")} | {"grpo_passk": "pass_at_k"}
# verl's plain loss is PPO's with the second clip of Ye et al. 2020 (arXiv:1912.09729) at `clip_ratio_c`.
_LOSSES = {"vanilla": "dual_clip", "geo_mean": "gmpo"}
_LOSSES |= {name: name for name in ("gspo", "sapo", "cispo", "dppo_tv", "dppo_kl")}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "sequence_sum",
}
_OF_GAE = shared.only_of_gae("algorithm.adv_estimator")


def _advantage(value: Any, source: Source) -> Values | None:
    if is_on(source.get("distillation.enabled")):
        return None
    if value not in _ADVANTAGES:
        raise LeftToUserError(f"no estimator {value!r}: algorithm.name knows {', '.join(_ADVANTAGES)}")
    if value != "gae":
        return {"algorithm.name": _ADVANTAGES[value], "algorithm.advantage": _ADVANTAGES[value]}
    # A critic begins as the actor where its own path is not known.
    path = next(filter(None, map(source.given.get, ("critic.model.path", f"{_MODEL}.path"))), "path/to/model")
    values = {"algorithm.name": "ppo", "algorithm.advantage": "gae", "critic.path": str(path)}
    return values | {"algorithm.num_generations": int(source.get("actor_rollout_ref.rollout.n"))}


def _kl_in_loss(value: Any, source: Source) -> Values | None:
    if not is_on(value):
        elsewhere = is_on(source.get("algorithm.use_kl_in_reward")) or is_on(source.get("distillation.enabled"))
        return None if elsewhere else {"algorithm.beta": 0.0}
    name = str(source.get(f"{_ACTOR}.kl_loss_type", "low_var_kl"))
    return {
        "algorithm.beta": float(source.get(f"{_ACTOR}.kl_loss_coef", 0.001)),
        "algorithm.kl_in": "loss",
        "algorithm.kl_estimator": KL_ESTIMATORS[name.rstrip("+")] + "+" * name.endswith("+"),
    }


def _kl_in_reward(value: Any, source: Source) -> Values | None:
    if not is_on(value) or is_on(source.get("distillation.enabled")):
        return None
    values = {
        "algorithm.beta": float(source.get("algorithm.kl_ctrl.kl_coef", 0.001)),
        "algorithm.kl_in": "reward",
        "algorithm.kl_estimator": KL_ESTIMATORS[str(source.get("algorithm.kl_penalty", "kl")).rstrip("+")],
    }
    if source.get("algorithm.kl_ctrl.type") == "adaptive":
        values["algorithm.kl_target"] = float(source.get("algorithm.kl_ctrl.target_kl", 0.1))
    return values


def _minibatches(value: Any, source: Source) -> int:
    size = int(source.get("data.train_batch_size"))
    return shared.whole(size, min(int(value), size), "prompts of a step and of an update")


def _clip(value: Any, source: Source) -> Values:
    return shared.clip(source.get(f"{_ACTOR}.clip_ratio_low", value), source.get(f"{_ACTOR}.clip_ratio_high", value))


def _end_rate(value: Any, source: Source) -> float | None:
    style = source.get(f"{_ACTOR}.optim.lr_decay_style", source.get(f"{_ACTOR}.optim.lr_scheduler_type", "constant"))
    return None if style == "constant" else float(f"{float(value):.6g}")


def _end_share(value: Any, source: Source) -> float | None:
    return _end_rate(float(source.get(f"{_ACTOR}.optim.lr")) * float(value), source)


def _packed(value: Any, source: Source) -> Values | None:
    if not is_on(value):
        return None
    # Ranks that share a sequence hold together what one may.
    names = (*_ULYSSES, "megatron.context_parallel_size", "engine.cp")
    num_ranks = max(int(source.get(f"{_ACTOR}.{name}", 1)) for name in names)
    tokens = int(source.get(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384)) * num_ranks
    return shared.packed_tokens(tokens, source.get("data.max_response_length"))


def _micro_batch(value: Any, source: Source) -> int | None:
    """Samples of one rank; with `use_dynamic_bsz` verl does not read it."""
    return None if is_on(source.get(f"{_ACTOR}.use_dynamic_bsz")) else int(value)


def _sequence_parallel(value: Any, source: Source) -> bool | None:
    return is_on(value) if int(source.get(f"{_ACTOR}.megatron.tensor_model_parallel_size", 1)) > 1 else None


def _servers(value: Any, source: Source) -> Values:
    """Servers beside the ranks, unless they have devices of their own."""
    if any(name.startswith(("async_training.", "rollout.n", "actor_rollout_ref.rollout.nn")) for name in source.given):
        return {"rollout.tensor_parallel": int(value)}
    counts = source.given.get("trainer.nnodes", 1), source.given.get("trainer.n_gpus_per_node", 8)
    return shared.servers(value, *counts)


def _low_rank(alpha: str, default: int, modules: str) -> Convert:
    return lambda value, source: shared.lora(
        value, source.get(f"{_MODEL}.{alpha}", default), source.get(f"{_MODEL}.{modules}")
    )


def _overlong(value: Any, source: Source) -> float | None:
    if not is_on(value):
        return None
    options = {name.split(".")[-1]: source.get(name) for name in source.given if ".overlong_buffer" in name}
    longest = source.get("data.max_response_length")
    return shared.overlong_buffer(options.get("len", 0), longest, options.get("penalty_factor", 1.0))


def _replay(value: Any, source: Source) -> bool | None:
    """R3 replays what the generator chose (arXiv:2510.11370), R2 what the trainer chose before."""
    if value == "R2":
        raise LeftToUserError("R2 has no counterpart: training.replay_routing replays the generator's choices (R3)")
    return True if value == "R3" else None


def _correction(value: Any, source: Source) -> str:
    if value not in ("token", "sequence"):
        raise LeftToUserError(f"{value} has no counterpart: correction.weight knows token and sequence")
    if is_on(source.get("algorithm.rollout_correction.bypass_mode")):
        raise LeftToUserError("with bypass_mode the old log-probabilities are the generator's: nothing to correct")
    return value


def _correction_limit(value: Any, source: Source) -> float | None:
    bypass = is_on(source.get("algorithm.rollout_correction.bypass_mode"))
    return float(value) if source.get("algorithm.rollout_correction.rollout_is") and not bypass else None


def _distillation(value: Any, source: Source) -> Values | None:
    if not is_on(value):
        return None
    values: Values = {"algorithm.name": "distill", "algorithm.advantage": "distill"}
    teachers = [given for name, given in source.given.items() if name.endswith(".model_path") and "teacher" in name]
    values["model.reference_path"] = str(teachers[0]) if len(teachers) == 1 else "path/to/teacher"
    if is_on(source.get("distillation.distillation_loss.use_task_rewards", True)):
        values["algorithm.options.distill_reward_weight"] = 1.0
    raise LeftToUserError("here one teacher, model.reference_path, and a loss of its own: docs/algorithms.md", values)


def _scale(value: Any, source: Source) -> str | None:
    return "dr_grpo" if source.get("algorithm.adv_estimator") == "grpo" and not is_on(value) else None


DEFAULTS = {
    "algorithm": {"adv_estimator": "gae", "gamma": 1.0, "lam": 1.0},
    "data": {"train_batch_size": 1024, "max_prompt_length": 512, "max_response_length": 512},
    "actor_rollout_ref": {
        "actor": {
            "optim": {"lr": 1e-6, "betas": [0.9, 0.999]},
            "ppo_mini_batch_size": 256,
            "clip_ratio": 0.2,
            "clip_ratio_c": 3.0,
            "policy_loss": {"loss_mode": "vanilla"},
            "loss_agg_mode": "token-mean",
            "use_kl_loss": False,
            "fsdp_config": {"dtype": "bfloat16"},
            "megatron": {"use_distributed_optimizer": True},
        },
        "rollout": {"n": 1, "dtype": "bfloat16", "val_kwargs": {"temperature": 0}},
    },
    "trainer": {"total_epochs": 30, "save_freq": -1, "test_freq": -1},
}
_BUILD = "build it: mindrlhf data build --handler verl --input FILE --output"
_DATA = (
    pairs("data", "tokenizer=tokenizer_dir shuffle"),
    pairs("run", "seed"),
    pairs("rollout", "max_response_length"),
    pairs("evaluation", "val_max_samples=max_prompts", shared.not_negative),
    each("train_batch_size", shared.prompts),
    each("max_prompt_length", shared.prompt_length("data.max_response_length", f"{_ACTOR}.use_dynamic_bsz")),
    each("apply_chat_template_kwargs.*", shared.template_option("data.apply_chat_template_kwargs.")),
    todo("train_files", f"{_BUILD} train.mindrecord; then set data.train_file"),
    todo("val_files", f"{_BUILD} eval.mindrecord; then set data.eval_file", {"data.eval_file": shared.EVAL_FILE}),
    todo("train_max_samples", "build a file of so many records"),
    todo("tool_config_path function_tool_path", shared.TOOLS),
)
_OF_ACTOR = (
    pairs("optimizer", "optim.lr=start_lr optim.weight_decay=weight_decay optim.clip_grad=max_grad_norm"),
    pairs("optimizer", "grad_clip=max_grad_norm"),
    pairs("optimizer", "optim.lr_scheduler_type=lr_schedule optim.lr_decay_style=lr_schedule", shared.SCHEDULES),
    pairs("optimizer", "optim.lr_warmup_steps=warmup_steps", shared.positive),
    pairs("optimizer", "optim.min_lr_ratio=end_lr", _end_share),
    pairs("optimizer", "optim.min_lr=end_lr", _end_rate),
    each("optim.lr_warmup_steps_ratio", shared.warmup_share),
    each("optim.betas", lambda betas, source: {"optimizer.beta1": betas[0], "optimizer.beta2": betas[1]}),
    only("optim.optimizer", "AdamW", "adam", "adamw", otherwise="the optimiser is AdamW"),
    pairs("training", "ppo_epochs=num_iterations"),
    pairs("training", "ppo_mini_batch_size=num_minibatches", _minibatches),
    pairs("training", "ppo_micro_batch_size_per_gpu=micro_batch_size", _micro_batch),
    pairs("training", "use_dynamic_bsz=sequence_lengths", _packed),
    pairs("training", "*router_replay.mode=replay_routing", _replay),
    todo("ppo_micro_batch_size", "set training.micro_batch_size to the samples of one rank"),
    pairs("algorithm", "clip_ratio=clip_low", _clip),
    pairs("algorithm", "clip_ratio_low=clip_low", lambda value, source: min(float(value), 1.0)),
    pairs("algorithm", "clip_ratio_high=clip_high entropy_coeff=entropy_coefficient"),
    pairs("algorithm.options", "policy_loss.tau_pos=sapo_tau_positive policy_loss.tau_neg=sapo_tau_negative"),
    pairs("algorithm.options", "clip_ratio_c=dual_clip"),
    pairs("algorithm", "policy_loss.loss_mode=loss", _LOSSES),
    pairs("algorithm", "loss_agg_mode=aggregation", _AGGREGATIONS),
    pairs("algorithm", "use_kl_loss=beta", _kl_in_loss),
    pairs("parallel_config", "megatron.tensor_model_parallel_size=model_parallel engine.tp=model_parallel"),
    pairs("parallel_config", "megatron.context_parallel_size=context_parallel engine.cp=context_parallel"),
    pairs("parallel_config", " ".join(f"{name}=context_parallel" for name in _ULYSSES)),
    pairs("parallel_config", "megatron.expert_model_parallel_size=expert_parallel engine.ep=expert_parallel"),
    pairs("parallel_config", "veomni.expert_parallel_size=expert_parallel"),
    pairs("parallel_config", "megatron.use_distributed_optimizer=enable_parallel_optimizer"),
    pairs("parallel_config", "megatron.sequence_parallel=use_seq_parallel", _sequence_parallel),
    each("megatron.pipeline_model_parallel_size engine.pp", shared.pipeline),
    pairs("memory", "*.optimizer_offload=offload_optimizer *.offload_policy=offload_optimizer", shared.SWITCH),
    pairs("memory", "*.optimizer_cpu_offload=offload_optimizer", shared.SWITCH),
    pairs("model", "megatron.override_transformer_config.recompute_granularity=recompute", shared.FULL),
    pairs("model", "megatron.dtype=compute_dtype fsdp_config.dtype=compute_dtype", shared.BFLOAT16),
    pairs("model", "fsdp_config.mixed_precision.param_dtype=compute_dtype", shared.BFLOAT16),
    pairs("model", "fsdp_config.model_dtype=param_dtype", shared.BFLOAT16),
    pairs("run", "fsdp_config.full_determinism=deterministic", shared.SWITCH),
)
_OF_ROLLOUT = (
    pairs("rollout", "temperature top_p dtype gpu_memory_utilization max_num_seqs response_length=max_response_length"),
    pairs("rollout", "tensor_model_parallel_size=tensor_parallel", _servers),
    pairs("rollout", "top_k", shared.not_negative),
    pairs("algorithm", "n=num_generations"),
    pairs("evaluation", "val_kwargs.temperature=temperature val_kwargs.n=num_samples"),
    pairs("tools", "multi_turn.max_assistant_turns=max_turns"),
    pairs("tools", "multi_turn.max_tool_response_length=max_response_tokens"),
    pairs("tools", "multi_turn.format=dialect", {"hermes": "hermes", "qwen3_coder": "qwen3_coder"}),
    pairs("training", "enable_rollout_routing_replay=replay_routing", shared.SWITCH),
    only("name", "vllm", "???", otherwise="the generator is vLLM"),
    only("mode", "sync", "async", otherwise="servers draw a whole step"),
    only("multi_turn.enable", False, otherwise=shared.TOOLS),
    todo("multi_turn.tool_config_path", shared.TOOLS),
)
_OF_MODEL = (
    pairs("model", "path enable_gradient_checkpointing=recompute"),
    pairs("data", "tokenizer_path=tokenizer_dir"),
    pairs("lora", "lora_rank=rank", _low_rank("lora_alpha", 16, "target_modules")),
    pairs("lora", "lora.rank=rank", _low_rank("lora.alpha", 32, "lora.target_modules")),
    pairs("lora", "lora_adapter_path=path lora.adapter_path=path"),
    todo("custom_chat_template", "give it to mindrlhf data build --template"),
)
_ALGORITHM = (
    pairs("algorithm", "adv_estimator=advantage", _advantage),
    pairs("algorithm.options", "gamma lam=gae_lambda", _OF_GAE),
    pairs("algorithm", "norm_adv_by_std_in_grpo=advantage", _scale),
    pairs("algorithm", "use_kl_in_reward=beta", _kl_in_reward),
    pairs("algorithm", "filter_groups.enable=dynamic_sampling"),
    pairs("algorithm", "filter_groups.max_num_gen_batches=max_oversampling", shared.positive),
    pairs("correction", "rollout_correction.bypass_mode=bypass"),
    pairs("correction", "rollout_correction.rollout_is=weight", _correction),
    pairs("correction", "rollout_correction.rollout_is_threshold=max_weight", _correction_limit),
    todo("rollout_correction.rollout_rs*", "set correction.mask and correction.mask_bounds"),
    only("use_pf_ppo", False, otherwise="samples are not reweighted"),
)
_TRAINER = (
    pairs("training", "total_epochs=epochs"),
    pairs("run", "total_training_steps=max_steps default_local_dir=output_dir seed"),
    pairs("run", "device", shared.DEVICE),
    pairs("checkpoint", "save_freq=every_steps", shared.not_negative),
    pairs("checkpoint", "max_*_ckpt_to_keep=keep_last"),
    pairs("evaluation", "test_freq=every_steps", shared.not_negative),
    pairs("evaluation", "val_before_train=before_training"),
    pairs("critic", "critic_warmup=warmup_steps", _OF_GAE),
    pairs("observe", "logger=sinks", shared.trackers),
    pairs("observe", "project_name=project", str),
    todo("experiment_name", shared.RUN_NAME),
    only("val_only", False, otherwise="use `mindrlhf eval`"),
)
TABLE = {
    **under("data", *_DATA),
    **under(_ACTOR, *_OF_ACTOR),
    **under("actor_rollout_ref.rollout", *_OF_ROLLOUT),
    **under(_MODEL, *_OF_MODEL),
    **under("algorithm", *_ALGORITHM),
    **under("trainer", *_TRAINER),
    **pairs("model", "actor_rollout_ref.ref.model.path=reference_path"),
    **pairs("critic", "critic.optim.lr=start_lr critic.cliprange_value=clip_range", _OF_GAE),
    **pairs("reward", "reward.num_workers=num_workers reward.reward_model.model_path=model_path"),
    **pairs("reward", "reward_model.model.path=model_path"),
    **pairs("algorithm", "reward*.overlong_buffer*.enable=overlong_buffer", _overlong),
    **pairs("algorithm", "distillation.enabled=name", _distillation),
    **pairs("profiler", "global_profiler.steps=steps"),
    **each("*.reward_kwargs.max_resp_len reward*.overlong_buffer*", lambda value, source: None),  # read with `enable`
    **todo("*.reward_kwargs.*", "options of a verifier: reward.options"),
    **todo("reward*.reward_manager*", "choose verifiers: `mindrlhf rewards list`, reward.verifier_function"),
    **todo(
        "*custom_reward_function.path",
        "set reward.verifier_function to a file with a function of (completion, answer): docs/migration.md has the "
        "lines around one of (data_source, solution_str, ground_truth, extra_info)",
    ),
    **todo(
        "async_training.* trainer.v1.*",
        "set rollout.off_policy_steps, rollout.segment_tokens and asynchronous: docs/async.md",
    ),
}
