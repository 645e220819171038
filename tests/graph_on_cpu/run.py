"""Run compiled parallel graphs on CPU ranks: the parent's side.

Every rank is a real process of ``msrun`` that executes the graphs compiled for it, lowered by
:mod:`graph_on_cpu.lower`, on its own shard and talks to the others through real collectives. What puts
batches into the graphs, publishes, saves, restores and exports is the product's own worker, team and policy
(:mod:`graph_on_cpu.rank`). So what a cluster would compute can be compared, number by number, with one
process that knows nothing of parallelism. The model and the batches must be small: this is the check of a layout, not a
way to train.

MindSpore is imported in the ranks, not here.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from mindrlhf.config.training import ParallelSection
from mindrlhf.errors import RunFailure
from mindrlhf.launch.launch import launch
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.specs import find_spec
from mindrlhf.specs.lora import AdaptedRules, LoraOptions
from mindrlhf.weights.convert import export_hf
from mindrlhf.weights.sharded import rank_file

_IMPORT_PATH = [str(parent) for parent in Path(__file__).resolve().parents[1:3]]  # this package's and the product's
MODEL_NAME = "model"
BATCHES_NAME = "batches.safetensors"
SPEC_NAME = "execution.json"
ENDED_PREFIX = "ended_"  # of the files by which ranks say that all is written
RESULT_NAME = "rank_{rank}.json"
UPDATES_NAME = "updates.json"
OUTPUTS_NAME = "outputs.safetensors"
PUBLISHED_NAME = "published_{moment}.safetensors"
SAVED_NAME, EXPORT_NAME = "saved", "exported"
# The moments at which ranks publish: at the start, after the last update, and after the updates that follow the first
# were made once more from a checkpoint.
PUBLICATIONS = ("before", "after", "resumed")
SEED = 3  # of new adapters


@dataclass(frozen=True)
class ExecutionJob:
    """One layout to execute.

    Attributes:
        name: of its directory and in messages.
        parallel: the layout, with `data_parallel` filled in.
        graphs: the MindIR file of each rank's update, as compiled for Ascend.
        output_graphs: those of the log-probabilities, or of a critic's values.
        token_inputs: names of the token arrays that the update takes, in order.
        computed_input: that of them which the output graphs compute under the initial weights, "old_logprobs" or
            "values"; empty when all are given.
        after_token: see :class:`mindrlhf.training.engine.shards.Shards`.
        lora: fields of :class:`mindrlhf.specs.lora.LoraOptions`, of adapters that are trained in place of the model;
            they begin with those of :data:`SEED`.
        replays_routing: the rows have experts.
        between_devices: see :func:`mindrlhf.weights.publish.publisher.open_weight_buffers`.
        gradient_graphs: those of the gradients alone, for the calls of an update before its last one; none: all go to
            that of the update.
        steps_apart: see :class:`mindrlhf.training.engine.sharded_updates.UpdateGraph`.
    """

    name: str
    parallel: ParallelSection
    graphs: tuple[str, ...]
    output_graphs: tuple[str, ...]
    token_inputs: tuple[str, ...]
    computed_input: str = ""
    after_token: bool = False
    lora: dict | None = None
    replays_routing: bool = False
    between_devices: bool = False
    gradient_graphs: tuple[str, ...] = ()
    steps_apart: bool = False

    @property
    def layout(self) -> Layout:
        """Which rank holds which shard."""
        return Layout.from_config(self.parallel, len(self.graphs))


@dataclass(frozen=True)
class ExecutionResult:
    """What one job did.

    Attributes:
        job: the job.
        losses: of each call, from the last stage.
        resumed_losses: of the calls after the first update, made once more from a checkpoint.
        statistics: of each update, over all ranks.
        grad_norms: of each update, before clipping.
        outputs: by name, of each call, float32 [rows, length] of all ranks: "first", log-probabilities (or values)
            that the step began with, or each update, where none were asked for; "updates", those that each update of
            a policy returned; "reference", those of the reference model at the end; "synchronised", those of it as a
            copy of the policy.
        weights: the final parameters, whole, by MindFormers name, as saved; of a model with adapters, theirs.
        replica_difference: largest difference between ranks that hold the same shard.
        published: the logical Hugging Face tensors by the moment's name (``PUBLICATIONS``).
        written_bytes: bytes that each rank wrote to the buffer for a version. Together they are never less than the
            tensors' own size, the lower bound, since each element has to be written once.
        exported: the Hugging Face directory that rank 0 wrote.
        machines: the machine of each rank.
        buffers: a digest of all that lies in the buffer of each rank's node at the end.
        lowered: nodes rewritten for the CPU on rank 0, by operator.
    """

    job: ExecutionJob
    losses: tuple[float, ...]
    resumed_losses: tuple[float, ...]
    statistics: tuple[np.ndarray, ...]
    grad_norms: tuple[float, ...]
    outputs: dict[str, tuple[np.ndarray, ...]]
    weights: dict[str, np.ndarray]
    replica_difference: float
    published: dict[str, dict[str, np.ndarray]]
    written_bytes: tuple[int, ...]
    exported: Path
    machines: tuple[str, ...]
    buffers: tuple[str, ...]
    lowered: dict[str, int]


def execute(
    jobs: Sequence[ExecutionJob],
    hf_config: dict,
    tensors: Mapping[str, np.ndarray],
    batches: Sequence[Sequence[np.ndarray]],
    directory: str | os.PathLike,
    *,
    learning_rate: float,
    kl_coefficient: float,
    is_last: Sequence[bool],
    timeout_s: float = 300.0,
    images: Sequence[Sequence[np.ndarray]] = (),
    start: Callable[[Sequence[str], int, Path, Mapping[str, str]], int] | None = None,
) -> list[ExecutionResult]:
    """Train one step of each job, an update for each call that is a last one; the jobs take turns in one set of ranks.

    Args:
        jobs: layouts of one world size.
        hf_config: the model's config.json.
        tensors: initial weights, float32, by Hugging Face name.
        batches: for each call the inputs of the graph of an update, whole, in its order. A rank gets its own rows only.
        directory: for graphs, logs and shards; made when missing.
        learning_rate: of every update.
        kl_coefficient: of every update.
        is_last: for each call whether it ends an update.
        images: for each call those that its rows show, in the order in which they count their rows.
        timeout_s: a rank that is not done by then ends itself, and with it the run.
        start: runs the ranks from their command, number, directory of logs and environment, and returns the exit code;
            None starts them on this machine.

    Raises:
        RunFailure: a rank failed or was too slow; its log is named.
    """
    world_size = jobs[0].layout.world_size
    directory = Path(directory).absolute()
    for job in jobs:
        assert len(job.graphs) == len(job.output_graphs) == world_size, f"{job.name}: graphs for each of its ranks"
        (directory / job.name).mkdir(parents=True)
    export_hf(iter(tensors.items()), hf_config, directory / MODEL_NAME)
    _write_inputs(batches, images, directory / BATCHES_NAME)
    spec = {
        "hf_config": hf_config,
        "learning_rate": learning_rate,
        "kl_coefficient": kl_coefficient,
        "is_last": list(is_last),
        "timeout_s": timeout_s,
        "jobs": [asdict(job) | {"model_dir": str(directory / MODEL_NAME)} for job in jobs],
    }
    (directory / SPEC_NAME).write_text(json.dumps(spec))
    environment = {"OMP_NUM_THREADS": "1", "MS_NODE_TIMEOUT": str(max(30, int(timeout_s)))}
    path = [*_IMPORT_PATH, os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = ["-m", "graph_on_cpu", str(directory)]
    code = (start or _start_here)(command, world_size, directory / "logs", environment)
    if code != 0:
        raise RunFailure(f"executing {', '.join(job.name for job in jobs)} failed; logs: {directory / 'logs'}")
    return [_collect(job, hf_config, directory / job.name, len(batches)) for job in jobs]


def _write_inputs(batches: Sequence[Sequence[np.ndarray]], images: Sequence[Sequence[np.ndarray]], path: Path) -> None:
    inputs = {f"{call}.{index}": array for call, batch in enumerate(batches) for index, array in enumerate(batch)}
    for call, shown in enumerate(images):
        inputs |= {f"{call}.image.{number:04}": pixels for number, pixels in enumerate(shown)}
    save_file({name: np.ascontiguousarray(array) for name, array in inputs.items()}, path)


def _start_here(command: Sequence[str], world_size: int, log_dir: Path, environment: Mapping[str, str]) -> int:
    return launch(command, world_size, log_dir, env=environment, out=sys.stdout)


def _collect(job: ExecutionJob, hf_config: dict, directory: Path, num_calls: int) -> ExecutionResult:
    ranks = range(job.layout.world_size)
    reports = [json.loads((directory / RESULT_NAME.format(rank=rank)).read_text()) for rank in ranks]
    # A critic's graph also stands for the actor's, which is warmed up too. The last rank is in the last stage.
    num_warm_up_calls = 2 if job.computed_input == "values" or job.gradient_graphs and not job.steps_apart else 1
    losses = reports[-1]["losses"][num_warm_up_calls:]
    updates = json.loads((directory / UPDATES_NAME).read_text())
    arrays = load_file(directory / OUTPUTS_NAME)
    kinds = {name.partition(".")[0] for name in arrays}
    weights, difference = _assemble(job, hf_config, directory / SAVED_NAME / MODEL_NAME)
    return ExecutionResult(
        job=job,
        losses=tuple(losses[:num_calls]),
        resumed_losses=tuple(losses[num_calls:]),
        statistics=tuple(np.array(update["statistics"]) for update in updates),
        grad_norms=tuple(update["grad_norm"] for update in updates),
        outputs={kind: tuple(arrays[f"{kind}.{call}"] for call in range(num_calls)) for kind in kinds},
        weights=weights,
        replica_difference=difference,
        published={moment: load_file(directory / PUBLISHED_NAME.format(moment=moment)) for moment in PUBLICATIONS},
        written_bytes=tuple(report["written_bytes"] for report in reports),
        exported=directory / EXPORT_NAME,
        machines=tuple(report["machine"] for report in reports),
        buffers=tuple(report["buffer"] for report in reports),
        lowered=reports[0]["lowered"],
    )


def _assemble(job: ExecutionJob, hf_config: dict, directory: Path) -> tuple[dict[str, np.ndarray], float]:
    """Put the shards together that the ranks have saved; also the largest difference between replicas of a shard."""
    spec = find_spec(hf_config)
    dims = spec.dims(hf_config)
    layouts = parameter_layouts(spec, dims, job.layout)
    if job.lora:
        adapted = AdaptedRules(spec, dims, LoraOptions(**job.lora))
        saved = {rule.mf_name for rule in adapted.trained()}
        layouts = [one for one in parameter_layouts(adapted, dims, job.layout) if one.name in saved]
    shards = [load_file(rank_file(directory, rank, "safetensors")) for rank in range(job.layout.world_size)]
    weights, difference = {}, 0.0
    for layout in layouts:
        whole = np.full(layout.shape, np.nan, np.float32)
        for ranks in layout.replicas().values():
            first = shards[ranks[0]][layout.name]
            whole[layout.shard_of(ranks[0])] = first
            for rank in ranks[1:]:
                difference = max(difference, float(np.abs(shards[rank][layout.name] - first).max()))
        weights[layout.name] = whole
    return weights, difference
