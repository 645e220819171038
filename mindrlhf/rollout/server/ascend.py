"""What vLLM-Ascend 0.23.0 leaves undone in a worker for a server that sleeps and tells log-probabilities.

Looked up in the wheel; not run on an NPU.
"""

import subprocess
import sys
from typing import Any

import torch

_ASK_S = 300.0  # importing torch_npu takes seconds, from a cold network disk minutes


def cache_bytes(config: dict[str, Any]) -> int:
    """Return the size of the KV cache of each device of a server, from its share and what else is to be there.

    vLLM would measure what is left: but ranks that take or give back memory of the same NPU meanwhile shrink it, or
    trip an assertion. The device is asked in a process of its own, which leaves nothing there.

    Raises:
        RuntimeError: nothing is left for it.
    """
    ask = "import torch, torch_npu; print(torch.npu.mem_get_info(0)[1])"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=_ASK_S, check=True)
    whole = int(answer.stdout.split()[-1])
    left = int(whole * config["gpu_memory_utilization"]) - config["reserved_bytes"]
    if left <= 0:
        raise RuntimeError(
            f"no memory is left for the KV cache: rollout.gpu_memory_utilization {config['gpu_memory_utilization']} of "
            f"{whole / 2**30:.1f} GiB, weights and workspace {config['reserved_bytes'] / 2**30:.1f}: raise it, or "
            "rollout.tensor_parallel"
        )
    print(f"mindrlhf: KV cache {left / 2**30:.2f} GiB of each NPU's {whole / 2**30:.2f}", flush=True)
    return left


def tell_processed_logprobs(model_runner: Any) -> None:
    """Have log-probabilities be of what is sampled from: after temperature, top-k and top-p.

    Its runner makes its sampler without the engine's ``logprobs_mode`` (worker/model_runner_v1.py), so they would be
    those of temperature 1.
    """
    sampler = model_runner.sampler
    sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "processed_logprobs"


class WhatSleepForgets:
    """What a worker has to put back itself after its weights were awake again, from a sleep of level 2.

    Its ``wake_up`` leaves experts' weights transposed, as a loader wants them who loads into the model that was built.
    Ours goes on from the parameters that were there before (vLLM's layerwise reload), whose memory is the same. And
    the tables of rotary angles, which are no buffers of the model but lie in the memory of its weights, it forgets
    (ops/rotary_embedding.py).

    Args:
        model: of the worker, about to sleep.
        tables: the module that holds the tables.
    """

    def __init__(self, model: torch.nn.Module, tables: Any):
        self._model = model
        self._parameters = dict(model.named_parameters())
        held = {name: value for name, value in vars(tables).items() if isinstance(value, torch.Tensor)}
        self._tables = [(table, table.cpu().clone()) for table in held.values()]

    def put_back(self) -> None:
        """Put it back; the weights' memory is there."""
        for name, parameter in self._parameters.items():
            owner, _, last = name.rpartition(".")
            module = self._model.get_submodule(owner)
            if getattr(module, last) is not parameter:
                setattr(module, last, parameter)
        for table, values in self._tables:
            table.copy_(values)
