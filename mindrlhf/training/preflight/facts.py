"""Facts of model, data and machine before a run, for a starting config and the estimate of memory."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mindrlhf.config.derived import is_base, needs_critic, reference_path
from mindrlhf.config.schema import AnyConfig, GrpoConfig
from mindrlhf.config.starting import Facts
from mindrlhf.data.mindrecord import PromptFile
from mindrlhf.data.tokenizers import load_tokenizer
from mindrlhf.errors import UserError
from mindrlhf.rewards.fitting import fitting_verifier
from mindrlhf.rollout.vllm_options import cpu_cache_gib
from mindrlhf.specs import find_spec
from mindrlhf.specs.dims import ModelDims
from mindrlhf.specs.lora import adapters
from mindrlhf.specs.model import ModelSpec
from mindrlhf.system.json_lines import read_json_lines
from mindrlhf.system.sizes import format_size
from mindrlhf.training.preflight import RunInputs
from mindrlhf.weights.convert import hf_shapes
from mindrlhf.weights.hf import read_hf_config

NUM_RECORDS_READ = 256
GIB = 2**30
# Measured on SmolLM2-135M (float32, one thread): resident memory of a trainer and of a server beside what is counted
# below. MindSpore with its graphs, and Python with PyTorch and vLLM.
TRAINER_BASE_BYTES, SERVER_BASE_BYTES = int(1.4 * GIB), int(1.3 * GIB)
_FLOAT_BYTES = 4


def read_facts(task: str, model_dir: str, train_file: str, eval_file: str = "") -> Facts:
    """Read what ``config new`` can know; what is not there yet is left out.

    Raises:
        UserError: the model is of no family that can be trained, or the data cannot be read, or is of another task.
    """
    facts: dict = {"num_cores": len(os.sched_getaffinity(0))}
    if Path(model_dir).exists():
        spec, dims = _model(model_dir)
        hf_config = read_hf_config(model_dir)
        facts["num_parameters"] = _size(hf_shapes(spec, dims).values())
        facts["sees_images"] = dims.vision is not None
        facts["max_positions"] = (hf_config.get("text_config") or hf_config).get("max_position_embeddings")
    if task == "train" and Path(train_file).is_file():
        file = PromptFile.open(train_file)
        places = np.unique(np.linspace(0, len(file) - 1, NUM_RECORDS_READ).astype(int)) if len(file) else []
        records = file.read([int(place) for place in places])
        texts, answers = _texts(model_dir, records[:32]), [record.answer for record in records]
        facts["verifiers"] = fitting_verifier(answers, texts, file.header.verifier_choices)
        more = [PromptFile.open(eval_file)] if eval_file and Path(eval_file).is_file() else []
        facts["longest_prompt"] = max(one.header.longest_prompt for one in (file, *more))
        if records:
            facts["usual_question"] = _usual_question([record.prompt_ids for record in records])
            facts["answer_chars"] = int(np.quantile([len(answer) for answer in answers], 0.95))
    return Facts(**facts)


def _usual_question(prompts: Sequence[np.ndarray]) -> int:
    """The median of the tokens of prompts, without those at both ends that are the same in all: the template's."""
    shared = 0
    if len(prompts) > 1:
        shortest = min(map(len, prompts))
        for ends in (1, -1):
            rows = np.stack([prompt[::ends][:shortest] for prompt in prompts])
            differs = (rows != rows[0]).any(axis=0)
            shared += int(differs.argmax()) if differs.any() else 0
    return max(1, int(np.median([len(prompt) for prompt in prompts])) - shared)


def _texts(model_dir: str, records: list) -> list[str]:
    """The prompts as texts, where the model's directory has a tokenizer that can say."""
    try:
        tokenizer = load_tokenizer(model_dir)
        return [tokenizer.decode(record.prompt_ids.tolist()) for record in records]
    except (UserError, IndexError, OverflowError):
        return []


def _model(model_dir: str) -> tuple[ModelSpec, ModelDims]:
    hf_config = read_hf_config(model_dir)
    spec = find_spec(hf_config)
    return spec, spec.dims(hf_config)


