"""slime: the flags of its `train.py`, with those of Megatron-LM.

Names and defaults after slime/utils/arguments.py of that project (2026). `global_batch_size` counts samples,
`rollout_batch_size` prompts; the servers there are SGLang's.
"""

from typing import Any

from mindrlhf.config.imports.rules import NoCounterpartError, Rule, Source, Values, by_hand, each, into, to, without
from mindrlhf.config.imports.shared import (
    CLIP_KEYS,
    KERNELS,
    MODEL_SAYS,
    PIPELINE_KEYS,
    PROMPT_KEYS,
    ROW_KEYS,
    clip,
    flag,
    is_on,
    kl_estimator,
    only,
    only_of_gae,
    pipeline,
    positive,
    prompts,
    rows_of_tokens,
    schedule,
    sequence_parallel,
    template_option,
    top_k,
    warmup_share,
    whole,
)

_ADVANTAGES = {
    "grpo": {"algorithm.name": "grpo", "algorithm.advantage": "grpo"},
    "gspo": {"algorithm.name": "gspo", "algorithm.advantage": "grpo"},
    "cispo": {"algorithm.name": "cispo", "algorithm.advantage": "grpo"},
    "reinforce_plus_plus": {"algorithm.name": "reinforce_pp", "algorithm.advantage": "reinforce_pp"},
    "reinforce_plus_plus_baseline": {
        "algorithm.name": "reinforce_pp_baseline",
        "algorithm.advantage": "reinforce_pp_baseline",
    },
    "ppo": {"algorithm.name": "ppo", "algorithm.advantage": "gae"},
}


def _advantage(value: Any, source: Source) -> Values:
    if str(value) not in _ADVANTAGES:
        raise NoCounterpartError(f"no estimator {value!r}: algorithm.advantage knows those in docs/algorithms.md")
    values: Values = dict(_ADVANTAGES[value])
    values["algorithm.aggregation"] = "token_mean" if is_on(source.get("calculate_per_token_loss")) else "sequence_mean"
    if value == "ppo":
        paths = (source.given.get(name) for name in ("critic_load", "hf_checkpoint"))
        values["critic.path"] = str(next(filter(None, paths), "path/to/model"))
    return values


def _minibatches(value: Any, source: Source) -> Values:
    if source.get("num_steps_per_rollout") is not None:
        return {}
    samples = int(source.get("rollout_batch_size")) * int(source.get("n_samples_per_prompt"))
    return {"training.num_minibatches": whole(samples, value, "samples of a step and of an update")}


def _clip(value: Any, source: Source) -> Values:
    high = source.get("eps_clip_high", value)
    return clip(value, high)


