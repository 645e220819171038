"""Products of the rollout server's linear layers; to be run by the rollout interpreter.

usage: python tests/helpers/linear_probe.py < JSON of (a config, unused; [[rows, in, out, bias, packed], ...])

Prints "probe" and JSON: of each shape the largest error against float64, relative to the largest result, before and
after the weight was changed in place; and whether products with a packed copy still had the old weight until it was
forgotten.
"""

import json
import sys

import numpy as np
import torch

from mindrlhf.rollout.server.linear import PlainLinear, forget_copies


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


if __name__ == "__main__":
    _, shapes = json.load(sys.stdin)
    print("probe", json.dumps([probe(*shape) for shape in shapes]), flush=True)
