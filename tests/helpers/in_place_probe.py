"""Loading into live parameters by the copies that a loader made; to be run by the rollout interpreter.

usage: python tests/helpers/in_place_probe.py < JSON of (a config, unused; [[what the loader does, buckets], ...])

Prints "probe" and JSON: of each model that was given five versions, the last two by another buffer, the largest
difference of its parameters from what they should be after each version, the names of what it said that it loaded, and
how often its loader was asked.
"""

import json
import sys

import numpy as np
import torch

from mindrlhf.cpu.rollout.in_place import InPlaceLoader
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.tensors import TensorInfo

HEIGHTS, WIDTH, PADDED = {"q": 6, "k": 3, "words": 10}, 4, 16
LARGE = 16411  # times as high: copied in several parts, the last one smaller


class Model(torch.nn.Module):
    """Fuses "q" and "k", and pads "words" with zeros, as vLLM's loaders do."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.num_loads = way, 0
        self.scale = LARGE if way == "columns" else 1
        fused = torch.full((9 * self.scale, WIDTH), torch.nan)
        fused = fused.t().contiguous().t() if way == "columns" else fused
        self.fused = torch.nn.Parameter(fused, requires_grad=False)
        self.words = torch.nn.Parameter(torch.full((PADDED, WIDTH), torch.nan), requires_grad=False)

    def load_weights(self, weights) -> set[str]:
        self.num_loads += 1
        names = set()
        for name, tensor in weights:
            names.add("words" if name == "words" else "fused")
            if self.way == "skips" and name == "words":
                self.words.data.fill_(0)
                continue
            if self.way == "computes":
                tensor = tensor * 2.0
            elif self.way == "converts":
                tensor = tensor.to(torch.float64).to(torch.float32)
            rows = 6 * self.scale, 3 * self.scale
            target = {"q": self.fused.data[: rows[0]], "k": self.fused.data.narrow(0, *rows)}
            target["words"] = self.words.data[:10]
            target[name].copy_(tensor)
            if name == "words":
                self.words.data[10:].fill_(0)
                if self.way == "changes":
                    self.words.data.add_(1.0)
                elif self.way == "overwrites":
                    self.words.data[:10].copy_(tensor.flip(0))
        return names

    def expected(self, tensors) -> tuple[np.ndarray, np.ndarray]:
        factor = 2.0 if self.way == "computes" else 1.0
        words = tensors["words"][::-1] if self.way == "overwrites" else tensors["words"]
        words = words * np.float32(self.way != "skips")
        padded = np.concatenate([words * factor, np.zeros((PADDED - 10, WIDTH), np.float32)])
        return np.concatenate([tensors["q"], tensors["k"]]) * factor, padded + np.float32(self.way == "changes")


def run(way: str, num_buckets: int) -> list:
    model = Model(way)
    loader = InPlaceLoader(model)
    random = np.random.default_rng(num_buckets)
    heights = {name: height * (1 if name == "words" else model.scale) for name, height in HEIGHTS.items()}
    infos = [TensorInfo(name, "float32", (height, WIDTH)) for name, height in heights.items()]
    differences, names = [], set()
    for version in range(5):
        if version in (0, 3):
            buffer = WeightBuffer.create(infos, bucket_bytes=200 if num_buckets > 1 else 0)
            assert buffer.num_buckets == num_buckets
        tensors = {name: random.standard_normal((height, WIDTH), np.float32) for name, height in heights.items()}
        for bucket in range(num_buckets):
            buffer.begin(version, bucket)
            for name, tensor in tensors.items():
                if buffer.wants(name):
                    buffer.write(name, tensor)
            buffer.commit()
            views = ((name, torch.from_numpy(array)) for name, _, array in buffer.tensors(version))
            names |= loader.load(buffer, views)
        found = (model.fused.numpy(), model.words.numpy())
        pairs = zip(found, model.expected(tensors), strict=True)
        differences.append(max(float(np.abs(one - other).max()) for one, other in pairs))
    return [differences, sorted(names), model.num_loads]


if __name__ == "__main__":
    _, cases = json.load(sys.stdin)
    print("probe", json.dumps([run(*case) for case in cases]), flush=True)
