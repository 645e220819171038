"""The section `rollout`: the generator."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mindrlhf.config.keys import RunConfig, key
from mindrlhf.errors import Rules

# Patterns of names of EngineArgs that are not for users, each with the reason.
_SET_BY_OTHER_KEYS = {
    "max_num_seqs gpu_memory_utilization dtype": "rollout has a key of that name",
    "seed": "run.seed says it",
    "model tokenizer max_model_len load_format hf_* *_tokenizer_init": "it follows from the model and the data",
    "tensor_parallel_size pipeline_parallel_size data_parallel_* *context_parallel_size nnodes node_rank master_* "
    "distributed_executor_backend": "rollout.tensor_parallel and rollout.num_replicas lay servers out",
    "profiler_config": "profiler.tools says it",
}
REFUSED_ENGINE_ARGS = _SET_BY_OTHER_KEYS | {
    "logprobs_mode *generation_config logits_processors": "training needs the log-probability of each token as sampled",
    "enable_sleep_mode weight_transfer_config": "ranks and servers take turns on their devices",
    "worker_cls worker_extension_cls scheduler_cls": "ours load weights and count sequences",
    "quantization* kv_cache_dtype *lora*": "published weights are whole and of rollout.dtype",
}


@dataclass(frozen=True)
class RolloutSection:
    """The generator: one vLLM server process per replica, in an interpreter of its own."""

    engine: str = key("vllm", "what samples in a server: vllm, or path/to/file.py:Class; see docs/families.md")
    python: str = key(
        "",
        "interpreter of the rollout environment; empty means .venv-rollout beside the package, else this one",
    )
    env: dict[str, str] = key({}, "environment variables set for the rollout server")
    num_replicas: int = key(
        1, "number of servers that share the prompts; of several nodes each has an equal part of them, at least one",
        minimum=1,
    )
    off_policy_steps: int = key(
        0, "off-policy lag: while a step trains, samples of this many later steps are generated, so that a step trains "
        "on samples of the weights of as many steps before; 0 samples within the step; see docs/async.md",
        minimum=0,
        maximum=64,
    )
    segment_tokens: int = key(
        0, "partial rollout: most tokens that a response is given at a time; one that needs more goes on in the next "
        "step, with its weights; 0 finishes all in their step; see docs/async.md",
        minimum=0,
    )
    asynchronous: bool = key(
        False,
        "sample without end and train on what is complete, weights at most `off_policy_steps` steps old; see "
        "docs/async.md",
    )
    replay_order: str = key(
        "", "output directory of an asynchronous run to repeat exactly", read_with="rollout.asynchronous"
    )
    max_segments: int = key(
        4,
        "max. policy versions per response; the last one finishes it",
        minimum=2,
        read_with="rollout.segment_tokens",
    )
    in_flight: float = key(
        1.5, "prompts in flight, as a multiple of those that a step trains on; only with `segment_tokens`",
        minimum=1,
        exclusive_minimum=True,
        read_with="rollout.segment_tokens",
    )
    max_response_length: int = key(512, "longest response, in tokens, stop token included", minimum=1)
    temperature: float = key(
        1.0, "sampling temperature; training logits are divided by it too", minimum=0, exclusive_minimum=True
    )
    top_p: float = key(
        1.0,
        "nucleus sampling mass; 1 samples from the whole distribution",
        minimum=0,
        maximum=1,
        exclusive_minimum=True,
    )
    top_k: int = key(0, "sample from the top-k tokens; 0 means all", minimum=0)
    stop: tuple[str, ...] = key(
        (), "texts that end a response, as in ['</answer>'], and stay part of it; see docs/data.md#chat-templates"
    )
    dtype: str = key(
        "float32", "type of the generator's weights and arithmetic", choices=("float32", "bfloat16"),
        on_ascend="bfloat16",
    )
    max_num_seqs: int = key(64, "most sequences decoded at once by a server", minimum=1)
    num_threads: int = key(1, "CPU threads of a server", minimum=1)
    tensor_parallel: int = key(
        1, "devices that share one replica's weights; above the ranks of a node, of whole nodes: see docs/cluster.md",
        minimum=1,
    )
    gpu_memory_utilization: float = key(
        0.6, "share of device memory a server may take (Ascend)", minimum=0.05, maximum=0.95
    )
    engine_args: dict[str, Any] = key(
        {}, "arguments of vLLM's EngineArgs, as in {enforce_eager: true}; see docs/performance.md#vllms-own-arguments"
    )
    weight_buffer_gib: float = key(
        0.0,
        "host memory of a node through which new weights pass to the servers, in buckets, in GiB; 0: the whole model",
        minimum=0,
    )
    restarts: int = key(
        2, "how often dead or silent servers of all nodes are started again before a run fails", minimum=0, maximum=1000
    )


def stop_rules(config: RunConfig) -> Rules:
    """Rules of the texts that end a response."""
    yield not all(config.rollout.stop), (
        "'rollout.stop' has an empty text, which every response begins with: remove it, or set rollout.stop to []"
    )


def schedule_rules(config: RunConfig) -> Rules:
    """Rules of when samples are made: `off_policy_steps`, `asynchronous`, `segment_tokens`."""
    rollout, num_steps = config.rollout, config.run.max_steps
    ahead, span = rollout.off_policy_steps, rollout.segment_tokens
    if ahead:
        yield 0 < num_steps <= ahead, (
            f"'rollout.off_policy_steps' is {ahead}, but the run ends after run.max_steps = {num_steps} steps, so that "
            f"all samples would be of the starting weights: set it below {num_steps} (1 is usual)"
        )
        yield config.run.device == "ascend" and "ASCEND_RT_VISIBLE_DEVICES" not in rollout.env, (
            f"'rollout.off_policy_steps' is {ahead}, so that the server generates while the ranks train, and needs "
            "devices of its own: name them in rollout.env as ASCEND_RT_VISIBLE_DEVICES, or set it to 0"
        )
    for name, usual in (("off_policy_steps", 2), ("segment_tokens", max(1, rollout.max_response_length // 8))):
        yield rollout.asynchronous and not getattr(rollout, name), (
            f"'rollout.asynchronous' is true, which needs rollout.{name}, and that is 0: set it ({usual} is usual)"
        )
    yield span and span >= rollout.max_response_length, (
        f"'rollout.segment_tokens' is {span}, but no response is longer than rollout.max_response_length = "
        f"{rollout.max_response_length}: set it lower, or to 0"
    )


def server_rules(config: RunConfig) -> Rules:
    """Rules of how servers make samples and come by weights."""
    rollout = config.rollout
    replays = config.training.replay_routing
    for name, is_set in (("profiler.tools", "vllm" in config.profiler.tools), ("training.replay_routing", replays)):
        yield rollout.engine != "vllm" and is_set, (
            f"'rollout.engine' is {rollout.engine}, but '{name}' is vLLM's: remove one of them"
        )
    yield from _engine_arg_rules(rollout.engine_args, config.run.device)
    yield config.run.device == "ascend" and rollout.engine == "vllm" and rollout.dtype == "float32", (
        "'rollout.dtype' is float32, but attention on an NPU is of bfloat16: set it so, or leave it out"
    )


def _engine_arg_rules(engine_args: Mapping[str, Any], device: str) -> Rules:
    for names, reason in REFUSED_ENGINE_ARGS.items():
        for name in (name for name in engine_args if any(fnmatchcase(name, pattern) for pattern in names.split())):
            yield True, f"'rollout.engine_args' has {name}, but {reason}: remove it"
    yield device == "cpu" and "enable_chunked_prefill" in engine_args, (
        "'rollout.engine_args' has enable_chunked_prefill, but on a CPU prompts that are read in parts lose their "
        "seed: remove it"
    )
    speculative = engine_args.get("speculative_config")
    method = speculative.get("method") if isinstance(speculative, Mapping) else speculative
    yield method not in (None, "ngram", "suffix"), (
        f"'rollout.engine_args' has speculative_config with method {method}, but nobody publishes a draft model's "
        "weights: take ngram or suffix"
    )
