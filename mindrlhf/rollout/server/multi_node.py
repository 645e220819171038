"""A server that lies over several nodes: how its processes find each other, and each the buffer of its own node.

vLLM joins the processes by torch's store at one address, then by gloo groups (on Ascend also HCCL's) and, from the
engine to the workers of other nodes and back, by ZeroMQ. None of this asks who is there, and ZeroMQ carries pickles:
see docs/security.md. All of it is bound to the address by which the nodes reach each other.
"""

import importlib
import ipaddress
import json
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from mindrlhf.system.wire import family_of

_VARIABLE = "MINDRLHF_SERVER_PLACE"  # what the worker processes get to know


def prepare(span: dict[str, Any], tensor_parallel: int, buffer_file: str) -> None:
    """Set the environment of this process and of those it will start; vLLM must not be loaded yet.

    Args:
        span: the fields of ``mindrlhf.rollout.processes.server.NodePlace``.
        tensor_parallel: of the server.
        buffer_file: holds the path of this node's weight buffer, in a process that no trainer tells it.
    """
    place = {"host": span["host"], "port": span["port"], "num_workers": tensor_parallel // span["num_nodes"]}
    os.environ[_VARIABLE] = json.dumps(place | {"buffer_file": buffer_file if span["number"] else ""})
    os.environ.setdefault("VLLM_HOST_IP", span["own_host"])
    if interface := _interface_of(span["own_host"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def join_nodes() -> None:
    """In a worker process of such a server, before it joins the others, put right what vLLM takes for granted."""
    if _VARIABLE not in os.environ:
        return
    from mindrlhf.rollout.server.cpu import count_workers_as_devices

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # the name in torch is a function of it
    place = json.loads(os.environ[_VARIABLE])
    count_workers_as_devices(place["num_workers"])
    store = rendezvous.TCPStore

    def bound_store(host_name: str, port: int, is_master: bool = False, **options: Any):
        """Make torch's store; it would listen on all addresses of the machine."""
        if is_master:
            listener = socket.create_server((host_name, port), family=family_of(host_name))
            options["master_listen_fd"] = listener.detach()
        return store(host_name=host_name, port=port, is_master=is_master, **options)

    rendezvous.TCPStore = bound_store


def buffer_of_node(path: str) -> str:
    """Return the path of the weight buffer of this node; ``path`` is that of the engine's."""
    file = json.loads(os.environ.get(_VARIABLE, "{}")).get("buffer_file")
    return Path(file).read_text(encoding="utf-8") if file else path


def _interface_of(host: str) -> str:
    """Return the network interface that has an address; empty when none has."""
    wanted = ipaddress.ip_address(host if ":" in host else socket.gethostbyname(host))
    for name, addresses in psutil.net_if_addrs().items():
        own = [one.address.partition("%")[0] for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
        if wanted in map(ipaddress.ip_address, own):
            return name
    return ""
