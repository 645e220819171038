"""Workarounds for vLLM-Ascend 0.23.0: sleep mode and log-probabilities.

Looked up in the wheel; not run on an NPU.
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mindrlhf.rollout.server.streams import mix

_LARGEST_GRAPH = 512  # sequences, as its default
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


def graph_arguments(max_num_seqs: int) -> dict[str, dict[str, Any]]:
    """Return what vLLM-Ascend is told of its graphs and cores.

    Graphs of decoding alone, of sizes that double: its default is one of each of 23 to 51 sizes and of each piece of
    the model, several hundred, of which drivers before HDK 25.5.1 have not the streams (its compilation/acl_graph.py).
    Its binding of threads to cores would stop irqbalance on the host, and binds no rank.
    """
    largest = min(max_num_seqs, _LARGEST_GRAPH)
    sizes = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*sizes, largest]}
    return {"compilation_config": graphs, "additional_config": {"enable_cpu_binding": False}}


def set_up_sampler(sampler: Any, sampling: Any) -> None:
    """Have log-probabilities be of what is sampled from, after temperature, top-k and top-p; and rows sampled at once.

    Its runner makes its sampler without the engine's ``logprobs_mode`` (worker/model_runner_v1.py), so they would be
    those of temperature 1. And it would draw as many exponential numbers as there are tokens, once for each row.

    Args:
        sampler: of the model's runner.
        sampling: its module.
    """
    sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "processed_logprobs"
    without_seeds = sampling.random_sample

    def random_sample(probs: torch.Tensor, generators: dict[int, torch.Generator]) -> torch.Tensor:
        return (sample_rows if len(generators) == len(probs) else without_seeds)(probs, generators)

    sampling.random_sample = random_sample


def sample_rows(probs: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """Sample a token of each row of probabilities [rows, tokens], by the inverse of its distribution function.

    The uniform number of a row is a function of its generator's seed and of the draws before, so that it depends on no
    other row; and the launches are as many for all rows as for one. In float32 the sum over 150,000 tokens is right to
    about 1e-5, which moves that much of the mass to a neighbour.

    Args:
        generators: by row; its offset counts the draws by fours, since the runner takes some back.

    Returns:
        int64 [rows].
    """
    draws = [(one.initial_seed(), one.get_offset() // 4) for _, one in sorted(generators.items())]
    for one in generators.values():
        one.set_offset(one.get_offset() + 4)
    seeds, counts = np.array(draws, np.uint64).T
    # 24 bits: the largest is 1 - 2**-24, and times the sum less than that.
    uniform = (mix(mix(seeds) + counts) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    host = torch.from_numpy(uniform)
    if probs.device.type != "cpu":
        host = host.pin_memory()  # so that nobody waits for the copy
    sums = probs.cumsum(-1)
    wanted = host.to(probs.device, non_blocking=True)[:, None] * sums[:, -1:]
    # An accelerator sums in blocks, so that in float32 the sums may fall on the way: no token of probability 0 is it.
    is_likely, places = probs > 0, torch.arange(probs.shape[-1], dtype=torch.int32, device=probs.device)
    first = torch.where(is_likely & (sums > wanted), places, len(places)).amin(-1)
    last = torch.where(is_likely, places, -1).amax(-1)
    return torch.minimum(first, last).long()


class WhatSleepForgets:
    """Restores worker state that a level-2 sleep discards.

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
