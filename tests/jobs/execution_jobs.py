"""Compiles layouts of a small model for Ascend and executes them on CPU ranks."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from cpu_execution.run import ExecutionJob, ExecutionResult, execute
from execution_cases import EPSILON, IS_LAST, LEARNING_RATE, NUM_ROWS, ROW_LENGTH, mf_weights

from mindrlhf.config.sections import ParallelSection
from mindrlhf.dryrun.compile.request import CompileRequest, compile_ranks
from mindrlhf.layout.layout import Layout
from mindrlhf.layout.rows import num_logprob_pieces, num_update_pieces


def compile_and_execute(
    root: Path,
    model: dict,
    all_layouts: dict[int, dict[str, dict]],
    batches: Sequence[Sequence[np.ndarray]],
    cells: tuple[str, str],
    with_outputs: Collection[str],
    output_input: int,
) -> dict[str, ExecutionResult]:
    """Return the result of every layout by name.

    Args:
        root: directory for graphs and logs.
        model: its config.json.
        all_layouts: by number of ranks, name -> parallel_config.
        batches: for each call the inputs of the update.
        cells: the update, and the graph of outputs without gradients.
        with_outputs: layouts whose ranks also compute the outputs under the initial weights,
        output_input: in place of this input of the update.
    """
    requests = {
        (name, cell, rank): _request(model, name, parallel, rank, cell, root)
        for size, layouts in all_layouts.items()
        for name, parallel in layouts.items()
        for cell in cells
        if cell == cells[0] or name in with_outputs
        for rank in range(size)
    }
    compile_ranks(list(requests.values()), timeout_s=1800, num_processes=2)
    results = {}
    for size, layouts in all_layouts.items():
        jobs = []
        for name, parallel in layouts.items():
            graphs, output_graphs = (
                tuple(requests[name, cell, rank].mindir_file for rank in range(size) if (name, cell, rank) in requests)
                for cell in cells
            )
            section = ParallelSection(**parallel)
            pieces = num_update_pieces(section), num_logprob_pieces(section)
            layout = Layout.from_config(section, size)
            jobs.append(ExecutionJob(name, layout, graphs, pieces[0], output_graphs, pieces[1], output_input))
        inputs = (jobs, model, mf_weights(model), batches, root / f"ranks_{size}")
        done = execute(*inputs, learning_rate=LEARNING_RATE, is_last=IS_LAST, timeout_s=400)
        results.update({result.job.name: result for result in done})
    return results


def _request(model: dict, name: str, parallel: dict, rank: int, cell: str, root: Path) -> CompileRequest:
    num_cuts = parallel["data_parallel"] * parallel.get("micro_batch_num", 1)
    return CompileRequest(
        model,
        parallel,
        rank=rank,
        seq_length=ROW_LENGTH,
        batch_size=NUM_ROWS // num_cuts,
        compute_dtype="float32",
        epsilon=EPSILON,
        cell=cell,
        mindir_file=str(root / f"{name}_{cell}_{rank}.mindir"),
    )
