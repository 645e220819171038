"""What a worker puts back after a sleep, with a model on the CPU that is put to sleep by hand."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindrlhf.rollout.server.ascend import WhatSleepForgets, sample_rows, set_up_sampler

model = torch.nn.Module()
model.experts = torch.nn.Module()
model.experts.w13_weight = torch.nn.Parameter(torch.arange(24.0).reshape(2, 3, 4), requires_grad=False)
model.norm = torch.nn.LayerNorm(4)
tables = SimpleNamespace(cos=torch.tensor([1.0, 2.0]), unset=None, name="rope")
before, norm, table = model.experts.w13_weight, model.norm.weight, tables.cos
forgotten = WhatSleepForgets(model, tables)
# vLLM-Ascend's wake_up, and memory that is there again without what was in it.
model.experts.w13_weight = torch.nn.Parameter(before.transpose(1, 2), requires_grad=False)
table.fill_(float("nan"))
before.data.fill_(7.0)  # what a new version loads
forgotten.put_back()
sampler = SimpleNamespace(logprobs_mode="raw_logprobs", topk_topp_sampler=SimpleNamespace(logprobs_mode="raw_logprobs"))
sampling = SimpleNamespace(random_sample=lambda probs, generators: "theirs")
set_up_sampler(sampler, sampling)


class Stream:
    """What a generator of an NPU says of itself."""

    def __init__(self, seed):
        self.seed, self.offset = seed, 0

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset


class Counter(TorchDispatchMode):
    """Counts the operators that run."""

    num = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.num += 1
        return function(*arguments, **(options or {}))


def num_operators(num_rows):
    with Counter() as counter:
        sample_rows(torch.full((num_rows, 8), 0.125), dict(enumerate(map(Stream, range(num_rows)))))
    return counter.num


SHARES = np.array([0.0, 0.5, 0.0, 0.25, 0.125, 0.0, 0.125, 0.0])
rows = torch.tensor(SHARES, dtype=torch.float32).expand(2000, 8)
streams = dict(enumerate(map(Stream, range(5, 2005))))
drawn = np.stack([sample_rows(rows.clone(), streams).numpy() for _ in range(10)])
alone, taken_back = Stream(5 + 77), Stream(5 + 77)
of_one = [int(sample_rows(rows[:1] * 3, {0: alone})) for _ in range(10)]
repeated = []
for _ in range(10):  # what the runner does with a prompt that is read in part
    sample_rows(rows[:1], {0: taken_back})
    taken_back.set_offset(taken_back.get_offset() - 4)
    repeated.append(int(sample_rows(rows[:1], {0: taken_back})))
turned = {row: Stream(5 + 9 - row) for row in range(10)}
mixed = sample_rows(rows[:10], dict(reversed(turned.items()))).tolist()
few = {0: Stream(1)}


def blocked_sum(values, dim):
    """A running sum as an accelerator's, in float32: rounding moves it up or down where a block begins."""
    return torch.Tensor.cumsum(values, dim) - 1e-2 * (torch.arange(values.shape[-1]) % 2)


falling = rows.clone()
falling.cumsum = lambda dim: blocked_sum(falling, dim)
unlikely = sum(int((SHARES[sample_rows(falling, streams).numpy()] == 0).sum()) for _ in range(20))
found = {
    "shares": (np.bincount(drawn.ravel(), minlength=8) / drawn.size).tolist(),
    "shares of each draw": [(np.bincount(one, minlength=8) / one.size).tolist() for one in drawn],
    "pairs": [float(np.mean((drawn[:-1] == 1) & (drawn[1:] == 1))), float(np.mean(drawn[:, :-1] == drawn[:, 1:]))],
    "alone": [of_one, repeated, drawn[:, 77].tolist()],
    "turned": [mixed[::-1], drawn[0, :10].tolist()],
    "operators": [num_operators(1), num_operators(64)],
    "unlikely": unlikely,
    "ours where all have seeds": [
        isinstance(sampling.random_sample(rows[:1].clone(), few), torch.Tensor), sampling.random_sample(rows[:2], few)
    ],
    "same parameter": model.experts.w13_weight is before and model.norm.weight is norm,
    "shape": list(model.experts.w13_weight.shape),
    "new weights": bool((model.experts.w13_weight == 7).all()),
    "table": tables.cos.tolist() if tables.cos is table else "another",
    "modes": [sampler.logprobs_mode, sampler.topk_topp_sampler.logprobs_mode],
}
config, given = json.load(sys.stdin)
if given == "arguments":  # which import vLLM
    from mindrlhf.rollout.server.engine import engine_arguments

    config |= {"device": "ascend", "max_num_seqs": 48, "engine_args": {"async_scheduling": False}}
    config["engine_args"]["compilation_config"] = {"cudagraph_mode": "PIECEWISE"}
    config["engine_args"]["additional_config"] = {"weight_prefetch_config": {}}
    model_dir = Path(config["model_dir"])
    model_dir.mkdir(exist_ok=True)
    (model_dir / "config.json").write_text("{}")
    told = engine_arguments(config, None)
    found = {name: told[name] for name in ("compilation_config", "additional_config", "async_scheduling", "seed")}
print("probe", json.dumps(found))
