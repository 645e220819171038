"""Compile the training step of one rank of a layout, on any machine: the parent's side.

MindSpore is only imported in a child process (:mod:`mindrlhf.dryrun.compile.child`), which compiles for Ascend:
with CANN where it is installed, else in simulation (:mod:`mindrlhf.dryrun.compile.ascend_stubs`).
"""

import json
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mindrlhf.config.schema import GrpoConfig
from mindrlhf.config.training import SHARED_PROMPTS
from mindrlhf.errors import RunFailure, UserError
from mindrlhf.layout.batch import BatchPlan
from mindrlhf.specs import find_spec
from mindrlhf.system.child import Child, module_words
from mindrlhf.system.files import last_lines
from mindrlhf.system.progress import watched

# Kinds of collective operators, as MindSpore names them.
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AlltoAllV", "Send", "Receive", "Broadcast")

# The graphs of training: a policy's update, its gradients without the optimiser, and the log-probabilities of the old
# policy or the reference; a critic's update, and its values, whose model is of a scoring architecture; supervised
# fine-tuning; learning from pairs, of a policy or, with a scoring architecture, of a reward model.
UPDATE, GRADIENTS, LOGPROBS, VALUE_UPDATE, VALUES = "update", "gradients", "logprobs", "value_update", "values"
SUPERVISED_UPDATE, PAIR_UPDATE = "supervised_update", "pair_update"
# The frozen vision tower, which ranks of the first stage run by themselves. It takes slots of images.
TOWER = "tower"


@dataclass(frozen=True)
class CompileRequest:
    """One rank of one layout of one training step.

    Attributes:
        hf_config: the model's config.json.
        parallel: `parallel_config` keys with `data_parallel` filled in.
        rank: global rank to compile; see :class:`mindrlhf.layout.layout.Layout` for the order of ranks.
        seq_length: tokens per row.
        micro_batch_size: rows per micro-batch and data-parallel rank.
        num_layers: decoder layers to compile, spread over the stages; 0 means all of the model's.
        param_dtype, compute_dtype: "float32" or "bfloat16".
        recompute: recompute activations in the backward pass.
        memory: keys of the section `memory` that are not at their defaults.
        plan_memory: run MindSpore's memory planner too (simulation level 1); the report then has no collectives.
        beta: weight of the KL term; above 0 the reference log-probabilities enter the loss.
        epsilon: AdamW's, a constant of the graph.
        optimizer: `optimizer.type`.
        shared_prompts: rows whose samples share their prompt: input_ids are int32 [rows, 3, length], see CausalLM.
        replays_routing: input_ids have experts, see there.
        slots: of ``TOWER``: images, and patches of each.
        lora: fields of :class:`mindrlhf.specs.lora.LoraOptions`, of the adapters that are trained; None trains all.
        cell: one of the graphs above. The inputs of ``LOGPROBS`` and ``VALUES`` are the first four of the updates,
            those of ``TOWER`` are of :class:`mindrlhf.models.vision.tower.VisionTower`.
        strategy_file: where to write MindSpore's strategy file, an absolute path; empty writes none.
        mindir_file: absolute path for the rank's sharded graph (`.mindir`); empty exports none. It takes
            the batch of all ranks: int32 input_ids, segment_ids, labels, then float32 mask and the arrays of
            `mindrlhf.algorithms.losses.POLICY_INPUTS` (of a critic: `mindrlhf.algorithms.value_loss.VALUE_INPUTS`; of
            pairs: `COEFFICIENT_INPUTS`; supervised: none), all [rows, length], then float32 [rows, 2] (kl_coefficient,
            num_tokens); rows =
            micro_batch_size * data_parallel * micro_batch_num.
    """

    hf_config: dict
    parallel: dict[str, int | bool]
    rank: int = 0
    seq_length: int = 4096
    micro_batch_size: int = 1
    num_layers: int = 0
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    recompute: bool = False
    memory: dict[str, int | str | tuple[str, ...]] = field(default_factory=dict)
    plan_memory: bool = False
    beta: float = 0.04
    epsilon: float = 1e-8
    optimizer: str = "adamw"
    shared_prompts: bool = False
    replays_routing: bool = False
    slots: tuple[int, int] = (4, 1024)
    lora: dict[str, object] | None = None
    cell: str = UPDATE
    strategy_file: str = ""
    mindir_file: str = ""


