"""Compiles graphs with MindSpore's Ascend back end in simulation and reads the kernels that it would launch.

``python -m kernel_counts.compile DIRECTORY`` is the process of one graph.
"""

import atexit
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kernel_counts.graph_text import Kernel, dump_kernels, read_kernels
from mindrlhf.config.training import ParallelSection
from mindrlhf.dryrun.compile import ascend_stubs
from mindrlhf.dryrun.compile.child import build_cell, example_inputs, start_mindspore
from mindrlhf.dryrun.compile.request import CompileRequest

_IMPORT_PATH = [str(parent) for parent in Path(__file__).resolve().parents[1:3]]  # this package's and the product's


@dataclass(frozen=True)
class KernelReport:
    """Kernels of one graph.

    Attributes:
        kernels: in the order of their launch. Where shapes depend on data, as those of experts may, there are neither
            an order nor a plan of memory.
    """

    kernels: tuple[Kernel, ...]


def compile_kernels(requests: Sequence[CompileRequest]) -> list[KernelReport]:
    """Compile each request in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MS_", "RANK_"))}
    environment |= {"PYTHONPATH": os.pathsep.join(_IMPORT_PATH), "GLOG_v": "3", "OMP_NUM_THREADS": "1"}
    reports = []
    for request in requests:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            (directory / "request.json").write_text(json.dumps(asdict(request)))
            command = [sys.executable, "-m", "kernel_counts.compile", name]
            ended = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, timeout=1800)
            assert ended.returncode == 0, ended.stderr[-4000:]
            reports.append(pickle.loads((directory / "report").read_bytes()))
    return reports


def _compile(directory: Path) -> KernelReport:
    request = CompileRequest(**json.loads((directory / "request.json").read_text()))
    parallel = ParallelSection(**request.parallel)
    stage_size = parallel.data_parallel * parallel.model_parallel * parallel.context_parallel
    world_size = stage_size * parallel.pipeline_stage
    ascend_stubs.activate(0, 1, ascend_stubs.LEVEL_PLAN_MEMORY)
    from mindrlhf.models.context import import_mindformers

    import_mindformers()
    ascend_stubs.set_rank(request.rank, world_size)
    dump_kernels(directory / "kernels")
    start_mindspore(request.rank, world_size, parallel, directory / "strategy.ckpt", directory / "mindformers")
    step = build_cell(request, parallel)
    # MindFormers takes every simulation for a dry run, and would give all experts as many tokens.
    for _, cell in step.cells_and_names():
        if hasattr(cell, "token_dispatcher"):
            cell.token_dispatcher.is_dryrun = False
    from mindrlhf.dryrun.compile.graph import plan_memory

    try:
        plan_memory(step, example_inputs(request, parallel))
    except RuntimeError as error:
        # All is compiled, but a plan of memory needs shapes, which experts know when they run.
        if "can not support dynamic shape" not in str(error):
            raise
    atexit._run_exitfuncs()  # MindSpore writes the order of launches as it ends, and nothing else is left to do
    return KernelReport(read_kernels(directory / "kernels", world_size))


if __name__ == "__main__":
    work_dir = Path(sys.argv[1])
    from kernel_counts import compile as this

    report = this._compile(work_dir)
    (work_dir / "report").write_bytes(pickle.dumps(report))
    sys.stdout.flush()
    os._exit(0)
