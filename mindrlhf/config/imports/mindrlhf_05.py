"""mindrlhf 0.5: its GRPO config (`rl_config`, `actor_config`, `ref_config`, `reward_config`, `generate_config`, ...).

Keys after examples/grpo/*_tutorial/grpo_config.yaml and mindrlhf/configs/grpo_configs.py of that project.
"""

from typing import Any

from mindrlhf.config.imports.rules import NoCounterpartError, Rule, Source, Values, by_hand, each, into, to, without
from mindrlhf.config.imports.shared import MODEL_SAYS, only, schedule, top_k

_ONE_LAYOUT = "actor and reference share one layout here: `parallel_config`"
_VLLM = "vLLM's own default is used"


def _interval(value: Any, source: Source) -> Values:
    return {"checkpoint.every_steps": int(value)}


def _beta(value: Any, source: Source) -> Values:
    return {"algorithm.beta": float(value), "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3"}


def _sync(value: Any, source: Source) -> Values:
    if not value:
        return {}
    return {
        "algorithm.sync_ref_model": True,
        "algorithm.ref_model_sync_steps": int(source.get("ref_config.ref_model_sync_steps", 50)),
    }


def _packing(value: Any, source: Source) -> Values:
    return {"training.pack": bool(value)}


def _pipeline_micro_batches(value: Any, source: Source) -> Values:
    stages = int(source.get("actor_config.parallel_config.pipeline_stage", 1))
    return {"parallel_config.micro_batch_num": int(value)} if stages > 1 or int(value) > 1 else {}


def _device(value: Any) -> str:
    if str(value).lower() not in ("ascend", "cpu"):
        raise NoCounterpartError(f"{value} is neither Ascend nor CPU")
    return str(value).lower()


def _repetition(value: Any, source: Source) -> Values:
    if float(value) != 1:
        raise NoCounterpartError("sampling here is from the model's own distribution: a penalty would bias training")
    return {}


DEFAULTS = {
    "rl_config.epochs": 10,
    "rl_config.seq_length": 4096,
    "rl_config.beta": 0.01,
    "rl_config.num_generations": 8,
    "rl_config.num_rollouts": 4,
    "rl_config.chunk_size": 1,
    "rl_config.epsilon_low": 0.2,
    "rl_config.epsilon_high": 0.2,
    "actor_config.optimizer.adam_beta2": 0.95,
    "actor_config.lr_schedule.lr": 5e-7,
    "actor_config.lr_schedule.lr_decay_style": "cosine",
    "actor_config.lr_schedule.warmup_step": 10,
    "generate_config.sampling_config.temperature": 0.8,
    "generate_config.sampling_config.top_p": 0.8,
    "generate_config.sampling_config.top_k": 20,
    "generate_config.sampling_config.max_tokens": 512,
    "context.device_target": "Ascend",
}

_PARALLEL = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
_ACTOR_LAYOUT = {f"actor_config.parallel_config.{name}": to(f"parallel_config.{name}") for name in _PARALLEL}