@dataclass(frozen=True)
class CompiledParameter:
    """Layout of a parameter on one rank, as MindSpore's compiler decided.

    Attributes:
        name: MindFormers name; state and gradients have prefixes (`adam_m.`, `adam_v.`, `grad.`, `accu_grads.`).
        global_shape: shape of the whole tensor.
        shard_shape: shape on this rank, before optimiser sharding.
        device_matrix, tensor_map: MindSpore's layout; see :mod:`mindrlhf.layout.layout`.
        optimizer_shard_step, optimizer_shard_size: of the strategy file; 0 and 0 without optimiser sharding.
    """

    name: str
    global_shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    device_matrix: tuple[int, ...]
    tensor_map: tuple[int, ...]
    optimizer_shard_step: int = 0
    optimizer_shard_size: int = 0


@dataclass(frozen=True)
class Collective:
    """Collectives of the compiled graph that are alike.

    Attributes:
        kind: one of ``COLLECTIVES``.
        group_ranks: the ranks of the group; of Send and Receive, all stages of the pipeline.
        count: operators in the graph (of one execution of the step).
        input_bytes: bytes of the input tensor of one; 0 where routing decides it at run time.
        output_bytes: bytes of the output tensor of one.
    """

    kind: str
    group_ranks: tuple[int, ...]
    count: int
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class CompileReport:
    """Result of one compilation.

    Attributes:
        rank: the rank compiled.
        stage: its pipeline stage.
        num_layers: layers compiled, over all stages.
        parameters: this stage's parameters, optimiser state and accumulators.
        collectives: collectives of the compiled graph; None when they were not read (``plan_memory``, or a graph
            of over 2 GB).
        seconds: wall time of the compilation.
        peak_rss_bytes: peak memory of the compiling process.
        planned_memory_bytes: device memory MindSpore planned for the step, a lower bound (workspaces of CANN
            kernels and buffers of HCCL are not known in simulation); 0 unless asked for.
        simulated: whether CANN was simulated.
    """

    rank: int
    stage: int
    num_layers: int
    parameters: tuple[CompiledParameter, ...]
    collectives: tuple[Collective, ...] | None = None
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    planned_memory_bytes: int = 0
    simulated: bool = True


# Exit codes of the child: it says in one line on stderr what the user can mend, or leaves its log.
EXIT_USER_ERROR = 2
_LOG_LINES = 4
_ERRORS = ("RuntimeError", "ValueError", "TypeError", "Exception")
_KILLED = "it was killed, as when the machine's memory is used up: free some, or compile fewer layers"


def compiled_config(hf_config: dict) -> dict:
    """Return the config.json of what is compiled of a model: of one whose layers take image rows its decoder alone.

    Such rows (DeepStack) may go to more layers than are compiled. The decoder lies on the ranks alike.
    """
    spec = find_spec(hf_config)
    vision = spec.dims(hf_config).vision
    return spec.decoder_config(hf_config) if vision is not None and vision.deepstack_blocks else hf_config


def update_request(
    config: GrpoConfig, hf_config: dict, batch: BatchPlan, parallel: dict[str, Any], rank: int, num_layers: int = 0
) -> CompileRequest:
    """Return the update of a run, as ``rank`` compiles it; ``parallel`` has `data_parallel` filled in."""
    return CompileRequest(
        hf_config=hf_config,
        parallel=parallel,
        rank=rank,
        seq_length=batch.row_length,
        micro_batch_size=batch.rows_per_pipeline_micro_batch,
        num_layers=num_layers,
        param_dtype=config.model.param_dtype,
        compute_dtype=config.model.compute_dtype,
        recompute=config.model.recompute,
        memory=asdict(config.memory),
        beta=config.algorithm.beta,
        optimizer=config.optimizer.type,
        shared_prompts=config.training.packing == SHARED_PROMPTS,
        replays_routing=config.training.replay_routing,
        lora=config.lora.options and asdict(config.lora.options),
    )


