"""Options of a vLLM rollout server, their checks, and the environment of its process."""

import ast
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindrlhf.config.keys import nearest_choice
from mindrlhf.config.rollout import RolloutSection
from mindrlhf.errors import UserError
from mindrlhf.layout.server_shards import weight_elements, workspace_bytes
from mindrlhf.specs import find_spec, has_linear_attention
from mindrlhf.weights.hf import read_hf_config

VLLM = "vllm"
_ASK_ORIGINS = """
import importlib.util, sys
del sys.path[0]
print(*(getattr(importlib.util.find_spec(name), "origin", "") for name in sys.argv[1:]), sep="\\n")
"""
# In the server's private directory: what it may import, and its temporary files.
PACKAGES_NAME, TEMPORARY_NAME = "packages", "tmp"
# vLLM 0.32's, of models without latent attention.
_CPU_LINEAR_SIZES = {64, 128}
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# For the size of a cache: batches of sequences that it holds; tokens that are planned ahead of each, and the rest of
# its last block; bytes of a number, in bfloat16 it is less.
_CACHED_BATCHES, _PLANNED_TOKENS, _NUMBER_BYTES = 4, 128, 4
_CPU_CACHE_GIB = 1.0  # at most
# Of CANN: the devices that a process sees, which it then counts from 0.
DEVICES_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
# Variables that would make the server take itself for a training rank, or load the trainer's libraries.
_DROPPED_VARIABLES = {
    "RANK", "RANK_ID", "RANK_SIZE", "RANK_TABLE_FILE", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "DEVICE_ID", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV",
    # Set by a rank for itself, which a server that is started again would take over and the first one not.
    "HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC",
    # vLLM cannot sleep with expandable segments, so a shell's options are for other programs.
    "PYTORCH_NPU_ALLOC_CONF",
}  # fmt: skip
_DROPPED_PREFIXES = ("MS_", "MINDSPORE", "OMPI_", "PMIX_", "OMP_", "KMP_", "GOMP_", "GLOG_", "VLLM_")
_DEVICE_VARIABLES = {
    "cpu": {
        # Threads that spin while they wait starve the trainer on shared cores.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM compiles sampler operators at the first request otherwise, which needs a C++ compiler and seconds.
        "TORCHDYNAMO_DISABLE": "1",
    },
    "ascend": {"VLLM_ASCEND_ENABLE_NZ": "0"},  # weights in that layout cannot be reloaded
}
# Those of the caller's environment win.
_DEFAULTS = {
    "cpu": {
        # Logits are the size of the vocabulary times the samples, and glibc would give such memory back to the system
        # after every token, and take it again page by page: a third of the time with 152k entries.
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(2 << 30),
    },
    # CANN's default is one port on an NPU and 32 of its host, for which its rank and its server would fight.
    "ascend": {"HCCL_NPU_SOCKET_PORT_RANGE": "auto", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"},
}


@dataclass(frozen=True)
class VllmOptions:
    """Options of one rollout server.

    ``load_format`` is vLLM's: "auto" reads the safetensors of ``model_dir``; "dummy" needs its config.json only, and
    weights are pushed before the first rollout. ``kv_cache_gib`` None leaves the size to ``gpu_memory_utilization``: on
    a CPU a share of the machine's memory, on an NPU of the device less ``reserved_bytes``, whatever others take there.
    ``record_routing`` has samples bring the experts of their tokens, on a CPU in a server of one process. ``env`` is
    added last to the server's environment. ``profile_dir`` is where vLLM's profiler writes; "" leaves it out.
    ``tokenizer_dir`` is where stop strings are decoded from; "" when there are none. ``engine_args`` are vLLM's, added
    last. ``engine`` is "vllm", or the
    absolute path and class of another (:func:`mindrlhf.sandbox.user_files.find_engine`).
    """

    python: str
    model_dir: str
    log_path: str
    engine: str = VLLM
    device: str = "cpu"
    dtype: str = "float32"
    load_format: str = "dummy"
    max_model_len: int = 2048
    max_num_seqs: int = 64
    seed: int = 0
    num_threads: int = 1
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = 1.0
    reserved_bytes: int = 0
    enable_sleep: bool = False
    profile_dir: str = ""
    start_timeout_s: float = 900.0
    record_routing: bool = False
    tokenizer_dir: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def check_options(options: VllmOptions) -> None:
    """Raise ``UserError`` when there is no interpreter or config.json, or the model takes fewer tokens."""
    _check_program(options.python)
    check_positions(options.model_dir, options.max_model_len)


def check_python(python: str, engine: str = VLLM, engine_args: Collection[str] = ()) -> None:
    """Raise ``UserError`` when there is no such interpreter, it lacks packages, or its vLLM has no such arguments.

    Packages are looked for and vLLM's source is read; neither is run.
    """
    _check_program(python)
    packages = ("numpy", "vllm") if engine == VLLM or engine_args else ("numpy",)
    answer = subprocess.run([python, "-c", _ASK_ORIGINS, *packages], capture_output=True, text=True)
    origins = dict(zip(packages, answer.stdout.split("\n")))
    missing = [name for name in packages if not origins.get(name)]
    if missing:
        raise UserError(
            f"the rollout interpreter is {python}, which has no {' and no '.join(missing)}: set rollout.python to that "
            "of the rollout environment"
        )
    if not engine_args:
        return
    source = (Path(origins["vllm"]).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    known = [node.target.id for node in classes["EngineArgs"].body if isinstance(node, ast.AnnAssign)]
    for name in engine_args:
        if name not in known:
            near = nearest_choice(name, known)
            hint = f"did you mean {near}?" if near else "remove it"
            raise UserError(f"'rollout.engine_args' has {name}, which EngineArgs of the vLLM there has not: {hint}")


def _check_program(python: str) -> None:
    if shutil.which(python) is None:
        raise UserError(f"rollout.python '{python}' is no executable; give the rollout environment's python")


def check_positions(model_dir: str, max_model_len: int) -> None:
    """Raise ``UserError`` when a prompt and its response, ``max_model_len`` tokens, are longer than the model takes."""
    hf_config = read_hf_config(model_dir)
    # Models that see may keep what is about text in a part of its own.
    max_positions = (hf_config.get("text_config") or hf_config).get("max_position_embeddings")
    if max_positions is not None and (type(max_positions) is not int or max_model_len > max_positions):
        raise UserError(
            f"a prompt with its response may have {max_model_len} tokens (max_model_len), and the model in {model_dir} "
            f"takes {max_positions!r} (max_position_embeddings); lower the prompt or response length: "
            "rollout.max_response_length, 'data build --max-prompt-length', or 'rewards serve --max-length'"
        )


def check_head_size(model_dir: str, device: str, engine: str = VLLM) -> None:
    """Raise ``UserError`` when vLLM's attention on a CPU cannot compute with the model's heads."""
    hf_config = read_hf_config(model_dir)
    dims = find_spec(hf_config).dims(hf_config)
    if (device, engine) == ("cpu", VLLM) and dims.latent is None and dims.head_dim not in _CPU_HEAD_SIZES:
        raise UserError(
            f"the model in {model_dir} has heads of {dims.head_dim} channels, but vLLM's attention on a CPU is for "
            f"{', '.join(map(str, _CPU_HEAD_SIZES))}: take a model with one of these, or another rollout.engine"
        )


def check_linear_attention(model_dir: str, device: str, rollout: RolloutSection) -> None:
    """Raise ``UserError`` when vLLM on a CPU cannot do with layers of linear attention what is asked."""
    hf_config = read_hf_config(model_dir)
    linear = find_spec(hf_config).dims(hf_config).linear
    if (device, rollout.engine) != ("cpu", VLLM) or linear is None:
        return
    if rollout.dtype != "float32" and not {linear.key_dim, linear.value_dim} <= _CPU_LINEAR_SIZES:
        raise UserError(
            f"the model in {model_dir} has heads of {linear.key_dim} and {linear.value_dim} channels in its linear "
            f"attention, which vLLM on a CPU computes in {rollout.dtype} for 64 and 128 only: set rollout.dtype to "
            "float32"
        )
    for key in ("speculative_config", "enable_prefix_caching"):
        if rollout.engine_args.get(key):
            raise UserError(
                f"'rollout.engine_args' has {key}, which vLLM on a CPU does not do with linear attention: remove it"
            )


def cpu_cache_gib(rollout: RolloutSection, model_dir: str, max_model_len: int) -> float:
    """Return the size of a server's KV cache on a CPU: 1 GiB, or less where less is always enough.

    All of it is allocated at the start and gone through after each update, so a small model has no use for more than
    what several times as many sequences as run at once need, which leaves room for prefixes of those that wait.
    """
    hf_config = read_hf_config(model_dir)
    dims = find_spec(hf_config).dims(hf_config)
    if dims.latent is not None or dims.linear is not None:  # whose cache vLLM may lay out in another way
        return _CPU_CACHE_GIB
    num_tokens = _CACHED_BATCHES * rollout.max_num_seqs * (max_model_len + _PLANNED_TOKENS)
    return min(_CPU_CACHE_GIB, num_tokens * dims.cached_numbers() * _NUMBER_BYTES / 2**30)


def reserved_bytes(rollout: RolloutSection, model_dir: str) -> int:
    """Return what weights and workspace take of a server's share of a device, as `mindrlhf plan` counts it."""
    hf_config = read_hf_config(model_dir)
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    width = 4 if rollout.dtype == "float32" else 2
    weights = weight_elements(spec.rules(dims), dims, rollout.tensor_parallel) * width
    return weights + workspace_bytes(dims, rollout.max_num_seqs)


def sees_images(model_dir: str) -> bool:
    return read_hf_config(model_dir).get("vision_config") is not None


def plugin_of(model_dir: str) -> str | None:
    """Return the module of the server whose ``register`` each process of vLLM has to call for the model, if any."""
    if sees_images(model_dir):
        return "vision"
    return "linear_attention" if has_linear_attention(read_hf_config(model_dir)) else None


def write_plugin(packages: Path, module: str) -> None:
    """Make vLLM call a module's ``register`` in each process that has ``packages`` on its path, those it starts too.

    Plugins are entry points of installed packages: this writes what an installed one would have.
    """
    installed = packages / "mindrlhf_vision-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mindrlhf-vision\nVersion: 0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nmindrlhf_{module} = mindrlhf.rollout.server.{module}:register\n"
    , encoding="utf-8")


def devices_of(
    rollout: RolloutSection, server: int, environment: Mapping[str, str], num_nodes: int = 1
) -> dict[str, str]:
    """Return the variable that gives a server, counted from 0 on its node, Ascend devices that no other has.

    Args:
        num_nodes: that the server lies over; of each it has as many devices.
        environment: of this process. It, or else `rollout.env`, may say which devices of the node are there for
            servers; they are all otherwise.

    Raises:
        UserError: there are too few of them.
    """
    size = rollout.tensor_parallel // num_nodes
    first = server * size
    listed = rollout.env.get(DEVICES_VARIABLE) or environment.get(DEVICES_VARIABLE)
    if not listed:
        return {DEVICES_VARIABLE: ",".join(map(str, range(first, first + size)))}
    devices = [device.strip() for device in listed.split(",")]
    if first + size > len(devices):
        raise UserError(
            f"{DEVICES_VARIABLE} is {listed}, {len(devices)} devices, but server {server} of this node needs "
            f"{size} after those before it: name more, or lower rollout.tensor_parallel or rollout.num_replicas"
        )
    return {DEVICES_VARIABLE: ",".join(devices[first : first + size])}


def server_environment(options: VllmOptions, private_dir: str) -> dict[str, str]:
    """Return the variables of the server's process; ``private_dir`` is its own and holds what it imports."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED_VARIABLES and not name.startswith(_DROPPED_PREFIXES)
    }
    own = os.path.join(private_dir, PACKAGES_NAME)
    path = filter(None, [own, options.env.get("PYTHONPATH", ""), *_packages_of_cann(options)])
    ours = {
        "TMPDIR": os.path.join(private_dir, TEMPORARY_NAME),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(options.num_threads),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if options.tensor_parallel_size == 1 else "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    joined = {"PYTHONPATH": os.pathsep.join(path)}  # that of `rollout.env` alone would hide mindrlhf
    return _DEFAULTS[options.device] | kept | ours | _DEVICE_VARIABLES[options.device] | dict(options.env) | joined


def _packages_of_cann(options: VllmOptions) -> list[str]:
    """The PYTHONPATH of CANN's set_env.sh, for a server that uses the CANN of this process (`acl` is there)."""
    homes = [os.environ.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if name not in options.env]
    roots = [os.path.realpath(home) for home in homes if home]
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [one for one in entries if any(Path(os.path.realpath(one)).is_relative_to(root) for root in roots)]
