"""vLLM's engine of one process, in the versions whose internals this package knows, in less time.

1. Kernels: see ``kernels.py``.
2. Tokens are sampled by ``sampler.py``.
3. Requests go to the engine core and come back from it without vLLM's text output layer; log-probabilities are taken
   where tokens are sampled.
4. Tokens are planned several at a time (``multi_step.py``), and dense models compute them without vLLM's layers
   (``dense.py``). A prompt is read once for its samples (``shared_prefill.py``).
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

from mindrlhf.cpu.rollout import kernels
from mindrlhf.cpu.rollout.multi_step import MultiStep
from mindrlhf.cpu.rollout.sampler import Stream, StreamSampler
from mindrlhf.rollout.server.engine import TOKENS_ONLY, VllmEngine, read_tokens
from mindrlhf.rollout.types import Completion


class CpuEngine(VllmEngine):
    """vLLM in this process, with the changes of :mod:`mindrlhf.cpu.rollout.engine`."""

    sampler = "inverse_cdf"

    def __init__(self, config: dict[str, Any]):
        kernels.install_kernels()
        super().__init__(config)
        self._core = self._engine.engine_core.engine_core
        model_runner = self._model_runner()
        self._sampler = model_runner.sampler = StreamSampler(model_runner)
        self._weights_load_in_place = kernels.weights_are_plain(model_runner.get_model())
        kernels.call_attention_directly(model_runner.get_model())
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
        priority = [kernels.RMS_NORM_PROVIDER, "native"]
        arguments = super()._engine_arguments(config) | {"max_num_batched_tokens": read_tokens(config)}
        del arguments["enable_chunked_prefill"]  # the sampler's streams have no state to set back
        arguments["ir_op_priority"] = {"rms_norm": priority, "fused_add_rms_norm": priority}
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
        if stream.stopped_at and stream.stopped_at == request.num_output_tokens:  # also by the last of its tokens
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
