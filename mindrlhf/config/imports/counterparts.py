"""Which of our keys the other stacks have, and why they lack the rest.

A test holds this to the tables of the importers: a new key of ours is the target of a rule, is named in the advice of
one, or stands here.
"""

import re
from collections.abc import Iterable, Mapping
from types import ModuleType

from mindrlhf.config.imports.rules import Rule

ALL = "any"  # no stack has a key for it

_NO_SETS = "there is no evaluation on held-out prompts"
_NO_TOOLS = "there are no tools"
_NO_CRITIC = "there is no critic"
_NO_LORA = "all weights are trained"
_NO_REWARD_MODEL = "there is no reward model"
_NO_TEACHER = "there is no distillation from a teacher"
_NO_CORRECTION = "the generator's log-probabilities are not used"
_IN_STEP = "samples are made within the step"
_END_TOKENS = "responses end by their end tokens"
_ONE_DIALECT = "calls are read in the form of its own templates"
_ONE_LOSS = "there is one loss"
_NO_VESPO = "the loss vespo is not there"
_VESPO = "algorithm.vespo_k_positive algorithm.vespo_lambda_positive algorithm.vespo_k_negative "
_VESPO += "algorithm.vespo_lambda_negative"
_NO_COV = "no tokens are left out by their covariance"
_COV = "algorithm.clip_cov_ratio algorithm.clip_cov_low algorithm.clip_cov_high"
_BY_FUNCTION = "rewards are functions of the user, or of the data set"
_OF_OURS = "a switch of the cells here"
_ADAMW = "the optimiser is AdamW"
_OPTIMIZER = "optimizer.type optimizer.momentum"
_LAYOUT = "the layout is that of FSDP or DeepSpeed"

