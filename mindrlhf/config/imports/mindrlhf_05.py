"""mindrlhf 0.5: its GRPO config (`rl_config`, `actor_config`, `ref_config`, `reward_config`, `generate_config`, ...).

Keys after examples/grpo/*_tutorial/grpo_config.yaml and mindrlhf/configs/grpo_configs.py of that project.
"""

from typing import Any

from mindrlhf.config.imports import shared
from mindrlhf.config.imports.tables import Source, Values, each, only, pairs, todo, under


def _sync(value: Any, source: Source) -> Values | None:
    steps = int(source.get("ref_config.ref_model_sync_steps", 50))
    return {"algorithm.sync_ref_model": True, "algorithm.ref_model_sync_steps": steps} if value else None


def _micro_batches(value: Any, source: Source) -> int | None:
    stages = int(source.get("actor_config.parallel_config.pipeline_stage", 1))
    return int(value) if stages > 1 or int(value) > 1 else None


DEFAULTS = {
    "rl_config": {
        "epochs": 10,
        "seq_length": 4096,
        "beta": 0.01,
        "num_generations": 8,
        "num_rollouts": 4,
        "chunk_size": 1,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
    },
    "actor_config": {
        "optimizer": {"adam_beta2": 0.95},
        "lr_schedule": {"lr": 5e-7, "lr_decay_style": "cosine", "warmup_step": 10},
    },
    "generate_config": {"sampling_config": {"temperature": 0.8, "top_p": 0.8, "top_k": 20, "max_tokens": 512}},
    "context": {"device_target": "Ascend"},
}
_OF_RL = (
    pairs("run", "seed"),
    pairs("run", "deterministic", {True: True, False: False, "ON": True, "OFF": False}),
    pairs("data", "dataset_file=train_file tokenizer_dir"),
    pairs("training", "epochs num_rollouts chunk_size num_iterations batch_size=micro_batch_size"),
    pairs("training", "packing", shared.PACKING),
    pairs("training", "seq_length=sequence_lengths", lambda value, source: [int(value)]),
    pairs("algorithm", "num_generations epsilon_low=clip_low epsilon_high=clip_high"),
    pairs("algorithm", "beta", shared.beta),
    pairs("checkpoint", "save_checkpoint_dir=save_dir save_ckpt_interval=every_steps save_max_ckpt_num=keep_last"),
    pairs("observe", "performance_stats"),
    pairs("observe", "tensorboard=sinks", {True: ["tensorboard"], False: []}),
)
_LAYOUT = "data_parallel model_parallel pipeline_stage context_parallel expert_parallel use_seq_parallel vocab_emb_dp"
_OF_ACTOR = (
    pairs("run", "save=output_dir"),
    under("parallel_config", pairs("parallel_config", _LAYOUT)),
    pairs("parallel_config", "parallel_config.micro_batch_num=micro_batch_num", _micro_batches),
    pairs("parallel_config", "enable_parallel_optimizer"),
    pairs("model", "recompute_config.recompute=recompute"),
    pairs("optimizer", "optimizer.adam_beta1=beta1 optimizer.adam_beta2=beta2 optimizer.eps=epsilon"),
    pairs("optimizer", "optimizer.weight_decay=weight_decay lr_schedule.lr=start_lr lr_schedule.min_lr=end_lr"),
    pairs("optimizer", "lr_schedule.warmup_step=warmup_steps"),
    pairs("optimizer", "lr_schedule.lr_decay_style=lr_schedule", shared.SCHEDULES),
    pairs("memory", "optimizer.opt_offload=swap_moments"),
    only("optimizer.type", "adamw", "AdamW", otherwise="the optimiser is AdamW"),
    todo("load", "set model.path to the Hugging Face directory; `mindrlhf weights convert` makes one"),
)
_OF_GENERATION = (
    pairs("rollout", "max_num_seqs gpu_memory_utilization parallel_config.model_parallel=tensor_parallel"),
    pairs("rollout", "parallel_config.data_parallel=num_replicas sampling_config.temperature=temperature"),
    pairs("rollout", "sampling_config.top_p=top_p sampling_config.max_tokens=max_response_length"),
    pairs("rollout", "sampling_config.top_k=top_k", shared.not_negative),
    each("max_prompt_length", shared.prompt_length("", "rl_config.packing")),
    only("sampling_config.repetition_penalty", 1, otherwise="a penalty would bias training"),
    todo("sampling_config.min_p sampling_config.min_tokens", "not there: set rollout.top_p or rollout.top_k"),
)
TABLE = {
    **under("rl_config", *_OF_RL),
    **under("actor_config", *_OF_ACTOR),
    **under("generate_config", *_OF_GENERATION),
    **under("reward_config", pairs("reward", "verifier_function verifier_weight")),
    **pairs("algorithm", "ref_config.sync_ref_model=sync_ref_model", _sync),
    **pairs("run", "context.device_target=device", {"Ascend": "ascend", "CPU": "cpu"}),
    **todo("ref_config.load", "set model.reference_path where it is not the starting model"),
}
