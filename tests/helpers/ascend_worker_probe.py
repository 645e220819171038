"""What a worker puts back after a sleep, with a model on the CPU that is put to sleep by hand."""

import json
from types import SimpleNamespace

import torch

from mindrlhf.rollout.server.ascend import WhatSleepForgets, tell_processed_logprobs

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
tell_processed_logprobs(SimpleNamespace(sampler=sampler))
found = {
    "same parameter": model.experts.w13_weight is before and model.norm.weight is norm,
    "shape": list(model.experts.w13_weight.shape),
    "new weights": bool((model.experts.w13_weight == 7).all()),
    "table": tables.cos.tolist() if tables.cos is table else "another",
    "modes": [sampler.logprobs_mode, sampler.topk_topp_sampler.logprobs_mode],
}
print("probe", json.dumps(found))
