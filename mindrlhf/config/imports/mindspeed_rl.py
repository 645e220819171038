"""MindSpeed-RL: `megatron_training`, `actor_config`, `ref_config`, `critic_config`, `rl_config`, `generate_config`.

Keys and defaults after mindspeed_rl/config_cls (`rl_config.py`, `megatron_config.py`, `generate_config.py`) and
configs/ of that project. A batch there counts prompts (`global_batch_size`), a mini-batch samples (`mini_batch_size`).
"""

from typing import Any

from mindrlhf.config.imports.rules import NoCounterpartError, Rule, Source, Values, by_hand, each, into, to, without
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
    top_k,
    warmup_share,
    whole,
)


def _advantage(value: Any, source: Source) -> Values:
    if value == "group_norm":
        return {"algorithm.name": "grpo", "algorithm.advantage": "grpo"}
    if value == "gae":
        path = source.given.get("critic_config.load", "path/to/model")
        return {"algorithm.name": "ppo", "algorithm.advantage": "gae", "critic.path": str(path)}
    raise NoCounterpartError(f"no estimator {value!r}: set algorithm.name")


def _kl(value: Any, source: Source) -> Values:
    values: Values = {
        "algorithm.beta": float(value),
        "algorithm.kl_in": "reward" if source.get("rl_config.adv_estimator") == "gae" else "loss",
    }
    if source.get("rl_config.kl_ctrl_type") == "adaptive":
        values["algorithm.kl_target"] = float(source.get("rl_config.kl_target"))
    return values


def _minibatches(value: Any, source: Source) -> Values:
    prompts_of_step = source.get("actor_config.global_batch_size", source.get("megatron_training.global_batch_size"))
    if prompts_of_step is None:
        raise NoCounterpartError("global_batch_size is missing: set training.chunk_size and training.num_minibatches")
    samples = int(prompts_of_step) * int(source.get("rl_config.n_samples_per_prompt"))
    return {"training.num_minibatches": whole(samples, min(int(value), samples), "samples of a step and of an update")}


def _clip(value: Any, source: Source) -> Values:
    if source.get("rl_config.clip_higher_enable"):
        low, high = source.get("rl_config.clip_ratio_low", value), source.get("rl_config.clip_ratio_high", value)
    else:
        low = high = value
    return clip(low, high)


def _overlong(value: Any, source: Source) -> Values:
    if not value:
        return {}
    longest = source.get("rl_config.rollout_max_tokens", source.get("generate_config.sampling_config.max_tokens"))
    tokens = source.get("rl_config.overlong_buffer", 0)
    return overlong_buffer(tokens, longest, source.get("rl_config.overlong_buffer_penalty_factor", 1.0))


def _dynamic_rows(value: Any, source: Source) -> Values:
    if not value:
        return {}
    tokens = source.get("rl_config.max_packing_token_size")
    if tokens is None:
        raise NoCounterpartError("max_packing_token_size is missing: set training.sequence_lengths")
    return rows_of_tokens(int(tokens), source.get("generate_config.sampling_config.max_tokens"))


def _end_rate(value: Any, source: Source) -> Values:
    is_constant = source.get("actor_config.lr_decay_style", "linear") == "constant"
    return {} if is_constant else {"optimizer.end_lr": float(value)}


def _recompute(value: Any, source: Source) -> Values:
    return {"model.recompute": True} if value == "full" else {}


def _sequence_parallel(value: Any, source: Source) -> Values:
    names = (f"{section}.tensor_model_parallel_size" for section in ("actor_config", "megatron_training"))
    is_shared = max(int(source.get(name, 1)) for name in names) > 1
    return {"parallel_config.use_seq_parallel": bool(value)} if is_shared else {}


def _low_rank(value: Any, source: Source) -> Values:
    sections = ("actor_config", "megatron_training")
    alpha, modules = (
        next((found for one in sections if (found := source.get(f"{one}.{name}")) is not None), default)
        for name, default in (("lora_alpha", 32), ("lora_target_modules", None))
    )
    return lora(value, alpha, modules)


def _trackers(name: str) -> Rule:
    return into(lambda value, source: {"observe.sinks": ["tensorboard", name]} if value else {}, "observe.sinks")


def _types(value: Any, source: Source) -> Values:
    return {"model.compute_dtype": "bfloat16"} if value else {}


