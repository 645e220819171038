"""The one place that sets MindSpore's global state: context, communication, MindFormers' switches."""

import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindrlhf.config.run import RunSection
from mindrlhf.config.training import ParallelSection
from mindrlhf.cpu.imports import quick_imports
from mindrlhf.system import heartbeat, processes
from mindrlhf.system.processor import OPENBLAS_CORE_VARIABLE


@dataclass(frozen=True)
class Rank:
    """Number of this process among the trainer ranks."""

    index: int
    world_size: int

    @property
    def is_rank_0(self) -> bool:
        """Rank 0 drives the loop; the others serve it."""
        return self.index == 0


def num_ranks_from_environment() -> int:
    """Return the world size that msrun announced, 1 outside of msrun."""
    return int(os.environ.get("MS_WORKER_NUM", "1"))


def num_nodes_from_environment() -> int:
    """Return how many nodes the run has, as its launchers said; or if msrun was called by hand, as that was told."""
    if said := os.environ.get(processes.NUM_NODES_VARIABLE):
        return int(said)
    own = msrun_option(processes.command_line(os.getppid()), "local_worker_num")
    return max(1, num_ranks_from_environment() // own) if own else 1


def msrun_option(words: Sequence[str], name: str) -> int | None:
    """Return the number that follows an option of msrun on its command line, None when none does."""
    for word, following in zip(words, [*words[1:], ""]):
        option, separator, value = word.partition("=")
        if option in (f"--{name}", f"-{name}") and (number := value if separator else following).isdigit():
            return int(number)
    return None


def is_rank_0_process() -> bool:
    """Return whether this process will become rank 0; msrun numbers its workers before MindSpore joins them.

    Its scheduler runs the same program, without a number.
    """
    return os.environ.get("RANK_ID", "0") == "0" and os.environ.get("MS_ROLE") != "MS_SCHED"


def is_first_of_node() -> bool:
    """Return whether this is the first rank of its node: msrun numbers the devices of each node from 0."""
    return os.environ.get("DEVICE_ID", "0") == "0" and os.environ.get("MS_ROLE") != "MS_SCHED"


def start_runtime(run: RunSection, log_dir: Path) -> Rank:
    """Set the MindSpore context from the config and join the other ranks; call it once per process.

    The number of threads comes from ``OMP_NUM_THREADS``, which the launcher sets: MindSpore's own default
    is a pool of threads far larger than a share of a CPU machine.
    """
    if num_ranks_from_environment() == 1 and run.device == "cpu":
        heartbeat.enter("loading MindSpore")  # of several, the launcher must see which has not begun to join
    with quick_imports():
        from mindrlhf.models.context import DEVICE_TARGETS, import_mindspore, prepare_mindformers

        ms = import_mindspore()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device(DEVICE_TARGETS[run.device])
    ms.set_seed(run.seed)
    if run.deterministic:
        # The libraries of collectives read these when the ranks join; what the user set stays.
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
        os.environ.setdefault("LCCL_DETERMINISTIC", "1")
        ms.set_deterministic(True)
    world_size = num_ranks_from_environment()
    index = 0
    if world_size > 1 or run.device != "cpu":  # graphs that are sharded ask for it, of one rank too
        from mindspore.communication import get_rank, init

        # Nothing is to be done but to be woken.
        signal.signal(heartbeat.ROUSE_SIGNAL, lambda number, frame: None)
        heartbeat.enter(heartbeat.JOINING)
        init()
        heartbeat.enter(heartbeat.JOINED)
        signal.signal(heartbeat.ROUSE_SIGNAL, signal.SIG_DFL)
        # MindSpore has put handlers of its own there, which end the process without cleaning up.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.getsignal(number))
        # The parallel mode stays stand-alone, unless start_parallel follows: OptimizerStep holds the only collective
        # of data parallelism.
        index = get_rank()
    cores = os.sched_getaffinity(0)
    with quick_imports():
        prepare_mindformers(run.device, log_dir / "mindformers")
    if run.device == "cpu":
        # MindFormers ties each rank to cores of its own, but ranks and the rollout server share them here: a thread
        # tied to one would wait while another is free.
        os.sched_setaffinity(0, cores)
        num_threads = int(os.environ.get("OMP_NUM_THREADS") or "1")
        # Set last: preparing MindFormers resets it.
        ms.set_context(runtime_num_threads=num_threads)
        if index == 0:  # what the last bits of a result depend on, beside the config
            kernels = os.environ.get(OPENBLAS_CORE_VARIABLE) or "chosen by OpenBLAS"
            print(f"[INFO] BLAS kernels: {kernels}; threads: {num_threads}", flush=True)  # for the log alone
    return Rank(index, world_size)


def start_parallel(parallel: ParallelSection, rank: Rank, strategy_file: Path) -> None:
    """Have MindSpore shard all graphs from now on (Ascend); ``strategy_file`` gets the layout of the last one."""
    import mindspore as ms

    options = {}
    if parallel.enable_parallel_optimizer and parallel.pipeline_stage == parallel.micro_batch_num == 1:
        # Gathers weights while the layer before computes; of several micro-batches it would not leave their function.
        # MindSpore reads the file at once. It must not lie beside the strategies: their merge refuses other files.
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            file.write('{"computation_allgather_overlap": true}')
            file.flush()
            ms.set_context(ascend_config={"parallel_speed_up_json_path": file.name})
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL,
        device_num=rank.world_size,
        global_rank=rank.index,
        # Inputs have the rows of all ranks, but a rank reads its own only; see mindrlhf.layout.rows.
        full_batch=True,
        gradients_mean=False,
        pipeline_stages=parallel.pipeline_stage,
        enable_parallel_optimizer=parallel.enable_parallel_optimizer,
        enable_alltoall=True,
        strategy_ckpt_config={"save_file": str(strategy_file), "only_trainable_params": False},
        **options,
    )
