"""On which TCP ports the processes of a run listen: any, or those of ``run.ports``, for which a firewall has a rule."""

import contextlib
import os
import random
import re
import socket
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from mindrlhf.errors import RunFailure, UserError
from mindrlhf.system.wire import family_of

PORTS_VARIABLE = "MINDRLHF_PORTS"  # as in run.ports; set by the launcher for all that it starts
LEAST_PORTS = 16  # of a node: the launcher's, the scheduler's, ranks', and a few for each rollout server


def parse_ports(text: str) -> range:
    """Return the ports that a text such as "20000-20100" means, both ends included.

    Raises:
        UserError: it means none, or too few.
    """
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text.strip())
    first, last = (int(match[1]), int(match[2])) if match else (0, -1)
    if not 1024 <= first <= last < 1 << 16:
        raise UserError(f"'run.ports' is '{text[:60]}': give two ports from 1024 to 65535, as in 20000-20100")
    if last - first + 1 < LEAST_PORTS:
        raise UserError(f"'run.ports' is '{text}', {last - first + 1} ports: give {LEAST_PORTS} at least")
    return range(first, last + 1)


def use_ports(text: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have this process and those that it starts listen on these ports only; nothing happens for ""."""
    if text:
        ports = parse_ports(text)
        environment[PORTS_VARIABLE] = text
        environment.setdefault("VLLM_PORT", str(ports[len(ports) // 2]))  # vLLM counts upwards from there
        environment.setdefault("HCCL_HOST_SOCKET_PORT_RANGE", text)


def candidates() -> Iterator[int]:
    """Yield the ports that may be taken, in random order: of the run, or those that no outgoing connection gets."""
    if text := os.environ.get(PORTS_VARIABLE):
        ports = parse_ports(text)
    else:
        ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8")
        first_ephemeral_port = int(ephemeral.split()[0])
        ports = range(10_000, first_ephemeral_port) or range(10_000, 65_536)
    yield from random.SystemRandom().sample(ports, k=len(ports))


def find_free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of ``host`` that is free now and that the kernel gives to no outgoing connection.

    Raises:
        RunFailure: there is none.
    """
    for port in candidates():
        with socket.socket(family_of(host), socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise _none_free(host)


def listen(host: str, *, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens on a free port of ``host``, a numeric address.

    Args:
        backlog: of ``socket.listen``.

    Raises:
        RunFailure: there is none.
    """
    family = family_of(host)
    if PORTS_VARIABLE not in os.environ:
        return socket.create_server((host, 0), family=family, backlog=backlog)
    for port in candidates():
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError:
            continue
    raise _none_free(host)


def _none_free(host: str) -> RunFailure:
    where = os.environ.get(PORTS_VARIABLE) or "10000 on"
    return RunFailure(f"no TCP port of {host} is free among those of {where}: give a wider 'run.ports'")
