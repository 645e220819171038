"""`mindrlhf plan --compile --kernels`: what a device is given, counted in the graphs of one and of two layers.

The difference of both is a layer; what is left is the embedding, the head and the loss.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile.kernels import FORWARD, PARTS, PRODUCTS, RECEIVE, SEND, STATE, WEIGHTS, size_bytes
from mindrlhf.dryrun.compile.request import (
    COLLECTIVES,
    GRADIENTS,
    LOGPROBS,
    UPDATE,
    CompileReport,
    CompileRequest,
    compile_ranks,
)
from mindrlhf.dryrun.compile.strategy import shorten
from mindrlhf.dryrun.plan.compiled import step_request
from mindrlhf.dryrun.plan.devices import Device
from mindrlhf.dryrun.plan.parameters import ELEMENT_BYTES
from mindrlhf.dryrun.plan.plan import Plan
from mindrlhf.dryrun.plan.replay import Replay, replay
from mindrlhf.dryrun.plan.text import columns, wrap
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.specs import find_spec
from mindrlhf.system.sizes import format_size

# Of a pipeline: what is enough to see all its kernels.
_COMPILED_STAGES, _COMPILED_MICRO_BATCHES = 2, 2
_CALLS = {GRADIENTS: "a call before the last", UPDATE: "the last call", LOGPROBS: "a pass without gradients"}
# Copies to the host; the host waits for what it copies.
_HOST_SYNCS = ("MoveTo", "CopyToHost", "D2HCopy")


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives that are alike: in a layer, and outside of the layers, of one call.

    Attributes:
        carries: weights, gradients, activations or state.
        layer_bytes, other_bytes: of the larger side.
        hidden: share of their time in which the main stream had other work; see :mod:`mindrlhf.dryrun.plan.replay`.
    """

    op: str
    carries: str
    dtype: str
    num_ranks: int
    layer_count: float
    layer_bytes: float
    other_count: float
    other_bytes: float
    hidden: float


@dataclass(frozen=True)
class KernelCounts:
    """What the kernels of a call are, of which an update has several.

    Attributes:
        cell: the graph.
        num_micro_batches: of a call, in a pipeline or added up in the graph; kernels of a layer are of one of them,
            those of the optimiser's state of the call.
        kernels, memory_bytes: of a layer by part of the step, collectives left out of both.
        state_bytes: read and written for each element of a rank's shards, in a call.
        logit_bytes: read and written for each logit, beside the products.
        weight_casts: casts of a layer's weights by part of the step.
        square_nodes: kernels of a layer with a tensor [.., length, length].
        host_syncs, dynamic_nodes: of a layer: copies that the host waits for, nodes whose shape is known when they run.
        has_even_experts: whether times, memory and what is hidden are of MindFormers' dry run, in which experts get
            equal shares of the tokens, since the graph that runs has shapes that depend on them.
        seconds: of a call with all layers, as the device promises and as is assumed to be reached.
        busy: seconds of the latter by cause, without waiting for each other.
        operations: of the products.
        planned_bytes: device memory of a call, extrapolated from MindSpore's plans for one and two layers.
    """

    cell: str
    num_micro_batches: int
    kernels: dict[str, float]
    memory_bytes: dict[str, float]
    state_bytes: float
    logit_bytes: float
    weight_casts: dict[str, float]
    square_nodes: float
    host_syncs: float
    dynamic_nodes: float
    collectives: tuple[CollectiveRow, ...]
    has_even_experts: bool
    seconds: tuple[float, float]
    busy: dict[str, float]
    operations: float
    planned_bytes: float


def compile_kernels(plan: Plan) -> list[KernelCounts]:
    """Compile the graphs of a step with one and with two layers to a pipeline stage, and count.

    Of a pipeline two stages are compiled with two micro-batches, and the last stage, which has the head, is counted.

    Raises:
        UserError, RunFailure: as :func:`mindrlhf.dryrun.compile.request.compile_ranks`.
    """
    return [compile_cell(plan, cell) for cell in (GRADIENTS, UPDATE, LOGPROBS)]


