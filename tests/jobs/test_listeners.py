"""Which processes of a run listen on TCP ports, and on which addresses: docs/security.md names them all."""

import contextlib
import os
import socket
import struct
import time
from pathlib import Path

import pytest
from slow_tests import SLOW

from mindrlhf.system.ports import find_free_port
from mindrlhf.system.processes import read_environment

pytestmark = pytest.mark.timeout(900)

TIMEOUT_S = 400  # generous: other work may load the machine
_LISTEN = "0A"  # in /proc/net/tcp


def listening_addresses(pid: int) -> set[tuple[str, int]]:
    """Return the addresses and ports on which a process listens for TCP connections; none once it is gone."""
    found = set()
    with contextlib.suppress(OSError):
        inodes = set()
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(f"/proc/{pid}/fd/{descriptor}").removeprefix("socket:[").removesuffix("]"))
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in inodes:
                    address, port = fields[1].split(":")
                    words = struct.unpack(f">{len(address) // 8}I", bytes.fromhex(address))
                    packed = struct.pack(f"={len(words)}I", *words)  # the kernel prints words of its own byte order
                    found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def role(pid: int, words: str) -> str:
    """Return what a process of a run is."""
    if "mindrlhf.rollout.server" in words:
        return "rollout server"
    if "mindrlhf.training.main" not in words:
        return "launcher" if "mindrlhf.cli" in words else words
    environment = read_environment(pid)
    if "msrun" in words:
        return "msrun"
    return "scheduler" if environment.get("MS_ROLE") == "MS_SCHED" else f"rank {environment.get('RANK_ID')}"


def test_a_listening_socket_is_found():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        addresses = {("127.0.0.1", server.getsockname()[1]), ("::1", six.getsockname()[1])}
        assert addresses <= listening_addresses(os.getpid())
        assert all(port != 0 for _, port in listening_addresses(os.getpid()))


@SLOW
def test_no_process_of_a_run_listens_but_those_that_docs_security_names(start_job, tmp_path):
    first = find_free_port()
    ours = set(range(first, first + 101))
    job = start_job(tmp_path / "run", "--workers", 2, run__max_steps=2, run__ports=f"{first}-{first + 100}")
    seen: dict[str, set[tuple[str, int]]] = {}
    while job.process.poll() is None:
        for pid, words in job.running().items():
            seen.setdefault(role(pid, words), set()).update(listening_addresses(pid))
        time.sleep(0.1)
    assert job.wait(TIMEOUT_S) == 0, job.text()
    assert {"launcher", "msrun", "scheduler", "rank 0", "rank 1", "rollout server"} <= seen.keys()
    num_ports = {name: len(addresses) for name, addresses in seen.items() if addresses}
    # MindSpore's scheduler, MindSpore's own port of each rank, and for a moment the lead's, where the ranks report.
    assert num_ports.keys() == {"scheduler", "rank 0", "rank 1"}, seen
    assert num_ports["scheduler"] == num_ports["rank 1"] == 1 <= num_ports["rank 0"] <= 2, seen
    assert {address for addresses in seen.values() for address, _ in addresses} == {"127.0.0.1"}, seen
    # Those that are ours to place are of run.ports; MindSpore chooses one of each rank by itself.
    ports = {name: {port for _, port in addresses} for name, addresses in seen.items()}
    assert ports["scheduler"] <= ours and len(ports["rank 0"] - ours) == len(ports["rank 1"] - ours) == 1, seen
