"""TRL: arguments of `GRPOConfig` (with those of transformers' `TrainingArguments`), `ModelConfig`, `ScriptArguments`.

Keys and defaults after trl/trainer/grpo_config.py of that project (1.x).
"""

from typing import Any

from mindrlhf.config.imports import shared
from mindrlhf.config.imports.shared import is_on
from mindrlhf.config.imports.tables import LeftToUserError, Source, Values, each, only, pairs, todo

_AGGREGATIONS = dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), "token_mean")
_AGGREGATIONS |= {"grpo": "sequence_mean", "sapo": "sequence_mean", "dr_grpo": "sequence_sum", "luspo": "sequence_sum"}
NUM_PROCESSES = "num_processes"  # a flag of accelerate, or given with the command


def _batch(value: Any, source: Source) -> Values:
    accumulated = int(source.get("gradient_accumulation_steps"))
    size = int(value) * accumulated * int(source.get("nproc_per_node", source.get(NUM_PROCESSES)))
    steps = int(source.get("steps_per_generation") or accumulated)
    drawn = source.get("generation_batch_size") or size // accumulated * steps
    groups = shared.whole(drawn, source.get("num_generations"), "samples of a step and of a group")
    return {
        "training.micro_batch_size": int(value),
        **shared.prompts(groups, source),
        "training.num_minibatches": shared.whole(drawn, size, "samples of a step and of an update"),
    }


def _loss(value: Any, source: Source) -> Values:
    if value not in _AGGREGATIONS:
        raise LeftToUserError(f"no loss {value!r}: set algorithm.loss and algorithm.aggregation")
    values: Values = {"algorithm.aggregation": _AGGREGATIONS[value]}
    high = float(source.get("epsilon_high") or source.get("epsilon"))
    if value == "cispo":
        return values | {"algorithm.loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": high - 1}
    values |= {"algorithm.clip_low": float(source.get("epsilon")), "algorithm.clip_high": high}
    if value in ("sapo", "vespo"):
        return values | {"algorithm.loss": value}
    if source.get("importance_sampling_level") == "sequence":
        return values | {"algorithm.loss": "gspo"}
    if value == "luspo":
        raise LeftToUserError("luspo with ratios of tokens: set importance_sampling_level to sequence")
    if source.get("delta") is not None:  # bounds the ratio of bad tokens, as the second clip does
        return values | {"algorithm.loss": "dual_clip", "algorithm.options.dual_clip": float(source.get("delta"))}
    return values | {"algorithm.loss": "ppo_clip"}


def _correction(value: Any, source: Source) -> Values:
    if not is_on(value) or not is_on(source.get("use_vllm")):
        return {"correction.weight": "none"}
    level, _, kind = str(source.get("vllm_importance_sampling_mode")).partition("_")
    cap = float(source.get("vllm_importance_sampling_cap") or source.get("vllm_importance_sampling_clip_max"))
    if kind == "truncate":
        return {"correction.weight": level, "correction.max_weight": cap}
    low = float(source.get("vllm_importance_sampling_clip_min", 0.0))
    values = {"correction.weight": "none", "correction.mask": level}
    return values | {"correction.mask_bounds": [low, cap]}


def _evaluation(value: Any, source: Source) -> Values:
    if value not in ("steps", "epoch"):
        return {"evaluation.every_steps": 0}
    values: Values = {"data.eval_file": shared.EVAL_FILE}
    if value == "steps":
        values["evaluation.every_steps"] = int(source.get("eval_steps") or source.get("logging_steps", 10))
    raise LeftToUserError("build it: mindrlhf data build --output eval.mindrecord; then set data.eval_file", values)


def _low_rank(value: Any, source: Source) -> Values | None:
    if not is_on(value):
        return None
    if is_on(source.get("use_dora")):
        raise LeftToUserError("use_dora has no counterpart: adapters are plain low-rank products (lora.rank)")
    rank, alpha = source.get("lora_r", 16), source.get("lora_alpha", 32)
    return shared.lora(rank, alpha, source.get("lora_target_modules", "all-linear"))


def _schedule(value: Any, source: Source) -> Values:
    ours = shared.SCHEDULES[value]
    return {"optimizer.lr_schedule": ours, **({} if ours == "constant" else {"optimizer.end_lr": 0.0})}


def _saving(value: Any, source: Source) -> int:
    return int(source.get("save_steps")) if value == "steps" else 0


