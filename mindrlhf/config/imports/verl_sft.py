"""verl's supervised fine-tuning: `model`, `data`, `optim`, `engine`, `trainer` of its `sft_trainer`.

Keys and defaults after verl/trainer/config/sft_trainer_engine.yaml of that project (0.8). Older ones lie deeper
(`model.partial_pretrain`, `optim` the same).
"""

from collections.abc import Iterable
from typing import Any

from mindrlhf.config.imports.rules import Rule, Source, Values, by_hand, each, into, to, without
from mindrlhf.config.imports.shared import (
    KERNELS,
    LORA_KEYS,
    MODEL_SAYS,
    PIPELINE_KEYS,
    flag,
    lora,
    only,
    pipeline,
    positive,
    schedule,
    trackers,
    warmup_share,
)

TASK = "sft"


def is_one(names: Iterable[str]) -> bool:
    """Whether these keys are of fine-tuning, not of reinforcement learning."""
    sections = {name.split(".")[0] for name in names}
    return not sections & {"actor_rollout_ref", "algorithm"} and bool(sections & {"optim", "model", "engine"})


def _low_rank(value: Any, source: Source) -> Values:
    return lora(value, source.get("model.lora_alpha", 16), source.get("model.target_modules"))


def _betas(value: Any, source: Source) -> Values:
    return {"optimizer.beta1": float(value[0]), "optimizer.beta2": float(value[1])}


def _end_rate(value: Any, source: Source) -> Values:
    return {"optimizer.end_lr": float(value)} if _decays(source) else {}


def _end_share(value: Any, source: Source) -> Values:
    rate = float(source.get("optim.lr")) * float(value)
    return {"optimizer.end_lr": float(f"{rate:.6g}")} if _decays(source) else {}


def _decays(source: Source) -> bool:
    style = source.get("optim.lr_decay_style", source.get("optim.lr_scheduler_type", source.get("optim.warmup_style")))
    return style not in (None, "constant")


DEFAULTS = {
    "data.train_batch_size": 256,
    "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 1024,
    "optim.lr": 1e-5,
    "optim.weight_decay": 0.01,
    "optim.betas": [0.9, 0.95],
    "trainer.total_epochs": 4,
    "trainer.seed": 1,
    "trainer.save_freq": -1,
}

_HARDWARE = "the command says it: --workers ranks on each node, --nodes"

RULES: dict[str, Rule] = {
    "data.train_files": by_hand("build it: mindrlhf data build --task sft --input FILE; then set data.train_file"),
    "data.val_files": by_hand("build it in the same way; then set data.eval_file"),
    "data.train_batch_size": into(
        # A record is a sequence of its own there.
        lambda value, source: {"supervised.rows_per_step": int(value), "supervised.pack": False},
        "supervised.rows_per_step",
        "supervised.pack",
    ),
    "data.micro_batch_size_per_gpu": to("supervised.micro_batch_size", int),
    "data.max_length": to("supervised.sequence_lengths", lambda value: [int(value)]),
    "data.*": without("decided when the data is built: docs/tutorial.md"),
    "model.path": to("model.path", str),
    "model.partial_pretrain": to("model.path", str),
    "model.tokenizer_path": to("data.tokenizer_dir", str),
    "model.enable_gradient_checkpointing": to("model.recompute"),
    "model.lora_rank": into(_low_rank, *LORA_KEYS),
    "model.lora_adapter_path": to("lora.path", str),
    "model.custom_chat_template": by_hand("give it to mindrlhf data build --template"),
    "model.*": without(MODEL_SAYS),
    "optim.lr": to("optimizer.start_lr", float),
    "optim.weight_decay": to("optimizer.weight_decay", float),
    "optim.betas": into(_betas, "optimizer.beta1", "optimizer.beta2"),
    "optim.clip_grad": to("optimizer.max_grad_norm", float),
    "optim.lr_warmup_steps": positive("optimizer.warmup_steps"),
    "optim.lr_warmup_steps_ratio": into(warmup_share),
    **each(
        "optim.", "lr_scheduler_type lr_decay_style warmup_style lr_scheduler", to("optimizer.lr_schedule", schedule)
    ),
    "optim.min_lr": into(_end_rate, "optimizer.end_lr"),
    "optim.min_lr_ratio": into(_end_share, "optimizer.end_lr"),
    "optim.*": without("AdamW with one schedule: docs/config.md"),
    **each("engine.", "tensor_model_parallel_size tp tp_size", to("parallel_config.model_parallel")),
    **each("engine.", "pipeline_model_parallel_size pp pp_size", into(pipeline, *PIPELINE_KEYS)),
    **each(
        "engine.",
        "context_parallel_size cp cp_size ulysses_sequence_parallel_size ulysses_parallel_size",
        to("parallel_config.context_parallel"),
    ),
    **each("engine.", "expert_model_parallel_size ep ep_size", to("parallel_config.expert_parallel")),
    "engine.use_distributed_optimizer": to("parallel_config.enable_parallel_optimizer"),
    "engine.sequence_parallel": to("parallel_config.use_seq_parallel"),
    "engine.override_transformer_config.recompute_granularity": into(
        lambda value, source: {"model.recompute": True} if value == "full" else {}, "model.recompute"
    ),
    "engine.optimizer_offload": without("no generator takes turns with training"),
    "engine.*": without(KERNELS),
    "checkpoint.*": without("checkpoints hold all that a resume needs"),
    "trainer.total_epochs": to("supervised.epochs", int),
    "trainer.total_training_steps": positive("run.max_steps"),
    "trainer.seed": to("run.seed", int),
    "trainer.save_freq": to("checkpoint.every_steps", lambda value: max(int(value), 0)),
    "trainer.max_ckpt_to_keep": to("checkpoint.keep_last", int),
    "trainer.default_local_dir": to("run.output_dir", str),
    "trainer.device": to("run.device", lambda value: "cpu" if value == "cpu" else "ascend"),
    "trainer.logger": into(trackers, "observe.sinks"),
    "trainer.project_name": to("observe.project", str),
    "trainer.experiment_name": to("observe.run_name", str),
    **each("trainer.", "nnodes n_gpus_per_node", without(_HARDWARE)),
    "trainer.*": without("everything of a run lies in run.output_dir"),
    "defaults*": without("files of the other stack: what they say by default is known"),
    "hydra.*": without("of Hydra, not of the run"),
    "*profiler.*": without("see docs/debugging.md for profilers"),
    "ulysses_sequence_parallel_size": to("parallel_config.context_parallel"),
    "use_remove_padding": without("packed sequences have no padding between"),
    **each("optim.override_optimizer_config.", "optimizer_cpu_offload", flag("memory.swap_moments")),
    "optim.optimizer": only("AdamW", "adam", "adamw", otherwise="the optimiser is AdamW"),
}
