"""Compile the training step of ranks: the child process of :mod:`mindrlhf.dryrun.compile.request`.

``main``, with DIRECTORY as its argument, reads ``requests.json`` there, writes ``report_INDEX.json`` for
each request, and ``user_error`` for what the user can mend. MindSpore's parallel state is global and can be set once,
so every request has a process; they are forked after the import, which takes seconds. ``exit_INDEX`` has the exit code
of one that failed.
"""

import contextlib
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mindrlhf.config.algorithm import CriticSection
from mindrlhf.config.memory import MemorySection
from mindrlhf.config.model import ModelSection
from mindrlhf.config.training import OptimizerSection, ParallelSection
from mindrlhf.cpu.imports import quick_imports
from mindrlhf.dryrun.compile import ascend_stubs as simulation
from mindrlhf.dryrun.compile.collectives import read_collectives
from mindrlhf.dryrun.compile.request import (
    EXIT_USER_ERROR,
    GRADIENTS,
    LOGPROBS,
    PAIR_UPDATE,
    SUPERVISED_UPDATE,
    TOWER,
    VALUE_UPDATE,
    VALUES,
    CompiledParameter,
    CompileReport,
    CompileRequest,
)
from mindrlhf.errors import UserError
from mindrlhf.images.positions import NUM_IDS
from mindrlhf.specs import find_spec, with_num_layers
from mindrlhf.specs.lora import LoraOptions
from mindrlhf.system.processes import die_with_parent

# What every request needs, imported once.
_SHARED_MODULES = (
    "mindrlhf.algorithms.losses",
    "mindrlhf.dryrun.compile.graph",
    "mindrlhf.training.engine.factory",
)
_CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def main() -> int:
    """Serve all requests of a directory; return the exit code."""
    directory = Path(sys.argv[1])
    die_with_parent()
    work = json.loads((directory / "requests.json").read_text(encoding="utf-8"))
    requests = [CompileRequest(**values) for values in work["requests"]]
    level = simulation.LEVEL_PLAN_MEMORY if requests[0].plan_memory else simulation.LEVEL_COMPILE
    try:
        simulated = simulation.activate(0, 1, level)
        from mindrlhf.models.context import import_mindformers

        with quick_imports():
            import_mindformers()
            for module in _SHARED_MODULES:
                importlib.import_module(module)
    except UserError as error:
        (directory / "user_error").write_text(str(error), encoding="utf-8")
        return EXIT_USER_ERROR
    running: dict[int, int] = {}  # index of the request by process
    failed = False
    for index, request in enumerate(requests):
        if len(running) == work["num_processes"]:
            failed |= _wait_for_one(running, directory)
        if failed:
            break
        parent, process = os.getpid(), os.fork()
        if not process:
            die_with_parent(parent)
            os._exit(_serve(request, directory, index, simulated))
        running[process] = index
    while running:
        failed |= _wait_for_one(running, directory)
    # A failed request has left a log instead of a report.
    return EXIT_USER_ERROR if (directory / "user_error").exists() else 0


def _wait_for_one(running: dict[int, int], directory: Path) -> bool:
    """Wait for a process to end, note how if it failed, and return whether it did."""
    process, status = os.wait()
    index = running.pop(process)
    if status:
        (directory / f"exit_{index}").write_text(str(os.waitstatus_to_exitcode(status)), encoding="utf-8")
    return status != 0