DEFAULTS = {
    "rl_config.adv_estimator": "group_norm",
    "rl_config.kl_penalty": "kl",
    "rl_config.kl_ctrl_type": "fixed",
    "rl_config.init_kl_coef": 0.01,
    "rl_config.kl_target": 100.0,
    "rl_config.mini_batch_size": 1,
    "rl_config.epochs": 1,
    "rl_config.clip_ratio": 0.2,
    "rl_config.entropy_coeff": 0.001,
    "rl_config.n_samples_per_prompt": 1,
    "rl_config.verifier_function": ["base_acc"],
    "rl_config.verifier_weight": [1.0],
    "rl_config.verifier_timeout": 30,
    "actor_config.lr_decay_style": "linear",
    "actor_config.min_lr": 0.0,
    "actor_config.adam_beta2": 0.999,
    "generate_config.sampling_config.max_tokens": 128,
    "generate_config.sampling_config.top_k": 50,
    "generate_config.sampling_config.temperature": 0.2,
    "generate_config.infer_tensor_parallel_size": 8,
    "generate_config.dtype": "bfloat16",
}

_DISPATCH = "samples are dealt to the ranks by the run"
_CLUSTER = "the command says it: --workers ranks on each node, --nodes"
_BOARDS = "metrics go to metrics.jsonl, TensorBoard and the report"
_DATA = "decided when the data is built: docs/tutorial.md"
_VLLM = "vLLM's own default, or what the servers need, is used"