def compile_cell(plan: Plan, cell: str) -> KernelCounts:
    """See :func:`compile_kernels`; ``cell`` is a graph of :mod:`mindrlhf.dryrun.compile.request`."""
    layout, given = plan.layout, plan.config.parallel_config.micro_batch_num
    stages, micro_batches = min(layout.pipeline_stage, _COMPILED_STAGES), min(given, _COMPILED_MICRO_BATCHES)
    whole = step_request(plan, (stages - 1) * layout.stage_size)
    parallel = whole.parallel | {"pipeline_stage": stages, "micro_batch_num": micro_batches}
    requests = two_depths(dataclasses.replace(whole, cell=cell, parallel=parallel))
    reports = timed = compile_ranks(requests)
    if any(kernel.stream < 0 for report in reports for kernel in report.kernels):
        timed = compile_ranks([dataclasses.replace(each, even_experts=True) for each in requests])
    num_layers = max(plan.layer_stages.count(stage) for stage in range(layout.pipeline_stage))
    counts = count_kernels(requests[0], reports, timed, num_layers, plan.machine.device)
    return _of_pipeline(counts, layout.pipeline_stage, given)


def two_depths(request: CompileRequest) -> list[CompileRequest]:
    """Return the request of a graph's kernels with one and with two layers to a pipeline stage."""
    stages = int(request.parallel.get("pipeline_stage", 1))
    whole = dataclasses.replace(request, plan_memory=True, kernels=True)
    return [
        dataclasses.replace(whole, num_layers=number, hf_config=shorten(whole.hf_config, number))
        for number in (stages, 2 * stages)
    ]


def _of_pipeline(counts: KernelCounts, stages: int, micro_batches: int) -> KernelCounts:
    """Extend a call to all micro-batches and stages: those before the last fill the pipeline and drain it."""
    state = counts.busy.get(STATE, 0.0)
    factor = (micro_batches + stages - 1) / counts.num_micro_batches
    best, reached = (state + (seconds - state) * factor for seconds in counts.seconds)
    return dataclasses.replace(counts, seconds=(best, reached))


def count_kernels(
    request: CompileRequest,
    reports: Sequence[CompileReport],
    timed: Sequence[CompileReport],
    num_layers: int,
    device: Device,
) -> KernelCounts:
    """Count the kernels of two reports, whose stages have a layer and two.

    Args:
        timed: the same, in the order of their launch.
        num_layers: of the stage.
    """
    one, two = reports
    micro_batches = int(request.parallel.get("micro_batch_num", 1))
    first, second = (_Totals(report, request.seq_length) for report in (one, two))
    per_part = {part: 1 if part == STATE else micro_batches for part in PARTS}
    replays = [[replay(report.kernels, one) for report in timed] for one in (device.promised, device)]
    ends = [_extend(*(found.seconds for found in pair), num_layers) for pair in replays]
    real = replays[1]
    return KernelCounts(
        cell=request.cell,
        num_micro_batches=micro_batches,
        kernels={part: (second.kernels[part] - first.kernels[part]) / per_part[part] for part in PARTS},
        memory_bytes={part: (second.memory[part] - first.memory[part]) / per_part[part] for part in PARTS},
        state_bytes=(second.memory[STATE] - first.memory[STATE]) / _layer_elements(request),
        logit_bytes=_logit_bytes(one, request),
        weight_casts={
            part: (second.weight_casts[part] - first.weight_casts[part]) / per_part[part]
            for part in PARTS
            if second.weight_casts[part]
        },
        square_nodes=(second.square_nodes - first.square_nodes) / micro_batches,
        host_syncs=(second.host_syncs - first.host_syncs) / micro_batches,
        dynamic_nodes=(second.dynamic_nodes - first.dynamic_nodes) / micro_batches,
        collectives=tuple(_collective_rows(first, second, real[1])),
        has_even_experts=any(kernel.stream < 0 for kernel in two.kernels) and timed is not reports,
        seconds=(ends[0], ends[1]),
        busy={
            cause: _extend(real[0].busy[cause], real[1].busy[cause], num_layers) for cause in sorted(real[1].busy)
        },
        operations=_extend(real[0].operations, real[1].operations, num_layers),
        planned_bytes=_extend(*(report.planned_memory_bytes for report in timed), num_layers),
    )


