"""Products of the rollout server's linear layers; to be run by the rollout interpreter.

usage: python tests/helpers/linear_probe.py < JSON of (a config, unused; [[rows, in, out, bias, way], ...])

Prints "probe" and JSON: of each shape the largest error against float64, relative to the largest result, before and
after the weight was changed in place; the same of rows whose results may lie by columns, and whether they do; and
whether products still had the old weight until it was forgotten. Then, by way, for which numbers of rows from 2 on
products have other bits than oneDNN's of just these rows; and by how many MiB a process grows with 500 numbers of rows,
and with 500 others. Last, in which way twelve layers multiply, asked in
turn and then again, where MKL holds back, where it does not, and where the processor has no AVX2.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch

from mindrlhf.cpu.rollout import linear
from mindrlhf.cpu.rollout.linear import PlainLinear, Way, Ways, forget_copies

ONEDNN = torch.ops.mkldnn._linear_pointwise.default
SHAPES = [(1024, 16), (1024, 1024), (8192, 128)]  # small, large, large and narrow


def error(result, x, weight, bias) -> float:
    expected = x.double().numpy() @ weight.double().numpy().T
    if bias is not None:
        expected = expected + bias.double().numpy()
    return float(np.abs(result.numpy() - expected).max() / np.abs(expected).max())


def probe(num_rows, num_in, num_out, has_bias, way) -> dict:
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, num_in), torch.randn(num_out, num_in)
    bias = torch.randn(num_out) if has_bias else None
    layer = torch.nn.Module()
    layer.cpu_linear = PlainLinear(weight, Way[way])
    old = layer.cpu_linear(x, weight, bias)
    before = error(old, x, weight, bias)
    weight.copy_(torch.randn(num_out, num_in))
    is_stale = torch.equal(layer.cpu_linear(x, weight, bias), old)
    forget_copies(torch.nn.Sequential(layer))
    new = layer.cpu_linear(x, weight, bias)
    free = layer.cpu_linear.of_rows(bias, may_lie_by_columns=True)(x)
    bound = layer.cpu_linear.of_rows(bias)(x)
    return {
        "errors": [before, *(error(result, x, weight, bias) for result in (new, free, bound))],
        "stale": is_stale,
        "by rows": [new.is_contiguous(), bound.is_contiguous()],
        "by columns": free.stride() == (1, num_rows) and num_rows > 1,
    }


def other_bits(way: str) -> list[int]:
    torch.manual_seed(0)
    weight, x = torch.randn(1152, 640), torch.randn(1300, 640)
    one = PlainLinear(weight, Way[way])
    one._uses_onednn = True
    product = one.of_rows(None, may_lie_by_columns=True)
    product(x)  # makes the packed copy

    def exactly(rows: torch.Tensor) -> torch.Tensor:
        if way == "LEFT" and len(rows) <= linear.FEW_ROWS:
            return ONEDNN(weight, rows, None, "none", [], "").t()
        return ONEDNN(rows, weight if one._packed is None else one._packed, None, "none", [], "")

    numbers = [*range(2, 140), *range(140, 1300, 37)]
    return [number for number in numbers if not torch.equal(product(x[:number]), exactly(x[:number]))]


def anonymous_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Anonymous:"))


def growth_mib() -> tuple[float, float]:
    """Of products with 500 numbers of rows, and then with 500 others."""
    x, layers = torch.randn(1300, 128), [PlainLinear(torch.randn(out, 128), Way.PACKED) for out in (256, 1024)]
    odd, even = np.arange(1, 1001, 2), np.arange(2, 1002, 2)
    memory = [anonymous_mib()]
    for numbers in (odd, even):
        for number, layer in itertools.product(numbers.tolist(), layers):
            layer(x[:number], None, None)
        memory.append(anonymous_mib())
    return memory[1] - memory[0], memory[2] - memory[1]


def ways(holds_back: bool, has_avx2: bool) -> list[list[str]]:
    linear._mkl_holds_back, linear._has_avx2 = lambda: holds_back, lambda: has_avx2
    linear.MAX_PACKED_BYTES = 5 * 4 << 20
    chosen, layers = Ways(), [torch.nn.Module() for _ in range(12)]
    weights = [torch.empty(SHAPES[number % len(SHAPES)]) for number in range(12)]
    return [[chosen.of(*one).name for one in zip(layers, weights, strict=True)] for _ in range(2)]


if __name__ == "__main__":
    _, shapes = json.load(sys.stdin)
    probed = [probe(*shape) for shape in shapes]
    bits = {way.name: other_bits(way.name) for way in Way}
    print(
        "probe",
        json.dumps([*probed, bits, growth_mib(), ways(True, True), ways(False, True), ways(False, False)]),
        flush=True,
    )
