"""The plan as text of at most 100 columns."""

from collections.abc import Iterable, Sequence

from mindrlhf.dryrun.plan.compiled import PlannedStage
from mindrlhf.dryrun.plan.memory import PhaseMemory
from mindrlhf.dryrun.plan.parameters import StageState
from mindrlhf.dryrun.plan.plan import Plan
from mindrlhf.dryrun.plan.roofline import PROMPT_SHARE, RESPONSE_SHARE, UNSEEN, StepSeconds
from mindrlhf.dryrun.plan.search import Candidate, SearchResult
from mindrlhf.dryrun.plan.verdict import Verdict
from mindrlhf.layout.batch import batch_lines
from mindrlhf.system.sizes import format_size

WIDTH = 100


def render_text(plan: Plan, verdict: Verdict) -> str:
    parts = [
        _heading(plan),
        section("Batch", columns(batch_lines(plan.config, plan.batch, plan.layout.data_parallel), "<><")),
        section("Pipeline stages", _stage_lines(plan)),
        section("Memory of a rank", _memory_lines(plan)),
        section("Parameters", _parameter_lines(plan)),
        section("Rollout servers", _rollout_lines(plan)),
    ]
    if plan.tower is not None:
        words = f"{plan.tower.num_parameters:,} parameters, frozen, whole on every rank of the first stage; "
        parts.append(section("Vision tower", wrap(f"{words}~ {format_size(plan.tower.run_bytes)} while it runs")))
    if plan.config.run.device != "cpu":
        parts.append(section("Time of a step", _time_lines(plan.seconds)))
    return "\n\n".join([*parts, section("Verdict", verdict_lines(verdict))])


def _time_lines(times: StepSeconds) -> list[str]:
    low, high = times.tokens_per_s
    rows = [("~ " + phase, f"{seconds:.1f} s") for phase, seconds in times.phases.items() if seconds]
    return [
        *columns([*rows, ("~ step", f"{times.seconds:.1f} s")], "<>"),
        *wrap(
            f"~ {low:,.0f} to {high:,.0f} tokens/s/NPU of prompts and responses: an estimate. The seconds are a "
            f"roofline, which no run reaches. Published runs on Ascend took up to 34 times theirs, so the range goes "
            f"to {UNSEEN:.0f} times. Responses are taken as {RESPONSE_SHARE:.0%} of the longest allowed, prompts as "
            f"{PROMPT_SHARE:.0%}."
        ),
    ]


def section(title: str, lines: Iterable[str]) -> str:
    """Return a titled block."""
    return "\n".join([title, "-" * len(title), *lines])


def verdict_lines(verdict: Verdict) -> list[str]:
    lines = wrap(("FITS: " if verdict.fits else "DOES NOT FIT: ") + verdict.reason)
    if verdict.changes:
        lines += ["Any one of these makes it fit:", *(f"  {change}" for change in verdict.changes)]
    elif not verdict.fits:
        lines.append("No single change is enough: try --search, or more devices.")
    for note in verdict.notes:
        lines += wrap(f"Note: {note}")
    return lines


def search_lines(result: SearchResult) -> list[str]:
    """Return the best layouts and how they were ranked."""
    lines = [
        f"{result.num_tried:,} layouts tried, {result.num_feasible:,} possible for this model, "
        f"{result.num_fitting:,} fit."
    ]
    if not result.best:
        return [*lines, "None fits: use more devices, shorter sequences, or a smaller share for the generator."]
    header = ("", "dp", "mp", "pp", "cp", "ep", "opt", "recompute", "micro", "peak", "free", "~ s/step")
    rows = [header, *(_candidate_row(index, candidate) for index, candidate in enumerate(result.best, 1))]
    lines += columns(rows, ">" * len(header))
    lines += wrap("Ranked by the roofline of a step; layouts with less than 10 % free memory rank lower.")
    lines += ["", "The best, as overrides:"]
    words = [f"{key}={str(value).lower()}" for key, value in result.best[0].keys.items()]
    return lines + [f"  {word}" for word in words]


