"""Replay of the streams and events of compiled graphs: a roofline of each kernel.

A kernel takes as long as its memory traffic or its products need, whichever is more (the roofline of Williams et al.
2009, doi:10.1145/1498765.1498785), a collective as long as its busiest rank sends. None of it was measured on a device.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kernel_counts.graph_text import PRODUCTS, RECEIVE, SEND, Kernel, size_bytes
from mindrlhf.dryrun.compile.request import COLLECTIVES
from mindrlhf.dryrun.plan.roofline import Device

# FlashAttention's backward pass has five products, the forward pass two (Dao 2023, arXiv:2307.08691, section 3.1).
_ATTENTION_BACKWARD = 2.5
_MAIN_STREAM = 0


@dataclass
class Replay:
    """What a replay found, in seconds.

    Attributes:
        waits: of the main stream, by the collective that it waits for.
        begins: by layer and operator, what a collective carries before it, when the first one begins.
    """

    waits: Counter = field(default_factory=Counter)
    begins: dict[tuple[int, str], float] = field(default_factory=dict)


def replay(kernels: Iterable[Kernel], device: Device) -> Replay:
    """Run through kernels in the order of their launch, each stream at its own pace."""
    result, sent, last = Replay(), {}, {}
    time: dict[int, float] = defaultdict(float)
    for kernel in kernels:
        stream = kernel.stream
        if kernel.op == SEND:
            sent[kernel.event] = time[stream], last.get(stream, "")
        elif kernel.op == RECEIVE:
            until, cause = sent.get(kernel.event, (0.0, ""))
            if stream == _MAIN_STREAM and until > time[stream]:
                result.waits[cause] += until - time[stream]
            time[stream] = max(time[stream], until)
        else:
            seconds, last[stream] = kernel_seconds(kernel, device), _cause(kernel)
            name = last[stream] if kernel.op in COLLECTIVES else kernel.op
            result.begins.setdefault((kernel.layer, name), time[stream])
            time[stream] += seconds
    return result


def _cause(kernel: Kernel) -> str:
    return f"{kernel.role} {kernel.op}" if kernel.op in COLLECTIVES else kernel.part


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """Return the seconds of a kernel."""
    if kernel.op in COLLECTIVES:
        return _collective_seconds(kernel, device)
    seconds = (size_bytes(kernel.inputs) + size_bytes(kernel.outputs)) / device.memory
    return max(seconds, product_operations(kernel) / device.products)


def _collective_seconds(kernel: Kernel, device: Device) -> float:
    size = len(kernel.ranks)
    if size < 2:
        return 0.0
    whole = max(size_bytes(kernel.inputs), size_bytes(kernel.outputs))
    moved = whole if kernel.op in ("Send", "Receive", "Broadcast") else whole * (size - 1) / size
    if kernel.op == "AllReduce":
        moved *= 2
    return moved / device.exchange_rate(kernel.ranks)


def product_operations(kernel: Kernel) -> float:
    """Return the floating-point operations of a product, 0 of any other kernel."""
    if not PRODUCTS.fullmatch(kernel.op):
        return 0.0
    shapes = [dims for _, dims in kernel.inputs if len(dims) > 1]
    made = [dims for _, dims in kernel.outputs if len(dims) > 1]
    if kernel.op.startswith("FlashAttention"):
        query, key, value = shapes[:3]
        length, width = (query[-2], query[-1]) if len(query) == 4 else (query[0], query[-1])
        heads = math.prod(query) // (length * width)
        # Causal: half of the scores.
        operations = heads * length * (key[-2] if len(key) == 4 else key[0]) * (width + value[-1])
        return operations * (_ATTENTION_BACKWARD if kernel.op.endswith("Grad") else 1)
    if kernel.op.startswith("GroupedMatmul"):
        rows, weights = shapes[:2]
        return 2.0 * math.prod(rows) * weights[-1]
    if kernel.op in ("MatmulReduceScatter", "AllGatherMatmul"):
        rows, weights = shapes[:2]
        size = len(kernel.ranks) or 1
        gathered = size if kernel.op == "AllGatherMatmul" else 1
        return 2.0 * rows[0] * gathered * math.prod(weights)
    # (m k) (k n) / (m n) = k ** 2, of each product of a batch.
    batch = math.prod(made[0][:-2])
    inner = math.sqrt(math.prod(shapes[0]) * math.prod(shapes[1]) / batch / math.prod(made[0]))
    return 2.0 * math.prod(made[0]) * inner
