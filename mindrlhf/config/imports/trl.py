"""TRL: the arguments of `GRPOConfig` (with those of transformers' `TrainingArguments`), `ModelConfig` and
`ScriptArguments`: in YAML, on a command line, or in a program.

Keys and defaults after trl/trainer/grpo_config.py of that project (1.x).
"""

from typing import Any

from mindrlhf.config.imports.rules import NoCounterpartError, Rule, Source, Values, by_hand, each, into, to, without
from mindrlhf.config.imports.shared import (
    LORA_KEYS,
    MODEL_SAYS,
    PROMPT_KEYS,
    is_on,
    lora,
    only,
    positive,
    prompt_length,
    prompts,
    schedule,
    template_option,
    top_k,
    trackers,
    whole,
)

_AGGREGATIONS = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "sequence_sum",
    "cispo": "token_mean",
    "sapo": "sequence_mean",
    "luspo": "sequence_sum",
    "vespo": "token_mean",
}
NUM_PROCESSES = "num_processes"  # not of the file: given with the command


def _samples_of_update(source: Source) -> int:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    return int(source.get(names[0])) * int(source.get(names[1])) * int(source.get(NUM_PROCESSES, 1))


def _batch(value: Any, source: Source) -> Values:
    size = _samples_of_update(source)
    drawn = source.get("generation_batch_size")
    if drawn is None:
        steps = int(source.get("steps_per_generation") or source.get("gradient_accumulation_steps"))
        drawn = size // int(source.get("gradient_accumulation_steps")) * steps
    return {
        "training.micro_batch_size": int(source.get("per_device_train_batch_size")),
        **prompts(whole(drawn, source.get("num_generations"), "samples of a step and of a group")),
        "training.num_minibatches": whole(drawn, size, "samples of a step and of an update"),
    }


def _loss(value: Any, source: Source) -> Values:
    if str(value) not in _AGGREGATIONS:
        raise NoCounterpartError(f"no loss {value!r}: set algorithm.loss and algorithm.aggregation")
    values: Values = {"algorithm.aggregation": _AGGREGATIONS[value]}
    high = source.get("epsilon_high") or source.get("epsilon")
    if value == "cispo":
        return values | {"algorithm.loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": float(high) - 1}
    values |= {"algorithm.clip_low": float(source.get("epsilon")), "algorithm.clip_high": float(high)}
    if value in ("sapo", "vespo"):
        return values | {"algorithm.loss": value}
    if source.get("importance_sampling_level", "token") == "sequence":
        return values | {"algorithm.loss": "gspo"}
    if value == "luspo":
        raise NoCounterpartError("luspo with ratios of tokens: set importance_sampling_level to sequence")
    if source.get("delta") is not None:  # bounds the ratio of bad tokens, as the second clip does
        return values | {"algorithm.loss": "dual_clip", "algorithm.dual_clip": float(source.get("delta"))}
    return values | {"algorithm.loss": "ppo_clip"}


def _scale(value: Any, source: Source) -> Values:
    if value in (True, "group"):
        return {"algorithm.scale_rewards": True}
    if value in (False, "none"):
        return {"algorithm.scale_rewards": False}
    raise NoCounterpartError(f"{value!r} has no counterpart here: by batch is `algorithm.advantage` lite_ppo")


def _correction(value: Any, source: Source) -> Values:
    if not value or not source.get("use_vllm"):
        return {"correction.weight": "none"}
    level, _, kind = str(source.get("vllm_importance_sampling_mode")).partition("_")
    cap = float(source.get("vllm_importance_sampling_cap") or source.get("vllm_importance_sampling_clip_max"))
    low = float(source.get("vllm_importance_sampling_clip_min", 0.0))
    if kind == "truncate":
        return {"correction.weight": level, "correction.max_weight": cap}
    return {
        "correction.weight": "none",
        "correction.mask": level,
        "correction.mask_low": low,
        "correction.mask_high": cap,
    }