def _kl_in_loss(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {} if float(source.get("kl_coef", 0)) else {"algorithm.beta": 0.0}
    return {
        "algorithm.beta": float(source.get("kl_loss_coef", 0.0)),
        "algorithm.kl_in": "loss",
        "algorithm.kl_estimator": kl_estimator(source.get("kl_loss_type", "k1")),
        "algorithm.kl_unbiased": is_on(source.get("use_unbiased_kl")),
    }


def _kl_in_reward(value: Any, source: Source) -> Values:
    if not float(value) or is_on(source.get("use_kl_loss")):
        return {}
    estimator = kl_estimator(source.get("kl_loss_type", "k1"))
    return {"algorithm.beta": float(value), "algorithm.kl_in": "reward", "algorithm.kl_estimator": estimator}


def _dynamic_rows(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {}
    tokens = int(source.get("max_tokens_per_gpu")) * int(source.get("context_parallel_size", 1))
    return rows_of_tokens(tokens, source.get("rollout_max_response_len"))


def _micro_batch(value: Any, source: Source) -> Values:
    return {} if is_on(source.get("use_dynamic_batch_size")) else {"training.micro_batch_size": int(value)}


def _servers(value: Any, source: Source) -> Values:
    """As many as the devices of the ranks hold, which they share, or as are kept for them."""
    values: Values = {"rollout.tensor_parallel": int(value)}
    devices = int(source.get("actor_num_nodes", 1)) * int(source.get("actor_num_gpus_per_node", 8))
    if not is_on(source.get("colocate")) and source.get("rollout_num_gpus") is not None:
        devices = int(source.get("rollout_num_gpus"))
    return values | {"rollout.num_replicas": whole(devices, value, "devices, and those of a server")}


def _correction(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {"correction.weight": "none"}
    return {"correction.weight": "token", "correction.max_weight": float(source.get("tis_clip", 2.0))}


def _end_rate(value: Any, source: Source) -> Values:
    is_constant = schedule(source.get("lr_decay_style")) == "constant"
    return {} if is_constant else {"optimizer.end_lr": float(value)}


def _filter(value: Any, source: Source) -> Values:
    if "nonzero_std" in str(value):
        return {"algorithm.dynamic_sampling": True}
    raise NoCounterpartError(f"{value}: algorithm.dynamic_sampling keeps groups whose rewards differ, no others")


DEFAULTS = {
    "bf16": True,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "weight_decay": 0.01,
    "lr_decay_style": "linear",
    "min_lr": 0.0,
    "n_samples_per_prompt": 1,
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "use_kl_loss": False,
    "use_tis": False,
    "value_clip": 0.2,
    "gamma": 1.0,
    "lambd": 1.0,
    "rollout_shuffle": False,
    "num_critic_only_steps": 0,
}

_HARDWARE = "the command says it: --workers ranks on each node, --nodes"
_DATA = "decided when the data is built: docs/tutorial.md"
_BOARDS = "metrics go to metrics.jsonl, TensorBoard and the report"
_HOOKS = "a hook of that stack"

RULES: dict[str, Rule] = {
    "hf_checkpoint": to("model.path", str),
    "ref_load": by_hand("set model.reference_path, a Hugging Face directory, where it is not the starting model"),
    "load": by_hand("a checkpoint of Megatron: set model.path to the Hugging Face directory"),
    "save": to("checkpoint.save_dir", str),
    "save_interval": to("checkpoint.every_steps", int),
    "save_hf": without("the trained model is exported at the end"),
    "async_save": to("checkpoint.asynchronous", is_on),
    "prompt_data": by_hand("build it: mindrlhf data build --output train.mindrecord; then set data.train_file"),
    "eval_prompt_data": by_hand(
        "build each: mindrlhf data build; then set data.eval_file and evaluation.sets",
        {"data.eval_file": "path/to/eval.mindrecord"},
    ),
    "rm_type": by_hand("choose verifiers: `mindrlhf rewards list`, reward.verifier_function"),
    "custom_rm_path": by_hand("reward.verifier_function: path/to/file.py:function"),
    "rm_url": by_hand("reward.verifier_function: path/to/file.py:function"),
    "rollout_shuffle": to("data.shuffle", is_on),
    "apply_chat_template_kwargs*": template_option("apply_chat_template_kwargs"),
    **each(
        "",
        "input_key label_key metadata_key tool_key apply_chat_template reward_key eval_reward_key eval_input_key "
        "eval_label_key eval_tool_key multimodal_keys rollout_max_prompt_len rollout_max_context_len loss_mask_type "
        "eval_max_prompt_len eval_max_context_len eval_max_response_len",
        without(_DATA),
    ),
    "num_rollout": positive("run.max_steps"),
    "num_epoch": to("training.epochs", int),
    "rollout_batch_size": into(lambda value, source: prompts(value), *PROMPT_KEYS),
    "n_samples_per_prompt": to("algorithm.num_generations", int),
    "global_batch_size": into(_minibatches, "training.num_minibatches"),
    "num_steps_per_rollout": to("training.num_minibatches", int),
    "rollout_max_response_len": to("rollout.max_response_length", int),
    "rollout_temperature": to("rollout.temperature", float),
    "rollout_top_p": to("rollout.top_p", float),
    "rollout_top_k": to("rollout.top_k", top_k),
    "rollout_stop": to("rollout.stop", lambda value: list(value) if isinstance(value, (list, tuple)) else [value]),
    "rollout_stop_*": by_hand("responses end where the tokenizer and generation_config.json say"),
    "rollout_seed": without("`run.seed` is for all"),
    "seed": to("run.seed", int),
    "rollout_num_gpus_per_engine": into(_servers, "rollout.tensor_parallel", "rollout.num_replicas"),
    "rollout_num_gpus": without("goes with rollout_num_gpus_per_engine: `rollout.num_replicas`"),
    "sglang_mem_fraction_static": to("rollout.gpu_memory_utilization", float),
    "sglang_max_running_requests": to("rollout.max_num_seqs", int),
    "sglang_*": without("the generator is vLLM: its own default, or what the servers need, is used"),
    "update_weight_buffer_size": to("rollout.weight_buffer_gib", lambda value: int(value) / 2**30),
    "update_weight*": without("weights reach vLLM through a weight buffer in shared memory"),
    "partial_rollout": by_hand("set rollout.segment_tokens: docs/async.md"),
    "mask_offpolicy_in_partial_rollout": by_hand("see `correction.mask`"),
    "over_sampling_batch_size": without("a step with algorithm.dynamic_sampling samples until it is full"),
    "dynamic_sampling_filter_path": into(_filter, "algorithm.dynamic_sampling"),
    "eval_interval": to("evaluation.every_steps", int),
    "n_samples_per_eval_prompt": to("evaluation.num_samples", int),
    "eval_temperature": to("evaluation.temperature", float),
    "eval_top_*": without("evaluation samples with its temperature alone"),
    "skip_eval_before_train": flag("evaluation.before_training", False),
    "advantage_estimator": into(
        _advantage,
        *sorted({key for values in _ADVANTAGES.values() for key in values}),
        "algorithm.aggregation",
        "critic.path",
    ),
    "eps_clip": into(_clip, *CLIP_KEYS),
    "eps_clip_high": without("goes with eps_clip: `algorithm.clip_high`"),
    "eps_clip_c": into(
        lambda value, source: {"algorithm.loss": "dual_clip", "algorithm.dual_clip": float(value)},
        "algorithm.loss",
        "algorithm.dual_clip",
    ),
    "calculate_per_token_loss": without("goes with advantage_estimator: `algorithm.aggregation`"),
    "use_kl_loss": into(
        _kl_in_loss, "algorithm.beta", "algorithm.kl_in", "algorithm.kl_estimator", "algorithm.kl_unbiased"
    ),
    "kl_coef": into(_kl_in_reward, "algorithm.beta", "algorithm.kl_in", "algorithm.kl_estimator"),
    **each("", "kl_loss_coef kl_loss_type use_unbiased_kl", without("goes with use_kl_loss: `algorithm.beta`")),
    "ref_update_interval": into(
        lambda value, source: {"algorithm.sync_ref_model": True, "algorithm.ref_model_sync_steps": int(value)},
        "algorithm.sync_ref_model",
        "algorithm.ref_model_sync_steps",
    ),
    "entropy_coef": to("algorithm.entropy_coefficient", float),
    "disable_grpo_std_normalization": flag("algorithm.scale_rewards", False),
    "normalize_advantages": without("advantages are normalised by their estimator"),
    "disable_rewards_normalization": by_hand("see algorithm.advantage"),
    "use_tis": into(_correction, "correction.weight", "correction.max_weight"),
    "tis_clip*": without("goes with use_tis: `correction.max_weight`"),
    "use_rollout_logprobs": to("correction.bypass", is_on),
    "use_rollout_routing_replay": flag("training.replay_routing"),
    "use_routing_replay": only(False, otherwise="training.replay_routing replays the generator's choices"),
    "use_opd": by_hand("set algorithm.name: distill, with the teacher as model.reference_path: docs/algorithms.md"),
    "opd_*": without("goes with use_opd"),
    "use_opsm": by_hand("set correction.off_policy_mask to opsm_delta"),
    "opsm_delta": without("goes with use_opsm"),
    "gamma": only_of_gae("advantage_estimator", "algorithm.gamma", "ppo"),
    "lambd": only_of_gae("advantage_estimator", "algorithm.gae_lambda", "ppo"),
    "lr": to("optimizer.start_lr", float),
    "min_lr": into(_end_rate, "optimizer.end_lr"),
    "lr_decay_style": to("optimizer.lr_schedule", schedule),
    "lr_warmup_iters": positive("optimizer.warmup_steps"),
    "lr_warmup_fraction": into(warmup_share),
    "lr_*": without("the rate falls over the whole run"),
    "weight_decay": to("optimizer.weight_decay", float),
    "adam_beta1": to("optimizer.beta1", float),
    "adam_beta2": to("optimizer.beta2", float),
    "adam_eps": to("optimizer.epsilon", float),
    "clip_grad": to("optimizer.max_grad_norm", float),
    "optimizer": only("adam", otherwise="the optimiser is AdamW"),
    "optimizer_cpu_offload": flag("memory.offload_optimizer"),
    **each(
        "", "overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer", without("goes with optimizer_cpu_offload")
    ),
    "use_distributed_optimizer": to("parallel_config.enable_parallel_optimizer", is_on),
    "tensor_model_parallel_size": to("parallel_config.model_parallel", int),
    "pipeline_model_parallel_size": into(pipeline, *PIPELINE_KEYS),
    "context_parallel_size": to("parallel_config.context_parallel", int),
    "expert_model_parallel_size": to("parallel_config.expert_parallel", int),
    "expert_tensor_parallel_size": without("experts are shared by `parallel_config.expert_parallel`"),
    "sequence_parallel": sequence_parallel("tensor_model_parallel_size"),
    "decoder_*": without("layers are dealt to the stages evenly"),
    "recompute_granularity": into(
        lambda value, source: {"model.recompute": True} if value == "full" else {}, "model.recompute"
    ),
    "recompute_*": without("recomputation is by whole layers: `model.recompute`"),
    "use_dynamic_batch_size": into(_dynamic_rows, *ROW_KEYS),
    "max_tokens_per_gpu": without("goes with use_dynamic_batch_size: `training.sequence_lengths`"),
    "log_probs_max_tokens_per_gpu": without("`training.sequence_lengths` are for all passes"),
    "log_probs_chunk_size": to("memory.logit_positions", lambda value: max(int(value), 0)),
    "micro_batch_size": into(_micro_batch, "training.micro_batch_size"),
    "balance_*": without("samples are dealt to the ranks by the run"),
    "num_critic_only_steps": only_of_gae("advantage_estimator", "critic.warmup_steps", "ppo"),
    "critic_lr": only_of_gae("advantage_estimator", "critic.start_lr", "ppo"),
    "value_clip": only_of_gae("advantage_estimator", "critic.clip_range", "ppo"),
    "critic_load": without("goes with advantage_estimator: `critic.path`"),
    "critic_*": without("the critic has the actor's layout, batches and options"),
    **each("", "actor_num_nodes actor_num_gpus_per_node num_gpus_per_node", without(_HARDWARE)),
    **each(
        "", "colocate offload offload_train offload_rollout", without("ranks and servers take turns on the devices")
    ),
    "use_fault_tolerance": without("`rollout.restarts`"),
    "rollout_health_check_*": without("`rollout.stall_timeout_s`"),
    "use_wandb": into(
        lambda value, source: {"observe.sinks": ["tensorboard", "wandb"]} if is_on(value) else {}, "observe.sinks"
    ),
    "wandb_project": to("observe.project", str),
    "wandb_group": to("observe.run_name", str),
    "wandb_*": without(_BOARDS),
    "use_tensorboard": to("observe.tensorboard", is_on),
    "tb_*": without(_BOARDS),
    "log_*": without(_BOARDS),
    "loss_type": only("policy_loss", otherwise="another command: mindrlhf sft"),
    "disable_compute_advantages_and_returns": without("goes with loss_type"),
    "deterministic_mode": to("run.deterministic", is_on),
    "ref_micro_batch_size": without("`training.micro_batch_size` is for all passes"),
    "multimodal_keys.*": without(_DATA),
    "save_debug_*": without("samples go to samples.jsonl: `observe.samples_per_step`"),
    "load_debug_*": by_hand("see `mindrlhf replay` in docs/debugging.md"),
    "debug_*": by_hand("see docs/debugging.md"),
    "dump_details": without("samples go to samples.jsonl: `observe.samples_per_step`"),
    "record_memory_history": without("see docs/performance.md#memory"),
    "memory_*": without("see docs/performance.md#memory"),
    "profile*": by_hand("see `profiler` in docs/config.md"),
    "custom_generate_function_path": by_hand("tools.agent, tools.names or tools.environment: docs/agents.md"),
    "rollout_function_path": by_hand("tools.agent, tools.names or tools.environment: docs/agents.md"),
    "custom_*_path": by_hand(_HOOKS),
    "*_path": by_hand(_HOOKS),
    "custom_config_path": by_hand("keys of that YAML file: import it as well"),
    "freeze_params_name_list": by_hand("`lora` trains a part; all others train all"),
    "only_train_params_name_list": by_hand("`lora` trains a part; all others train all"),
    **each(
        "",
        "spec swiglu num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
        "group_query_attention normalization norm_epsilon rotary_* use_rotary_position_embeddings "
        "position_embedding_type vocab_size disable_bias_linear add_qkv_bias qk_layernorm attention_output_gate "
        "untie_embeddings_and_output_weights multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim v_head_dim "
        "qk_pos_emb_head_dim num_experts moe_* make_vocab_size_divisible_by apply_layernorm_1p use_gated_attention "
        "max_position_embeddings seq_length attention_dropout hidden_dropout mtp_* enable_mtp_training "
        "padded_vocab_size rope_* use_rope_scaling original_max_position_embeddings model_name no_rope_fusion",
        without(MODEL_SAYS),
    ),
    **each(
        "",
        "accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 attention_backend fp8_* fp4_* "
        "cross_entropy_* no_* distributed_* overlap_* transformer_impl train_backend megatron_* use_flash_attn "
        "qwen_gdn_backend data_pad_size_multiplier allgather_cp experimental_* tokenizer_*",
        without(KERNELS),
    ),
    "bf16": flag("model.compute_dtype", "bfloat16"),
    "fp16": only(False, otherwise="float32 or bfloat16: model.compute_dtype"),
    **each("", "ci_* check_weight_update_equal", without("tests of that stack")),
}