RULES: dict[str, Rule] = {
    "rl_config.deterministic": to("run.deterministic", lambda value: value in (True, "ON", "on")),
    "rl_config.dataset_file": to("data.train_file"),
    "rl_config.tokenizer_dir": to("data.tokenizer_dir"),
    "rl_config.tokenizer_type": without("the tokenizer directory says it"),
    "rl_config.model_name": without(MODEL_SAYS),
    "rl_config.align_type": without("the command says it: mindrlhf train"),
    "rl_config.epochs": to("training.epochs"),
    "rl_config.batch_size": to("training.micro_batch_size"),
    "rl_config.seq_length": to("training.sequence_lengths", lambda value: [int(value)]),
    "rl_config.packing": into(_packing, "training.pack"),
    "rl_config.pack_num": without("sequences are packed by length"),
    "rl_config.sink_size": without("a step is one call of the graph"),
    "rl_config.use_parallel": without("the number of ranks says it: --workers"),
    "rl_config.parallel_mode": without("always semi_auto_parallel"),
    "rl_config.load_ckpt_format": without("read from the files' names"),
    "rl_config.save_ckpt_format": without("checkpoints are safetensors"),
    "rl_config.enable_compile_cache": without("graphs are compiled at each start"),
    "rl_config.save_strategy_dir": without("`mindrlhf strategy` writes strategy files"),
    "rl_config.save_data_file": without("samples go to samples.jsonl of the output directory"),
    "rl_config.save_prompt_completions_data": without("samples go to samples.jsonl: `observe.samples_per_step`"),
    "rl_config.save_prompt_completions_interval": without("every step: `observe.samples_per_step`"),
    "rl_config.save_prompt_completions_dir": without("samples go to the output directory"),
    "rl_config.save_checkpoint_dir": to("checkpoint.save_dir"),
    "rl_config.reshard_*": without("weights reach vLLM through a weight buffer in shared memory"),
    "rl_config.enable_reshard_optimizer": without("the optimiser's state stays where it is"),
    "rl_config.save_ckpt_interval": into(_interval, "checkpoint.every_steps"),
    "rl_config.save_max_ckpt_num": to("checkpoint.keep_last"),
    "rl_config.tensorboard": to("observe.tensorboard"),
    "rl_config.tensorboard_*": without("event files go to the output directory"),
    "rl_config.performance_stats": to("observe.performance_stats"),
    "rl_config.enable_full_monitor": without("all metrics are always written"),
    "rl_config.calculate_entropy": without("entropy is always measured"),
    "rl_config.micro_batch_interleaved": to("parallel_config.micro_batch_interleave_num"),
    "rl_config.beta": into(_beta, "algorithm.beta", "algorithm.kl_in", "algorithm.kl_estimator"),
    "rl_config.num_generations": to("algorithm.num_generations"),
    "rl_config.num_rollouts": to("training.num_rollouts"),
    "rl_config.chunk_size": to("training.chunk_size"),
    "rl_config.num_iterations": to("training.num_iterations"),
    "rl_config.epsilon_low": to("algorithm.clip_low"),
    "rl_config.epsilon_high": to("algorithm.clip_high"),
    "rl_config.enable_oldpolicy": without("old log-probabilities are computed wherever an update needs them"),
    "rl_config.seed": to("run.seed"),
    **each(
        "rl_config.",
        "init_kl_coef kl_coef target horizon gamma lam cliprange cliprange_value vf_coef pretrain_coef scale_reward "
        "ref_mean ref_std gen_experience_kwargs",
        without("read by no line of its GRPO either"),
    ),
    "actor_config.load": by_hand("set model.path to the Hugging Face directory; `mindrlhf weights convert` makes one"),
    "actor_config.save": to("run.output_dir"),
    "actor_config.model_config": without(MODEL_SAYS),
    **_ACTOR_LAYOUT,
    "actor_config.parallel_config.use_seq_parallel": to("parallel_config.use_seq_parallel"),
    "actor_config.parallel_config.micro_batch_num": into(_pipeline_micro_batches, "parallel_config.micro_batch_num"),
    "actor_config.parallel_config.vocab_emb_dp": to("parallel_config.vocab_emb_dp"),
    "actor_config.recompute_config.recompute": to("model.recompute"),
    "actor_config.recompute_config.*": without("recomputation is by whole layers: `model.recompute`"),
    "actor_config.enable_parallel_optimizer": to("parallel_config.enable_parallel_optimizer"),
    "actor_config.enable_alltoall": without("MindFormers' cells choose the all-to-all of experts"),
    "actor_config.offset": without("layers are dealt to the stages evenly"),
    "actor_config.use_eod_attn_mask_compression": without("packed sequences always have their mask"),
    "actor_config.loss_scale_value": without("no loss scale: sums are float32"),
    "actor_config.optimizer.type": only("adamw", "AdamW", otherwise="the optimiser is AdamW"),
    "actor_config.optimizer.adam_beta1": to("optimizer.beta1"),
    "actor_config.optimizer.adam_beta2": to("optimizer.beta2"),
    "actor_config.optimizer.eps": to("optimizer.epsilon"),
    "actor_config.optimizer.weight_decay": to("optimizer.weight_decay"),
    "actor_config.optimizer.opt_offload": to("memory.swap_moments"),
    "actor_config.lr_schedule.lr": to("optimizer.start_lr"),
    "actor_config.lr_schedule.min_lr": to("optimizer.end_lr"),
    "actor_config.lr_schedule.warmup_step": to("optimizer.warmup_steps"),
    "actor_config.lr_schedule.decay_steps": without("the rate falls over the whole run"),
    "actor_config.lr_schedule.lr_decay_style": to("optimizer.lr_schedule", schedule),
    "ref_config.load": by_hand("set model.reference_path where it is not the starting model"),
    "ref_config.model_config": without(MODEL_SAYS),
    "ref_config.ref_model_batch_size": without("`training.micro_batch_size` is for all passes"),
    "ref_config.sync_ref_model": into(_sync, "algorithm.sync_ref_model", "algorithm.ref_model_sync_steps"),
    "ref_config.ref_model_sync_steps": without("goes with sync_ref_model"),
    **each(
        "ref_config.",
        "parallel_config.* recompute_config.* offset use_eod_attn_mask_compression",
        without(_ONE_LAYOUT),
    ),
    "reward_config.verifier_function": to("reward.verifier_function"),
    "reward_config.verifier_weight": to("reward.verifier_weight"),
    "generate_config.load": without("vLLM starts with the model that is trained"),
    "generate_config.model_config": without(MODEL_SAYS),
    "generate_config.hf_config_path": without(MODEL_SAYS),
    "generate_config.infer_model_batch_size": without("vLLM batches by itself: `rollout.max_num_seqs`"),
    "generate_config.parallel_config.model_parallel": to("rollout.tensor_parallel"),
    "generate_config.parallel_config.data_parallel": to("rollout.num_replicas"),
    "generate_config.parallel_config.*": without("servers have tensor parallelism only"),
    "generate_config.use_vllm": without("always vLLM"),
    "generate_config.max_num_seqs": to("rollout.max_num_seqs"),
    "generate_config.max_prompt_length": by_hand("give it to `mindrlhf data build --max-prompt-length`"),
    "generate_config.max_model_len": without("the longest prompt and response decide it"),
    "generate_config.gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    "generate_config.trust_remote_code": without("no code of a model directory is run"),
    **each("generate_config.", "block_size max_num_batched_tokens num_scheduler_steps offset", without(_VLLM)),
    "generate_config.use_eod_attn_mask_compression": without("vLLM has no packed sequences"),
    "generate_config.sampling_config.temperature": to("rollout.temperature"),
    "generate_config.sampling_config.top_p": to("rollout.top_p"),
    "generate_config.sampling_config.top_k": to("rollout.top_k", top_k),
    "generate_config.sampling_config.max_tokens": to("rollout.max_response_length"),
    "generate_config.sampling_config.repetition_penalty": into(_repetition),
    "generate_config.sampling_config.min_p": by_hand("not there: set top_p or top_k"),
    "generate_config.sampling_config.min_tokens": by_hand("not there: reward empty answers with 0 instead"),
    "generate_config.sampling_config.*_token_id": without("the tokenizer says it"),
    "generate_config.sampling_config.logprobs": without("the log-probability of each token is always returned"),
    "generate_config.sampling_config.detokenize": without("tokens are sent, not text"),
    "context.device_target": to("run.device", _device),
    "context.max_device_memory": without("vLLM's share is `rollout.gpu_memory_utilization`"),
    **each(
        "context.",
        "mode max_call_depth save_graphs save_graphs_path device_id jit_config.* memory_optimize_level ascend_config.*",
        without("MindSpore's context is set by the run; graph mode always"),
    ),
    "monitor_config.*": without("memory is in the metrics of every step"),
    "profiler_config.*": without("see docs/debugging.md for profilers"),
}