def grpo_outlook(config: GrpoConfig, inputs: RunInputs) -> tuple[str, ...]:
    """Return what a `mindrlhf train` run will do, in words: steps, samples, updates, evaluations, and how long."""
    training, evaluation, num_steps = config.training, config.evaluation, inputs.num_steps
    num_prompts = training.chunk_size * training.num_rollouts
    num_samples = num_prompts * config.algorithm.num_generations
    num_updates = training.num_minibatches * training.num_iterations
    num_epochs = num_steps * num_prompts / max(1, len(inputs.prompts))
    each = f"{num_prompts:,} prompts, {num_samples:,} samples and {_counted(num_updates, 'update')}"
    lines = [f"{_counted(num_steps, 'step')} of {each}: {num_epochs:.1f} epochs of {len(inputs.prompts):,} prompts"]
    if inputs.held_out is not None:
        every = evaluation.every_steps
        steps = {*range(every, num_steps, every)} if every else set()
        count = len(steps | {num_steps}) + evaluation.before_training
        held_out = min(len(inputs.held_out), evaluation.max_prompts or len(inputs.held_out))
        samples = _counted(evaluation.num_samples, "sample")
        lines.append(f"{_counted(count, 'evaluation')} on {held_out:,} held-out prompts, {samples} each")
    if every := config.checkpoint.every_steps:
        size = format_size(checkpoint_bytes(config))
        written, kept = _counted(num_steps // every, "checkpoint"), config.checkpoint.keep_last
        none = f"no checkpoint is written (every {_counted(every, 'step')}, the run has {num_steps})"
        lines.append(f"{written} of {size} each; the last {kept} stay" if num_steps >= every else none)
    if step_s := _last_step_s(Path(config.run.output_dir, "metrics.jsonl")):
        minutes = max(1, round(num_steps * step_s / 60))
        lines.append(f"about {minutes:,} min, by the {step_s:.2f} s a step of the last run there")
    return tuple(lines)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _last_step_s(metrics: Path) -> float:
    """Return the median seconds of a step of the run that has written these metrics; 0 where there is none."""
    if not metrics.is_file():
        return 0.0
    found = (line.value for line in read_json_lines(metrics) if line.error is None)
    times = [one["timing/all"] for one in found if isinstance(one.get("timing/all"), (int, float))]
    return float(np.median(times)) if times else 0.0


def checkpoint_bytes(config: AnyConfig) -> int:
    """Return the size of a checkpoint: weights, and AdamW's moments of what is trained, in float32.

    A reference model is saved where it follows the policy, and a critic.
    """
    num_parameters, num_trained = _num_parameters(config)
    element = 2 if config.model.param_dtype == "bfloat16" else _FLOAT_BYTES
    size_bytes = (num_trained if config.lora.rank is not None else num_parameters) * element
    size_bytes += 2 * num_trained * _FLOAT_BYTES
    if isinstance(config, GrpoConfig):
        if config.algorithm.sync_ref_model:
            size_bytes += num_parameters * element
        if needs_critic(config) and config.critic.path:
            size_bytes += _size(hf_shapes(*_model(config.critic.path)).values()) * (element + 2 * _FLOAT_BYTES)
    return size_bytes


def _num_parameters(config: AnyConfig) -> tuple[int, int]:
    """Return the parameters of the policy, and those of them, or of its adapters, that are trained."""
    spec, dims = _model(config.model.path)
    num_parameters = num_trained = _size(hf_shapes(spec, dims).values())
    if config.lora.options is not None:
        found = adapters(spec, dims, config.lora.options)
        num_trained = _size(shape for one in found for rule in (one.down, one.up) for shape in rule.shape(dims))
    return num_parameters, num_trained


def _size(shapes: Iterable[Sequence[int]]) -> int:
    return sum(prod(shape) for shape in shapes)


@dataclass(frozen=True)
class HostMemory:
    """Estimated resident memory of a run on CPUs, in bytes; what trainers and servers share is counted once."""

    trainer: int  # of each
    server: int  # of each
    shared: int  # the weight buffer
    total: int

    def __str__(self) -> str:
        trainer, server, shared, total = (
            f"{size / GIB:.1f}" for size in (self.trainer, self.server, self.shared, self.total)
        )
        return f"about {total} GiB of memory: a trainer {trainer}, a server {server}, shared weights {shared}"


def host_memory(config: GrpoConfig, row_length: int, max_model_len: int, num_ranks: int) -> HostMemory:
    """Estimate what a run of `mindrlhf train` takes with ``run.device: cpu``.

    A trainer holds the weights, and of all that are trained gradients and at most two moments, in float32; a reference
    model its weights; and the activations of a micro-batch, for which a layer keeps 14 numbers of the hidden size, 3
    of the MLP's and 2 of each head's row of scores a token. A server holds weights and the key-value cache.
    """
    _, dims = _model(config.model.path)
    num_parameters, num_trained = _num_parameters(config)
    weights = num_parameters * _FLOAT_BYTES
    reference = reference_path(config)
    num_copies = 2 if reference and not is_base(config, reference) else 1
    tokens = config.training.micro_batch_size * row_length
    widths = 14 * dims.hidden_size + 3 * dims.intermediate_size + 2 * dims.num_heads * row_length
    per_token = widths * (1 if config.model.recompute else dims.num_layers)
    trainer = TRAINER_BASE_BYTES + weights * num_copies + 3 * num_trained * _FLOAT_BYTES
    trainer += tokens * per_token * _FLOAT_BYTES
    element = 2 if config.rollout.dtype == "bfloat16" else _FLOAT_BYTES
    cache = int(cpu_cache_gib(config.rollout, config.model.path, max_model_len) * GIB)
    server = SERVER_BASE_BYTES + num_parameters * element + cache
    total = num_ranks * trainer + config.rollout.num_replicas * server + weights
    return HostMemory(trainer, server, weights, total)
