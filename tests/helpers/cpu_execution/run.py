"""Run compiled parallel graphs on CPU ranks: the parent's side.

Every rank is a real process of ``msrun`` that executes the graph compiled for it (lowered by
:mod:`cpu_execution.lower`) on its own slices and talks to the others through real collectives. So what a
cluster would compute can be compared, number by number, with one process that knows nothing of parallelism; and what it
would publish, with the tensors themselves. The model and the batches must be small: this is the check of a layout, not
a way to train.

MindSpore is imported in the ranks (:mod:`cpu_execution.rank`), not here.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np

from mindrlhf.errors import RunFailure
from mindrlhf.launch.launch import launch
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.specs import find_spec
from mindrlhf.weights.board import TensorInfo, WeightBoard
from mindrlhf.weights.convert import hf_shapes

WEIGHTS_NAME = "weights.safetensors"
BATCHES_NAME = "batches.safetensors"
SPEC_NAME = "execution.json"
RESULT_NAME = "rank_{rank}.json"
SLICES_NAME = "rank_{rank}.safetensors"
LOGPROBS_NAME = "logprobs_{rank}.safetensors"
_MODULES = str(Path(__file__).parents[1])  # where ranks find this package
# The moments at which ranks publish to a board of their own.
PUBLICATIONS = ("before", "after")


@dataclass(frozen=True)
class ExecutionJob:
    """One layout to execute.

    Attributes:
        name: of its directory and in messages.
        layout: which rank holds which slice.
        graphs: the MindIR file of each rank's update, as compiled for Ascend.
        num_pieces: that the update cuts its rows into.
        logprob_graphs: those of the log-probabilities, or of a critic's values. They run first, under the initial
            weights, and what they return takes the place of the update's input number ``logprob_input``. Empty leaves
            the inputs as they are.
        num_logprob_pieces: that they cut their rows into.
    """

    name: str
    layout: Layout
    graphs: tuple[str, ...]
    num_pieces: int = 1
    logprob_graphs: tuple[str, ...] = ()
    num_logprob_pieces: int = 1
    logprob_input: int | None = None


@dataclass(frozen=True)
class Publication:
    """What the ranks wrote to a weight board.

    Attributes:
        tensors: the logical Hugging Face tensors, as read from the sealed board.
        written_bytes: bytes that each rank wrote. Together they are never less than the tensors' own size, the
            lower bound, since each element has to be written once.
        seconds: time that each rank spent writing.
    """

    tensors: dict[str, np.ndarray]
    written_bytes: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class ExecutionResult:
    """What one job did.

    Attributes:
        job: the job.
        losses: of each call, from the last stage.
        logprobs: of each call, float32 [rows, length] of all ranks; empty without ``logprob_graphs``.
        weights: the final parameters, whole, by MindFormers name.
        replica_difference: largest difference between ranks that hold the same slice.
        published: by the moment's name (``PUBLICATIONS``).
        lowered: nodes rewritten for the CPU on rank 0, by operator.
    """

    job: ExecutionJob
    losses: tuple[float, ...]
    logprobs: tuple[np.ndarray, ...]
    weights: dict[str, np.ndarray]
    replica_difference: float
    published: dict[str, Publication]
    lowered: dict[str, int]


def execute(
    jobs: Sequence[ExecutionJob],
    hf_config: dict,
    weights: Mapping[str, np.ndarray],
    batches: Sequence[Sequence[np.ndarray]],
    directory: str | os.PathLike,
    *,
    learning_rate: float,
    is_last: Sequence[bool] = (),
    timeout_s: float = 300.0,
) -> list[ExecutionResult]:
    """Call the update once per batch of each job; the jobs take turns in one set of ranks.

    Args:
        jobs: layouts of one world size.
        hf_config: the model's config.json.
        weights: whole initial parameters, float32, by MindFormers name.
        batches: for each call the inputs of the graph, whole, in its order. A rank gets its own rows only.
        directory: for graphs, logs and slices; made when missing.
        learning_rate: of every update.
        is_last: for each call whether it ends an update; empty means that every call is one.
        timeout_s: a rank that is not done by then ends itself, and with it the run.

    Raises:
        RunFailure: a rank failed or was too slow; its log is named.
        WeightBoardError: the ranks did not publish each element exactly once.
    """
    world_size = jobs[0].layout.world_size
    for job in jobs:
        assert len(job.graphs) == job.layout.world_size == world_size, f"{job.name}: one graph for each of its ranks"
    directory = Path(directory).absolute()
    boards = {job.name: {moment: _create_board(hf_config) for moment in PUBLICATIONS} for job in jobs}
    options = {
        "hf_config": hf_config,
        "learning_rate": learning_rate,
        "timeout_s": timeout_s,
        "is_last": list(is_last) or [True] * len(batches),
    }
    _write_inputs(directory, jobs, boards, weights, batches, options)
    command = ["-m", "cpu_execution.rank", str(directory)]
    environment = {
        "OMP_NUM_THREADS": "1",
        "MS_NODE_TIMEOUT": str(max(30, int(timeout_s))),
        "PYTHONPATH": os.pathsep.join((_MODULES, *filter(None, [os.environ.get("PYTHONPATH")]))),
    }
    code = launch(command, world_size, directory / "logs", env=environment, out=StringIO())
    if code != 0:
        raise RunFailure(f"executing {', '.join(job.name for job in jobs)} failed; logs: {directory / 'logs'}")
    return [_collect(job, hf_config, directory / job.name, boards[job.name]) for job in jobs]


def _write_inputs(
    directory: Path,
    jobs: Sequence[ExecutionJob],
    boards: Mapping[str, Mapping[str, WeightBoard]],
    weights: Mapping[str, np.ndarray],
    batches: Sequence[Sequence[np.ndarray]],
    options: dict,
) -> None:
    """Write what the ranks read: the weights, the inputs of all calls, and the jobs beside ``options``."""
    from safetensors.numpy import save_file

    for job in jobs:
        (directory / job.name).mkdir(parents=True, exist_ok=True)
    save_file(_contiguous(weights), directory / WEIGHTS_NAME)
    inputs = {f"{step}.{index}": array for step, batch in enumerate(batches) for index, array in enumerate(batch)}
    save_file(_contiguous(inputs), directory / BATCHES_NAME)
    described = [
        {
            "name": job.name,
            "layout": job.layout.to_dict(),
            "graphs": [os.path.abspath(graph) for graph in job.graphs],
            "num_pieces": job.num_pieces,
            "num_logprob_pieces": job.num_logprob_pieces,
            "logprob_input": job.logprob_input,
            "logprob_graphs": [os.path.abspath(graph) for graph in job.logprob_graphs],
            "boards": {moment: board.path for moment, board in boards[job.name].items()},
        }
        for job in jobs
    ]
    spec = options | {"num_inputs": len(batches[0]), "jobs": described}
    (directory / SPEC_NAME).write_text(json.dumps(spec))


def _create_board(hf_config: dict) -> WeightBoard:
    spec = find_spec(hf_config)
    shapes = hf_shapes(spec, spec.dims(hf_config))
    return WeightBoard.create(TensorInfo(name, "float32", tuple(shape)) for name, shape in shapes.items())


def _collect(job: ExecutionJob, hf_config: dict, directory: Path, boards: Mapping[str, WeightBoard]) -> ExecutionResult:
    ranks = range(job.layout.world_size)
    reports = [json.loads((directory / RESULT_NAME.format(rank=rank)).read_text()) for rank in ranks]
    published = {
        moment: _read_board(board, [report["published"][moment] for report in reports])
        for moment, board in boards.items()
    }
    weights, difference = _assemble(job, hf_config, directory)
    losses = tuple(reports[-1]["losses"])  # the last rank is in the last stage
    logprobs = _assemble_logprobs(job, directory, len(losses)) if job.logprob_graphs else ()
    return ExecutionResult(job, losses, logprobs, weights, difference, published, reports[0]["lowered"])


def _read_board(board: WeightBoard, parts: Sequence[dict]) -> Publication:
    """Seal a board that the ranks have written, and copy it."""
    with board:
        board.begin(0)
        board.seal([part["contribution"] for part in parts])
        board.verify(0)
        tensors = {name: array.copy() for name, _, array in board.tensors(0)}
    written = tuple(part["written_bytes"] for part in parts)
    return Publication(tensors, written, tuple(part["seconds"] for part in parts))


def _assemble(job: ExecutionJob, hf_config: dict, directory: Path) -> tuple[dict[str, np.ndarray], float]:
    """Put the ranks' final slices together; also the largest difference between copies of a slice."""
    from safetensors.numpy import load_file

    spec = find_spec(hf_config)
    slices = [load_file(directory / SLICES_NAME.format(rank=rank)) for rank in range(job.layout.world_size)]
    weights, difference = {}, 0.0
    for layout in parameter_layouts(spec, spec.dims(hf_config), job.layout):
        whole = np.full(layout.shape, np.nan, np.float32)
        for ranks in layout.replicas().values():
            first = slices[ranks[0]][layout.name]
            whole[layout.slice_of(ranks[0])] = first
            for rank in ranks[1:]:
                difference = max(difference, float(np.abs(slices[rank][layout.name] - first).max()))
        weights[layout.name] = whole
    return weights, difference


def _assemble_logprobs(job: ExecutionJob, directory: Path, num_calls: int) -> tuple[np.ndarray, ...]:
    """Put the rows of all copies together, each from its last rank, which is in the last stage."""
    from safetensors.numpy import load_file

    layout = job.layout
    last_of = {layout.coordinates(rank).data: rank for rank in range(layout.world_size)}
    own = [load_file(directory / LOGPROBS_NAME.format(rank=last_of[copy])) for copy in range(layout.data_parallel)]
    return tuple(np.concatenate([arrays[str(call)] for arrays in own]) for call in range(num_calls))


def _contiguous(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}