# Stack -> reason -> keys, with spaces between.
WITHOUT: Mapping[str, Mapping[str, str]] = {
    ALL: {
        "a run from random weights is for tests": "model.random_init",
        "a reward model's score is taken as it is": "reward.model_weight",
        "verifiers are functions of one's own there, without limits or gates": (
            "reward.failure_value reward.memory_limit_mib reward.gates reward.closed_gate_value reward.by_choice"
        ),
        "verifiers run where the trainer does, or where Ray puts them": "reward.every_node tools.every_node",
        "Ray starts and restarts processes": "run.start_timeout_s rollout.start_timeout_s",
        "training and generation share an interpreter": "rollout.python rollout.env rollout.num_threads",
        "an engine is one of its own": "rollout.engine",
        "asynchronous runs are another program there": (
            "rollout.asynchronous rollout.replay_order rollout.max_segments rollout.in_flight"
        ),
        "drafts come from a model there, from the prompt here": "rollout.draft_tokens",
        "of CPUs": "rollout.kv_cache_gib",
        "of vLLM-Ascend": "rollout.sleep_extra_cleanup",
        "weights go pairwise from rank to server": "rollout.weights_transport",
        "tools have no limits of their own": "tools.timeout_s tools.num_workers tools.memory_limit_mib",
        "programs run elsewhere, or without a sandbox": "sandbox.allow_weak",
        "the k is fixed": "algorithm.pass_k",
        "prompts are drawn whatever they earn": (
            "algorithm.rest_epochs algorithm.rest_easy algorithm.rest_hopeless algorithm.curriculum"
        ),
        "the loss kimi is not there": "algorithm.mirror_tau",
        "settings are given one by one": "correction.preset",
        "no response is left out for one token": "correction.veto",
        "one way of packing": "training.packing",
        "all samples take part in updates": "training.skip_zero_advantages",
        "states are sharded over all ranks": "parallel_config.optimizer_weight_shard_size",
        "logits are computed in chunks of positions alone": "memory.logit_vocabulary",
        "recomputation is of all layers, or of the first": "memory.recompute_layers memory.recompute_operators",
        "a run does not end by its evaluation": "evaluation.patience",
        "accuracy is the reward": "evaluation.verifier evaluation.verifiers evaluation.best_by",
        "checkpoints are in a shared directory": "checkpoint.node_local",
        "a run goes on whatever its numbers are": (
            "run.fail_without_signal "
            "guard.max_skipped_updates guard.warn_rollout_diff guard.max_rollout_diff guard.grad_spike_factor "
            "guard.max_failed_steps"
        ),
        "text alone is written": "observe.sample_tokens observe.groups_per_step",
        "metrics go to a tracker": "observe.prometheus_port",
        "ports are the system's choice": "run.ports",
        "an agent is code within the run, or has settings of its own": (
            "tools.agent_open tools.agent_python tools.agent_timeout_s tools.agent_tokens "
            "tools.agents_at_once tools.agent_gather_s"
        ),
        "profilers have settings of their own": "profiler.ranks profiler.mindspore profiler.vllm",
        "precision debuggers have files of their own": (
            "msprobe.enabled msprobe.dump_dir msprobe.stages msprobe.first_step msprobe.last_step msprobe.level "
            "msprobe.task"
        ),
        _OF_OURS: "rollout.restarts rollout.stall_timeout_s observe.performance_stats run.hang_timeout_s "
        "parallel_config.data_parallel parallel_config.micro_batch_interleave_num parallel_config.vocab_emb_dp "
        "observe.samples_per_step memory.logit_positions",
    },
    "mindspeed-rl": {
        _ADAMW: _OPTIMIZER,
        _NO_COV: _COV,
        _NO_VESPO: _VESPO,
        _END_TOKENS: "rollout.stop",
        _ONE_DIALECT: "tools.dialect",
        "weights are as in the checkpoint": "model.param_dtype",
        "the tower is frozen": "model.train_vision",
        _BY_FUNCTION: "reward.options",
        "it runs on Ascend": "run.device",
        _IN_STEP: "rollout.off_policy_steps rollout.segment_tokens",
        "weights are resharded in place": "rollout.weight_buffer_gib",
        "turns of tools have no limit of their own": "tools.environment tools.agent tools.max_turns",
        "advantages are always scaled by group": "algorithm.scale_rewards",
        _NO_TEACHER: "algorithm.distill_reward_weight algorithm.distill_top_k distillation.teachers",
        _ONE_LOSS: "algorithm.loss algorithm.dual_clip algorithm.sapo_tau_positive algorithm.sapo_tau_negative "
        "algorithm.kl_unbiased",
        "truncated responses count as others": "algorithm.overlong_filter",
        "the reference stays": "algorithm.sync_ref_model algorithm.ref_model_sync_steps",
        _NO_CORRECTION: (
            "correction.weight correction.max_weight correction.mask correction.mask_low correction.mask_high "
            "correction.off_policy_mask correction.bypass training.replay_routing"
        ),
        "a run has a number of steps": "training.epochs",
        "a warm-up is a share of the steps": "optimizer.warmup_steps",
        "fixed there": "optimizer.epsilon lora.rank_stabilised critic.end_lr critic.warmup_steps",
        _NO_SETS: ("evaluation.before_training evaluation.num_samples evaluation.temperature evaluation.sets"),
        "every checkpoint is kept, in `save`": (
            "checkpoint.keep_last checkpoint.keep_best checkpoint.asynchronous checkpoint.save_dir"
        ),
        "steps of its profiler are a range": "profiler.steps",
    },
    "mindrlhf": {
        _ADAMW: _OPTIMIZER,
        _NO_COV: _COV,
        _NO_VESPO: _VESPO,
        _END_TOKENS: "rollout.stop",
        _ONE_DIALECT: "tools.dialect",
        "types are those of the model file": "model.param_dtype model.compute_dtype rollout.dtype",
        "models are of text": "model.train_vision",
        _NO_SETS: (
            "data.eval_file evaluation.every_steps evaluation.before_training evaluation.num_samples "
            "evaluation.temperature evaluation.max_prompts evaluation.sets"
        ),
        "prompts come in the file's order": "data.shuffle",
        _NO_REWARD_MODEL: "reward.model_path",
        "verifiers run in the process of the trainer": "reward.num_workers reward.timeout_s reward.options",
        "a run has epochs": "run.max_steps",
        _IN_STEP: "rollout.off_policy_steps rollout.segment_tokens",
        "weights are resharded in place": "rollout.weight_buffer_gib",
        _NO_TOOLS: (
            "tools.names tools.environment tools.agent tools.max_turns tools.max_calls tools.max_response_tokens"
        ),
        "it is GRPO": (
            "algorithm.name algorithm.advantage algorithm.scale_rewards algorithm.gamma algorithm.gae_lambda "
            "algorithm.whiten_advantages algorithm.loss algorithm.aggregation algorithm.dual_clip "
            "algorithm.sapo_tau_positive algorithm.sapo_tau_negative algorithm.kl_unbiased algorithm.kl_target "
            "algorithm.kl_gain algorithm.entropy_coefficient algorithm.dynamic_sampling algorithm.max_oversampling "
            "algorithm.overlong_buffer algorithm.overlong_penalty algorithm.overlong_filter"
        ),
        _NO_TEACHER: "algorithm.distill_reward_weight algorithm.distill_top_k distillation.teachers",
        _NO_CORRECTION: (
            "correction.weight correction.max_weight correction.mask correction.mask_low correction.mask_high "
            "correction.off_policy_mask correction.bypass training.replay_routing"
        ),
        "one update in each pass": "training.num_minibatches",
        "gradients are scaled to the norm 1": "optimizer.max_grad_norm",
        _NO_LORA: "lora.rank lora.alpha lora.rank_stabilised lora.targets lora.path",
        _NO_CRITIC: "critic.path critic.start_lr critic.end_lr critic.clip_range critic.warmup_steps",
        "the optimiser is moved with its gradients": "memory.offload_optimizer",
        "checkpoints go by their steps": "checkpoint.keep_best checkpoint.asynchronous",
        "TensorBoard alone": "observe.sinks observe.project observe.run_name",
        "steps of its profiler are a range": "profiler.steps",
    },
    "verl": {
        _ADAMW: _OPTIMIZER,
        "drift is masked on both sides": "correction.off_policy_mask",
        _NO_VESPO: _VESPO,
        _END_TOKENS: "rollout.stop",
        "verifiers are chosen by the data's source": "reward.verifier_weight reward.timeout_s",
        "the number of devices says it": "rollout.num_replicas",
        "an environment is a tool of its own": "tools.environment tools.agent",
        "turns are limited, calls are not": "tools.max_calls",
        "advantages of gae are always whitened": "algorithm.whiten_advantages",
        "truncated responses count as others": "algorithm.overlong_filter",
        "the reference stays": "algorithm.sync_ref_model algorithm.ref_model_sync_steps",
        "fixed there": "optimizer.epsilon lora.rank_stabilised",
        "its moments are moved with the rest of the optimiser": "memory.swap_moments",
        "validation files are one list": "evaluation.sets",
        "checkpoints lie in the run's directory, by steps": "checkpoint.keep_best checkpoint.save_dir",
        "one of its loggers": "observe.tensorboard",
        "weights go in buckets of megabytes within the engine": "rollout.weight_buffer_gib",
    },
    "trl": {
        _ADAMW: _OPTIMIZER,
        _NO_COV: _COV,
        _END_TOKENS: "rollout.stop",
        _ONE_DIALECT: "tools.dialect",
        "the reference is the starting model": "model.reference_path",
        "the tower is trained or not by the user's program": "model.train_vision",
        "the tokenizer is that of the model": "data.tokenizer_dir",
        "data sets have a split": "evaluation.sets evaluation.max_prompts",
        "a reward model is one of `reward_funcs`": "reward.model_path",
        "rewards run in the trainer's process": "reward.num_workers reward.timeout_s reward.options",
        "a seed is all": "run.deterministic",
        "servers are started by hand": "rollout.num_replicas rollout.max_num_seqs rollout.weight_buffer_gib",
        _IN_STEP: "rollout.off_policy_steps rollout.segment_tokens",
        "tools are given by the program": (
            "tools.names tools.environment tools.agent tools.max_calls tools.max_response_tokens"
        ),
        "it is GRPO, with the loss's variants": (
            "algorithm.name algorithm.advantage algorithm.gamma algorithm.gae_lambda algorithm.whiten_advantages "
            "algorithm.kl_target algorithm.kl_gain algorithm.dynamic_sampling algorithm.max_oversampling "
            "algorithm.overlong_buffer algorithm.overlong_penalty correction.bypass"
        ),
        _NO_TEACHER: "algorithm.distill_reward_weight algorithm.distill_top_k distillation.teachers",
        "rows are padded": "training.sequence_lengths training.pack",
        "experts are routed anew": "training.replay_routing",
        "adapters are begun anew": "lora.path",
        _NO_CRITIC: "critic.path critic.start_lr critic.end_lr critic.clip_range critic.warmup_steps",
        _LAYOUT: (
            "parallel_config.model_parallel parallel_config.pipeline_stage parallel_config.context_parallel "
            "parallel_config.expert_parallel parallel_config.use_seq_parallel parallel_config.micro_batch_num "
            "parallel_config.enable_parallel_optimizer memory.offload_optimizer memory.swap_moments"
        ),
        "evaluation samples as training does": "evaluation.before_training evaluation.temperature",
        "checkpoints lie in the run's directory": "checkpoint.asynchronous checkpoint.save_dir",
        "one of its `report_to`": "observe.tensorboard",
        "profilers are callbacks": "profiler.steps",
    },
    "openrlhf": {
        _NO_COV: _COV,
        "drift is masked on both sides": "correction.off_policy_mask",
        _NO_VESPO: _VESPO,
        _END_TOKENS: "rollout.stop",
        _ONE_DIALECT: "tools.dialect",
        "the reference is the starting model": "model.reference_path",
        "weights are as in the checkpoint": "model.param_dtype rollout.dtype",
        "the tokenizer is that of the model": "data.tokenizer_dir",
        "prompts are always shuffled": "data.shuffle",
        "one reward function, in a server or a file": (
            "reward.verifier_weight reward.num_workers reward.timeout_s reward.options"
        ),
        "it runs on GPUs": "run.device",
        "a run has episodes": "run.max_steps",
        "sampling is by temperature and nucleus": "rollout.top_k",
        "the servers' own default": "rollout.max_num_seqs rollout.weight_buffer_gib",
        "an agent is a program": "tools.max_turns tools.max_calls tools.max_response_tokens",
        "advantages of gae are always whitened": "algorithm.whiten_advantages",
        _NO_TEACHER: "algorithm.distill_reward_weight algorithm.distill_top_k distillation.teachers",
        "losses are means over tokens": "algorithm.aggregation",
        "the loss is not there": "algorithm.sapo_tau_positive algorithm.sapo_tau_negative algorithm.kl_unbiased",
        "the reference stays": "algorithm.sync_ref_model algorithm.ref_model_sync_steps",
        "old log-probabilities are always computed": "correction.bypass",
        "experts are routed anew": "training.replay_routing",
        "a warm-up is a share of the steps": "optimizer.warmup_steps",
        "adapters are plain, and begun anew": "lora.rank_stabilised lora.path",
        _LAYOUT: (
            "parallel_config.pipeline_stage parallel_config.expert_parallel parallel_config.use_seq_parallel "
            "parallel_config.micro_batch_num memory.swap_moments"
        ),
        "one data set, at every so many steps": ("evaluation.before_training evaluation.max_prompts evaluation.sets"),
        "checkpoints stop the run": "checkpoint.asynchronous",
        "profilers are outside": "profiler.steps",
    },
    "slime": {
        _ADAMW: _OPTIMIZER,
        _NO_COV: _COV,
        _NO_VESPO: _VESPO,
        _ONE_DIALECT: "tools.dialect",
        "weights are as in the checkpoint": "model.param_dtype rollout.dtype",
        "what is trained is told by the names of parameters": "model.train_vision",
        "the tokenizer is that of the model": "data.tokenizer_dir",
        "one reward function": (
            "reward.verifier_weight reward.model_path reward.num_workers reward.timeout_s reward.options"
        ),
        "a run has no directory of its own": "run.output_dir",
        "it runs on GPUs": "run.device",
        "a step later is another program": "rollout.off_policy_steps",
        "an agent is a program": "tools.max_turns tools.max_calls tools.max_response_tokens",
        "advantages of ppo are whitened by `normalize_advantages`": "algorithm.whiten_advantages",
        _NO_TEACHER: "algorithm.distill_reward_weight algorithm.distill_top_k distillation.teachers",
        "the loss is not there": "algorithm.sapo_tau_positive algorithm.sapo_tau_negative",
        "the weight of the KL is fixed": "algorithm.kl_target algorithm.kl_gain",
        "sampling goes on until the batch is full": "algorithm.max_oversampling",
        "rewards are shaped by the user's function": (
            "algorithm.overlong_buffer algorithm.overlong_penalty algorithm.overlong_filter"
        ),
        "bounds of a mask are in the user's function": "correction.mask_low correction.mask_high",
        "one pass over a step": "training.num_iterations",
        _NO_LORA: "lora.rank lora.alpha lora.rank_stabilised lora.targets lora.path",
        "the critic's rate falls as the actor's": "critic.end_lr",
        "its moments are moved with the rest of the optimiser": "memory.swap_moments",
        "every prompt of an evaluation file": "evaluation.max_prompts",
        "every checkpoint is kept": "checkpoint.keep_last checkpoint.keep_best",
        "steps of its profiler are a range": "profiler.steps",
    },
}


def carried(rules: Iterable[Rule]) -> set[str]:
    return {key for rule in rules for key in rule.targets}


def named(rules: Iterable[Rule]) -> set[str]:
    """Return what looks like a key in the advice and the reasons of rules."""
    return {name for rule in rules for name in re.findall(r"\b[a-z_]+\.[a-z_]+\b", rule.text)}


def reasons(stack: str) -> dict[str, str]:
    """Return our keys that a stack lacks, with why; those that no stack has among them."""
    groups = [WITHOUT[ALL], WITHOUT[stack]]
    return {key: reason for group in groups for reason, keys in group.items() for key in keys.split()}


def counts(module: ModuleType) -> dict[str, int]:
    """Return how many of a stack's keys and patterns are carried over, left to the user, and without need of any."""
    rules = module.RULES.values()
    return {
        "carried": sum(rule.translate is not None for rule in rules),
        "by hand": sum(rule.translate is None and rule.is_for_user for rule in rules),
        "explained": sum(rule.translate is None and not rule.is_for_user for rule in rules),
    }
