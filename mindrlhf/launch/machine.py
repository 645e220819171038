"""Check that this machine can start the requested ranks, and find the command that does."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.launch.peers import Peers

MAX_RANKS_PER_CORE = 2
VISIBLE_VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"


def check_ranks(device: str, num_ranks: int, oversubscribe: bool = False) -> str:
    """Return a remark on ranks that share cores, empty when each has one of its own.

    Args:
        device: `run.device`.
        num_ranks: to be started on this machine.
        oversubscribe: start any number of ranks on the cores there are.

    Raises:
        UserError: no NPU, fewer NPUs than ranks, or far fewer cores than ranks.
    """
    if device == "ascend":
        return _check_npus(num_ranks)
    num_cores = len(os.sched_getaffinity(0))
    if num_ranks <= num_cores:
        return ""
    if num_ranks > MAX_RANKS_PER_CORE * num_cores and not oversubscribe:
        raise UserError(
            f"--workers is {num_ranks}, but this machine has {_counted(num_cores, 'core')}: give at most "
            f"{MAX_RANKS_PER_CORE * num_cores}, or add --oversubscribe to start them all the same"
        )
    return f"{num_ranks} ranks share {_counted(num_cores, 'core')}, so each is slower than alone"


def check_launcher(num_ranks: int) -> None:
    """Check that this environment has what starts several ranks.

    Raises:
        UserError: it has no ``msrun``, or no ``python`` beside it.
    """
    bin_dir = Path(sys.executable).parent
    for name in ("msrun", "python") if num_ranks > 1 else ():
        if not (bin_dir / name).exists():
            raise UserError(f"{bin_dir} has no {name}: run bash scripts/setup.sh and use the mindrlhf of its .venv")


def msrun_argv(command: Sequence[str], num_workers: int, log_dir: Path, master_port: int, peers: Peers) -> list[str]:
    """Return the command line of msrun for the ranks of this machine.

    Raises:
        UserError: this environment has no ``msrun``.
    """
    check_launcher(num_workers)
    return [
        sys.executable,
        "-P",
        str(Path(sys.executable).parent / "msrun"),
        f"--worker_num={num_workers * peers.num_nodes}",
        f"--local_worker_num={num_workers}",
        f"--node_rank={peers.node}",
        f"--master_addr={peers.host}",
        f"--master_port={master_port}",
        "--join=True",
        f"--log_dir={log_dir}",
        # Ranks from 0 on would be shown by processes of msrun's own; this one does not exist.
        f"--tail_worker_log={num_workers * peers.num_nodes}",
        "python",
        *command,
    ]


def _check_npus(num_ranks: int) -> str:
    num_npus = len(_npu_paths())
    visible = os.environ.get(VISIBLE_VARIABLE)
    if num_npus and visible is not None:
        numbers = [one.strip() for one in visible.split(",")]
        if len(set(numbers)) < len(numbers) or not all(re.fullmatch(r"[0-9]{1,4}", one) for one in numbers):
            raise UserError(f"{VISIBLE_VARIABLE} is {visible[:80]}: give numbers of NPUs, each once, as in 0,1,2,3")
        if num_ranks > len(numbers):
            raise UserError(
                f"--workers is {num_ranks}, but {VISIBLE_VARIABLE} is {visible[:80]}, {_counted(len(numbers), 'NPU')}: "
                "give fewer workers, or name more NPUs"
            )
    if not num_npus:
        raise UserError(
            "run.device is ascend, but this machine has no NPU (no /dev/davinci0): start the run on one that has, or "
            "set run.device=cpu"
        )
    if num_ranks > num_npus:
        raise UserError(f"--workers is {num_ranks}, but this machine has {num_npus} NPUs: give at most {num_npus}")
    return ""


def has_npus() -> bool:
    return bool(_npu_paths())


def _npu_paths() -> list[Path]:
    return list(Path("/dev").glob("davinci[0-9]*"))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
