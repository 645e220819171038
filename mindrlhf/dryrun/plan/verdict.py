"""Verdict of a plan: does it fit, and if not, which single change of the config makes it fit."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindrlhf.algorithms.optimizers import OPTIMIZERS
from mindrlhf.config.schema import GrpoConfig
from mindrlhf.dryrun.plan.memory import PhaseMemory, plan_memory
from mindrlhf.dryrun.plan.plan import Machine, Model, Plan, prepare
from mindrlhf.errors import UserError
from mindrlhf.system.sizes import format_size

MAX_CHANGES = 3
# Host memory that nodes of eight NPUs commonly have is 1 to 2 TB, of which other processes take a part.
LARGE_BUFFER_BYTES = 10**12
_LEAST_UTILIZATION = 0.1
_LOGIT_POSITIONS = 1024  # a tile of logits and the head's gradient take a few GB then


@dataclass(frozen=True)
class Change:
    """Keys to set, and the peak memory of the run that has them."""

    keys: Mapping[str, Any]
    peak_bytes: int

    def __str__(self) -> str:
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in self.keys.items())
        return f"{words}  (peak {format_size(self.peak_bytes)})"


@dataclass(frozen=True)
class Verdict:
    """Answer of a plan.

    Attributes:
        fits: the run fits.
        reason: one sentence with the numbers.
        changes: what would make it fit, the mildest first; empty when it fits, or when no single change does.
        notes: what devices do not show.
    """

    fits: bool
    reason: str
    changes: tuple[Change, ...]
    notes: tuple[str, ...] = ()


def give_verdict(plan: Plan) -> Verdict:
    """Compare a plan with its devices; if it does not fit, look for changes that do."""
    reason = _reason(plan)
    if plan.fits:
        return Verdict(True, reason, (), _notes(plan))
    changes = []
    for keys in _candidates(plan):
        memory = try_keys(plan.config, keys, plan.model, plan.machine)
        if memory is not None:
            changes.append(Change(keys, memory))
        if len(changes) == MAX_CHANGES:
            break
    return Verdict(False, reason, tuple(changes), _notes(plan))


def try_keys(config: GrpoConfig, keys: Mapping[str, Any], model: Model, machine: Machine) -> int | None:
    """Return the peak memory of ``config`` with ``keys`` set, or None if it is impossible or does not fit."""
    try:
        inputs, _ = prepare(with_keys(config, keys), model, machine)
    except UserError:
        return None
    peak = max(phase.total for phase in plan_memory(inputs))
    return peak if peak <= machine.device_bytes and inputs.rollout.num_full_sequences >= 1 else None


def with_keys(config: GrpoConfig, keys: Mapping[str, Any]) -> GrpoConfig:
    """Return ``config`` with dotted ``keys`` set."""
    for dotted, value in keys.items():
        section, _, name = dotted.partition(".")
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return config


def _reason(plan: Plan) -> str:
    device = plan.machine.device_bytes
    if plan.peak.total > device:
        return (
            f"{_where(plan.peak, plan)} needs {format_size(plan.peak.total)} of {format_size(device)}; most of it is "
            f"{_largest_parts(plan.peak)}"
        )
    if plan.rollout.num_full_sequences < 1:
        return (
            f"the KV cache of a rollout server has {format_size(plan.rollout.kv_cache)}, but one sequence of "
            f"{plan.batch.row_length:,} tokens takes {format_size(plan.rollout.kv_token * plan.batch.row_length)}"
        )
    slack = 1 - plan.peak.total / device
    return (
        f"the peak, {_where(plan.peak, plan)}, takes {format_size(plan.peak.total)} of "
        f"{format_size(device)} ({100 * slack:.0f} % free)"
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = []
    config = plan.config
    if plan.buffer_bytes > LARGE_BUFFER_BYTES:
        notes.append(
            f"the weight buffer takes {format_size(plan.buffer_bytes)} of every node's host memory: check "
            "that the nodes have it, or bound it by rollout.weight_buffer_gib"
        )
    if config.memory.offload_optimizer:
        state = max(state.moments + state.gradient_sums for state in plan.states)
        notes.append(f"every rank keeps up to {format_size(state)} of optimizer state in host memory between updates")
    if config.memory.swap_moments:
        moments = max(state.moments for state in plan.states)
        title = OPTIMIZERS[config.optimizer.type].title
        notes.append(
            f"every rank keeps up to {format_size(moments)} of {title}'s moments in host memory but for the "
            "optimizer's step, and moves them both ways in each update"
        )
    if plan.rollout.num_full_sequences < plan.rollout.max_num_seqs:
        notes.append(
            f"the KV cache holds {plan.rollout.num_full_sequences:,} full sequences, fewer than rollout.max_num_seqs = "
            f"{plan.rollout.max_num_seqs:,}: servers will queue or recompute when responses are long"
        )
    if plan.config.run.device == "ascend" and plan.config.rollout.top_p < 1:
        notes.append("rollout.top_p below 1: its kernel takes 19 to 27 ms a token on an NPU, read of vllm-ascend 0.23")
    return tuple(notes)


def _where(phase: PhaseMemory, plan: Plan) -> str:
    stage = f" of pipeline stage {phase.stage}" if plan.layout.pipeline_stage > 1 else ""
    return f"the {phase.phase}{stage}"


def _largest_parts(phase: PhaseMemory) -> str:
    largest = sorted(phase.items, key=lambda item: -item.size_bytes)[:3]
    return ", ".join(f"{item.name} {format_size(item.size_bytes)}" for item in largest)


def _candidates(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield changes, from those that cost nothing to those that cost speed; the search tries other layouts."""
    config, layout = plan.config, plan.layout
    parallel, training, rollout = config.parallel_config, config.training, config.rollout
    if layout.model_parallel > 1 and not layout.use_seq_parallel:
        yield {"parallel_config.use_seq_parallel": True}
    if parallel.vocab_emb_dp and layout.model_parallel > 1:
        yield {"parallel_config.vocab_emb_dp": False}
    if not parallel.enable_parallel_optimizer and layout.data_parallel > 1:
        yield {"parallel_config.enable_parallel_optimizer": True}
    on_ascend = config.run.device == "ascend"
    if on_ascend and not rollout.off_policy_steps and not config.memory.offload_optimizer:
        yield {"memory.offload_optimizer": True}
    yield from _rollout_candidates(plan)
    if on_ascend and not config.memory.logit_tile:
        yield {"memory.logit_tile": _LOGIT_POSITIONS}
    if on_ascend and not config.memory.swap_moments:
        yield {"memory.swap_moments": True}
    if not config.memory.recomputes_parts and not config.model.recompute:
        yield {"model.recompute": True}
    for factor in (2, 4, 8):
        if training.micro_batch_size % (factor * plan.batch.num_pipeline_micro_batches) == 0:
            yield {"training.micro_batch_size": training.micro_batch_size // factor}
    if rollout.tensor_parallel < plan.machine.node_size and rollout.num_replicas % 2 == 0:
        yield {
            "rollout.tensor_parallel": rollout.tensor_parallel * 2,
            "rollout.num_replicas": rollout.num_replicas // 2,
        }


def _rollout_candidates(plan: Plan) -> Iterator[dict[str, Any]]:
    """The largest share for the generator that leaves the trainer its state, in steps of 5 %."""
    resident = plan.peak.total - plan.rollout.share
    share = int((1 - resident / plan.machine.device_bytes) * 20) / 20
    if plan.peak.phase == "rollout" and _LEAST_UTILIZATION <= share < plan.config.rollout.gpu_memory_utilization:
        yield {"rollout.gpu_memory_utilization": share}