DEFAULTS = {
    NUM_PROCESSES: 1,
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
    "gradient_checkpointing": True,
    "bf16": True,
}
_BFLOAT16 = {"model.compute_dtype": "bfloat16", "rollout.dtype": "bfloat16"}
TABLE = {
    **pairs("model", "model_name_or_path=path gradient_checkpointing=recompute"),
    **each("bf16", {True: _BFLOAT16, False: None}),
    **pairs("run", "output_dir seed"),
    **pairs("run", "max_steps", shared.positive),
    **pairs("run", "use_cpu=device", {True: "cpu", False: "ascend"}),
    **pairs("optimizer", "learning_rate=start_lr warmup_steps weight_decay max_grad_norm"),
    **pairs("optimizer", "adam_beta1=beta1 adam_beta2=beta2 adam_epsilon=epsilon"),
    **pairs("optimizer", "lr_scheduler_type=lr_schedule", _schedule),
    **each("warmup_ratio", shared.warmup_share),
    **pairs("training", "num_train_epochs=epochs num_iterations"),
    **pairs("training", "per_device_train_batch_size=micro_batch_size", _batch),
    **pairs("algorithm", "num_generations entropy_coef=entropy_coefficient"),
    **pairs("algorithm", "use_bias_correction_kl=kl_estimator", {True: "k3+", False: None}),
    **pairs("algorithm.options", "sapo_temperature_pos=sapo_tau_positive sapo_temperature_neg=sapo_tau_negative"),
    **pairs("algorithm.options", "vespo_k_pos=vespo_k_positive vespo_lambda_pos=vespo_lambda_positive"),
    **pairs("algorithm.options", "vespo_k_neg=vespo_k_negative vespo_lambda_neg=vespo_lambda_negative"),
    **pairs("algorithm", "mask_truncated_completions=overlong_filter"),
    **pairs("algorithm", "scale_rewards=advantage", {True: None, "group": None, False: "dr_grpo", "none": "dr_grpo"}),
    **pairs("algorithm", "beta", shared.beta),
    **pairs("algorithm", "loss_type=loss", _loss),
    **pairs("correction", "off_policy_mask_threshold=off_policy_mask"),
    **pairs("correction", "vllm_importance_sampling_correction=weight", _correction),
    **pairs("rollout", "max_completion_length=max_response_length temperature top_p"),
    **pairs("rollout", "vllm_tensor_parallel_size=tensor_parallel"),
    **pairs("rollout", "vllm_gpu_memory_utilization=gpu_memory_utilization"),
    **pairs("rollout", "top_k", shared.not_negative),
    **pairs("data", "shuffle_dataset=shuffle"),
    **each("max_prompt_length", shared.prompt_length("max_completion_length")),
    **each("chat_template_kwargs.*", shared.template_option("chat_template_kwargs.")),
    **pairs("evaluation", "num_generations_eval=num_samples"),
    **pairs("evaluation", "eval_strategy=every_steps", _evaluation),
    **pairs("checkpoint", "save_total_limit=keep_last load_best_model_at_end=keep_best"),
    **pairs("checkpoint", "save_strategy=every_steps", _saving),
    **pairs("lora", "use_peft=rank", _low_rank),
    **pairs("lora", "use_rslora=rank_stabilised", shared.SWITCH),
    **pairs("tools", "max_tool_calling_iterations=max_turns"),
    **pairs("observe", "report_to=sinks", shared.trackers),
    **pairs("observe", "project", str),
    **todo("run_name", shared.RUN_NAME),
    **only("repetition_penalty", 1, otherwise="a penalty biases training: samples are of the model's own"),
    **only("fp16", False, otherwise="float32 or bfloat16: model.compute_dtype"),
    **only("load_in_8bit load_in_4bit", False, otherwise="weights are float32 or bfloat16: model.param_dtype"),
    **only("multi_objective_aggregation", "sum_then_normalize", otherwise="set `algorithm.advantage` to gdpo"),
    **todo("dataset_name", "build it with mindrlhf data build --output train.mindrecord; set data.train_file"),
    **todo("generation_kwargs.*", "set what you need of it in `rollout`"),
    **todo("reward_funcs", "set reward.verifier_function: `mindrlhf rewards list`, or path/to/file.py:function"),
    **todo("reward_weights", "set reward.verifier_weight, a number for each function"),
    **todo("sync_ref_model", "the reference becomes a copy of the actor, no mixture: set algorithm.sync_ref_model"),
}
