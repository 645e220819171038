"""The plan as JSON values: the numbers of the text, with sizes in bytes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mindrlhf.dryrun.plan.compiled import PlannedStage
from mindrlhf.dryrun.plan.plan import Plan
from mindrlhf.dryrun.plan.search import Candidate, SearchResult
from mindrlhf.dryrun.plan.verdict import Change, Verdict

FORMAT_VERSION = 1
# Keys of the format whose numbers have other names here.
_KEYS = {
    "num_pipeline_micro_batches": "num_pieces",
    "rows_per_pipeline_micro_batch": "rows_per_piece",
    "shard_shape": "slice_shape",
}


def plan_json(
    plan: Plan, verdict: Verdict, result: SearchResult | None, planned: Sequence[PlannedStage]
) -> dict[str, Any]:
    """Return all that the text says, and the ranks of every group."""
    values = {
        "format_version": FORMAT_VERSION,
        "model": {
            "name": plan.model.name,
            "num_parameters": plan.num_parameters,
            "num_adapter_parameters": plan.num_adapter_parameters,
        },
        "machine": dataclasses.asdict(plan.machine),
        "layout": plan.layout.to_dict(),
        "batch": _json_fields(plan.batch),
        "groups": [dataclasses.asdict(kind) for kind in plan.groups],
        "layer_stages": list(plan.layer_stages),
        "states": [dataclasses.asdict(state) for state in plan.states],
        "parameters": [_json_fields(row) for row in plan.rows],
        "memory": [dataclasses.asdict(phase) | {"total": phase.total} for phase in plan.memory],
        "rollout": dataclasses.asdict(plan.rollout),
        "transfer": dataclasses.asdict(plan.transfer),
        "verdict": {
            "fits": verdict.fits,
            "reason": verdict.reason,
            "changes": [_change(change) for change in verdict.changes],
            "notes": list(verdict.notes),
        },
    }
    if plan.vision is not None:
        values["vision"] = dataclasses.asdict(plan.vision)
    if result is not None:
        values["search"] = {
            "num_tried": result.num_tried,
            "num_feasible": result.num_feasible,
            "num_fitting": result.num_fitting,
            "best": [_candidate(one) for one in result.best],
        }
    if planned:
        values["planned_memory"] = [dataclasses.asdict(one) for one in planned]
    return values


def _json_fields(record: Any) -> dict[str, Any]:
    return {_KEYS.get(name, name): value for name, value in dataclasses.asdict(record).items()}


def _change(change: Change) -> dict[str, Any]:
    return {"keys": dict(change.keys), "peak_bytes": change.peak_bytes}


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "keys": dict(one.keys),
        "peak_bytes": one.peak_bytes,
        "cost": dataclasses.asdict(one.cost) | {"seconds": one.cost.seconds, "score": one.cost.score},
    }
