"""Layouts that fit a number of devices, the best first."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.dryrun.plan.memory import plan_memory
from mindrlhf.dryrun.plan.plan import Machine, Model, prepare
from mindrlhf.dryrun.plan.roofline import roofline
from mindrlhf.dryrun.plan.verdict import try_keys, with_keys
from mindrlhf.errors import UserError

NUM_RESULTS = 5
# From this row length on, sequences are worth splitting over ranks.
LONG_ROW = 16_384
# A device that fills up to the last byte fails at the first uneven batch: less free memory than this costs rank.
WANTED_SLACK = 0.1
# Pipeline micro-batches per stage that a pipeline is tried with: more idle less, but take a larger micro_batch_size.
_MICRO_BATCHES_PER_STAGE = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Attributes:
        keys: the config keys that make it.
        peak_bytes: of its fullest moment.
        slack: share of the device that stays free.
        seconds: roofline of a step.
    """

    keys: Mapping[str, Any]
    peak_bytes: int
    slack: float
    seconds: float

    @property
    def score(self) -> tuple[float, int]:
        """Seconds, raised by the share of the wanted slack that is missing, then bytes; lower is better."""
        return self.seconds * (1 + max(0.0, WANTED_SLACK - self.slack)), self.peak_bytes


@dataclass(frozen=True)
class SearchResult:
    """Best candidates of a search, and how many layouts fit, were possible at all, and were tried."""

    best: tuple[Candidate, ...]
    num_fitting: int
    num_feasible: int
    num_tried: int


def search(config: GrpoConfig, model: Model, machine: Machine) -> SearchResult:
    """Try every layout of the model over the machine; keep what the model allows and the memory holds."""
    candidates: list[Candidate] = []
    num_tried = num_feasible = 0
    for keys in _layouts(config, model, machine):
        num_tried += 1
        try:
            inputs, _ = prepare(with_keys(config, keys), model, machine)
        except UserError:
            continue
        num_feasible += 1
        peak = max(phase.total for phase in plan_memory(inputs))
        if peak > machine.device_bytes or inputs.rollout.num_full_sequences < 1:
            continue
        seconds = roofline(inputs, model.num_active, machine.device).seconds
        candidates.append(Candidate(keys, peak, 1 - peak / machine.device_bytes, seconds))
    candidates.sort(key=lambda candidate: candidate.score)
    return SearchResult(tuple(_distinct(candidates)), len(candidates), num_feasible, num_tried)


def starting_layout(config: GrpoConfig, model: Model, machine: Machine) -> dict[str, Any] | None:
    """Return the keys with which a config fits, the plainest first: {} where it does; None where nothing does."""
    divided = (machine.world_size, model.dims.num_heads)
    for tensor in (size for size in (1, 2, 4, 8) if not any(number % size for number in divided)):
        servers = {"rollout.tensor_parallel": tensor, "rollout.num_replicas": machine.world_size // tensor}
        keys = servers if tensor > 1 else {}
        if try_keys(config, keys, model, machine) is not None:
            return keys
        if (result := search(with_keys(config, keys), model, machine)).best:
            return keys | dict(result.best[0].keys)
    return None


def _distinct(candidates: list[Candidate]) -> list[Candidate]:
    """The best few that differ in how they shard the model, not just in a switch."""
    axes = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
    best: dict[tuple, Candidate] = {}
    for candidate in candidates:
        layout_keys = tuple(candidate.keys.get(f"parallel_config.{axis}", 1) for axis in axes)
        best.setdefault(layout_keys, candidate)
        if len(best) == NUM_RESULTS:
            break
    return list(best.values())


def _layouts(config: GrpoConfig, model: Model, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the keys of every layout that uses all devices, with tensor parallelism inside a node."""
    dims = model.dims
    long_rows = max(config.training.sequence_lengths, default=0) >= LONG_ROW
    num_experts = model.num_experts
    for tensor in divisors(machine.world_size):
        if tensor > machine.node_size or dims.num_heads % tensor:
            continue
        for stages in divisors(machine.world_size // tensor):
            if stages > dims.num_layers:
                continue
            replicas = machine.world_size // tensor // stages
            for context in divisors(replicas) if long_rows else (1,):
                sizes = divisors(replicas * tensor) if num_experts else ()
                experts = [size for size in sizes if num_experts % size == 0] or [1]
                layout_keys = {
                    "parallel_config.data_parallel": replicas // context,
                    "parallel_config.model_parallel": tensor,
                    "parallel_config.pipeline_stage": stages,
                    "parallel_config.context_parallel": context,
                    "parallel_config.use_seq_parallel": tensor > 1,
                    "parallel_config.vocab_emb_dp": tensor == 1,
                }
                for expert in experts:
                    yield from _switches(config, layout_keys | {"parallel_config.expert_parallel": expert})


def _switches(config: GrpoConfig, layout_keys: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stages = layout_keys["parallel_config.pipeline_stage"]
    replicas = layout_keys["parallel_config.data_parallel"] * layout_keys["parallel_config.context_parallel"]
    given_rows = max(1, config.training.micro_batch_size // config.parallel_config.micro_batch_num)
    shards = (False, True) if replicas > 1 else (False,)
    counts = [stages * factor for factor in _MICRO_BATCHES_PER_STAGE] if stages > 1 else [1]
    recomputes = (False,) if config.memory.recomputes_parts else (False, True)
    every_rows = sorted({given_rows, 1})
    for shard, recompute, num_micro_batches, rows in itertools.product(shards, recomputes, counts, every_rows):
        yield layout_keys | {
            "parallel_config.enable_parallel_optimizer": shard,
            "parallel_config.micro_batch_num": num_micro_batches,
            "training.micro_batch_size": num_micro_batches * rows,
            "model.recompute": recompute,
        }


def divisors(value: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small = [size for size in range(1, math.isqrt(value) + 1) if value % size == 0]
    return sorted({*small, *(value // size for size in small)})
