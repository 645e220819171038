"""Which of several nodes this is, and where node 0 can be reached: from options, or from what starts jobs on clusters.

Slurm, Kubernetes (indexed jobs, LeaderWorkerSet, Kubeflow's PyTorchJob, Ascend's operator) and torchrun each have
variables of their own; the first that number the nodes count.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from mindrlhf.errors import UserError

DEFAULT_PORT = 8118
# What a job of Slurm gets from its number, so that two jobs on a node do not meet.
_SLURM_PORTS = range(20_000, 30_000)


@dataclass(frozen=True)
class Place:
    """Where a launcher stands among those of a run.

    Attributes:
        node: its number: first the nodes that train, from 0 on, then the spares; those for rollout only share the next.
        num_nodes: how many train.
        master, port: name or address of node 0, and where it listens.
        num_spares: how many wait to take the place of a node that is lost.
        is_elastic: nodes for rollout only may come.
        is_for_rollout: this is one.
    """

    node: int
    num_nodes: int
    master: str
    port: int
    num_spares: int = 0
    is_elastic: bool = False
    is_for_rollout: bool = False

    def address(self) -> tuple[int, str]:
        """Return the socket family and address of node 0.

        Raises:
            OSError: its name is not known, or not yet.
        """
        family, _, _, _, address = socket.getaddrinfo(self.master, self.port, type=socket.SOCK_STREAM)[0]
        return family, address[0]


def find_place(
    nodes: str | None,
    node_rank: int | None,
    master: str | None,
    environment: Mapping[str, str],
    num_spares: int = 0,
    *,
    is_elastic: bool = False,
    is_for_rollout: bool = False,
) -> Place | None:
    """Return where this launcher stands; None where there is one node only.

    Args:
        nodes: ``--nodes``: a number, or "auto" for what the environment says; None for one node.
        node_rank: ``--node-rank``; None for what the environment says.
        master: ``--master``: ADDRESS or ADDRESS:PORT of node 0; None for what the environment says.
        num_spares: ``--spares``; the environment's number of nodes has them in it, that of ``--nodes`` has not.
        is_elastic: ``--elastic``: there is a place then also where one node trains.
        is_for_rollout: ``--role rollout``.

    Raises:
        UserError: something is missing, or senseless.
    """
    if num_spares < 0:
        raise UserError(f"--spares is {num_spares}: give 0 or more")
    if is_for_rollout:
        _check_rollout_node(node_rank, is_elastic)
    if is_elastic and nodes is None:
        nodes, node_rank = "1", node_rank or 0
    if nodes is None:
        for option, value in (("--node-rank", node_rank), ("--master", master), ("--spares", num_spares or None)):
            if value is not None:
                raise UserError(f"{option} is {value}, but --nodes is missing: give --nodes N, or --nodes auto")
        return None
    found = _from_environment(environment)
    if nodes == "auto" and "num_nodes" not in found:
        raise UserError(
            "--nodes is auto, but no variable of Slurm, Kubernetes or torchrun says how many there are: give --nodes N "
            "--node-rank K --master ADDRESS:PORT"
        )
    num_nodes = int(found["num_nodes"]) - num_spares if nodes == "auto" else _number(nodes)
    if num_spares and num_nodes < 2:
        raise UserError(f"--spares is {num_spares}, but {max(0, num_nodes)} nodes train: a spare needs 2 at least")
    if num_nodes == 1 and not is_elastic:
        return None
    total = num_nodes + num_spares
    rank = node_rank if node_rank is not None else found.get("node")
    if is_for_rollout:
        rank = total
    if rank is None:
        raise UserError(f"--nodes is {nodes}, but --node-rank is missing: give each node its own, from 0 on")
    rank = int(rank)
    if not 0 <= rank < total + is_for_rollout:
        raise UserError(f"--node-rank is {rank}, but the {total} nodes are numbered from 0 to {total - 1}")
    address, port = _split(master or str(found.get("master", "")))
    if not address:
        what = "--elastic is given" if is_elastic else f"--nodes is {nodes}"
        raise UserError(f"{what}, but --master is missing: give the address of node 0, ADDRESS:PORT")
    port = port or int(found.get("port", DEFAULT_PORT))
    return Place(rank, num_nodes, address, port, num_spares, is_elastic, is_for_rollout)


def _check_rollout_node(node_rank: int | None, is_elastic: bool) -> None:
    if not is_elastic:
        raise UserError("--role is rollout, but --elastic is missing: give it to all nodes of the run")
    if node_rank is not None:
        raise UserError(f"--node-rank is {node_rank}, but nodes with --role rollout have no number: leave it out")


def _number(nodes: str) -> int:
    if not nodes.isdigit() or int(nodes) < 1:
        raise UserError(f"--nodes is {nodes}: give a number from 1 on, or auto")
    return int(nodes)


def _split(master: str) -> tuple[str, int]:
    """Return address and port; 0 where there is none. An IPv6 address with a port stands in brackets."""
    bracketed = re.fullmatch(r"\[(.+)\](?::(\d+))?", master)
    address, port = bracketed.groups() if bracketed else (master, None)
    if not bracketed and master.count(":") == 1:
        address, _, port = master.partition(":")
    if port is None:
        return address, 0
    if not port.isdigit() or not 0 < int(port) < 65_536:
        raise UserError(f"--master is {master}: its port is no number from 1 to 65535")
    return address, int(port)


def _from_environment(environment: Mapping[str, str]) -> dict[str, str | int]:
    """Return what the environment says: "num_nodes", "node", "master", "port", as far as it does."""
    for find in (_torchrun, _ascend_operator, _leader_worker_set, _slurm, _indexed_job):
        if (found := find(environment)).get("node") is not None:
            return {name: value for name, value in found.items() if value is not None}
    return {}


def _torchrun(environment: Mapping[str, str]) -> dict[str, str | int | None]:
    # With PET_ in front in Kubeflow's PyTorchJob.
    for prefix in ("PET_", ""):
        if environment.get(f"{prefix}NODE_RANK") and environment.get(f"{prefix}NNODES", "").isdigit():
            return {
                "num_nodes": environment[f"{prefix}NNODES"],
                "node": environment[f"{prefix}NODE_RANK"],
                "master": environment.get(f"{prefix}MASTER_ADDR") or environment.get("MASTER_ADDR"),
                "port": environment.get(f"{prefix}MASTER_PORT") or environment.get("MASTER_PORT"),
            }
    return {}


def _ascend_operator(environment: Mapping[str, str]) -> dict[str, str | int | None]:
    total, own = environment.get("MS_WORKER_NUM", ""), environment.get("MS_LOCAL_WORKER", "")
    if not (total.isdigit() and own.isdigit() and int(own)):
        return {}
    return {
        "num_nodes": int(total) // int(own),
        "node": environment.get("MS_NODE_RANK"),
        "master": environment.get("MS_SCHED_HOST"),
        "port": environment.get("MS_SCHED_PORT"),
    }


def _leader_worker_set(environment: Mapping[str, str]) -> dict[str, str | int | None]:
    return {
        "num_nodes": environment.get("LWS_GROUP_SIZE"),
        "node": environment.get("LWS_WORKER_INDEX"),
        "master": environment.get("LWS_LEADER_ADDRESS"),
    }


def _slurm(environment: Mapping[str, str]) -> dict[str, str | int | None]:
    if "SLURM_NODEID" not in environment:
        return {}
    if int(environment.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0]) > 1:
        raise UserError("Slurm starts several tasks on a node: start one, srun --ntasks-per-node=1 ...")
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = environment.get("SLURM_JOB_ID", "0")
    return {
        "num_nodes": environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES"),
        "node": environment["SLURM_NODEID"],
        "master": first_host(hosts) or None,
        "port": _SLURM_PORTS[int(job) % len(_SLURM_PORTS)] if job.isdigit() else None,
    }


def _indexed_job(environment: Mapping[str, str]) -> dict[str, str | int | None]:
    return {"node": environment.get("JOB_COMPLETION_INDEX")}


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: "gpu[07-09,12],login1" gives "gpu07"."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", hosts)
    return "".join(part or "" for part in match.groups())
