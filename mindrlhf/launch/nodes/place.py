"""Node index and address of node 0, from options or from the scheduler's environment.

Slurm, Kubernetes (indexed jobs, LeaderWorkerSet, Kubeflow's PyTorchJob, Ascend's operator), MPI and torchrun each have
variables of their own; the first that number the nodes count, and others must not contradict them.
"""

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
_MAX_HOSTS, _MAX_SHOWN_CHARS = 100_000, 80
_FIX = "unset the one that is stale, or give --nodes N --node-rank K"


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
    num_workers: int | None = None,
) -> Place | None:
    """Return where this launcher stands; None where there is one node only.

    Args:
        nodes: ``--nodes``: a number, or "auto" for what the environment says; None for one node.
        node_rank: ``--node-rank``; None for what the environment says.
        master: ``--master``: ADDRESS or ADDRESS:PORT of node 0; None for what the environment says.
        num_spares: ``--spares``; the environment's number of nodes has them in it, that of ``--nodes`` has not.
        is_elastic: ``--elastic``: there is a place then also where one node trains.
        is_for_rollout: ``--role rollout``.
        num_workers: ``--workers``.

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
    is_given = {"num_nodes": nodes != "auto", "node": node_rank is not None or is_for_rollout}
    address, port = _split(master or "")
    is_told = address and all(is_given.values())
    found = {} if is_told else _from_environment(environment, is_given, num_workers, needs_port=not port)
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


@dataclass(frozen=True)
class _Said:
    """A value read from one environment variable or derived from several; messages show ``name``."""

    name: str
    value: str

    def __str__(self) -> str:
        shown = self.value[:_MAX_SHOWN_CHARS]
        return f"{self.name} is {shown if shown.isprintable() else repr(shown)}"

    def number(self) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", self.value.strip()):
            what = ", a range of torchrun's" if re.fullmatch(r"[0-9]+:[0-9]+", self.value) else ", which is no number"
            raise UserError(f"{self}{what}: give --nodes N --node-rank K --master ADDRESS:PORT, or mend it")
        return int(self.value)


_Claim = dict[str, _Said]  # of "num_nodes", "node", "master", "port", what a system's variables say


def _from_environment(
    environment: Mapping[str, str], is_given: Mapping[str, bool], num_workers: int | None, needs_port: bool
) -> dict[str, str | int]:
    """Return what the environment says: "num_nodes", "node", "master", "port", as far as it does.

    The first system that numbers the nodes counts; others may say the same, and not something else.

    Args:
        is_given: of "num_nodes" and "node", whether an option says it.
        num_workers: ranks of this node, None where nobody knows.
        needs_port: whether no option says it.
    """
    claims = [claim for find in _SYSTEMS if (claim := find(environment))]
    needed = [name for name, given in is_given.items() if not given]
    counting = [claim for claim in claims if all(name in claim for name in needed)] or [
        claim for claim in claims if "node" in claim
    ]
    if not counting:
        return {}
    found = counting[0]
    numbers = {name: found[name].number() for name in needed if name in found}
    for claim in claims:
        for name in numbers.keys() & claim.keys():
            _refuse_other(claim[name], found[name], claim[name].number() != numbers[name])
    if {"num_nodes", "node"} <= numbers.keys() and numbers["node"] >= numbers["num_nodes"]:
        raise UserError(f"{found['node']}, but {found['num_nodes']}, and nodes are numbered from 0 on: {_FIX}")
    _check_world_size(environment, numbers.get("num_nodes"), found, num_workers)
    if masters := [claim["master"].value for claim in (found, *claims) if "master" in claim]:
        numbers["master"] = masters[0]
    if "port" in found and needs_port:
        numbers["port"] = found["port"].number()
        if not 0 < numbers["port"] < 65_536:
            raise UserError(f"{found['port']}, but ports go from 1 to 65535: set it to a free one, or give --master")
    return numbers


def _refuse_other(one: _Said, other: _Said, is_other: bool) -> None:
    if is_other:
        raise UserError(f"{one}, but {other}: {_FIX}")


def _check_world_size(
    environment: Mapping[str, str], num_nodes: int | None, found: _Claim, num_workers: int | None
) -> None:
    """Compare WORLD_SIZE, which counts ranks for torchrun and pods for Kubeflow, with the nodes and their ranks."""
    size = environment.get("WORLD_SIZE")
    if size is None or num_nodes is None or num_workers is None:
        return
    said = _Said("WORLD_SIZE", size)
    if said.number() not in (num_nodes, num_nodes * num_workers):
        total = f"--workers {num_workers} on each make {num_nodes * num_workers} ranks"
        raise UserError(f"{said}, but {found['num_nodes']} and {total}: unset it, or give another --workers")


def _claim(environment: Mapping[str, str], **names: str | tuple[str, ...]) -> _Claim:
    """Return what the first variable of each name says."""
    found = {}
    for key, of_key in names.items():
        for name in (of_key,) if isinstance(of_key, str) else of_key:
            if environment.get(name, "").strip():
                found[key] = _Said(name, environment[name].strip())
                break
    return found


def _torchrun(environment: Mapping[str, str]) -> _Claim:
    return _claim(
        environment, num_nodes="NNODES", node="NODE_RANK", master="MASTER_ADDR", port=("MASTER_PORT", "PET_MASTER_PORT")
    )


def _kubeflow(environment: Mapping[str, str]) -> _Claim:
    address = {"master": ("PET_MASTER_ADDR", "MASTER_ADDR"), "port": ("PET_MASTER_PORT", "MASTER_PORT")}
    return _claim(environment, num_nodes="PET_NNODES", node="PET_NODE_RANK", **address)


def _ascend_operator(environment: Mapping[str, str]) -> _Claim:
    claim = _claim(environment, node="MS_NODE_RANK", master="MS_SCHED_HOST", port="MS_SCHED_PORT")
    sizes = _claim(environment, total="MS_WORKER_NUM", own="MS_LOCAL_WORKER")
    if len(sizes) == 2:
        total, own = sizes["total"].number(), sizes["own"].number()
        if own == 0 or total % own:
            raise UserError(f"{sizes['total']}, but {sizes['own']}, which does not divide it: {_FIX}")
        claim["num_nodes"] = _Said("MS_WORKER_NUM / MS_LOCAL_WORKER", str(total // own))
    return claim if "num_nodes" in claim else {name: claim[name] for name in ("node",) if name in claim}


def _leader_worker_set(environment: Mapping[str, str]) -> _Claim:
    return _claim(environment, num_nodes="LWS_GROUP_SIZE", node="LWS_WORKER_INDEX", master="LWS_LEADER_ADDRESS")


def _slurm(environment: Mapping[str, str]) -> _Claim:
    claim = _claim(environment, num_nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), node="SLURM_NODEID")
    if "node" not in claim:
        return {}
    tasks = _claim(environment, tasks="SLURM_STEP_TASKS_PER_NODE").get("tasks")
    if tasks is not None and any(count > 1 for count in _tasks_per_node(tasks)):
        raise UserError(f"{tasks}: Slurm starts several tasks on a node; start one, srun --ntasks-per-node=1 ...")
    lists = _claim(environment, hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    if hosts := lists.get("hosts"):
        names = _hosts_of(hosts)
        claim["master"] = _Said(hosts.name, names[0])
        step_size = claim.get("num_nodes")
        if step_size and (hosts.name, step_size.name) == ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"):
            counted = _Said(f"{hosts.name} ({hosts.value[:_MAX_SHOWN_CHARS]})", f"of {len(names)} nodes")
            _refuse_other(counted, step_size, len(names) != step_size.number())
    job = environment.get("SLURM_JOB_ID", "0")
    if re.fullmatch(r"[0-9]{1,18}", job):
        claim["port"] = _Said("SLURM_JOB_ID", str(_SLURM_PORTS[int(job) % len(_SLURM_PORTS)]))
    return claim


def _tasks_per_node(said: _Said) -> list[int]:
    """Return the counts of a list such as "2(x3),1": two on each of three nodes, one on the next."""
    parts = [re.fullmatch(r"([0-9]{1,9})(?:\(x[0-9]{1,9}\))?", part.strip()) for part in said.value.split(",")]
    if not all(parts):
        raise UserError(f"{said}, which is no list of tasks as Slurm writes it, such as 1(x4): unset or mend it")
    return [int(part[1]) for part in parts]


def _mpi(environment: Mapping[str, str]) -> _Claim:
    """Open MPI's variables, or those of Hydra (MPICH, Intel MPI) and Slurm's PMI."""
    for size, rank, own in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ):
        claim = _claim(environment, num_nodes=size, node=rank)
        if len(claim) == 2:
            tasks = _claim(environment, own=own).get("own")
            if tasks is not None and tasks.number() > 1:
                raise UserError(f"{tasks}, but MPI is to start one task on a node: mpirun --map-by ppr:1:node")
            return claim
    return {}


def _indexed_job(environment: Mapping[str, str]) -> _Claim:
    return _claim(environment, node="JOB_COMPLETION_INDEX")


_SYSTEMS = (_kubeflow, _torchrun, _ascend_operator, _leader_worker_set, _slurm, _mpi, _indexed_job)


def _hosts_of(said: _Said) -> list[str]:
    try:
        return expand_hosts(said.value)
    except ValueError as error:
        raise UserError(f"{said}, which is no list of nodes ({error}): give --master, or mend it") from None


def expand_hosts(hosts: str) -> list[str]:
    """Return the hosts of a list as Slurm writes it: "a[1-2]b[01,03],c" gives a1b01, a1b03, a2b01, a2b03, c.

    Raises:
        ValueError: it is none, or names more than 100,000.
    """
    names: list[str] = []
    for item in re.findall(r"(?:\[[^\]]*\]|[^,\[\]])+|[\[\]]", hosts):
        parts = re.split(r"\[([^\]]*)\]", item.strip())
        found = [parts[0]]
        for ranges, text in zip(parts[1::2], parts[2::2]):
            numbers = [number for one in ranges.split(",") for number in _expand_range(one.strip())]
            if len(found) * len(numbers) > _MAX_HOSTS:
                raise ValueError(f"more than {_MAX_HOSTS} hosts")
            found = [f"{head}{number}{text}" for head in found for number in numbers]
        names += found
    if len(names) > _MAX_HOSTS or any(not re.fullmatch(r"[A-Za-z0-9._:-]+", name) for name in names):
        raise ValueError("a name of other characters, or too many")
    return names


def _expand_range(text: str) -> list[str]:
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"{text[:_MAX_SHOWN_CHARS]!r} is no range")
    first, last = int(match[1]), int(match[2] or match[1])
    if last - first >= _MAX_HOSTS:
        raise ValueError(f"more than {_MAX_HOSTS} hosts")
    return [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
