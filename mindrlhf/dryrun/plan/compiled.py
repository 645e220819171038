"""MindSpore's own memory plan of the training step, beside the estimate."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mindrlhf.dryrun.compile.request import (
    GRADIENTS,
    CompileReport,
    CompileRequest,
    compile_ranks,
    compiled_config,
    update_request,
)
from mindrlhf.dryrun.plan.memory import ASLEEP, RUNTIME, STEP, UPDATE
from mindrlhf.dryrun.plan.plan import Plan
from mindrlhf.layout.rows import step_length

# Not part of the compiled step: the generator and the runtime.
_OUTSIDE_THE_STEP = (RUNTIME, ASLEEP)


@dataclass(frozen=True)
class PlannedStage:
    """One pipeline stage as MindSpore's planner sees it.

    Attributes:
        stage: the pipeline stage.
        accumulating_bytes, last_bytes: peaks of a call before the last, 0 where an update is one call, and of the last;
            lower bounds, since workspaces of CANN's kernels and buffers of HCCL are unknown in simulation.
        estimated_bytes: this plan's estimate of the same step, without runtime and HCCL.
        num_layers: layers that were compiled, over all stages.
        seconds: wall time of the compilation.
        peak_rss_bytes: memory of the compiling process.
    """

    stage: int
    accumulating_bytes: int
    last_bytes: int
    estimated_bytes: int
    num_layers: int
    seconds: float
    peak_rss_bytes: int


def compile_plan(plan: Plan) -> list[PlannedStage]:
    """Compile the calls of an update for one rank of every distinct stage and ask for its memory plan.

    First, second and last stage stand for all: the stages between are alike.

    Raises:
        UserError, RunFailure: this machine cannot compile, or a compilation failed.
    """
    num_stages = plan.layout.pipeline_stage
    stages = sorted({0, min(1, num_stages - 1), num_stages - 1})
    requests = [_requests(plan, stage * plan.layout.stage_size) for stage in stages]
    reports = iter(compile_ranks([request for of_stage in requests for request in of_stage]))
    return [_planned(plan, list(itertools.islice(reports, len(of_stage)))) for of_stage in requests]


def _planned(plan: Plan, reports: Sequence[CompileReport]) -> PlannedStage:
    """Combine the reports of a stage's graphs, which run one after the other."""
    *before, last = (report.planned_memory_bytes for report in reports)
    return PlannedStage(
        stage=reports[0].stage,
        accumulating_bytes=max(before, default=0),
        last_bytes=last,
        estimated_bytes=step_estimate(plan, reports[0].stage),
        num_layers=reports[0].num_layers,
        seconds=sum(report.seconds for report in reports),
        peak_rss_bytes=max(report.peak_rss_bytes for report in reports),
    )


def step_estimate(plan: Plan, stage: int) -> int:
    """Return the estimate of the update's memory, of gradients or optimiser, without what is outside the graph."""
    return max(
        sum(item.size_bytes for item in phase.items if item.name not in _OUTSIDE_THE_STEP)
        for phase in plan.memory
        if phase.phase in (UPDATE, STEP) and phase.stage == stage
    )


def _requests(plan: Plan, rank: int) -> list[CompileRequest]:
    """Return the graphs of an update's calls: those before the last, if there are any, and the last."""
    whole = step_request(plan, rank)
    gradients = dataclasses.replace(whole, cell=GRADIENTS)
    if plan.config.memory.swap_moments:
        short = min(whole.seq_length, step_length(plan.layout))
        return [gradients, dataclasses.replace(whole, seq_length=short)]
    return [gradients, whole] if plan.batch.num_micro_batches_per_rank > 1 else [whole]


def step_request(plan: Plan, rank: int) -> CompileRequest:
    """Return the update of a plan's run, as ``rank`` compiles it."""
    parallel = dataclasses.asdict(plan.config.parallel_config) | {"data_parallel": plan.layout.data_parallel}
    request = update_request(plan.config, compiled_config(plan.model.hf_config), plan.batch, parallel, rank)
    return dataclasses.replace(request, plan_memory=True)
