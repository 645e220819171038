"""Compiles layouts of a small model for Ascend and executes them on CPU ranks."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import sanity_inputs
from execution_cases import EPSILON, IS_LAST, KL_COEFFICIENT, LEARNING_RATE, NUM_ROWS, hf_weights
from graph_on_cpu.run import ENDED_PREFIX, ExecutionJob, ExecutionResult, execute
from machines import Machines

from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile.request import GRADIENTS, UPDATE, CompileRequest, compile_ranks


def compile_and_execute(
    root: Path,
    model: dict,
    all_layouts: dict[int, dict[str, dict]],
    batches: Sequence[Sequence[np.ndarray]],
    cells: tuple[str, str],
    token_inputs: tuple[str, ...],
    computed_inputs: Mapping[str, str],
    *,
    shared_prompts: bool = False,
    replays_routing: bool = False,
    images: Sequence[Sequence[np.ndarray]] = (),
    after_token: bool = False,
    lora: dict | None = None,
    optimizer: str = "adamw",
    memory: Mapping[str, int | str | tuple[str, ...]] = MappingProxyType({}),
    gradients: bool = True,
) -> dict[str, ExecutionResult]:
    """Return the result of every layout by name.

    Args:
        root: directory for graphs and logs.
        model: its config.json.
        all_layouts: by number of ranks, name -> parallel_config.
        batches: for each call the inputs of the update.
        cells: the update, and the graph of outputs without gradients.
        token_inputs: names of the token arrays that the update takes.
        computed_inputs: name of a layout -> that of them which its ranks compute under the initial weights.
        shared_prompts, replays_routing: the rows are of that kind.
        images: of each call; see :func:`graph_on_cpu.run.execute`.
        optimizer: `optimizer.type`.
        memory: keys of the section `memory`.
        gradients: a policy's calls before the last of an update go to a graph without the optimizer, as in a run.
        after_token: of scoring models; see :class:`mindrlhf.training.engine.shards.Shards`.
        lora: of adapters that are trained in place of the model; see :class:`graph_on_cpu.run.ExecutionJob`.
    """
    compiled = (*cells, GRADIENTS) if cells[0] == UPDATE and gradients else cells
    own = {"shared_prompts": shared_prompts, "lora": lora, "optimizer": optimizer, "memory": dict(memory)}
    own |= {"replays_routing": replays_routing, "seq_length": batches[0][1].shape[1]}
    requests = {
        (name, cell, rank): replace(_request(model, name, parallel, rank, cell, root), **own)
        for size, layouts in all_layouts.items()
        for name, parallel in layouts.items()
        for cell in compiled
        for rank in range(size)
    }
    compile_ranks(list(requests.values()), timeout_s=1800, num_processes=2)
    results = {}
    for size, layouts in all_layouts.items():
        jobs = []
        for name, parallel in layouts.items():
            graphs = [tuple(requests[name, cell, rank].mindir_file for rank in range(size)) for cell in compiled]
            section = ParallelSection(**parallel)
            computed = computed_inputs.get(name, "")
            parts = (token_inputs, computed, after_token, own["lora"], replays_routing)
            own_job = ExecutionJob(name, section, *graphs[:2], *parts)
            apart = bool(memory.get("swap_moments"))
            jobs.append(replace(own_job, gradient_graphs=graphs[2] if graphs[2:] else (), steps_apart=apart))
        done = execute(
            jobs,
            model,
            hf_weights(model),
            batches,
            root / f"ranks_{size}",
            learning_rate=LEARNING_RATE,
            kl_coefficient=KL_COEFFICIENT,
            is_last=IS_LAST,
            timeout_s=900,
            images=images,
        )
        results.update({result.job.name: result for result in done})
    return results


def execute_over_machines(job: ExecutionJob, model: dict, batches, directory: Path, keep: Path) -> ExecutionResult:
    """Execute a job again, its ranks in equal parts on two pretended machines.

    Args:
        directory: for graphs and logs.
        keep: the directory that has the compiled graphs.
    """

    def start(command, world_size, log_dir, environment) -> int:
        bin_dir = Path(sys.executable).parent
        exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
        script = f"""
            cd {shlex.quote(str(sanity_inputs.REPOSITORY))}
            {exports}
            export PYTHONPATH=$PWD:$PYTHONPATH
            export PATH={bin_dir}:$PATH  # msrun starts whatever `python` comes first
            {bin_dir}/msrun --worker_num={world_size} --local_worker_num={world_size // 2} \
                --master_addr=$MASTER_IP --master_port=8118 --node_rank=$NODE_RANK --join=True \
                --log_dir={log_dir}/$NODE_RANK python {shlex.join(command)} &
            # msrun's scheduler may wait for ranks of another machine that have ended.
            while kill -0 $! 2>/dev/null; do
                [ $(ls {directory} | grep -c ^{ENDED_PREFIX}) -lt {world_size} ] || {{ sleep 5; exit 0; }}
                sleep 1
            done
            wait $!
        """
        (directory / "machines").mkdir()
        machines = Machines(directory / "machines", script, keep=(directory, keep, sanity_inputs.REPOSITORY))
        try:
            codes = machines.wait(900)
            return 0 if codes == [0, 0] else 1
        finally:
            machines.clean_up()

    (result,) = execute(
        [job],
        model,
        hf_weights(model),
        batches,
        directory,
        learning_rate=LEARNING_RATE,
        kl_coefficient=KL_COEFFICIENT,
        is_last=IS_LAST,
        timeout_s=800,
        start=start,
    )
    return result


def _request(model: dict, name: str, parallel: dict, rank: int, cell: str, root: Path) -> CompileRequest:
    num_cuts = parallel["data_parallel"] * parallel.get("micro_batch_num", 1)
    return CompileRequest(
        model,
        parallel,
        rank=rank,
        micro_batch_size=NUM_ROWS // num_cuts,
        compute_dtype="float32",
        epsilon=EPSILON,
        cell=cell,
        mindir_file=str(root / f"{name}_{cell}_{rank}.mindir"),
    )
