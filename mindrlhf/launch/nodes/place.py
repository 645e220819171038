"""Node index and address of node 0: from options, or from what Slurm, Ascend's operator or an indexed Job sets."""

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mindrlhf.errors import UserError

DEFAULT_PORT = 8118
# What a job of Slurm gets from its number, so that two jobs on a node do not meet.
_SLURM_PORTS = range(20_000, 30_000)
_DNS_LIMIT_S = 60.0
_MAX_SHOWN_CHARS = 80
_FIX = "give --nodes N --node-rank K --master ADDRESS:PORT, or mend it"


@dataclass(frozen=True)
class Place:
    """Position of a launcher among those of a run.

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

    def check_address(self) -> tuple[int, str]:
        """Return the same, or say at once that nobody knows the name; Kubernetes' DNS may be late, and is waited for.

        Raises:
            UserError: the name is not known.
        """
        end_s = time.monotonic() + (_DNS_LIMIT_S if is_in_kubernetes() else 0.0)
        while True:
            try:
                return self.address()
            except OSError as error:
                if time.monotonic() >= end_s:
                    raise UserError(
                        f"--master is {self.master}, a name that this machine does not know ({error.strerror}): give "
                        "an address of node 0"
                    ) from None
            time.sleep(1.0)


def is_in_kubernetes() -> bool:
    """Return whether Kubernetes started this: what is lost comes back, and names may be known only later."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


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
        return _check_single({"--node-rank": node_rank, "--master": master, "--spares": num_spares or None})
    address, port = _split(master or "")
    is_told = address and nodes != "auto" and (node_rank is not None or is_for_rollout)
    found = {} if is_told else _ascend_operator(environment) or _slurm(environment) or _indexed_job(environment)
    if nodes == "auto" and "num_nodes" not in found:
        raise UserError(
            "--nodes is auto, but no variable of Slurm or of Ascend's operator says how many there are: give --nodes N "
            "--node-rank K --master ADDRESS:PORT"
        )
    num_nodes = int(found["num_nodes"]) - num_spares if nodes == "auto" else _number(nodes)
    if num_spares and num_nodes < 2:
        raise UserError(f"--spares is {num_spares}, but {max(0, num_nodes)} nodes train: a spare needs 2 at least")
    if num_nodes == 1 and not is_elastic:
        return None
    total = num_nodes + num_spares
    rank = node_rank if node_rank is not None else found.get("node")
    rank = total if is_for_rollout else rank
    if rank is None:
        raise UserError(f"--nodes is {nodes}, but --node-rank is missing: give each node its own, from 0 on")
    rank = int(rank)
    if not 0 <= rank < total + is_for_rollout:
        raise UserError(f"--node-rank is {rank}, but the {total} nodes are numbered from 0 to {total - 1}")
    if not address:
        what = "--elastic is given" if is_elastic else f"--nodes is {nodes}"
        address, port = _found_address(found, what)
    port = port or int(found.get("port", DEFAULT_PORT))
    return Place(rank, num_nodes, address, port, num_spares, is_elastic, is_for_rollout)


def _found_address(found: Mapping[str, str | int], what: str) -> tuple[str, int]:
    address, port = _split(str(found.get("master", "")))
    if not address:
        raise UserError(f"{what}, but --master is missing: give the address of node 0, ADDRESS:PORT")
    return address, port


def _check_single(options: Mapping[str, object]) -> None:
    for option, value in options.items():
        if value is not None:
            raise UserError(f"{option} is {value}, but --nodes is missing: give --nodes N, or --nodes auto")


def _check_rollout_node(node_rank: int | None, is_elastic: bool) -> None:
    if not is_elastic:
        raise UserError("--role is rollout, but --elastic is missing: give it to all nodes of the run")
    if node_rank is not None:
        raise UserError(f"--node-rank is {node_rank}, but nodes with --role rollout have no number: leave it out")


def _number(nodes: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", nodes) or int(nodes) < 1:
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
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65_536:
        raise UserError(f"--master is {master}: its port is no number from 1 to 65535")
    return address, int(port)


_Found = dict[str, str | int]  # "num_nodes", "node", "master", "port", as far as they are said


def _shown(name: str, value: str) -> str:
    value = value[:_MAX_SHOWN_CHARS]
    return f"{name} is {value if value.isprintable() else repr(value)}"


def _number_of(name: str, environment: Mapping[str, str]) -> int:
    value = environment[name].strip()
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise UserError(f"{_shown(name, value)}, which is no number: {_FIX}")
    return int(value)


def _ascend_operator(environment: Mapping[str, str]) -> _Found:
    if not environment.get("MS_NODE_RANK"):
        return {}
    found: _Found = {"node": _number_of("MS_NODE_RANK", environment)}
    if environment.get("MS_WORKER_NUM") and environment.get("MS_LOCAL_WORKER"):
        total, own = (_number_of(name, environment) for name in ("MS_WORKER_NUM", "MS_LOCAL_WORKER"))
        if own == 0 or total % own:
            raise UserError(f"MS_WORKER_NUM is {total}, but MS_LOCAL_WORKER is {own}, which does not divide it: {_FIX}")
        found["num_nodes"] = total // own
    if environment.get("MS_SCHED_HOST"):
        found["master"] = environment["MS_SCHED_HOST"].strip()
    if environment.get("MS_SCHED_PORT"):
        found["port"] = port = _number_of("MS_SCHED_PORT", environment)
        if not 0 < port < 65_536:
            raise UserError(f"MS_SCHED_PORT is {port}, but ports go from 1 to 65535: set a free one, or give --master")
    return found


def _indexed_job(environment: Mapping[str, str]) -> _Found:
    name = "JOB_COMPLETION_INDEX"
    return {"node": _number_of(name, environment)} if environment.get(name) else {}


def _slurm(environment: Mapping[str, str]) -> _Found:
    if not environment.get("SLURM_NODEID"):
        return {}
    found: _Found = {"node": _number_of("SLURM_NODEID", environment)}
    if name := next((name for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if environment.get(name)), ""):
        found["num_nodes"] = _number_of(name, environment)
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if any(count != "1" for count in re.findall(r"([0-9]+)(?:\(x[0-9]+\))?(?:,|$)", tasks)):
        started = _shown("SLURM_STEP_TASKS_PER_NODE", tasks)
        raise UserError(f"{started}: Slurm starts several tasks on a node; start one, srun --ntasks-per-node=1 ...")
    name = next((name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if environment.get(name)), "")
    if name:
        found["master"] = first_host(environment[name].strip())
        if not found["master"]:
            raise UserError(f"{_shown(name, environment[name])}, which is no list of nodes: {_FIX}")
    job = environment.get("SLURM_JOB_ID", "0")
    if re.fullmatch(r"[0-9]{1,18}", job):
        found["port"] = _SLURM_PORTS[int(job) % len(_SLURM_PORTS)]
    return found


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it: a1b01 of "a[1-2]b[01,03],c"; "" where it is none."""
    found = re.match(r"(?:\[[0-9]+[^\[\]]*\]|[\w.:-])+(?=,|$)", hosts, re.ASCII)
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[0]) if found else ""
