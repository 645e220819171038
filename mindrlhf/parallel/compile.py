"""Compile the training step of one rank of a layout, on any machine: the parent's side.

MindSpore is only imported in a child process (:mod:`mindrlhf.parallel.compile_child`), which compiles for Ascend:
with CANN where it is installed, else in simulation (:mod:`mindrlhf.parallel.simulation`).
"""

from dataclasses import dataclass, field

# Kinds of collective operators, as MindSpore names them.
COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AllToAllv", "Send", "Receive", "Broadcast")


@dataclass(frozen=True)
class CompileRequest:
    """One rank of one layout of one training step.

    Attributes:
        hf_config: the model's config.json.
        parallel: `parallel_config` keys with `data_parallel` filled in.
        rank: global rank to compile; see :class:`mindrlhf.parallel.layout.Layout` for the order of ranks.
        seq_length: tokens per row.
        batch_size: rows per micro-batch and data-parallel rank.
        num_layers: decoder layers to compile, spread over the stages; 0 means all of the model's.
        param_dtype, compute_dtype: "float32" or "bfloat16".
        recompute: recompute activations in the backward pass.
        portable: use operators that have CPU kernels too (plain attention and norms, float32), so that the exported
            graph can be executed on CPU ranks; otherwise Ascend's fused ones.
        plan_memory: also run MindSpore's memory planner (simulation level 1).
        beta: weight of the KL term; above 0 the reference log-probabilities enter the loss.
        strategy_file: where to write MindSpore's strategy file; empty writes none.
        mindir_file: where to export the rank's sliced graph (`.mindir`); empty exports none.
    """

    hf_config: dict
    parallel: dict[str, int | bool]
    rank: int = 0
    seq_length: int = 4096
    batch_size: int = 1
    num_layers: int = 0
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    recompute: bool = False
    portable: bool = False
    plan_memory: bool = False
    beta: float = 0.04
    strategy_file: str = ""
    mindir_file: str = ""


@dataclass(frozen=True)
class CompiledParameter:
    """How one rank holds a parameter, as MindSpore's compiler decided.

    Attributes:
        name: MindFormers name; optimiser state and accumulators have prefixes (`adam_m.`, `adam_v.`, `grad.`).
        global_shape: shape of the whole tensor.
        slice_shape: shape on this rank, optimiser sharding included.
        device_matrix, tensor_map: MindSpore's layout; see :mod:`mindrlhf.parallel.layout`.
        optimizer_shard_step, optimizer_shard_size: of the strategy file; 0 and 0 without optimiser sharding.
    """

    name: str
    global_shape: tuple[int, ...]
    slice_shape: tuple[int, ...]
    device_matrix: tuple[int, ...]
    tensor_map: tuple[int, ...]
    optimizer_shard_step: int = 0
    optimizer_shard_size: int = 0


@dataclass(frozen=True)
class Collective:
    """Collectives of the compiled graph that are alike.

    Attributes:
        kind: one of ``COLLECTIVES``.
        group_ranks: the ranks of the group; of Send and Receive, the two ends.
        count: operators in the graph (of one execution of the step).
        input_bytes: bytes of the input tensor of one.
        output_bytes: bytes of the output tensor of one.
    """

    kind: str
    group_ranks: tuple[int, ...]
    count: int
    input_bytes: int
    output_bytes: int


@dataclass(frozen=True)
class CompileReport:
    """What one compilation found.

    Attributes:
        rank: the rank compiled.
        stage: its pipeline stage.
        num_layers: layers compiled, over all stages.
        parameters: this stage's parameters, optimiser state and accumulators.
        collectives: collectives of the compiled graph.
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
    collectives: tuple[Collective, ...] = field(default=())
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    planned_memory_bytes: int = 0
    simulated: bool = True


def compile_ranks(requests: list[CompileRequest], *, timeout_s: float = 1800.0) -> list[CompileReport]:
    """Compile each request in a process of its own, one after the other; MindSpore is imported once for all.

    Raises:
        UserError: this machine can neither compile nor simulate.
        RunFailure: a compilation failed; the message ends with the log's path.
    """
    raise NotImplementedError


def compile_rank(request: CompileRequest, *, timeout_s: float = 1800.0) -> CompileReport:
    """Compile one request; see :func:`compile_ranks`."""
    return compile_ranks([request], timeout_s=timeout_s)[0]
