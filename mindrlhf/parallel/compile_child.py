"""Compile the training step of ranks: the child process of :mod:`mindrlhf.parallel.compile`.

``python -m mindrlhf.parallel.compile_child DIRECTORY`` reads ``requests.json`` there, writes ``report_INDEX.json`` for
each request, and ``user_error`` for what the user can mend. MindSpore's parallel state is global and can be set once,
so every request has a process; they are forked after the import, which takes seconds.
"""

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

from mindrlhf.config.sections import OptimizerSection, ParallelSection
from mindrlhf.errors import UserError
from mindrlhf.parallel import simulation
from mindrlhf.parallel.collectives import read_collectives
from mindrlhf.parallel.compile import EXIT_USER_ERROR, CompiledParameter, CompileReport, CompileRequest
from mindrlhf.parallel.layout import Layout, parameter_layouts

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
_CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def main(directory: Path) -> int:
    """Serve all requests of ``directory``; return the exit code."""
    work = json.loads((directory / "requests.json").read_text())
    requests = [CompileRequest(**values) for values in work["requests"]]
    level = simulation.LEVEL_PLAN_MEMORY if requests[0].plan_memory else simulation.LEVEL_COMPILE
    try:
        simulated = simulation.activate(0, 1, level)
        importlib.import_module("mindformers")
    except UserError as error:
        (directory / "user_error").write_text(str(error))
        return EXIT_USER_ERROR
    running, failed = 0, False
    for index, request in enumerate(requests):
        if running == work["num_processes"]:
            failed |= os.wait()[1] != 0
            running -= 1
        if failed:
            break
        if not os.fork():
            os._exit(_serve(request, directory, index, simulated))
        running += 1
    for _ in range(running):
        failed |= os.wait()[1] != 0
    # A failed request has left a log instead of a report.
    return EXIT_USER_ERROR if (directory / "user_error").exists() else 0


def _serve(request: CompileRequest, directory: Path, index: int, simulated: bool) -> int:
    log = os.open(directory / f"log_{index}", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        report = compile_here(request, directory, simulated)
        temporary = directory / f"report_{index}.tmp"
        temporary.write_text(json.dumps(asdict(report)))
        temporary.rename(directory / f"report_{index}.json")
    except UserError as error:
        (directory / "user_error").write_text(str(error))
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
    _start_mindspore(request.rank, world_size, parallel, strategy_file, directory / "mindformers")
    with _placeholders():
        step = build_update(request, parallel, world_size)
    inputs = example_inputs(request, parallel)

    from mindrlhf.parallel.compile_graph import compile_graph, plan_memory, read_shards, write_graph

    planned_memory_bytes, collectives = 0, None
    if request.plan_memory:
        planned_memory_bytes = plan_memory(step, inputs)
    else:
        graph = compile_graph(step, inputs)
        if graph is not None:
            collectives = read_collectives(graph, world_size)
        if request.mindir_file:
            assert graph is not None, "the graph's message is larger than 2 GB: compile fewer layers"
            write_graph(graph, request.mindir_file)
    return CompileReport(
        rank=request.rank,
        stage=request.rank // stage_size,
        num_layers=request.num_layers or request.hf_config["num_hidden_layers"],
        parameters=tuple(_parameters(step, read_shards(strategy_file))),
        collectives=collectives,
        planned_memory_bytes=planned_memory_bytes,
        seconds=time.monotonic() - start,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        simulated=simulated,
    )


def _start_mindspore(rank: int, world_size: int, parallel: ParallelSection, strategy_file: Path, log_dir: Path) -> None:
    import mindspore as ms
    from mindspore.communication import init

    from mindrlhf.models.context import prepare_mindformers

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("Ascend")
    init()
    prepare_mindformers("ascend", log_dir)
    options = {}
    if parallel.enable_parallel_optimizer and parallel.optimizer_weight_shard_size > 0:
        options["parallel_optimizer_config"] = {"optimizer_weight_shard_size": parallel.optimizer_weight_shard_size}
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL,
        device_num=world_size,
        global_rank=rank,
        full_batch=True,
        gradients_mean=False,
        pipeline_stages=parallel.pipeline_stage,
        enable_parallel_optimizer=parallel.enable_parallel_optimizer,
        enable_alltoall=True,
        strategy_ckpt_config={"save_file": str(strategy_file), "only_trainable_params": False},
        **options,
    )


def _placeholders():
    """Parameters without data, which would be the whole model's."""
    from mindspore.nn.utils import no_init_parameters

    return no_init_parameters()


def build_update(request: CompileRequest, parallel: ParallelSection, world_size: int):
    """Return the cell of one update; see :class:`mindrlhf.training.parallel_cells.ParallelUpdate`."""
    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import PolicyLoss
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.training.cells import make_optimizer
    from mindrlhf.training.parallel_cells import ParallelUpdate, ShardedPolicyLoss

    hf_config = dict(request.hf_config)
    if request.num_layers:
        hf_config["num_hidden_layers"] = request.num_layers
    network = build_model(
        hf_config,
        seq_length=request.seq_length,
        compute_dtype=request.compute_dtype,
        param_dtype=request.param_dtype,
        device="ascend",
        parallel_config=request.parallel,
        recompute=request.recompute,
    )

    def make_loss(policy):
        return PolicyLoss(
            policy,
            policy_losses.surrogate("ppo_clip", **_CLIP),
            on_policy=False,
            kl_estimator="k3" if request.beta > 0 else "",
        )

    policy = PolicyLogProbs(network, 1.0, "ascend")
    loss = ShardedPolicyLoss(
        policy, make_loss, parallel.data_parallel, parallel.context_parallel, parallel.pipeline_stage - 1
    )
    options = OptimizerSection(epsilon=request.epsilon)
    optimizer = make_optimizer(network.trainable_params(), options)
    layout = Layout.from_config(parallel, world_size)
    layouts = parameter_layouts(network.spec, network.dims, layout, _ELEMENT_BYTES[request.param_dtype])
    num_replicas = {one.name: one.num_replicas for one in layouts}
    return ParallelUpdate(loss, optimizer, options.max_grad_norm, parallel, num_replicas, world_size)


def example_inputs(request: CompileRequest, parallel: ParallelSection) -> list:
    """Inputs of one update of all ranks, in the shapes and dtypes of training."""
    import mindspore as ms
    import numpy as np

    from mindrlhf.algorithms.losses import POLICY_INPUTS

    num_micro_batches = parallel.micro_batch_num * parallel.micro_batch_interleave_num
    rows = request.batch_size * parallel.data_parallel * num_micro_batches
    shape = (rows, request.seq_length)
    tokens = [ms.Tensor(np.ones(shape, np.int32)) for _ in range(3)]
    values = [ms.Tensor(np.ones(shape, np.float32)) for _ in range(1 + len(POLICY_INPUTS))]
    return [*tokens, *values, ms.Tensor(np.ones((rows, 2), np.float32))]


def _parameters(step, shards: dict[str, tuple[int, int]]) -> Iterable[CompiledParameter]:
    """This stage's parameters from MindSpore's record, of which the first entries are layout and shapes."""
    for name, (device_matrix, tensor_map, slice_shape, _, _, _, global_shape, *_) in step.parameter_layout_dict.items():
        if name in shards:
            layout = (tuple(entry) for entry in (global_shape, slice_shape, device_matrix, tensor_map))
            yield CompiledParameter(name, *layout, *shards[name])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