# Of `megatron_training`, and of the configs of single models, which override it.
_MODEL = {
    "micro_batch_size": to("training.micro_batch_size"),
    "tensor_model_parallel_size": to("parallel_config.model_parallel"),
    "pipeline_model_parallel_size": into(pipeline, *PIPELINE_KEYS),
    "context_parallel_size": to("parallel_config.context_parallel"),
    "expert_model_parallel_size": to("parallel_config.expert_parallel"),
    "use_distributed_optimizer": to("parallel_config.enable_parallel_optimizer"),
    "num_layers_per_virtual_pipeline_stage": without("stages hold consecutive layers"),
    "num_layer_list": without("layers are dealt to the stages evenly"),
    "noop_layers": without("layers are dealt to the stages evenly"),
    "lr": to("optimizer.start_lr", float),
    "lr_decay_style": to("optimizer.lr_schedule", schedule),
    "min_lr": into(_end_rate, "optimizer.end_lr"),
    "lr_warmup_fraction": into(warmup_share),
    "weight_decay": to("optimizer.weight_decay"),
    "clip_grad": to("optimizer.max_grad_norm"),
    "adam_beta1": to("optimizer.beta1"),
    "adam_beta2": to("optimizer.beta2"),
    "optimizer": only("adam", "adamw", otherwise="the optimiser is AdamW"),
    "swap_optimizer": flag("memory.swap_moments"),
    "recompute_granularity": into(_recompute, "model.recompute"),
    "recompute_*": without("recomputation is by whole layers: `model.recompute`"),
    "bf16": into(_types, "model.compute_dtype"),
    "global_batch_size": into(lambda value, source: prompts(value), *PROMPT_KEYS),
    "seq_length": without("packed sequences fit the longest sample: `training.sequence_lengths`"),
    "tokenizer_name_or_path": to("data.tokenizer_dir"),
    "tokenizer_*": without("the tokenizer directory says it"),
    "data_path": by_hand("build it: mindrlhf data build --input FILE --output train.mindrecord; set data.train_file"),
    "no_shuffle": to("data.shuffle", lambda value: not value),
    "full_shuffle_instruction_dataset": without("`data.shuffle` shuffles every epoch anew"),
    "split": without("held-out prompts are a file of their own: `data.eval_file`"),
    "dataset_additional_keys": by_hand("name them in mindrlhf data build --keep; rewards get them by name"),
    "dataloader_type": without(_DATA),
    "is_*_dataset": without("the command says it: train, sft, dpo, reward-model"),
    "prompt_type*": by_hand("give the chat template to mindrlhf data build --template"),
    "train_iters": to("run.max_steps"),
    "eval_interval": without("`evaluation.every_steps` where there is a `data.eval_file`"),
    "eval_iters": without("`evaluation.max_prompts`"),
    "save_interval": to("checkpoint.every_steps"),
    "save": to("run.output_dir"),
    "load": by_hand("set model.path to the Hugging Face directory; no conversion is needed"),
    "pretrained_checkpoint": by_hand("set model.path to the Hugging Face directory; no conversion is needed"),
    "no_load_*": without("--resume decides"),
    "no_save_*": without("checkpoints hold all that a resume needs"),
    "load_checkpoint_loosely": without("names and shapes must fit"),
    "finetune": without("--resume decides"),
    "seed": to("run.seed"),
    "npu_deterministic": to("run.deterministic"),
    "model": by_hand("set model.path to the Hugging Face directory of this model"),
    "stage": only(
        "ray_grpo", "ray_dapo", "ray_ppo", None, otherwise="another command: mindrlhf sft, dpo or reward-model"
    ),
    "no_check_for_nan_in_loss_and_grad": without("an update that is not finite is always withheld"),
    "enable_high_availability": without("--max-restarts, --resume"),
    "log_*": without(_BOARDS),
    "distributed_backend": without("MindSpore's: HCCL, or its own on CPU"),
    "no_shared_storage": without("checkpoints need a shared directory"),
    "dpo_loss_type": without("of `mindrlhf dpo`"),
    "ref_model": without("of `mindrlhf dpo`"),
    "refer_model_iter": without("of `mindrlhf dpo`"),
    "pad_to_multiple_of": without("packed sequences have their own lengths"),
    "variable_seq_lengths": without("`training.sequence_lengths`"),
    "num_workers": without("prompts are read by the ranks"),
    "skip_train": only(False, otherwise="use `mindrlhf eval`"),
    "do_sample": without("responses are always sampled"),
    "ai_framework": without("always MindSpore"),
    "mm_model": without(MODEL_SAYS),
    "lora_r": into(_low_rank, *LORA_KEYS),
    **each("", "lora_alpha lora_target_modules", without("goes with lora_r")),
    "lora_load": to("lora.path"),
    "lora_*": without("adapters are merged, and saved in PEFT's format: docs/lora.md"),
    "no_pad_to_seq_lengths": without("packed sequences have their own lengths"),
}
_OF_CONFIG_JSON = (
    "spec use_mcore_models num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels num_query_groups "
    "group_query_attention make_vocab_size_divisible_by padded_vocab_size add_qkv_bias disable_bias_linear "
    "attention_dropout hidden_dropout init_method_std position_embedding_type rotary_base normalization norm_epsilon "
    "swiglu untie_embeddings_and_output_weights multi_latent_attention qk_pos_emb_head_dim qk_head_dim q_lora_rank "
    "kv_lora_rank v_head_dim qk_layernorm attention_bias seq_aux first_k_dense_replace num_experts n_shared_experts "
    "norm_topk_prob beta_fast beta_slow low_freq_factor high_freq_factor *max_position_embeddings vocab_extra_ids "
    "rope_scaling_* moe_* use_rotary_position_embeddings"
)
_OF_KERNELS = (
    "use_flash_attn use_fused_* shape_order no_bias_dropout_fusion no_masked_softmax_fusion attention_softmax_in_fp32 "
    "no_gradient_accumulation_fusion gemm_gradient_accumulation_fusion use_ascend_coc coc_* swap_attention "
    "context_parallel_algo attention_mask_type reset_attention_mask reset_position_ids use_cp_send_recv_overlap "
    "use_tp_pp_dp_mapping ddp_bucket_size overlap_* accumulate_allreduce_grads_in_fp32 reuse_fp32_param "
    "initial_loss_scale use_kv_cache algorithm"
)


def _of_section(section: str) -> dict[str, Rule]:
    rules = {f"{section}.{name}": rule for name, rule in _MODEL.items()}
    rules[f"{section}.sequence_parallel"] = into(_sequence_parallel, "parallel_config.use_seq_parallel")
    rules |= each(f"{section}.", _OF_CONFIG_JSON, without(MODEL_SAYS))
    return rules | each(f"{section}.", _OF_KERNELS, without(KERNELS))


