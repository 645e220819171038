"""verl: `actor_rollout_ref`, `algorithm`, `data`, `critic`, `reward`, `trainer`.

Keys and defaults after verl/trainer/config/_generated_ppo_trainer.yaml of that project (0.7); older names of keys that
moved (`reward_model`, `custom_reward_function`) are known too.
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
    without,
)
from mindrlhf.config.imports.shared import (
    CLIP_KEYS,
    KERNELS,
    LORA_KEYS,
    MODEL_SAYS,
    OVERLONG_KEYS,
    PIPELINE_KEYS,
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
    pipeline,
    positive,
    prompt_length,
    prompts,
    rows_of_tokens,
    schedule,
    sequence_parallel,
    template_option,
    top_k,
    trackers,
    warmup_share,
    whole,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ADVANTAGES = {
    "gae": {"algorithm.name": "ppo", "algorithm.advantage": "gae", "algorithm.num_generations": 1},
    "grpo": {"algorithm.name": "grpo", "algorithm.advantage": "grpo"},
    "rloo": {"algorithm.name": "rloo", "algorithm.advantage": "rloo"},
    "reinforce_plus_plus": {"algorithm.name": "reinforce_pp", "algorithm.advantage": "reinforce_pp"},
    "reinforce_plus_plus_baseline": {
        "algorithm.name": "reinforce_pp_baseline",
        "algorithm.advantage": "reinforce_pp_baseline",
    },
    "remax": {"algorithm.name": "remax", "algorithm.advantage": "remax"},
    "gdpo": {"algorithm.name": "gdpo", "algorithm.advantage": "gdpo"},
    "grpo_passk": {"algorithm.name": "pass_at_k", "algorithm.advantage": "pass_at_k"},
}
# verl's plain loss is PPO's with the second clip of Ye et al. 2020 (arXiv:1912.09729) at `clip_ratio_c`.
_LOSSES = {"vanilla": "dual_clip", "geo_mean": "gmpo"}
_LOSSES |= {name: name for name in ("gspo", "sapo", "cispo", "dppo_tv", "dppo_kl")}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "sequence_sum",
}


def _advantage(value: Any, source: Source) -> Values:
    if is_on(source.get("distillation.enabled")):
        return {}
    if str(value) not in _ADVANTAGES:
        raise NoCounterpartError(f"no estimator {value!r}: algorithm.name knows {', '.join(_ADVANTAGES)}")
    values = dict(_ADVANTAGES[value])
    if value == "gae":
        values["algorithm.num_generations"] = int(source.get(f"{_ROLLOUT}.n", 1))
        # A critic begins as the actor where its own path is not known.
        given = [source.given.get(name) for name in ("critic.model.path", "actor_rollout_ref.model.path")]
        values["critic.path"] = str(next(filter(None, given), "path/to/model"))
    return values


def _kl_in_loss(value: Any, source: Source) -> Values:
    if not is_on(value):
        is_set_elsewhere = is_on(source.get("algorithm.use_kl_in_reward")) or is_on(source.get("distillation.enabled"))
        return {} if is_set_elsewhere else {"algorithm.beta": 0.0}
    name = str(source.get(f"{_ACTOR}.kl_loss_type", "low_var_kl"))
    return {
        "algorithm.beta": float(source.get(f"{_ACTOR}.kl_loss_coef", 0.001)),
        "algorithm.kl_in": "loss",
        "algorithm.kl_estimator": kl_estimator(name.rstrip("+")),
        "algorithm.kl_unbiased": name.endswith("+"),
    }


def _kl_in_reward(value: Any, source: Source) -> Values:
    if not is_on(value) or is_on(source.get("distillation.enabled")):
        return {}
    values = {
        "algorithm.beta": float(source.get("algorithm.kl_ctrl.kl_coef", 0.001)),
        "algorithm.kl_in": "reward",
        "algorithm.kl_estimator": kl_estimator(str(source.get("algorithm.kl_penalty", "kl")).rstrip("+")),
    }
    if source.get("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        values["algorithm.kl_target"] = float(source.get("algorithm.kl_ctrl.target_kl", 0.1))
    return values


def _minibatches(value: Any, source: Source) -> Values:
    size = source.get("data.train_batch_size")
    return {"training.num_minibatches": whole(size, min(int(value), int(size)), "prompts of a step and of an update")}


def _clip(value: Any, source: Source) -> Values:
    low, high = source.get(f"{_ACTOR}.clip_ratio_low"), source.get(f"{_ACTOR}.clip_ratio_high")
    return clip(value if low is None else low, value if high is None else high)


def _end_rate(value: Any, source: Source) -> Values:
    if source.get(f"{_ACTOR}.optim.lr_scheduler_type", "constant") == "constant":
        return {}
    return {"optimizer.end_lr": float(f"{float(source.get(f'{_ACTOR}.optim.lr')) * float(value):.6g}")}


def _sequence_ranks(source: Source) -> int:
    """Ranks that share a sequence: all of them together hold what one may."""
    names = (
        "ulysses_sequence_parallel_size",
        "fsdp_config.ulysses_sequence_parallel_size",
        "megatron.context_parallel_size",
    )
    names += ("veomni.ulysses_parallel_size", "engine.cp")
    return max(int(source.get(f"{_ACTOR}.{name}", 1)) for name in names)


def _end_rate_of_megatron(value: Any, source: Source) -> Values:
    style = source.get(f"{_ACTOR}.optim.lr_decay_style", source.get(f"{_ACTOR}.optim.lr_scheduler_type", "constant"))
    return {} if style == "constant" else {"optimizer.end_lr": float(value)}


def _end_rate_of_critic(value: Any, source: Source) -> Values:
    is_falling = source.get(f"{_ACTOR}.optim.lr_scheduler_type", "constant") != "constant"
    if not is_falling or source.get("algorithm.adv_estimator") != "gae":
        return {}
    return {"critic.end_lr": float(f"{float(source.get('critic.optim.lr', 1e-5)) * float(value):.6g}")}


def _types(value: Any, source: Source) -> Values:
    return {"model.compute_dtype": "bfloat16"} if str(value) in ("bfloat16", "bf16") else {}


def _param_types(value: Any, source: Source) -> Values:
    return {"model.param_dtype": "bfloat16"} if str(value) in ("bfloat16", "bf16") else {}


def _recompute(value: Any, source: Source) -> Values:
    return {"model.recompute": True} if value == "full" else {}


def _dynamic_rows(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {}
    tokens = int(source.get(f"{_ACTOR}.ppo_max_token_len_per_gpu", 16384)) * _sequence_ranks(source)
    return rows_of_tokens(tokens, source.get("data.max_response_length"))


def _micro_batch(value: Any, source: Source) -> Values:
    """Samples of one rank; with `use_dynamic_bsz` verl does not read it."""
    return {} if is_on(source.get(f"{_ACTOR}.use_dynamic_bsz")) else {"training.micro_batch_size": int(value)}


def _micro_batch_of_all(value: Any, source: Source) -> Values:
    """Samples of all data-parallel ranks together."""
    if is_on(source.get(f"{_ACTOR}.use_dynamic_bsz")):
        return {}
    ranks = (
        int(source.get("trainer.nnodes", 1)) * int(source.get("trainer.n_gpus_per_node", 8)) // _sequence_ranks(source)
    )
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        ranks //= int(source.get(f"{_ACTOR}.megatron.{name}", 1))
    return {"training.micro_batch_size": whole(value, ranks, "samples of a micro-batch on all ranks, and the ranks")}


def _low_rank(value: Any, source: Source) -> Values:
    model = "actor_rollout_ref.model"
    return lora(value, source.get(f"{model}.lora_alpha", 16), source.get(f"{model}.target_modules"))


def _low_rank_of_megatron(value: Any, source: Source) -> Values:
    model = "actor_rollout_ref.model.lora"
    return lora(value, source.get(f"{model}.alpha", 32), source.get(f"{model}.target_modules"))


def _overlong(prefix: str) -> Rule:
    def carry(value: Any, source: Source) -> Values:
        if not is_on(value):
            return {}
        longest = source.get("data.max_response_length", 512)
        return overlong_buffer(source.get(f"{prefix}.len", 0), longest, source.get(f"{prefix}.penalty_factor", 1.0))

    return into(carry, *OVERLONG_KEYS)


def _replay(value: Any, source: Source) -> Values:
    """R3 replays what the generator chose (arXiv:2510.11370), R2 what the trainer chose before."""
    if str(value) == "R3":
        return {"training.replay_routing": True}
    if str(value) == "disabled":
        return {}
    raise NoCounterpartError(
        f"{value} has no counterpart: training.replay_routing replays the generator's choices (R3)"
    )


def _correction(value: Any, source: Source) -> Values:
    if str(value) not in ("token", "sequence"):
        raise NoCounterpartError(f"{value} has no counterpart: correction.weight knows token and sequence")
    if is_on(source.get("algorithm.rollout_correction.bypass_mode")):
        raise NoCounterpartError("with bypass_mode the old log-probabilities are the generator's: nothing to correct")
    return {"correction.weight": str(value)}


def _teachers(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {}
    prefix, found = "distillation.teacher_models.", {}
    for name in [*source.given, *source.unknown]:
        if name.startswith(prefix) and name.endswith(".model_path"):
            teacher = name.removeprefix(prefix).removesuffix(".model_path")
            found[str(source.get(f"{prefix}{teacher}.key", teacher))] = str(source.given.get(name, "path/to/teacher"))
    values: Values = {"algorithm.name": "distill", "algorithm.advantage": "distill"}
    if len(found) == 1:
        values["model.reference_path"] = next(iter(found.values()))
    elif found:
        values["distillation.teachers"] = found
    if "topk" in str(source.get("distillation.distillation_loss.loss_mode", "k3")):
        values["algorithm.distill_top_k"] = int(source.get("distillation.distillation_loss.topk", 32))
    if is_on(source.get("distillation.distillation_loss.use_task_rewards", True)):
        values["algorithm.distill_reward_weight"] = 1.0
    raise NoCounterpartError("check algorithm.distill_top_k and distill_reward_weight: docs/algorithms.md", values)


def _frequency(key: str) -> Rule:
    return to(key, lambda value: max(int(value), 0))


def _reward_function(value: Any, source: Source) -> Values:
    name = source.get("reward.custom_reward_function.name") or source.get("custom_reward_function.name")
    raise NoCounterpartError(
        f"set reward.verifier_function to a file with a function of (completion, answer); "
        f"{value}:{name or 'compute_score'} takes (data_source, solution_str, ground_truth, extra_info)"
    )


DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    f"{_ACTOR}.optim.lr": 1e-6,
    f"{_ACTOR}.optim.betas": [0.9, 0.999],
    f"{_ACTOR}.ppo_mini_batch_size": 256,
    f"{_ACTOR}.clip_ratio": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
    f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}.loss_agg_mode": "token-mean",
    f"{_ACTOR}.use_kl_loss": False,
    f"{_ACTOR}.fsdp_config.dtype": "bfloat16",
    f"{_ROLLOUT}.n": 1,
    f"{_ROLLOUT}.dtype": "bfloat16",
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
}

_HARDWARE = "the command says it: --workers ranks on each node, --nodes"
_VLLM = "vLLM's own default, or what the servers need, is used"
_MEMORY = "see docs/performance.md#plan for what lies where"

RULES: dict[str, Rule] = {
    "*._target_": without("a class of verl's"),
    "*.profiler.*": without("see docs/debugging.md for profilers"),
    "global_profiler.steps": to("profiler.steps"),
    "global_profiler.*": without("see docs/debugging.md for profilers"),
    "ray_kwargs.*": without("there is no Ray here"),
    "transfer_queue.*": without("samples stay in the ranks' memory"),
    "data.tokenizer": to("data.tokenizer_dir"),
    "data.train_files": by_hand(
        "build it: mindrlhf data build --handler verl --input FILE --output train.mindrecord; then set data.train_file"
    ),
    "data.val_files": by_hand(
        "build it: mindrlhf data build --handler verl --input FILE --output eval.mindrecord; then set data.eval_file",
        {"data.eval_file": "path/to/eval.mindrecord"},
    ),
    "data.train_batch_size": into(lambda value, source: prompts(value), *PROMPT_KEYS),
    "data.max_prompt_length": into(prompt_length),
    "data.max_response_length": to("rollout.max_response_length"),
    "data.shuffle": to("data.shuffle"),
    "data.seed": to("run.seed"),
    "data.val_max_samples": to("evaluation.max_prompts", lambda value: max(int(value), 0)),
    "data.train_max_samples": by_hand("build a file of so many records"),
    "data.tool_config_path": by_hand("name the tools in tools.names; docs/tools.md"),
    "data.apply_chat_template_kwargs*": template_option("data.apply_chat_template_kwargs"),
    "data.function_tool_path": by_hand("name the functions in tools.names: path/to/file.py:function; docs/tools.md"),
    "data.mm_processor_kwargs*": by_hand("images are scaled when the data is built: docs/vision.md"),
    "data.filter_overlong_prompts*": without("mindrlhf data build counts and leaves out prompts that are too long"),
    "data.truncation": without("prompts that are too long are left out, not truncated"),
    **each(
        "data.",
        "use_shm prompt_key reward_fn_key val_batch_size return_raw_input_ids return_raw_chat return_full_prompt "
        "dataloader_num_workers image_patch_size validation_shuffle image_key video_key trust_remote_code custom_cls.* "
        "return_multi_modal_inputs sampler.* datagen.* answer_key gen_batch_size audio_key num_workers",
        without("decided when the data is built: docs/tutorial.md"),
    ),
    f"{_ACTOR}.optim.lr": to("optimizer.start_lr", float),
    f"{_ACTOR}.optim.lr_scheduler_type": to("optimizer.lr_schedule", schedule),
    f"{_ACTOR}.optim.warmup_style": to("optimizer.lr_schedule", schedule),
    f"{_ACTOR}.optim.lr_warmup_steps": positive("optimizer.warmup_steps"),
    f"{_ACTOR}.optim.lr_warmup_steps_ratio": into(warmup_share),
    f"{_ACTOR}.optim.min_lr_ratio": into(_end_rate, "optimizer.end_lr"),
    f"{_ACTOR}.optim.min_lr": into(_end_rate_of_megatron, "optimizer.end_lr"),
    f"{_ACTOR}.optim.lr_decay_style": to("optimizer.lr_schedule", schedule),
    f"{_ACTOR}.optim.weight_decay": to("optimizer.weight_decay"),
    f"{_ACTOR}.optim.betas": into(
        lambda value, source: {"optimizer.beta1": float(value[0]), "optimizer.beta2": float(value[1])},
        "optimizer.beta1",
        "optimizer.beta2",
    ),
    f"{_ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload": flag("memory.offload_optimizer"),
    f"{_ACTOR}.optim.clip_grad": to("optimizer.max_grad_norm"),
    f"{_ACTOR}.optim.optimizer": only("AdamW", "adam", "adamw", otherwise="the optimiser is AdamW"),
    **each(
        f"{_ACTOR}.optim.",
        "optimizer_impl total_training_steps num_cycles override_optimizer_config* lr_decay_steps lr_warmup_init "
        "zero_indexed_step",
        without("AdamW with one schedule: docs/config.md"),
    ),
    f"{_ACTOR}.grad_clip": to("optimizer.max_grad_norm"),
    f"{_ACTOR}.ppo_mini_batch_size": into(_minibatches, "training.num_minibatches"),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": into(_micro_batch, "training.micro_batch_size"),
    f"{_ACTOR}.ppo_micro_batch_size": into(_micro_batch_of_all, "training.micro_batch_size"),
    f"{_ACTOR}.use_dynamic_bsz": into(_dynamic_rows, *ROW_KEYS),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": without("goes with use_dynamic_bsz: `training.sequence_lengths`"),
    f"{_ACTOR}.ppo_epochs": to("training.num_iterations"),
    f"{_ACTOR}.shuffle": without("the samples of a step stay in order"),
    f"{_ACTOR}.clip_ratio": into(_clip, *CLIP_KEYS),
    f"{_ACTOR}.clip_ratio_low": to("algorithm.clip_low", lambda value: min(float(value), 1.0)),
    f"{_ACTOR}.clip_ratio_high": to("algorithm.clip_high"),
    f"{_ACTOR}.clip_ratio_c": to("algorithm.dual_clip"),
    f"{_ACTOR}.tau_pos": to("algorithm.sapo_tau_positive"),
    f"{_ACTOR}.tau_neg": to("algorithm.sapo_tau_negative"),
    f"{_ACTOR}.policy_loss.loss_mode": choice("algorithm.loss", _LOSSES),
    f"{_ACTOR}.policy_loss.tau_pos": to("algorithm.sapo_tau_positive"),
    f"{_ACTOR}.policy_loss.tau_neg": to("algorithm.sapo_tau_negative"),
    f"{_ACTOR}.policy_loss.clip_cov_*": without(
        "goes with the loss clip_cov: algorithm.clip_cov_ratio, algorithm.clip_cov_low and algorithm.clip_cov_high"
    ),
    f"{_ACTOR}.policy_loss.*": without("settings of losses that are not here"),
    f"{_ACTOR}.loss_agg_mode": choice("algorithm.aggregation", _AGGREGATIONS),
    f"{_ACTOR}.loss_scale_factor": without("sequence_sum divides by rollout.max_response_length"),
    f"{_ACTOR}.entropy_coeff": to("algorithm.entropy_coefficient"),
    f"{_ACTOR}.calculate_entropy": without("entropy is always measured"),
    f"{_ACTOR}.use_kl_loss": into(
        _kl_in_loss, "algorithm.beta", "algorithm.kl_in", "algorithm.kl_estimator", "algorithm.kl_unbiased"
    ),
    f"{_ACTOR}.kl_loss_coef": without("goes with use_kl_loss: `algorithm.beta`"),
    f"{_ACTOR}.kl_loss_type": without("goes with use_kl_loss: `algorithm.kl_estimator`"),
    f"{_ACTOR}.freeze_vision_tower": to("model.train_vision", lambda value: "none" if is_on(value) else "all"),
    f"{_ACTOR}.checkpoint.async_save": to("checkpoint.asynchronous"),
    f"{_ACTOR}.checkpoint.*": without("checkpoints hold all that a resume needs"),
    f"{_ACTOR}.megatron.tensor_model_parallel_size": to("parallel_config.model_parallel"),
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": into(pipeline, *PIPELINE_KEYS),
    f"{_ACTOR}.megatron.context_parallel_size": to("parallel_config.context_parallel"),
    f"{_ACTOR}.megatron.expert_model_parallel_size": to("parallel_config.expert_parallel"),
    f"{_ACTOR}.megatron.sequence_parallel": sequence_parallel(f"{_ACTOR}.megatron.tensor_model_parallel_size"),
    f"{_ACTOR}.megatron.use_distributed_optimizer": to("parallel_config.enable_parallel_optimizer"),
    f"{_ACTOR}.megatron.optimizer_offload": flag("memory.offload_optimizer"),
    f"{_ACTOR}.megatron.router_replay.mode": into(_replay, "training.replay_routing"),
    f"{_ACTOR}.megatron.dtype": into(_types, "model.compute_dtype"),
    f"{_ACTOR}.megatron.override_transformer_config.recompute_granularity": into(_recompute, "model.recompute"),
    f"{_ACTOR}.megatron.override_transformer_config.*": without(KERNELS),
    f"{_ACTOR}.megatron.*": without(_MEMORY),
    f"{_ACTOR}.veomni.ulysses_parallel_size": to("parallel_config.context_parallel"),
    f"{_ACTOR}.veomni.expert_parallel_size": to("parallel_config.expert_parallel"),
    f"{_ACTOR}.veomni.optimizer_offload": flag("memory.offload_optimizer"),
    f"{_ACTOR}.veomni.router_replay.mode": into(_replay, "training.replay_routing"),
    f"{_ACTOR}.veomni.*": without(_MEMORY),
    f"{_ACTOR}.engine.tp": to("parallel_config.model_parallel"),
    f"{_ACTOR}.engine.pp": into(pipeline, *PIPELINE_KEYS),
    f"{_ACTOR}.engine.cp": to("parallel_config.context_parallel"),
    f"{_ACTOR}.engine.ep": to("parallel_config.expert_parallel"),
    f"{_ACTOR}.engine.optimizer_offload": flag("memory.offload_optimizer"),
    f"{_ACTOR}.engine.*": without(_MEMORY),
    f"{_ACTOR}.ulysses_sequence_parallel_size": to("parallel_config.context_parallel"),
    f"{_ACTOR}.fsdp_config.fsdp_size": without("parallel_config.enable_parallel_optimizer shards optimiser states"),
    f"{_ACTOR}.fsdp_config.optimizer_offload": flag("memory.offload_optimizer"),
    f"{_ACTOR}.fsdp_config.offload_policy": flag("memory.offload_optimizer"),
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": to("parallel_config.context_parallel"),
    f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype": into(_types, "model.compute_dtype"),
    f"{_ACTOR}.fsdp_config.model_dtype": into(_param_types, "model.param_dtype"),
    f"{_ACTOR}.fsdp_config.full_determinism": flag("run.deterministic"),
    f"{_ACTOR}.fsdp_config.dtype": into(_types, "model.compute_dtype"),
    f"{_ACTOR}.fsdp_config.*": without(_MEMORY),
    f"{_ACTOR}.router_replay.mode": into(_replay, "training.replay_routing"),
    **each(
        f"{_ACTOR}.",
        "rollout_n strategy use_torch_compile use_prefix_grouper data_loader_seed use_fused_kernels "
        "entropy_from_logits_with_chunking entropy_checkpointing use_remove_padding calculate_sum_pi_squared "
        "sum_pi_squared_checkpointing router_replay.* load_weight entropy_from_logits_chunk_size pad_to_length* qat.* "
        "model_engine",
        without(KERNELS),
    ),
    "actor_rollout_ref.ref.model.path": to("model.reference_path"),
    "actor_rollout_ref.ref.*": without("the reference model has the actor's layout and batches"),
    f"{_ROLLOUT}.name": only("vllm", "???", otherwise="the generator is vLLM"),
    f"{_ROLLOUT}.mode": only("sync", "async", otherwise="servers draw a whole step"),
    f"{_ROLLOUT}.temperature": to("rollout.temperature"),
    f"{_ROLLOUT}.top_k": to("rollout.top_k", top_k),
    f"{_ROLLOUT}.top_p": to("rollout.top_p"),
    f"{_ROLLOUT}.n": to("algorithm.num_generations"),
    f"{_ROLLOUT}.response_length": to("rollout.max_response_length"),
    f"{_ROLLOUT}.dtype": to("rollout.dtype"),
    f"{_ROLLOUT}.gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    f"{_ROLLOUT}.tensor_model_parallel_size": to("rollout.tensor_parallel"),
    f"{_ROLLOUT}.max_num_seqs": to("rollout.max_num_seqs"),
    f"{_ROLLOUT}.val_kwargs.temperature": to("evaluation.temperature"),
    f"{_ROLLOUT}.val_kwargs.n": to("evaluation.num_samples"),
    f"{_ROLLOUT}.val_kwargs.*": without("evaluation samples with its temperature alone"),
    f"{_ROLLOUT}.multi_turn.enable": only(False, otherwise="name the tools in tools.names; docs/tools.md"),
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": to("tools.max_turns"),
    f"{_ROLLOUT}.multi_turn.max_tool_response_length": to("tools.max_response_tokens"),
    f"{_ROLLOUT}.multi_turn.format": choice("tools.dialect", {"hermes": "hermes", "qwen3_coder": "qwen3_coder"}),
    f"{_ROLLOUT}.multi_turn.tool_config_path": by_hand("name the tools in tools.names; docs/tools.md"),
    f"{_ROLLOUT}.multi_turn.*": without("tools follow the model's chat template: docs/tools.md"),
    f"{_ROLLOUT}.calculate_log_probs": without("the generator's log-probabilities always return: `correction`"),
    **each(
        f"{_ROLLOUT}.",
        "prompt_length ignore_eos enforce_eager cudagraph_capture_sizes free_cache_engine data_parallel_size "
        "expert_parallel_size pipeline_model_parallel_size max_num_batched_tokens max_model_len "
        "enable_chunked_prefill enable_prefix_caching logprobs_mode scheduling_policy load_format log_prob_* "
        "disable_log_stats do_sample over_sample_rate multi_stage_wake_up engine_kwargs* agent.* checkpoint_engine.* "
        "trace.* skip_* prometheus.* quantization* mtp* layered_summon update_weights_bucket_megabytes limit_images "
        "moe_* disaggregation.* qat* full_determinism seed nnodes n_gpus_per_node",
        without(_VLLM),
    ),
    f"{_ROLLOUT}.enable_rollout_routing_replay": flag("training.replay_routing"),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.tokenizer_path": to("data.tokenizer_dir"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": to("model.recompute"),
    "actor_rollout_ref.model.lora_rank": into(_low_rank, *LORA_KEYS),
    "actor_rollout_ref.model.lora.rank": into(_low_rank_of_megatron, *LORA_KEYS),
    "actor_rollout_ref.model.lora_adapter_path": to("lora.path"),
    "actor_rollout_ref.model.lora.adapter_path": to("lora.path"),
    **each(
        "actor_rollout_ref.model.",
        "hf_config_path use_shm trust_remote_code external_lib override_config* enable_activation_offload "
        "use_remove_padding use_liger use_fused_kernels fused_kernel_options.* tiled_mlp.* mtp.*",
        without(MODEL_SAYS),
    ),
    **each(
        "actor_rollout_ref.model.",
        "lora_alpha target_modules exclude_modules lora.*",
        without("goes with lora_rank"),
    ),
    "actor_rollout_ref.model.custom_chat_template": by_hand("give it to mindrlhf data build --template"),
    "actor_rollout_ref.hybrid_engine": without("ranks and servers share the devices"),
    "actor_rollout_ref.nccl_timeout": without("`run.hang_timeout_s` ends a run that hangs"),
    "critic.model.path": without("goes with adv_estimator gae: `critic.path`"),
    "critic.optim.lr": only_of_gae("algorithm.adv_estimator", "critic.start_lr"),
    "critic.optim.min_lr_ratio": into(_end_rate_of_critic, "critic.end_lr"),
    "critic.cliprange_value": only_of_gae("algorithm.adv_estimator", "critic.clip_range"),
    "critic.*": without("the critic has the actor's layout, batches and options"),
    "custom_reward_function.path": into(_reward_function),
    "reward.custom_reward_function.path": into(_reward_function),
    "*custom_reward_function.*": without("goes with its path"),
    "reward.reward_model.model_path": to("reward.model_path", str),
    "reward_model.model.path": to("reward.model_path", str),
    **{
        f"{section}.overlong_buffer{name}.enable": _overlong(f"{section}.overlong_buffer{name}")
        for section, name in (
            ("reward.reward_kwargs", "_cfg"),
            ("reward_model.reward_kwargs", "_cfg"),
            ("reward_model", ""),
            ("reward", ""),
        )
    },
    "*.overlong_buffer*": without("goes with its `enable`: `algorithm.overlong_buffer`"),
    "*.reward_kwargs.max_resp_len": without("`rollout.max_response_length`"),
    "*.reward_kwargs.*": by_hand("options of a verifier: reward.options"),
    "*sandbox_fusion.*": without("programs run in the sandbox of this machine: docs/security.md"),
    "reward.num_workers": to("reward.num_workers"),
    "reward*.reward_manager*": by_hand("choose verifiers: `mindrlhf rewards list`, reward.verifier_function"),
    "reward.reward_model.*": without("a reward model runs on the training ranks"),
    "reward_model.*": without("a reward model runs on the training ranks"),
    "algorithm.adv_estimator": into(
        _advantage, *sorted({key for values in _ADVANTAGES.values() for key in values}), "critic.path"
    ),
    "algorithm.gamma": only_of_gae("algorithm.adv_estimator", "algorithm.gamma"),
    "algorithm.lam": only_of_gae("algorithm.adv_estimator", "algorithm.gae_lambda"),
    "algorithm.norm_adv_by_std_in_grpo": into(
        lambda value, source: (
            {"algorithm.scale_rewards": is_on(value)}
            if source.get("algorithm.adv_estimator") in ("grpo", "grpo_passk")
            else {}
        ),
        "algorithm.scale_rewards",
    ),
    "algorithm.use_kl_in_reward": into(
        _kl_in_reward, "algorithm.beta", "algorithm.kl_in", "algorithm.kl_estimator", "algorithm.kl_target"
    ),
    "algorithm.kl_penalty": without("goes with use_kl_in_reward: `algorithm.kl_estimator`"),
    "algorithm.kl_ctrl.horizon": without("`algorithm.kl_gain` says how fast the weight follows"),
    "algorithm.kl_ctrl.*": without("goes with use_kl_in_reward: `algorithm.beta`, `algorithm.kl_target`"),
    "algorithm.rollout_correction.rollout_is": into(_correction, "correction.weight"),
    "algorithm.rollout_correction.rollout_is_threshold": into(
        lambda value, source: (
            {"correction.max_weight": float(value)}
            if source.get("algorithm.rollout_correction.rollout_is")
            and not is_on(source.get("algorithm.rollout_correction.bypass_mode"))
            else {}
        ),
        "correction.max_weight",
    ),
    "algorithm.rollout_correction.bypass_mode": to("correction.bypass"),
    "algorithm.rollout_correction.rollout_rs*": by_hand(
        "set correction.mask, correction.mask_low and correction.mask_high"
    ),
    "algorithm.rollout_correction.*": without("see `correction` in docs/config.md"),
    "algorithm.filter_groups.enable": to("algorithm.dynamic_sampling"),
    "algorithm.filter_groups.max_num_gen_batches": positive("algorithm.max_oversampling"),
    "algorithm.filter_groups.*": without("groups are compared by their reward"),
    "algorithm.use_pf_ppo": only(False, otherwise="samples are not reweighted"),
    "algorithm.pf_ppo.*": without("goes with use_pf_ppo"),
    "distillation.enabled": into(
        _teachers,
        "algorithm.name",
        "algorithm.advantage",
        "algorithm.distill_top_k",
        "algorithm.distill_reward_weight",
        "model.reference_path",
        "distillation.teachers",
    ),
    "distillation.*": without("goes with distillation.enabled"),
    "async_training.*": by_hand("set rollout.off_policy_steps, rollout.segment_tokens and asynchronous: docs/async.md"),
    "trainer.v1.*": by_hand("set rollout.off_policy_steps, rollout.segment_tokens and asynchronous: docs/async.md"),
    "skip.*": without("a switch for tests of that stack"),
    "rollout.*": without(_HARDWARE),
    "defaults*": without("files of the other stack: what they say by default is known"),
    "hydra.*": without("of Hydra, not of the run"),
    "model_engine": without("always MindSpore"),
    "trainer.total_epochs": to("training.epochs"),
    "trainer.total_training_steps": to("run.max_steps"),
    "trainer.save_freq": _frequency("checkpoint.every_steps"),
    "trainer.test_freq": _frequency("evaluation.every_steps"),
    "trainer.val_before_train": to("evaluation.before_training"),
    "trainer.val_only": only(False, otherwise="use `mindrlhf eval`"),
    "trainer.critic_warmup": only_of_gae("algorithm.adv_estimator", "critic.warmup_steps"),
    "trainer.default_local_dir": to("run.output_dir"),
    "trainer.max_*_ckpt_to_keep": to("checkpoint.keep_last"),
    "trainer.nnodes": without(_HARDWARE),
    "trainer.n_gpus_per_node": without(_HARDWARE),
    "trainer.device": to("run.device", lambda value: "cpu" if value == "cpu" else "ascend"),
    "trainer.resume_*": without("the command says it: --resume"),
    "trainer.logger": into(trackers, "observe.sinks"),
    "trainer.project_name": to("observe.project", str),
    "trainer.experiment_name": to("observe.run_name", str),
    "trainer.seed": to("run.seed"),
    **each(
        "trainer.",
        "log_val_generations rollout_data_dir validation_data_dir default_hdfs_dir "
        "del_local_ckpt_after_load esi_redundant_time",
        without("everything of a run lies in run.output_dir"),
    ),
    **each(
        "trainer.",
        "balance_batch ray_wait_register_center_timeout use_legacy_worker_impl",
        without("samples are dealt to the ranks by the run, without Ray"),
    ),
}
