"""The vLLM engine as the rollout server sees it: samples in, finished samples out."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, MultiModalKwargsItems
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor import multiproc_executor

from mindrlhf.rollout.sent_images import SentImage
from mindrlhf.rollout.server import ascend, cpu, grammars, linear_attention
from mindrlhf.rollout.server.routing import RoutingRecorder
from mindrlhf.rollout.server.streams import stream_key
from mindrlhf.rollout.server.vision import VisionModel, hf_config_of
from mindrlhf.rollout.stop_strings import StoppingSamples
from mindrlhf.rollout.types import Completion, experts_dtype
from mindrlhf.specs import find_spec

_CPU_BLOCK_SIZE = 32  # vLLM caches whole blocks of this many tokens only, and its CPU kernels want multiples of 32
_CPU_READ_TOKENS = 4096  # of prompts, read at once: of a small model another pass costs as much as 1,000 tokens

TOKENS_ONLY = {"detokenize": False, "ignore_eos": True}  # of SamplingParams


def engine_arguments(config: dict[str, Any], vision: VisionModel | None) -> dict[str, Any]:
    """Return what vLLM is told of ``config``, the same in all processes of a server.

    Args:
        vision: what the model sees with; None for a model of text.
    """
    arguments = {
        "model": config["model_dir"],
        "dtype": config["dtype"],
        "load_format": config["load_format"],
        "max_model_len": config["max_model_len"],
        "max_num_seqs": config["max_num_seqs"],
        "seed": config["seed"],
        "tensor_parallel_size": config["tensor_parallel_size"],
        "gpu_memory_utilization": config["gpu_memory_utilization"],
        "enable_sleep_mode": config["enable_sleep"],
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "mindrlhf.rollout.server.worker.WorkerExtension",
    }
    if config["profile_dir"]:
        from vllm.config import ProfilerConfig

        options = {"profiler": "torch", "torch_profiler_dir": config["profile_dir"]}
        arguments["profiler_config"] = ProfilerConfig(**options, torch_profiler_with_stack=False)
    if config["kv_cache_gib"] is not None:
        arguments["kv_cache_memory_bytes"] = int(config["kv_cache_gib"] * 2**30)
    elif config["device"] == "ascend" and "kv_cache_memory_bytes" not in config["engine_args"]:
        arguments["kv_cache_memory_bytes"] = ascend.cache_bytes(config)
    if config["device"] == "cpu":
        arguments |= {"enforce_eager": True, "block_size": _CPU_BLOCK_SIZE, "attention_backend": cpu.LATENT_ATTENTION}
        # Where a prompt was read in part, vLLM 0.32 sets the random stream back, which torch cannot on a CPU.
        most = max(read_tokens(config), config["max_model_len"])
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
    if config["device"] == "ascend":
        arguments |= ascend.graph_arguments(config["max_num_seqs"])
        arguments["enable_return_routed_experts"] = config["record_routing"]
    arguments |= linear_attention.engine_arguments(config)
    if vision is not None:
        arguments |= vision.engine_arguments(config["max_model_len"])
    arguments = _merged(arguments, config["engine_args"])
    if config["tokenizer_dir"] and not arguments.get("speculative_config"):  # with which vLLM takes no processors
        arguments["logits_processors"] = [*arguments.get("logits_processors", ()), grammars.PROCESSOR]
    if span := config["span"]:
        arguments |= {"nnodes": span["num_nodes"], "node_rank": span["number"], "distributed_executor_backend": "mp"}
        arguments |= {"master_addr": span["host"], "master_port": span["port"]}
    return arguments


def _merged(ours: dict[str, Any], users: dict[str, Any]) -> dict[str, Any]:
    """The arguments of both; where both have a mapping, its entries are merged."""
    both = {name for name, value in users.items() if isinstance(value, dict) and isinstance(ours.get(name), dict)}
    return ours | users | {name: ours[name] | users[name] for name in both}


def read_tokens(config: dict[str, Any]) -> int:
    """Return how many tokens of prompts are read at once on a CPU that may read a prompt in parts."""
    return max(config["max_num_seqs"], min(_CPU_READ_TOKENS, config["max_num_seqs"] * config["max_model_len"]))


class VllmEngine:
    """vLLM through its public interface. One batch at a time: ``submit``, then ``step`` until ``num_pending`` is 0."""

    sampler = "vllm"

    def __init__(self, config: dict[str, Any]):
        self._uses_sleep = config["enable_sleep"]
        self._forgets_batches = config["device"] == "cpu"
        self._kv_cache_is_asleep = False
        self._vision = VisionModel.of(config["model_dir"])
        self._image_items: dict[str, MultiModalKwargsItem] = {}  # of the batch, by digest
        cpu.do_without_lscpu()
        self._has_workers = config["tensor_parallel_size"] > 1
        is_alone = not self._has_workers and cpu.is_known()
        with cpu.without_listeners() if is_alone else contextlib.nullcontext():
            self._engine = LLMEngine.from_engine_args(EngineArgs(**self._engine_arguments(config)))
        if config["device"] == "ascend":
            self._engine.collective_rpc("set_up_sampler")
        records = config["record_routing"] and config["device"] == "cpu"
        self._recorder = RoutingRecorder(self._model_runner()) if records else None
        self._experts = None
        if config["record_routing"]:
            hf_config = hf_config_of(config["model_dir"])
            self._experts = find_spec(hf_config).dims(hf_config).experts
        self._prompt_lengths: list[int] = []  # of the batch
        self._internal_names: dict[str, str] = {}  # vLLM's of the pending samples
        self._profile_dir = Path(config["profile_dir"])
        self._profiled_step = 0
        self._pending: dict[str, tuple[int, int]] = {}
        self._num_submitted = 0
        self._weights_version = 0
        self._stopping = StoppingSamples(config["tokenizer_dir"])
        self._tokenizer_dir = config["tokenizer_dir"]
        self._grammar = ""  # of the batch

    def _engine_arguments(self, config: dict[str, Any]) -> dict[str, Any]:
        return engine_arguments(config, self._vision)

    def _model_runner(self):
        """vLLM's, where it runs in this process."""
        return self._engine.model_executor.driver_worker.worker.model_runner

    @property
    def num_pending(self) -> int:
        """Samples submitted and not yet returned by ``step``."""
        return len(self._pending)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        nums_samples: Sequence[int],
        seeds: Sequence[int],
        max_tokens: Sequence[int],
        sampling: dict[str, Any],
        images: Sequence[Sequence[SentImage]],
        nums_begun: Sequence[int] | None = None,
    ) -> None:
        """Queue ``nums_samples[i]`` samples of ``prompts[i]``; they share the prompt through the prefix cache, where on
        a CPU nothing is of earlier batches: those round a prefix in another way, and a new server has had none.

        The last ``nums_begun[i]`` tokens of a prompt are of the response already.

        Raises:
            ValueError: the image tokens of a prompt are not those of its ``images[i]``, or the model sees nothing.
        """
        if self._forgets_batches:
            self._forget_prefixes()
        self._image_items.clear()
        self._prompt_lengths = [len(prompt) for prompt in prompts]
        sampling = dict(sampling)
        self._stopping.begin_batch(sampling.pop("stop", ()))
        self._grammar = sampling.pop("grammar", "")
        nums_begun = [0] * len(prompts) if nums_begun is None else nums_begun
        requests = zip(prompts, nums_samples, seeds, max_tokens, images, nums_begun, strict=True)
        for request_index, (prompt, num_samples, seed, limit, own_images, num_begun) in enumerate(requests):
            own_sampling = {**sampling, "max_tokens": limit}
            features = self._features(prompt, own_images)
            for sample_index in range(num_samples):
                name = str(self._num_submitted)
                self._num_submitted += 1
                self._pending[name] = (request_index, sample_index)
                if self._stopping.stops is not None:
                    self._stopping.add(name, prompt, num_begun)
                if self._grammar:
                    told = {"name": name, "grammar": self._grammar, "tokenizer_dir": self._tokenizer_dir}
                    own_sampling = {**own_sampling, "extra_args": told}
                self._add(name, list(prompt), stream_key(seed, sample_index), own_sampling, features)

    def step(self, is_interrupted: Callable[[], bool] = lambda: False) -> list[Completion]:
        """Run the model, several times in a row if nobody interrupts it; return the samples that ended.

        Their ``request_id`` is the place of the prompt in the batch.
        """
        finished, stopped = [], []
        for output in self._engine.step():
            completion, name = output.outputs[0], output.request_id
            token_ids = list(completion.token_ids)
            logprobs = [entry[token].logprob for token, entry in zip(token_ids, completion.logprobs or ())]
            reason = completion.finish_reason
            if self._stopping.stops is not None:
                token_ids, logprobs, is_stopped = self._stopping.extend(name, token_ids, logprobs)
                if is_stopped and not output.finished:
                    stopped.append(name)
                reason = "stop" if is_stopped else reason
            if reason is not None:
                finished.append(self._finish(name, token_ids, logprobs, reason, completion.routed_experts))
        if stopped:
            self._engine.abort_request(stopped)
        return finished

    def abort(self) -> None:
        """Forget all pending samples."""
        self._engine.abort_request(list(self._pending))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._pending.clear()
        self._internal_names.clear()

    def update_weights(self, version: int, buffer_path: str) -> None:
        """Load what the buffer has of ``version``; when that is all of it now, forget all cached prefixes."""
        is_whole = all(self._engine.collective_rpc("load_weight_buffer", args=(buffer_path, version)))
        self._weights_version = version
        if not is_whole:
            return
        if self._kv_cache_is_asleep:
            self._engine.wake_up(tags=["kv_cache"])
            self._kv_cache_is_asleep = False
            self._say_memory("awake")
        self._forget_prefixes()

    def sleep(self) -> None:
        """Give up device memory: weights and KV cache are discarded (level 2). Nothing to do on a CPU."""
        if self._uses_sleep:
            self._engine.collective_rpc("before_sleep")
            self._engine.sleep(level=2)
            self._say_memory("asleep")

    def wake(self) -> None:
        """Take memory for the weights; the KV cache follows once they are loaded, so that both need not fit twice."""
        if self._uses_sleep:
            self._engine.wake_up(tags=["weights"])
            self._engine.collective_rpc("after_wake")
            self._kv_cache_is_asleep = True

    def profile(self, step: int) -> None:
        """Start vLLM's profiler for a step, from 1; with 0 end it, and call what it wrote after the step."""
        if step:
            self._profiled_step = step
            self._engine.start_profile()
            return
        self._engine.stop_profile()
        for trace in self._profile_dir.glob("*"):
            if not trace.name.startswith("step_"):
                trace.rename(trace.with_name(f"step_{self._profiled_step}_{trace.name}"))

    def record_layers(self, path: str) -> None:
        """Have the next prompt's hidden states written there."""
        self._engine.collective_rpc("record_layers", args=(path,))

    def close(self) -> None:
        """Stop vLLM's worker processes, if it has any.

        What is in this process ends with it: vLLM's own way out would collect garbage for seconds, to free memory that
        nobody uses again.
        """
        if self._has_workers:
            self._engine.engine_core.shutdown()

    def _say_memory(self, state: str) -> None:
        """Write to the server's log how much of each NPU is free, for whoever shares it."""
        found = self._engine.collective_rpc("device_memory")
        parts = [f"{free / 2**30:.2f} of {whole / 2**30:.2f}" for free, whole in found]
        print(f"mindrlhf: {state}: GiB free on each NPU: {', '.join(parts)}", flush=True)

    def _forget_prefixes(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache between two batches")
        if self._vision is not None:
            # What the tower saw; no other reset forgets it.
            self._engine.reset_encoder_cache()

    def _features(self, prompt: Sequence[int], images: Sequence[SentImage]) -> list[MultiModalFeatureSpec]:
        if self._vision is None:
            if images:
                raise ValueError("a prompt has images, and the model sees none")
            return []
        return self._vision.features(prompt, images, self._image_items)

    def _add(
        self, name: str, prompt: list[int], key: int, sampling: dict[str, Any], features: list[MultiModalFeatureSpec]
    ) -> None:
        kind = RequestOutputKind.FINAL_ONLY if self._stopping.stops is None else RequestOutputKind.DELTA
        params = SamplingParams(**sampling, seed=key >> 1, logprobs=0, output_kind=kind, **TOKENS_ONLY)
        if not features:
            self._internal_names[name] = self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
            return
        inputs = mm_input(
            prompt,
            MultiModalKwargsItems({"image": [feature.data for feature in features]}),
            {"image": [feature.identifier for feature in features]},
            {"image": [feature.mm_position for feature in features]},
        )
        self._internal_names[name] = self._engine.add_request(name, inputs, params)

    def _finish(
        self, name: str, token_ids: Any, logprobs: Any, finish_reason: str, experts: np.ndarray | None = None
    ) -> Completion:
        if finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a sample with finish reason '{finish_reason}'")
        request_index, sample_index = self._pending.pop(name)
        internal_name = self._internal_names.pop(name, name)
        # The last token was sampled, and never read.
        num_tokens = self._prompt_lengths[request_index] + len(token_ids) - 1
        if self._recorder is not None:
            experts = self._recorder.experts_of(internal_name, num_tokens)
        elif self._experts is not None:
            experts = experts[:num_tokens, list(self._experts.layers)].astype(experts_dtype(self._experts.num_experts))
            if experts.shape[-1] > 1 and not experts.any():  # a token has none twice
                message = "this vLLM-Ascend records no experts, as 0.26.0rc1: take 0.23.0, or leave out replay_routing"
                raise RuntimeError(message)
        completion = Completion(
            request_id=request_index,
            sample_index=sample_index,
            token_ids=np.asarray(token_ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            finish_reason=finish_reason,
            weights_version=self._weights_version,
            experts=experts,
        )
        return self._of_policy(name, completion) if self._grammar else completion

    def _of_policy(self, name: str, completion: Completion) -> Completion:
        """Return a sample that has kept to a grammar with the policy's own tokens, and log-probabilities of these."""
        failure, masses = self._engine.collective_rpc("take_allowed", args=(name,))[0]
        if failure:
            return replace(completion, unscored=f"the form cannot be followed: {failure}")
        masses = np.array(masses[: len(completion.token_ids)], np.float32)
        is_generated = masses >= grammars.MIN_ALLOWED
        logprobs = (completion.logprobs + masses)[is_generated]
        return replace(completion, logprobs=logprobs, is_generated=is_generated)


def run_workers(config: dict[str, Any]) -> None:
    """Run the workers of this node for an engine that is on another, until one of them ends."""
    cpu.do_without_lscpu()
    arguments = EngineArgs(**engine_arguments(config, VisionModel.of(config["model_dir"])))
    vllm_config = arguments.create_engine_config(headless=True)
    # Looked up now: vLLM-Ascend has put its own there with the platform.
    executor = multiproc_executor.MultiprocExecutor(vllm_config, monitor_workers=False)
    executor.start_worker_monitor(inline=True)