def _reference(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {}
    if float(source.get("ref_model_mixup_alpha")) != 1:
        raise NoCounterpartError("the reference becomes a copy of the actor, no mixture: set algorithm.sync_ref_model")
    return {
        "algorithm.sync_ref_model": True,
        "algorithm.ref_model_sync_steps": int(source.get("ref_model_sync_steps")),
    }


def _evaluation(value: Any, source: Source) -> Values:
    if value not in ("steps", "epoch"):
        return {"evaluation.every_steps": 0}
    values: Values = {"data.eval_file": "path/to/eval.mindrecord"}
    if value == "steps":
        values["evaluation.every_steps"] = int(source.get("eval_steps") or source.get("logging_steps", 10))
    raise NoCounterpartError("build it: mindrlhf data build --output eval.mindrecord; then set data.eval_file", values)


def _saving(value: Any, source: Source) -> Values:
    return {"checkpoint.every_steps": int(source.get("save_steps")) if value == "steps" else 0}


def _low_rank(value: Any, source: Source) -> Values:
    if not is_on(value):
        return {}
    if is_on(source.get("use_dora")):
        raise NoCounterpartError("use_dora has no counterpart: adapters are plain low-rank products (lora.rank)")
    rank, alpha = source.get("lora_r", 16), source.get("lora_alpha", 32)
    values: Values = {"lora.rank_stabilised": True} if is_on(source.get("use_rslora")) else {}
    try:
        return values | lora(rank, alpha, source.get("lora_target_modules", "all-linear"))
    except NoCounterpartError as error:
        raise NoCounterpartError(str(error), values | error.values) from None


_SAMPLING = {"temperature": "rollout.temperature", "top_p": "rollout.top_p", "top_k": "rollout.top_k"}


def _sampling(value: Any, source: Source) -> Values:
    if not isinstance(value, dict):
        raise NoCounterpartError("set what you need of it in `rollout`")
    values = {ours: value[theirs] for theirs, ours in _SAMPLING.items() if theirs in value}
    if rest := sorted(set(map(str, value)) - set(_SAMPLING)):
        raise NoCounterpartError(f"{', '.join(rest)}: set what you need of it in `rollout`", values)
    return values


def _entropy(value: Any, source: Source) -> Values:
    if is_on(source.get("use_adaptive_entropy")):
        raise NoCounterpartError("use_adaptive_entropy has no counterpart: set algorithm.entropy_coefficient")
    return {"algorithm.entropy_coefficient": float(value)}


DEFAULTS = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_completion_length": 512,
    "beta": 0.0,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "seed": 42,
    "eval_strategy": "no",
    "save_strategy": "steps",
    "save_steps": 500,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "gradient_checkpointing": True,
    "bf16": True,
}

_SERVER = "the run starts its own servers"
_HUB = "nothing is uploaded"
_BATCH = "goes with per_device_train_batch_size"