RULES: dict[str, Rule] = {
    "defaults*": without("the model directory's config.json takes the place of model files"),
    **_of_section("megatron_training"),
    **_of_section("actor_config"),
    "ref_config.load": by_hand("set model.reference_path where it is not the starting model"),
    "ref_config.*": without("the reference model has the actor's layout and batches"),
    "reward_config.load": by_hand("set reward.model_path to a Hugging Face directory"),
    "reward_config.*": without("a reward model has the actor's layout and batches"),
    "critic_config.load": by_hand("set critic.path to a Hugging Face directory"),
    "critic_config.lr": to("critic.start_lr", float),
    "critic_config.*": without("the critic has the actor's layout, batches and options"),
    "vit_config.*": without("the tower has the actor's layout"),
    "rl_config.adv_estimator": into(_advantage, "algorithm.name", "algorithm.advantage", "critic.path"),
    "rl_config.kl_penalty": to("algorithm.kl_estimator", kl_estimator),
    "rl_config.init_kl_coef": into(_kl, "algorithm.beta", "algorithm.kl_in", "algorithm.kl_target"),
    "rl_config.kl_ctrl_type": without("goes with init_kl_coef"),
    "rl_config.kl_target": without("goes with init_kl_coef"),
    "rl_config.kl_horizon": without("`algorithm.kl_gain` says how fast the weight follows"),
    "rl_config.gamma": only_of_gae("rl_config.adv_estimator", "algorithm.gamma"),
    "rl_config.lam": only_of_gae("rl_config.adv_estimator", "algorithm.gae_lambda"),
    "rl_config.advantage_whiten": only_of_gae("rl_config.adv_estimator", "algorithm.whiten_advantages"),
    "rl_config.beta": without("of `mindrlhf dpo`"),
    "rl_config.mini_batch_size": into(_minibatches, "training.num_minibatches"),
    "rl_config.n_samples_per_prompt": to("algorithm.num_generations"),
    "rl_config.num_samples_per_step": without(_DISPATCH),
    "rl_config.max_prompt_length": into(prompt_length),
    "rl_config.epochs": to("training.num_iterations"),
    "rl_config.clip_ratio": into(_clip, *CLIP_KEYS),
    "rl_config.clip_ratio_*": without("goes with clip_higher_enable"),
    "rl_config.clip_higher_enable": without("goes with clip_ratio"),
    "rl_config.cliprange_value": only_of_gae("rl_config.adv_estimator", "critic.clip_range"),
    "rl_config.entropy_coeff": to("algorithm.entropy_coefficient"),
    "rl_config.token_level_loss": to("algorithm.aggregation", lambda value: "token_mean" if value else "sequence_mean"),
    "rl_config.filter_groups_enable": to("algorithm.dynamic_sampling"),
    "rl_config.filter_groups_max_batches": positive("algorithm.max_oversampling"),
    "rl_config.filter_groups_*": without("groups are compared by their reward, and a step keeps its size"),
    "rl_config.overlong_buffer_enable": into(_overlong, *OVERLONG_KEYS),
    "rl_config.overlong_buffer*": without("goes with overlong_buffer_enable"),
    "rl_config.rollout_max_tokens": without("`rollout.max_response_length`"),
    "rl_config.rule_reward": only(True, otherwise="set reward.model_path"),
    "rl_config.verifier_function": to("reward.verifier_function"),
    "rl_config.verifier_weight": to("reward.verifier_weight"),
    "rl_config.verifier_timeout": to("reward.timeout_s", float),
    "rl_config.verifier_parallel": to("reward.num_workers"),
    "rl_config.use_dynamic_bsz": into(_dynamic_rows, *ROW_KEYS),
    "rl_config.*_max_packing_token_size": without("`training.sequence_lengths` are for all passes"),
    "rl_config.use_dp_batch_balance": without(_DISPATCH),
    "rl_config.log_max_throughput": without(_BOARDS),
    "rl_config.hccl_buffersize": without("an environment variable of HCCL"),
    "rl_config.async_engine": without("servers answer as requests come"),
    "rl_config.max_parallel_calls": without("`tools.max_calls` is for a whole response"),
    "rl_config.max_total_response_length": without("`rollout.max_response_length` counts answers of tools too"),
    "rl_config.use_kl_in_reward": without("goes with init_kl_coef: `algorithm.kl_in`"),
    "rl_config.max_packing_token_size": without("goes with use_dynamic_bsz"),
    "rl_config.ref_*": without("`training.micro_batch_size` is for all passes"),
    "rl_config.*_forward_micro_batch_size": without("`training.micro_batch_size` is for all passes"),
    "rl_config.update_micro_batch_size": to("training.micro_batch_size"),
    "rl_config.use_remove_padding": to("training.pack"),
    "rl_config.*_dispatch_size": without(_DISPATCH),
    "rl_config.shuffle_mini*": without("the samples of a step stay in order"),
    "rl_config.*_resource*": without(_CLUSTER),
    "rl_config.num_cpus_*": without(_CLUSTER),
    "rl_config.runtime_env_path": without("there is no Ray here"),
    "rl_config.blocking": without("stages of a step run one after the other"),
    "rl_config.guarantee_order": without("the order is always the same"),
    "rl_config.use_integrated_worker": without("ranks and servers share the devices"),
    "rl_config.integrated_mode_config*": without("ranks and servers share the devices"),
    "rl_config.enable_sharding_validate": without("`mindrlhf weights verify`"),
    "rl_config.tp_split_expert": without("`parallel_config.expert_parallel`"),
    "rl_config.use_tensorboard": to("observe.tensorboard"),
    "rl_config.use_wandb": _trackers("wandb"),
    "rl_config.use_swanlab": _trackers("swanlab"),
    **each("rl_config.", "wandb_project swanlab_project", to("observe.project", str)),
    **each("rl_config.", "wandb_exp_name swanlab_exp_name", to("observe.run_name", str)),
    **each("rl_config.", "wandb_* swanlab_*", without(_BOARDS)),
    "rl_config.partial_rollout_max_split": only(
        0, 1, otherwise="a step waits for all its samples; see docs/config.md for `rollout`"
    ),
    "rl_config.is_multimodal": without("the model directory says it"),
    "rl_config.img_pad_token_id": without(MODEL_SAYS),
    "rl_config.reuse_image_embeds": without("image embeddings are computed once for each image and step"),
    "rl_config.colocate_actor_and_vit": without("the tower runs where the actor does"),
    "rl_config.multi_turn_enable": only(False, otherwise="name the tools in tools.names; docs/tools.md"),
    "rl_config.max_tool_calls": to("tools.max_calls"),
    "rl_config.max_tool_response_length": to("tools.max_response_tokens"),
    "rl_config.share_backbone": without("the reference is the actor without its adapters"),
    "rl_config.tool_*": by_hand("name the tools in tools.names; docs/tools.md"),
    "rl_config.multi_turn_*": without("goes with multi_turn_enable"),
    "rl_config.zmq_communication": without("there is no Ray here"),
    "generate_config.tokenizer_name_or_path": to("data.tokenizer_dir"),
    "generate_config.trust_remote_code": without("no code of a model directory is run"),
    "generate_config.data_parallel_size": without("`rollout.num_replicas`"),
    "generate_config.infer_tensor_parallel_size": to("rollout.tensor_parallel"),
    **each(
        "generate_config.",
        "infer_pipeline_parallel_size infer_expert_parallel_size",
        only(1, otherwise="servers have tensor parallelism only"),
    ),
    "generate_config.max_num_seqs": to("rollout.max_num_seqs"),
    "generate_config.max_model_len": without("the longest prompt and response decide it"),
    "generate_config.dtype": to("rollout.dtype"),
    "generate_config.gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    "generate_config.offload_train_optimizer": flag("memory.offload_optimizer"),
    "generate_config.offload_train_*": without("see docs/performance.md#plan for what lies where"),
    "generate_config.sampling_config.max_tokens": to("rollout.max_response_length"),
    "generate_config.sampling_config.top_p": to("rollout.top_p"),
    "generate_config.sampling_config.top_k": to("rollout.top_k", top_k),
    "generate_config.sampling_config.temperature": to("rollout.temperature"),
    "generate_config.sampling_config.min_p": only(0, otherwise="set rollout.top_p or rollout.top_k"),
    "generate_config.sampling_config.seed": without("`run.seed` is for all"),
    **each(
        "generate_config.sampling_config.",
        "logprobs detokenize num_completions best_of",
        without("tokens and their log-probabilities always return"),
    ),
    **each(
        "generate_config.",
        "max_num_batched_tokens enable_prefix_caching num_scheduler_steps enforce_eager torchair_graph "
        "enable_expert_parallel ascend_scheduler_config_enabled limit_image_per_prompt limit_video_per_prompt",
        without(_VLLM),
    ),
    "profiler_config*": without("see docs/debugging.md for profilers"),
    "msprobe_config*": by_hand("see `msprobe` in docs/config.md"),
}