def compile_ranks(
    requests: Sequence[CompileRequest], *, timeout_s: float = 1800.0, num_processes: int = 1
) -> list[CompileReport]:
    """Compile each request in a process of its own; MindSpore is imported once for all.

    Args:
        requests: what to compile; all with the same `plan_memory`.
        timeout_s: time limit for all of them, in seconds.
        num_processes: how many compile at a time; each takes the memory of a whole compilation.

    Raises:
        UserError: this machine can neither compile nor simulate, or MindFormers refuses the layout.
        RunFailure: a compilation failed; the message has the end of its log.
    """
    assert len({request.plan_memory for request in requests}) == 1, "plan_memory must be the same for all requests"
    with tempfile.TemporaryDirectory(prefix="mindrlhf-compile-") as name:
        directory = Path(name)
        work = {"num_processes": num_processes, "requests": [asdict(request) for request in requests]}
        (directory / "requests.json").write_text(json.dumps(work), encoding="utf-8")
        with watched(lambda: len(list(directory.glob("report_*.json"))), len(requests), "graphs"):
            _run_child(directory, timeout_s)
        return [_read_report(directory, index, request) for index, request in enumerate(requests)]


def _run_child(directory: Path, timeout_s: float) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MS_", "RANK_"))}
    environment.setdefault("OMP_NUM_THREADS", "1")
    # Parameters are only placeholders; nothing of this process reaches a device.
    environment.update(GLOG_v="3", LOG_MF_PATH=str(directory / "mindformers"), PYTHONUNBUFFERED="1")
    child = Child(
        module_words("mindrlhf.dryrun.compile.child", directory),
        output=directory / "log",
        environment=environment,
        directory=directory,
    )
    try:
        code = child.wait(timeout_s)
    finally:
        child.kill()
    if code is None:
        raise RunFailure(f"compiling took longer than {timeout_s:.0f} s; compile fewer layers")
    if code == EXIT_USER_ERROR:
        raise UserError((directory / "user_error").read_text(encoding="utf-8"))
    if code == -signal.SIGKILL:
        raise RunFailure(f"compiling failed: {_KILLED}")
    if code:
        raise RunFailure(f"compiling failed with exit code {code}: {_log_tail(directory / 'log')}")


def _read_report(directory: Path, index: int, request: CompileRequest) -> CompileReport:
    path = directory / f"report_{index}.json"
    if not path.exists():
        exit_path = directory / f"exit_{index}"
        reason = _log_tail(directory / f"log_{index}")
        if exit_path.exists() and exit_path.read_text(encoding="utf-8") == str(-signal.SIGKILL):
            reason = _KILLED
        raise RunFailure(f"compiling rank {request.rank} of {_describe(request)} failed: {reason}")
    values = json.loads(path.read_text(encoding="utf-8"))
    values["parameters"] = tuple(
        CompiledParameter(**{key: tuple(value) if isinstance(value, list) else value for key, value in item.items()})
        for item in values["parameters"]
    )
    if values["collectives"] is not None:
        values["collectives"] = tuple(
            Collective(**{**item, "group_ranks": tuple(item["group_ranks"])}) for item in values["collectives"]
        )
    return CompileReport(**values)


def _describe(request: CompileRequest) -> str:
    return ", ".join(f"{key}={value}" for key, value in request.parallel.items() if value not in (1, False, -1))


def _log_tail(path: Path) -> str:
    """Last lines of a log with an error, joined."""
    if not path.exists():
        return "it left no log"
    errors = last_lines(path, _LOG_LINES, lambda line: line.lstrip().startswith(_ERRORS))
    return " | ".join(line.strip() for line in errors or last_lines(path, _LOG_LINES))