RULES: dict[str, Rule] = {
    NUM_PROCESSES: without("the command says it: --workers"),
    "model_name_or_path": to("model.path"),
    "model_revision": without("the directory is what it is"),
    "dataset_name": by_hand("build it with mindrlhf data build --output train.mindrecord; set data.train_file"),
    "dataset_*": without("decided when the data is built: docs/tutorial.md"),
    "output_dir": to("run.output_dir"),
    "seed": to("run.seed", int),
    "data_seed": without("`run.seed` is for all"),
    "learning_rate": to("optimizer.start_lr", float),
    "lr_scheduler_type": into(
        lambda value, source: {
            "optimizer.lr_schedule": schedule(value),
            **({} if schedule(value) == "constant" else {"optimizer.end_lr": 0.0}),
        },
        "optimizer.lr_schedule",
        "optimizer.end_lr",
    ),
    "lr_scheduler_kwargs": by_hand("set optimizer.lr_schedule and optimizer.end_lr"),
    "warmup_steps": to("optimizer.warmup_steps", int),
    "warmup_ratio": by_hand("a share of all steps: set optimizer.warmup_steps to the number of updates"),
    "weight_decay": to("optimizer.weight_decay", float),
    "adam_beta1": to("optimizer.beta1"),
    "adam_beta2": to("optimizer.beta2"),
    "adam_epsilon": to("optimizer.epsilon", float),
    "max_grad_norm": to("optimizer.max_grad_norm", float),
    "optim": only(
        "adamw_torch", "adamw_torch_fused", "adamw_hf", otherwise="the optimiser is AdamW with float32 moments"
    ),
    "num_train_epochs": to("training.epochs", int),
    "max_steps": positive("run.max_steps"),
    "per_device_train_batch_size": into(_batch, "training.micro_batch_size", "training.num_minibatches", *PROMPT_KEYS),
    "gradient_accumulation_steps": without(_BATCH),
    "generation_batch_size": without(_BATCH),
    "steps_per_generation": without(_BATCH),
    "per_device_eval_batch_size": without("vLLM batches by itself"),
    "num_generations": to("algorithm.num_generations"),
    "num_generations_eval": to("evaluation.num_samples"),
    "max_completion_length": to("rollout.max_response_length"),
    "max_prompt_length": into(prompt_length),
    "shuffle_dataset": to("data.shuffle"),
    "num_iterations": to("training.num_iterations"),
    "temperature": to("rollout.temperature"),
    "top_p": to("rollout.top_p"),
    "top_k": to("rollout.top_k", top_k),
    "min_p": by_hand("not there: set rollout.top_p or rollout.top_k"),
    "repetition_penalty": only(1, otherwise="sampling is from the model's own distribution: a penalty biases training"),
    "generation_kwargs": into(_sampling, *_SAMPLING.values()),
    "generation_kwargs.temperature": to("rollout.temperature"),
    "generation_kwargs.top_p": to("rollout.top_p"),
    "generation_kwargs.top_k": to("rollout.top_k", top_k),
    "generation_kwargs.*": by_hand("set what you need of it in `rollout`"),
    "chat_template_kwargs*": template_option("chat_template_kwargs"),
    "use_vllm": without("always vLLM"),
    "vllm_tensor_parallel_size": to("rollout.tensor_parallel"),
    "vllm_gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    "vllm_importance_sampling_correction": into(
        _correction,
        "correction.weight",
        "correction.max_weight",
        "correction.mask",
        "correction.mask_low",
        "correction.mask_high",
    ),
    "vllm_importance_sampling_*": without("goes with vllm_importance_sampling_correction"),
    "vllm_*": without(_SERVER),
    "beta": into(
        lambda value, source: {
            "algorithm.beta": float(value),
            "algorithm.kl_in": "loss",
            "algorithm.kl_estimator": "k3",
        },
        "algorithm.beta",
        "algorithm.kl_in",
        "algorithm.kl_estimator",
    ),
    "use_bias_correction_kl": to("algorithm.kl_unbiased"),
    "loss_type": into(
        _loss,
        "algorithm.loss",
        "algorithm.aggregation",
        "algorithm.clip_low",
        "algorithm.clip_high",
        "algorithm.dual_clip",
    ),
    "epsilon": without("goes with loss_type: `algorithm.clip_low`"),
    "epsilon_high": without("goes with loss_type: `algorithm.clip_high`"),
    "delta": without("goes with loss_type: `algorithm.dual_clip`"),
    "importance_sampling_level": without("goes with loss_type: `algorithm.loss`"),
    "sapo_temperature_pos": to("algorithm.sapo_tau_positive"),
    "sapo_temperature_neg": to("algorithm.sapo_tau_negative"),
    "vespo_k_pos": to("algorithm.vespo_k_positive"),
    "vespo_lambda_pos": to("algorithm.vespo_lambda_positive"),
    "vespo_k_neg": to("algorithm.vespo_k_negative"),
    "vespo_lambda_neg": to("algorithm.vespo_lambda_negative"),
    "scale_rewards": into(_scale, "algorithm.scale_rewards"),
    "reward_funcs": by_hand("set reward.verifier_function: `mindrlhf rewards list`, or path/to/file.py:function"),
    "reward_weights": to("reward.verifier_weight"),
    "multi_objective_aggregation": only("sum_then_normalize", otherwise="set `algorithm.advantage` to gdpo"),
    "mask_truncated_completions": to("algorithm.overlong_filter"),
    "sync_ref_model": into(_reference, "algorithm.sync_ref_model", "algorithm.ref_model_sync_steps"),
    "ref_model_*": without("goes with sync_ref_model"),
    "top_entropy_quantile": only(1, otherwise="all tokens take part in the loss"),
    "off_policy_mask_threshold": to("correction.off_policy_mask"),
    "max_tool_calling_iterations": to("tools.max_turns"),
    "eval_strategy": into(_evaluation, "evaluation.every_steps", "data.eval_file"),
    "eval_steps": without("goes with eval_strategy"),
    "save_strategy": into(_saving, "checkpoint.every_steps"),
    "save_steps": without("goes with save_strategy"),
    "save_total_limit": to("checkpoint.keep_last"),
    "load_best_model_at_end": to("checkpoint.keep_best"),
    "gradient_checkpointing": to("model.recompute"),
    "gradient_checkpointing_kwargs": without("whole layers are recomputed"),
    "gradient_checkpointing_kwargs.*": without("whole layers are recomputed"),
    "bf16": into(
        lambda value, source: (
            {"model.compute_dtype": "bfloat16", "rollout.dtype": "bfloat16"}
            if is_on(value) and not is_on(source.get("fp16"))
            else {}
        ),
        "model.compute_dtype",
        "rollout.dtype",
    ),
    "fp16": only(False, otherwise="float32 or bfloat16: model.compute_dtype"),
    "use_peft": into(_low_rank, *LORA_KEYS, "lora.rank_stabilised"),
    **each("", "lora_r lora_alpha lora_target_modules use_rslora use_dora", without("goes with use_peft")),
    "lora_dropout": without("adapters have no dropout"),
    "lora_*": without("adapters are on a layer's matrices: `lora.targets`"),
    **each(
        "", "load_in_8bit load_in_4bit", only(False, otherwise="weights are float32 or bfloat16: model.param_dtype")
    ),
    **each("", "bnb_* use_bnb_*", without("goes with load_in_4bit")),
    "entropy_coef": into(_entropy, "algorithm.entropy_coefficient"),
    **each("", "entropy_* use_adaptive_entropy", without("goes with entropy_coef")),
    "router_aux_loss_coef": without("experts are not balanced by a loss"),
    "vespo_*": without("settings of a loss that is not here"),
    "pad_to_multiple_of": without("packed sequences have their own lengths"),
    "trust_remote_code": without("no code of a model directory is run"),
    "transformers_continuous_batching_config": without("always vLLM"),
    "use_transformers_continuous_batching": without("always vLLM"),
    "config": by_hand("keys of that YAML file: import it as well"),
    "trl_*": without("the command says it"),
    "ignore_bias_buffers": without("gradients are summed by MindSpore"),
    "per_device_*": without(_BATCH),
    "max_completion_*": without("`rollout.max_response_length`"),
    "include_*": without("metrics are always the same"),
    "auto_find_batch_size": without("`training.micro_batch_size` does not change the result"),
    "use_cpu": to("run.device", lambda value: "cpu" if is_on(value) else "ascend"),
    "resume_from_checkpoint": without("the command says it: --resume"),
    "overwrite_output_dir": without("a run does not overwrite another"),
    "do_train": without("the command says it: mindrlhf train"),
    "do_eval": without("`evaluation.every_steps`"),
    "attn_implementation": without("MindFormers' cells choose it"),
    "dtype": without("`model.param_dtype` and `model.compute_dtype`"),
    "torch_dtype": without("`model.param_dtype` and `model.compute_dtype`"),
    "model_init_kwargs": without(MODEL_SAYS),
    "disable_dropout": without("there is no dropout"),
    "cast_lm_head_to_fp32": without("log-probabilities are computed in float32"),
    "log_*": without("samples go to samples.jsonl: `observe.samples_per_step`"),
    "logging_*": without("every step is logged"),
    "num_completions_to_print": without("samples go to samples.jsonl"),
    "report_to": into(trackers, "observe.sinks"),
    "run_name": to("observe.run_name", str),
    "project": to("observe.project", str),
    "push_to_hub": without(_HUB),
    "hub_*": without(_HUB),
    "ddp_*": without("gradients are summed by MindSpore"),
    "deepspeed": without("see `parallel_config`"),
    "fsdp*": without("see `parallel_config`"),
    "dataloader_*": without("prompts are read by the ranks"),
    "remove_unused_columns": by_hand("rewards get the columns that mindrlhf data build --keep names"),
    "ds3_gather_for_generation": without("weights reach vLLM through a weight buffer in shared memory"),
    "use_transformers_paged": without("always vLLM"),
    "cache_implementation": without("always vLLM"),
    "use_liger_kernel": without("logits are never whole on CPU; kernels are MindFormers'"),
    "torch_compile*": without("graphs are compiled whole"),
    "tf32": without("a switch of GPUs"),
}