def _extend(one: float, two: float, num_layers: int) -> float:
    return one + (num_layers - 1) * (two - one)


class _Totals:
    """Sums over the kernels of a graph."""

    def __init__(self, report: CompileReport, length: int):
        self.kernels: Counter = Counter()
        self.memory: Counter = Counter()
        self.weight_casts: Counter = Counter()
        self.collectives: Counter = Counter()
        self.collective_bytes: Counter = Counter()
        self.square_nodes = self.host_syncs = self.dynamic_nodes = 0
        for kernel in report.kernels:
            if kernel.op in (SEND, RECEIVE):
                continue
            tensors = (*kernel.inputs, *kernel.outputs)
            self.host_syncs += kernel.op in _HOST_SYNCS
            self.dynamic_nodes += any(min(dims, default=0) < 0 for _, dims in kernel.outputs)
            if kernel.op in COLLECTIVES:
                key = kernel.op, kernel.role, (kernel.outputs or kernel.inputs)[0][0], len(kernel.ranks)
                self.collectives[key] += 1
                self.collective_bytes[key] += max(size_bytes(kernel.inputs), size_bytes(kernel.outputs))
                continue
            self.kernels[kernel.part] += 1
            self.memory[kernel.part] += size_bytes(tensors)
            self.weight_casts[kernel.part] += kernel.role == WEIGHTS
            # Weights have two axes, and may be square too.
            self.square_nodes += any(len(dims) > 2 and dims[-2:] == (length, length) for _, dims in tensors)


def _layer_elements(request: CompileRequest) -> int:
    """Elements of the weights of the last layer that a rank holds."""
    spec, parallel = find_spec(request.hf_config), ParallelSection(**request.parallel)
    dims = spec.dims(request.hf_config)
    stage_size = parallel.data_parallel * parallel.model_parallel * parallel.context_parallel
    layout = Layout.from_config(parallel, stage_size * parallel.pipeline_stage)
    last = f"decoder.layers.{dims.num_layers - 1}."
    layouts = parameter_layouts(spec, dims, layout, ELEMENT_BYTES[request.param_dtype])
    return sum(math.prod(one.shard_shape) for one in layouts if one.name.startswith(last))


def _collective_rows(one: _Totals, two: _Totals, found: Replay) -> Iterable[CollectiveRow]:
    for key in sorted(two.collectives | one.collectives):
        count = two.collectives[key] - one.collectives[key]
        size = two.collective_bytes[key] - one.collective_bytes[key]
        op, carries, dtype, num_ranks = key
        cause = f"{carries} {op}"
        hidden = found.hidden[cause] / found.busy[cause] if found.busy[cause] else 0.0
        rest = one.collectives[key] - count, one.collective_bytes[key] - size
        yield CollectiveRow(op, carries, dtype, num_ranks, count, size, *rest, hidden)


