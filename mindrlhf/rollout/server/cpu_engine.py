"""vLLM's engine of one process on a CPU, in the versions whose internals are known, in less time.

1. Tokens are sampled by :mod:`mindrlhf.cpu.rollout.sampler`.
2. Requests go to the engine core and come back from it without vLLM's text output layer; log-probabilities are taken
   where tokens are sampled.
3. Tokens are planned several at a time (:mod:`mindrlhf.cpu.rollout.multi_step`).
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from mindrlhf.cpu.rollout.multi_step import MultiStep
from mindrlhf.cpu.rollout.sampler import Stream, StreamSampler
from mindrlhf.rollout.server import cpu
from mindrlhf.rollout.server.engine import TOKENS_ONLY, VllmEngine, read_tokens
from mindrlhf.rollout.server.streams import uniforms
from mindrlhf.rollout.types import Completion

_DTYPES = ("float32", "bfloat16")


class CpuEngine(VllmEngine):
    """vLLM in this process, with the changes of this module."""

    sampler = "inverse_cdf"

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._core = self._engine.engine_core.engine_core
        model_runner = self._model_runner()
        self._sampler = model_runner.sampler = StreamSampler(model_runner, uniforms)
        self._params: tuple[dict[str, Any], SamplingParams] | None = None
        self._steps = MultiStep(self._core, model_runner, self._sampler)
        if config["tokenizer_dir"]:  # there may be stop strings
            scheduler = self._core.scheduler
            self._take_tokens = scheduler._update_request_with_output
            scheduler._update_request_with_output = self._take_tokens_and_stop
        # What start-up made lives for ever: the collector need not look at it again.
        gc.collect()
        gc.freeze()

    def _engine_arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        arguments = super()._engine_arguments(config) | {"max_num_batched_tokens": read_tokens(config)}
        del arguments["enable_chunked_prefill"]  # the sampler's streams have no state to set back
        return arguments

    def step(self, is_interrupted: Callable[[], bool] = lambda: False) -> list[Completion]:
        outputs = self._steps.step(is_interrupted)
        finished = []
        for output in outputs[0].outputs if outputs else ():
            if output.finish_reason is not None:
                stream = self._sampler.streams.pop(output.request_id)
                length = stream.length
                finished.append(
                    self._finish(
                        output.request_id,
                        stream.token_ids[:length],
                        stream.logprobs[:length],
                        str(output.finish_reason),
                    )
                )
        return finished

    def _take_tokens_and_stop(self, request: Request, *arguments: Any, **options: Any) -> tuple[list[int], bool]:
        """Have vLLM take the tokens of a step, and end a request that the sampler has found a stop string in."""
        token_ids, is_stopped = self._take_tokens(request, *arguments, **options)
        stream = self._sampler.streams[request.request_id]
        if stream.is_stopped and stream.length == request.num_output_tokens:  # also by the last of its tokens
            request.status, is_stopped = RequestStatus.FINISHED_STOPPED, True
        return token_ids, is_stopped

    def abort(self) -> None:
        self._core.abort_requests(list(self._pending))
        while self._core.scheduler.has_requests():
            self._core.step_fn()
        self._sampler.streams.clear()
        self._pending.clear()

    def _add(
        self, name: str, prompt: list[int], key: int, sampling: dict[str, Any], features: list[MultiModalFeatureSpec]
    ) -> None:
        self._sampler.is_masked = bool(self._grammar)
        if self._params is None or self._params[0] != sampling:
            self._params = sampling, SamplingParams(**sampling, **TOKENS_ONLY)
        max_tokens = sampling["max_tokens"]
        self._sampler.streams[name] = Stream(
            key,
            np.empty(max_tokens, np.int32),
            np.empty(max_tokens, np.float32),
            stop_token_ids=frozenset(sampling["stop_token_ids"]),
            stops=self._stopping.stops,
            begun=self._stopping.begun(name),
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=list(features) or None,
            sampling_params=self._params[1],
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))


def build_engine(config: dict[str, Any]) -> VllmEngine:
    """Return the fastest engine that may be used with ``config`` (see ``VllmOptions`` for its keys)."""
    is_alone = config["device"] == "cpu" and config["tensor_parallel_size"] == 1 and cpu.is_known()
    return (CpuEngine if is_alone and config["dtype"] in _DTYPES else VllmEngine)(config)
