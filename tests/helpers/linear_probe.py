"""Products of the rollout server's linear layers; to be run by the rollout interpreter.

usage: python tests/helpers/linear_probe.py < JSON of (a config, unused; [[rows, in, out, bias, way], ...])

Prints "probe" and JSON: of each shape the largest error against float64, relative to the largest result, before and
after the weight was changed in place; the same of rows whose results may lie by columns, and whether they do; and
whether products still had the old weight until it was forgotten. Last, in which way twelve layers multiply, asked in
turn and then again, where MKL holds back, where it does not, and where the processor has no AVX2.
"""

import json
import sys

import numpy as np
import torch

from mindrlhf.cpu.rollout import linear
from mindrlhf.cpu.rollout.linear import PlainLinear, Way, Ways, forget_copies

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


def ways(holds_back: bool, has_avx2: bool) -> list[list[str]]:
    linear._mkl_holds_back, linear._has_avx2 = lambda: holds_back, lambda: has_avx2
    linear.MAX_PACKED_BYTES = 5 * 4 << 20
    chosen, layers = Ways(), [torch.nn.Module() for _ in range(12)]
    weights = [torch.empty(SHAPES[number % len(SHAPES)]) for number in range(12)]
    return [[chosen.of(*one).name for one in zip(layers, weights, strict=True)] for _ in range(2)]


if __name__ == "__main__":
    _, shapes = json.load(sys.stdin)
    probed = [probe(*shape) for shape in shapes]
    print("probe", json.dumps([*probed, ways(True, True), ways(False, True), ways(False, False)]), flush=True)
