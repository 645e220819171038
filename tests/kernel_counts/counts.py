"""Kernels of a layer, counted in the graphs of one and of two layers.

The difference of both is a layer; what is left is the embedding, the head and the loss.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kernel_counts.compile import KernelReport
from kernel_counts.graph_text import FORWARD, PARTS, PRODUCTS, RECEIVE, SEND, STATE, WEIGHTS, size_bytes
from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile.request import COLLECTIVES, CompileRequest
from mindrlhf.dryrun.compile.strategy import shorten
from mindrlhf.dryrun.plan.parameters import ELEMENT_BYTES
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.specs import find_spec

# Copies to the host; the host waits for what it copies.
_HOST_SYNCS = ("MoveTo", "CopyToHost", "D2HCopy")


class CollectiveRow(NamedTuple):
    """Collectives that are alike: in a layer, and outside of the layers, of one call."""

    op: str
    carries: str  # weights, gradients, activations or state
    dtype: str
    num_ranks: int
    layer_count: float
    other_count: float


@dataclass(frozen=True)
class KernelCounts:
    """What the kernels of a call are, of which an update has several.

    Attributes:
        cell: the graph.
        num_micro_batches: of a call, in a pipeline or added up in the graph; kernels of a layer are of one of them,
            those of the optimiser's state of the call.
        kernels: of a layer by part of the step, without collectives.
        state_bytes: read and written for each element of a rank's shards, in a call.
        logit_bytes: read and written for each logit, beside the products.
        weight_casts: casts of a layer's weights by part of the step.
        square_nodes: kernels of a layer with a tensor [.., length, length].
        host_syncs, dynamic_nodes: of a layer: copies that the host waits for, nodes whose shape is known when they run.
    """

    cell: str
    num_micro_batches: int
    kernels: dict[str, float]
    state_bytes: float
    logit_bytes: float
    weight_casts: dict[str, float]
    square_nodes: float
    host_syncs: float
    dynamic_nodes: float
    collectives: tuple[CollectiveRow, ...]


def two_depths(request: CompileRequest) -> list[CompileRequest]:
    """Return the request of a graph's kernels with one and with two layers to a pipeline stage."""
    stages = int(request.parallel.get("pipeline_stage", 1))
    whole = dataclasses.replace(request, plan_memory=True)
    return [
        dataclasses.replace(whole, num_layers=number, hf_config=shorten(whole.hf_config, number))
        for number in (stages, 2 * stages)
    ]


def count_kernels(request: CompileRequest, reports: Sequence[KernelReport]) -> KernelCounts:
    """Count the kernels of two reports, whose stages have a layer and two."""
    one, two = reports
    micro_batches = int(request.parallel.get("micro_batch_num", 1))
    first, second = (_Totals(report, request.seq_length) for report in (one, two))
    per_part = {part: 1 if part == STATE else micro_batches for part in PARTS}
    return KernelCounts(
        cell=request.cell,
        num_micro_batches=micro_batches,
        kernels={part: (second.kernels[part] - first.kernels[part]) / per_part[part] for part in PARTS},
        state_bytes=(second.state_bytes - first.state_bytes) / _layer_elements(request),
        logit_bytes=_logit_bytes(one, request),
        weight_casts={
            part: (second.weight_casts[part] - first.weight_casts[part]) / per_part[part]
            for part in PARTS
            if second.weight_casts[part]
        },
        square_nodes=(second.square_nodes - first.square_nodes) / micro_batches,
        host_syncs=(second.host_syncs - first.host_syncs) / micro_batches,
        dynamic_nodes=(second.dynamic_nodes - first.dynamic_nodes) / micro_batches,
        collectives=tuple(_collective_rows(first, second)),
    )


class _Totals:
    """Sums over the kernels of a graph."""

    def __init__(self, report: KernelReport, length: int):
        self.kernels: Counter = Counter()
        self.weight_casts: Counter = Counter()
        self.collectives: Counter = Counter()
        self.square_nodes = self.host_syncs = self.dynamic_nodes = self.state_bytes = 0
        for kernel in report.kernels:
            if kernel.op in (SEND, RECEIVE):
                continue
            tensors = (*kernel.inputs, *kernel.outputs)
            self.host_syncs += kernel.op in _HOST_SYNCS
            self.dynamic_nodes += any(min(dims, default=0) < 0 for _, dims in kernel.outputs)
            if kernel.op in COLLECTIVES:
                key = kernel.op, kernel.role, (kernel.outputs or kernel.inputs)[0][0], len(kernel.ranks)
                self.collectives[key] += 1
                continue
            self.kernels[kernel.part] += 1
            self.state_bytes += size_bytes(tensors) if kernel.part == STATE else 0
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


def _collective_rows(one: _Totals, two: _Totals) -> Iterable[CollectiveRow]:
    for key in sorted(two.collectives | one.collectives):
        count = two.collectives[key] - one.collectives[key]
        yield CollectiveRow(*key, count, one.collectives[key] - count)


def _logit_bytes(report: KernelReport, request: CompileRequest) -> float:
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
