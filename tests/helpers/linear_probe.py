"""Products of the rollout server's linear layers; to be run by the rollout interpreter.

usage: python tests/helpers/linear_probe.py < JSON of (a config, unused; [[rows, in, out, bias, packed], ...])

Prints "probe" and JSON: of each shape the largest error against float64, relative to the largest result, before and
after the weight was changed in place; and whether products with a packed copy still had the old weight until it was
forgotten. Last, of ten layers which have room for a packed copy, asked in turn and then again.
"""

import json
import sys

import numpy as np
import torch

from mindrlhf.rollout.server import linear
from mindrlhf.rollout.server.linear import PackedCopies, PlainLinear, forget_copies


def error(kernel, x, weight, bias) -> float:
    expected = x.double().numpy() @ weight.double().numpy().T
    if bias is not None:
        expected = expected + bias.double().numpy()
    return float(np.abs(kernel(x, weight, bias).numpy() - expected).max() / np.abs(expected).max())


def probe(num_rows, num_in, num_out, has_bias, packs) -> dict:
    torch.manual_seed(num_rows)
    x, weight = torch.randn(num_rows, num_in), torch.randn(num_out, num_in)
    bias = torch.randn(num_out) if has_bias else None
    layer = torch.nn.Module()
    layer.cpu_linear = PlainLinear(weight, packs)
    before = error(layer.cpu_linear, x, weight, bias)
    old = layer.cpu_linear(x, weight, bias)
    weight.copy_(torch.randn(num_out, num_in))
    is_stale = torch.equal(layer.cpu_linear(x, weight, bias), old)
    forget_copies(torch.nn.Sequential(layer))
    return {"before": before, "stale": is_stale, "after": error(layer.cpu_linear, x, weight, bias)}


def room() -> list[list[bool]]:
    linear._mkl_holds_back = lambda: True
    linear.MAX_PACKED_BYTES = 3 * 4 << 20
    copies, layers = PackedCopies(), [torch.nn.Module() for _ in range(10)]
    weights = [torch.empty(1024, 1024 if number % 2 else 16) for number in range(10)]
    return [[copies.wants(*one) for one in zip(layers, weights, strict=True)] for _ in range(2)]


if __name__ == "__main__":
    _, shapes = json.load(sys.stdin)
    print("probe", json.dumps([*(probe(*shape) for shape in shapes), room()]), flush=True)