def _serve(request: CompileRequest, directory: Path, index: int, simulated: bool) -> int:
    log = os.open(directory / f"log_{index}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        report = compile_here(request, directory, simulated)
        temporary = directory / f"report_{index}.tmp"
        temporary.write_text(json.dumps(asdict(report)), encoding="utf-8")
        temporary.rename(directory / f"report_{index}.json")
    except UserError as error:
        (directory / "user_error").write_text(str(error), encoding="utf-8")
        return EXIT_USER_ERROR
    except BaseException:  # the process ends here: whatever it was must get into the log
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def compile_here(request: CompileRequest, directory: Path, simulated: bool) -> CompileReport:
    """Compile a request in this process, whose MindSpore is imported but not set up yet."""
    start = time.monotonic()
    parallel = ParallelSection(**request.parallel)
    stage_size = parallel.data_parallel * parallel.model_parallel * parallel.context_parallel
    world_size = stage_size * parallel.pipeline_stage
    strategy_file = Path(request.strategy_file or directory / f"strategy_{os.getpid()}.ckpt")
    simulation.set_rank(request.rank, world_size)
    start_mindspore(request.rank, world_size, parallel, strategy_file, directory / "mindformers")
    step = build_cell(request, parallel)
    inputs = example_inputs(request, parallel)
    from mindrlhf.dryrun.compile.graph import compile_graph, plan_memory, read_graph, read_shards, write_graph
    from mindrlhf.models.context import by_itself

    planned_memory_bytes, collectives = 0, None
    if request.plan_memory:
        planned_memory_bytes = plan_memory(step, inputs)
    else:
        with by_itself() if request.cell == TOWER else contextlib.nullcontext():
            message = compile_graph(step, inputs)
        if message is not None:
            collectives = read_collectives(read_graph(message), world_size)
        if request.mindir_file:
            assert message is not None, "the graph's message is larger than 2 GB: compile fewer layers"
            write_graph(message, request.mindir_file)
    return CompileReport(
        rank=request.rank,
        stage=request.rank // stage_size,
        num_layers=request.num_layers or find_spec(request.hf_config).dims(request.hf_config).num_layers,
        parameters=() if request.cell == TOWER else tuple(_parameters(step, read_shards(strategy_file))),
        collectives=collectives,
        planned_memory_bytes=planned_memory_bytes,
        seconds=time.monotonic() - start,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        simulated=simulated,
    )


def start_mindspore(rank: int, world_size: int, parallel: ParallelSection, strategy_file: Path, log_dir: Path) -> None:
    import mindspore as ms
    from mindspore.communication import init

    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.runtime import Rank, start_parallel

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    init()
    prepare_mindformers("ascend", log_dir)
    start_parallel(parallel, Rank(rank, world_size), strategy_file)


def build_cell(request: CompileRequest, parallel: ParallelSection):
    """Return the cell that the request names, made by the factory that training uses."""
    from mindrlhf.training.engine.factory import build_logprobs, build_policy, build_scores, build_update
    from mindrlhf.training.engine.sharded_cells import ParallelGradients

    hf_config = request.hf_config
    if request.num_layers:
        hf_config = with_num_layers(hf_config, request.num_layers)
    model = ModelSection(
        path="", param_dtype=request.param_dtype, compute_dtype=request.compute_dtype, recompute=request.recompute
    )
    options = OptimizerSection(type=request.optimizer, epsilon=request.epsilon)
    memory = MemorySection(**request.memory)
    rows = {"row_length": request.seq_length, "shared_prompts": request.shared_prompts, "memory": memory}
    rows["lora"] = LoraOptions(**request.lora) if request.lora else None
    rows["replays_routing"] = request.replays_routing
    rows["num_image_rows"] = _num_rows(request, parallel) // parallel.data_parallel * request.seq_length
    if find_spec(hf_config).is_scorer:
        head = build_scores(hf_config, model, parallel, **rows)
    else:
        head = build_policy(hf_config, model, parallel, temperature=1.0, **rows)
    if request.cell == TOWER:
        return head.model.visual
    if request.cell in (LOGPROBS, VALUES):
        return build_logprobs(head, parallel)
    update = build_update(_loss(request, head), options, parallel)
    return ParallelGradients(update) if request.cell == GRADIENTS else update


def _loss(request: CompileRequest, head):
    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.losses import CoefficientLoss, PolicyLoss, SupervisedLoss
    from mindrlhf.algorithms.value_loss import ValueLoss

    if request.cell == VALUE_UPDATE:
        return ValueLoss(head, CriticSection().clip_range)
    if request.cell in (SUPERVISED_UPDATE, PAIR_UPDATE):
        return (SupervisedLoss if request.cell == SUPERVISED_UPDATE else CoefficientLoss)(head)
    surrogate = policy_losses.surrogate("ppo_clip", **_CLIP)
    return PolicyLoss(head, surrogate, on_policy=False, kl_estimator="k3" if request.beta > 0 else "")


def example_inputs(request: CompileRequest, parallel: ParallelSection) -> list:
    """Inputs of the cell for all ranks, in the shapes and dtypes of training."""
    import mindspore as ms
    import numpy as np

    from mindrlhf.algorithms.losses import COEFFICIENT_INPUTS, POLICY_INPUTS
    from mindrlhf.algorithms.value_loss import VALUE_INPUTS

    dims = find_spec(request.hf_config).dims(request.hf_config)
    if request.cell == TOWER:
        number, size = request.slots
        patches = np.zeros((number, size, dims.vision.patch_channels), np.float32)
        positions, is_patch = np.zeros((number, size, 4), np.int32), np.ones((number, size), np.float32)
        return [ms.Tensor(array) for array in (patches, positions, is_patch)]
    rows = _num_rows(request, parallel)
    shape = (rows, request.seq_length)
    model_shape = (rows, 3, request.seq_length) if request.shared_prompts else shape
    if dims.vision:
        model_shape = (*shape, NUM_IDS)
    if request.replays_routing:
        model_shape = (*shape, 1 + sum(dims.experts.layers) * dims.experts.num_active)
    tokens = [ms.Tensor(np.ones(size, np.int32)) for size in (model_shape, shape, shape)]
    if request.cell in (LOGPROBS, VALUES):
        return [*tokens, ms.Tensor(np.ones(shape, np.float32))]
    inputs = {VALUE_UPDATE: VALUE_INPUTS, SUPERVISED_UPDATE: (), PAIR_UPDATE: COEFFICIENT_INPUTS}
    names = inputs.get(request.cell, POLICY_INPUTS)
    values = [ms.Tensor(np.ones(shape, np.float32)) for _ in range(1 + len(names))]
    return [*tokens, *values, ms.Tensor(np.ones((rows, 2), np.float32))]


def _num_rows(request: CompileRequest, parallel: ParallelSection) -> int:
    """Rows of a call, of all ranks."""
    return request.micro_batch_size * parallel.data_parallel * parallel.micro_batch_num


def _parameters(step, shards: dict[str, tuple[int, int]]) -> Iterable[CompiledParameter]:
    """This stage's parameters from MindSpore's record, of which the first entries are layout and shapes."""
    for name, (device_matrix, tensor_map, shard_shape, _, _, _, global_shape, *_) in step.parameter_layout_dict.items():
        if name in shards:
            layout = (tuple(entry) for entry in (global_shape, shard_shape, device_matrix, tensor_map))
            yield CompiledParameter(name, *layout, *shards[name])