def planned_lines(planned: Sequence[PlannedStage]) -> list[str]:
    """Return the memory of the compiled calls of an update beside the estimate of the same."""
    rows = [("stage", "accumulating", "last call", "estimated", "layers", "compiled in", "by a process of")]
    for stage in planned:
        before = format_size(stage.accumulating_bytes) if stage.accumulating_bytes else "-"
        sizes = (before, format_size(stage.last_bytes), format_size(stage.estimated_bytes))
        compiled = (str(stage.num_layers), f"{stage.seconds:.0f} s", format_size(stage.peak_rss_bytes))
        rows.append((str(stage.stage), *sizes, *compiled))
    note = "The planner does not know workspaces of CANN's kernels and buffers of HCCL: a lower bound."
    return [*columns(rows, ">" * 7), *wrap(note)]


def wrap(text: str, indent: str = "") -> list[str]:
    """Break ``text`` into lines of at most ``WIDTH`` columns."""
    lines, line = [], indent
    for word in text.split():
        if len(line) + len(word) + 1 > WIDTH and line.strip():
            lines.append(line.rstrip())
            line = indent
        line += word + " "
    return [*lines, line.rstrip()]


def _candidate_row(index: int, candidate: Candidate) -> tuple[str, ...]:
    keys = {key.rpartition(".")[2]: value for key, value in candidate.keys.items()}
    axes = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
    return (
        str(index),
        *(str(keys[axis]) for axis in axes),
        "yes" if keys["enable_parallel_optimizer"] else "no",
        "yes" if keys["recompute"] else "no",
        str(keys["micro_batch_num"]),
        format_size(candidate.peak_bytes),
        f"{100 * candidate.slack:.0f}%",
        f"{candidate.seconds:.1f}",
    )


def _heading(plan: Plan) -> str:
    machine, layout = plan.machine, plan.layout
    nodes = f"{machine.num_nodes} node{'s' if machine.num_nodes > 1 else ''}"
    return "\n".join(
        [
            f"{plan.model.name}: {plan.num_parameters:,} parameters ({plan.num_parameters / 1e9:.2f}B) on "
            f"{machine.world_size} devices of {format_size(machine.device_bytes)}, {nodes}",
            f"layout: data {layout.data_parallel} x model {layout.model_parallel} x pipeline {layout.pipeline_stage}"
            f" x context {layout.context_parallel}, expert {layout.expert_parallel}"
            f"{', sequence parallel' if layout.use_seq_parallel else ''}"
            f"{', parallel optimizer' if layout.optimizer_shard != 1 else ''}",
            *_adapter_lines(plan),
            "exact: parameters, moments, gradients (sums over the layouts, to the byte); ~ marks an estimate",
        ]
    )


def _adapter_lines(plan: Plan) -> list[str]:
    if not plan.num_adapter_parameters:
        return []
    number = plan.num_adapter_parameters
    share = number / plan.num_parameters
    return [f"trained: adapters of rank {plan.config.lora.rank}, {number:,} parameters ({share:.2%} more)"]


def _stage_lines(plan: Plan) -> list[str]:
    rows = [("stage", "ranks", "layers", "parameters/rank", "parameters", "moments", "gradients")]
    size = plan.layout.stage_size
    for stage, state in enumerate(plan.states):
        layers = [layer for layer, layer_stage in enumerate(plan.layer_stages) if layer_stage == stage]
        extra = ["vision"] * (stage == 0 and plan.tower is not None) + ["embedding"] * (stage == 0)
        extra += ["head"] * (stage == plan.layout.pipeline_stage - 1)
        rows.append(
            (
                str(stage),
                f"{stage * size}-{(stage + 1) * size - 1}" if size > 1 else str(stage),
                f"{layers[0]}-{layers[-1]}" + "".join(f" + {word}" for word in extra),
                f"{state.num_elements:,}",
                *(format_size(value) for value in _exact_sizes(state)),
            )
        )
    return columns(rows, "><<>>>>")


