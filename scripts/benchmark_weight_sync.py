"""Time the sync of weights between the buffers of two nodes against plain sockets on the same link, in turn.

    python scripts/benchmark_weight_sync.py [--gib 0.5] [--rounds 5] [--layout rows|columns]
    python scripts/benchmark_weight_sync.py --node 0 --master 10.0.0.1:9000    # on one machine, and on the other:
    python scripts/benchmark_weight_sync.py --node 1 --master 10.0.0.1:9000

Without --node both nodes are processes of this machine, over its loopback. Each node has half of the model and sends it
to the other: stages of a pipeline (whole rows), or with "columns" halves of each row. Plain sockets send as many bytes
both ways over as many connections, from and into memory that is there, and nothing checks them.
"""

import argparse
import os
import socket
import threading
import time

import numpy as np

from mindrlhf.system.handshake import SignedConnection, admit, introduce
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.sync import plan_sync
from mindrlhf.weights.publish.tcp import NUM_STREAMS, TcpTransport
from mindrlhf.weights.tensors import TensorInfo

SHAPE = (4096, 4096)
SECRET = b"of this benchmark"
PIECE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", choices=("rows", "columns"), default="rows")
    parser.add_argument("--node", type=int, choices=(0, 1))
    parser.add_argument("--master", default="127.0.0.1:0", help="ADDRESS:PORT of node 0")
    arguments = parser.parse_args()
    host, _, port = arguments.master.rpartition(":")
    listener = None
    node = arguments.node
    if node != 1:
        listener = socket.create_server((host, int(port)))
        port = listener.getsockname()[1]
    if node is None:
        node = 1 if os.fork() == 0 else 0
    if node == 0:
        with listener:
            control = admit(listener.accept()[0], SECRET)
    else:
        control = introduce(_connect(host, int(port)), SECRET)
    own_host = control._connection.getsockname()[0]
    run(node, control, own_host, arguments)
    control.receive() if node == 0 else control.send({"kind": "end"})


def run(node: int, control: SignedConnection, own_host: str, arguments: argparse.Namespace) -> None:
    """Do the rounds; node 0 prints."""
    num_tensors = max(2, round(arguments.gib * 2**30 / (4 * SHAPE[0] * SHAPE[1]) / 2) * 2)
    infos = [TensorInfo(f"tensor_{index}", "float32", SHAPE) for index in range(num_tensors)]
    rows, columns = slice(0, SHAPE[0]), slice(0, SHAPE[1] // 2)
    held = [[(info.name, (rows, slice(0, SHAPE[1]))) for info in infos[side::2]] for side in (0, 1)]
    if arguments.layout == "columns":
        halves = (columns, slice(SHAPE[1] // 2, SHAPE[1]))
        held = [[(info.name, (rows, half)) for info in infos] for half in halves]
    with WeightBuffer.create(infos) as buffer:
        transport = TcpTransport(buffer, node, own_host)
        addresses = {node: transport.address, 1 - node: tuple(_swap(control, list(transport.address)))}
        written = [{(name, to_bounds(index)): 0 for name, index in own} for own in held]
        transfers = plan_sync(written, infos)
        transport.connect(transfers, addresses, SECRET)
        plain = _plain_connections(node, control, own_host)
        half_bytes = buffer.size_bytes // 2
        rates: dict[str, list[float]] = {"sync": [], "sockets": []}
        processor_s = {"sync": 0.0, "sockets": 0.0}
        for version in range(arguments.rounds + 1):
            buffer.begin(version)
            values = np.random.default_rng(version + node).random(SHAPE, np.float32)
            for name, index in held[node]:
                buffer.write(name, values[index], index)
            for what in ("sync", "sockets"):
                _swap(control, "ready")
                start_s, start_processor_s = time.perf_counter(), time.process_time()
                if what == "sync":
                    transport.sync(version)
                else:
                    _plain(plain, buffer, half_bytes)
                # The first round touches the memory.
                processor_s[what] += (time.process_time() - start_processor_s) if version else 0.0
                _swap(control, "done")
                rates[what].append(half_bytes / (time.perf_counter() - start_s) / 2**30)
        if node == 0:
            for what, measured in rates.items():
                cost_s = processor_s[what] / arguments.rounds / (2 * half_bytes / 2**30)
                print(f"{what:9} {_shown(measured[1:])} GiB/s each way; processor time of a node {cost_s:.2f} s/GiB")
            ratios = [one / other for one, other in zip(rates["sync"], rates["sockets"])][1:]
            print(f"ratio     {_shown(ratios)}: the median is {np.median(ratios):.2f}")
        transport.close()


def to_bounds(index: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((one.start, one.stop) for one in index)


def _plain_connections(node: int, control: SignedConnection, host: str) -> list[socket.socket]:
    """One connection each way for each stream: first those on which this node sends."""
    if node == 0:
        with socket.create_server((host, 0)) as listener:
            _swap(control, list(listener.getsockname()[:2]))
            return [listener.accept()[0] for _ in range(2 * NUM_STREAMS)]
    address = _swap(control, None)
    connections = [_connect(*address) for _ in range(2 * NUM_STREAMS)]
    return connections[NUM_STREAMS:] + connections[:NUM_STREAMS]


def _plain(connections: list[socket.socket], buffer: WeightBuffer, num_bytes: int) -> None:
    """Send and receive ``num_bytes`` over the connections, from the buffer's memory and into it."""
    memory = memoryview(buffer._memory)
    share = num_bytes // NUM_STREAMS
    starts = [index * share for index in range(NUM_STREAMS)]
    sending, receiving = connections[:NUM_STREAMS], connections[NUM_STREAMS:]

    def send(connection: socket.socket, start: int) -> None:
        for first in range(start, start + share, PIECE):
            connection.sendall(memory[first : min(first + PIECE, start + share)])

    def receive(connection: socket.socket, start: int) -> None:
        first = num_bytes + start
        end = first + share
        while first < end:
            first += connection.recv_into(memory[first : min(first + PIECE, end)])

    threads = [threading.Thread(target=send, args=pair) for pair in zip(sending, starts)]
    threads += [threading.Thread(target=receive, args=pair) for pair in zip(receiving, starts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _swap(control: SignedConnection, value):
    control.send({"value": value})
    return control.receive()[0]["value"]


def _connect(host: str, port: int) -> socket.socket:
    end_s = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=60)
            connection.settimeout(None)
            return connection
        except ConnectionRefusedError:  # the other node is not there yet
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def _shown(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in sorted(values))


if __name__ == "__main__":
    main()