def _logit_bytes(report: CompileReport, request: CompileRequest) -> float:
    """Bytes that kernels read and write of tensors as wide as a rank's share of the vocabulary, but for products.

    Per logit; 0 in a stage without a head. The head's weights have that width as well, times the hidden size.
    """
    tensor = int(request.parallel.get("model_parallel", 1))
    vocabulary, hidden = (int(request.hf_config[name]) for name in ("vocab_size", "hidden_size"))
    positions = request.micro_batch_size * request.seq_length // int(request.parallel.get("context_parallel", 1))
    width, total, logits = vocabulary // tensor, 0.0, 0.0

    def is_logits(dims: tuple[int, ...]) -> bool:
        return width in dims and (hidden not in dims or hidden == positions)

    for kernel in report.kernels:
        if kernel.part == STATE or kernel.op in COLLECTIVES or kernel.role == WEIGHTS:
            continue
        if not PRODUCTS.fullmatch(kernel.op):
            total += size_bytes(one for one in (*kernel.inputs, *kernel.outputs) if is_logits(one[1]))
        elif kernel.part == FORWARD and is_logits(kernel.outputs[0][1]):
            logits += math.prod(kernel.outputs[0][1])
    return total / logits if logits else 0.0


def kernel_rows(counts: KernelCounts) -> list[tuple[str, ...]]:
    """Return a table of a layer's kernels: part of the step, kernels, bytes of memory, casts of weights."""
    return [
        ("a layer", "kernels", "GB of memory", "casts of weights"),
        *(
            (part, f"{counts.kernels[part]:.4g}", f"{counts.memory_bytes[part] / 1e9:.3f}", _casts(counts, part))
            for part in PARTS
        ),
    ]


def _casts(counts: KernelCounts, part: str) -> str:
    return f"{counts.weight_casts.get(part, 0):.3g}" if part != STATE else "-"


def collective_table(rows: Sequence[CollectiveRow]) -> list[tuple[str, ...]]:
    """Return a table of collectives."""
    return [
        ("collective", "carries", "dtype", "ranks", "in a layer", "MB", "elsewhere", "MB", "hidden"),
        *(
            (
                *(row.op, row.carries, row.dtype, str(row.num_ranks), f"{row.layer_count:.4g}"),
                *(f"{row.layer_bytes / 1e6:.1f}", f"{row.other_count:.4g}", f"{row.other_bytes / 1e6:.1f}"),
                f"{row.hidden:.0%}",
            )
            for row in rows
        ),
    ]


def kernel_notes(counts: KernelCounts) -> list[str]:
    """Return the numbers that stand beside the tables."""
    best, reached = counts.seconds
    notes = [
        f"state: {counts.state_bytes:.0f} bytes of memory traffic for each element of a shard and call "
        f"({counts.state_bytes / counts.num_micro_batches:.0f} a micro-batch); head: {counts.logit_bytes:.0f} bytes "
        "for each logit, beside the products",
        f"of a layer: {counts.host_syncs:.3g} copies that the host waits for, {counts.dynamic_nodes:.3g} nodes of "
        f"dynamic shape, {counts.square_nodes:.3g} kernels with a tensor [.., length, length]",
        f"a call: {1e3 * best:.0f} ms as the device promises, {1e3 * reached:.0f} ms as assumed; busy "
        + ", ".join(f"{cause} {1e3 * seconds:.0f}" for cause, seconds in counts.busy.items() if seconds >= 5e-4),
        f"memory that MindSpore plans for all layers: {format_size(counts.planned_bytes)}",
    ]
    if counts.has_even_experts:
        notes.append(
            "counts are of the graph that runs; shapes of its experts depend on data, so times, memory and what is "
            "hidden are of MindFormers' dry run, which splits the tokens evenly"
        )
    return notes


def kernel_lines(all_counts: Sequence[KernelCounts], device: Device) -> list[str]:
    """Return the counts of every graph as text."""
    lines: list[str] = []
    for counts in all_counts:
        tables = columns(kernel_rows(counts), "<>>>"), columns(collective_table(counts.collectives), "<<<>>>>>>")
        lines += [f"{counts.cell}, {_CALLS[counts.cell]}:", *tables[0], "", *tables[1], ""]
        lines += [line for note in kernel_notes(counts) for line in wrap(note)] + [""]
    return [*lines, *wrap(device.words)]