def _exact_sizes(state: StageState) -> tuple[int, int, int]:
    return state.parameters + state.adapters, state.moments, state.gradient_sums + state.accumulators


def _memory_lines(plan: Plan) -> list[str]:
    """Table of the phases of the fullest stage, and the totals of the other stages."""
    shown = [phase for phase in plan.memory if phase.stage == plan.peak.stage]
    names = list(dict.fromkeys(item.name for phase in shown for item in phase.items))
    exact = {item.name for phase in shown for item in phase.items if item.exact}
    rows = [(f"stage {plan.peak.stage}", *(phase.phase for phase in shown))]
    for name in names:
        sizes = [next((item.size_bytes for item in phase.items if item.name == name), 0) for phase in shown]
        rows.append((("  " if name in exact else "~ ") + name, *(format_size(size) if size else "-" for size in sizes)))
    rows.append(("total", *(format_size(phase.total) for phase in shown)))
    lines = columns(rows, "<" + ">" * len(shown))
    if plan.layout.pipeline_stage > 1:
        lines += ["", *columns(_stage_totals(plan.memory), "<" + ">" * len(shown))]
    return lines


def _stage_totals(memory: Sequence[PhaseMemory]) -> list[tuple[str, ...]]:
    phases = list(dict.fromkeys(phase.phase for phase in memory))
    rows = [("total of", *phases)]
    for stage in sorted({phase.stage for phase in memory}):
        totals = {phase.phase: phase.total for phase in memory if phase.stage == stage}
        rows.append((f"stage {stage}", *(format_size(totals[phase]) for phase in phases)))
    return rows


def _parameter_lines(plan: Plan) -> list[str]:
    rows = [("name", "n", "global shape", "shard", "split", "with moments")]
    for row in plan.rows:
        rows.append(
            (
                _short_name(row.name),
                str(row.num_tensors),
                "x".join(map(str, row.shape)),
                "x".join(map(str, row.shard_shape)),
                row.split,
                format_size(row.state_bytes),
            )
        )
    return columns(rows, "<>>><>")


def _short_name(name: str) -> str:
    name = name.removeprefix("decoder.").removesuffix(".weight")
    return name.replace("layers.*.self_", "*.").replace("layers.*.", "*.")


def _rollout_lines(plan: Plan) -> list[str]:
    rollout, config = plan.rollout, plan.config.rollout
    span = config.tensor_parallel // plan.machine.node_size
    over = f" over {span} nodes" if span > 1 else ""
    return [
        f"{config.num_replicas} servers of {config.tensor_parallel} devices{over}; each device: share "
        f"{format_size(rollout.share)} = {config.gpu_memory_utilization} of {format_size(plan.machine.device_bytes)}",
        *wrap(
            f"~ weights {format_size(rollout.weights)}, workspace {format_size(rollout.workspace)}, KV cache "
            f"{format_size(max(0, rollout.kv_cache))} / {rollout.kv_token:,} B a token = "
            f"{rollout.num_cached_tokens:,} tokens"
        ),
        *wrap(
            f"~ {rollout.num_full_sequences:,} sequences of {plan.batch.row_length:,} tokens at once; max_num_seqs is "
            f"{rollout.max_num_seqs:,}; {plan.batch.num_samples_per_replica:,} samples a step"
        ),
        f"host memory of the weight buffer: {format_size(plan.buffer_bytes)} on each node",
    ]


def columns(rows: Sequence[Sequence[str]], alignment: str) -> list[str]:
    """Return rows as lines of columns; the last left-aligned one wraps under itself."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, alignment, widths)]
        line = "  ".join(cells).rstrip()
        if len(line) > WIDTH and alignment[-1] == "<":
            start = "  ".join([*cells[:-1], ""])
            first, *rest = wrap(row[-1], " " * len(start))
            lines += [start + first.strip(), *rest]
        else:
            lines.append(line)
    return lines
