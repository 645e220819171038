"""A rank on the CPU whose node is pretended: buffers of several nodes sync by broadcasts; started by msrun.

    python broadcast_rank.py DIRECTORY

``sync.json`` there has "infos", the fields of the tensors, and "cases": a name, "nodes" (the ranks of each),
"bucket_bytes" and, by node, "held": regions [[tensor, [[start, stop], ...]], ...] that its ranks write between them.
Transfers have "transfer_bytes". Node N of a case leaves its buffer as ``CASE_N_VERSION.npz``, and each rank
``CASE_wrote_R_VERSION``, what it wrote, and ``CASE_done_R_VERSION``, the bytes that it has sent.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.communication import get_group_size, get_rank, init
from mindspore.ops.communication import broadcast as broadcast_eagerly
from random_bits import random_bits

from mindrlhf.system.processes import die_with_launcher
from mindrlhf.training.broadcast import group_of, open_broadcast
from mindrlhf.weights.publish import sync as planning
from mindrlhf.weights.publish.buffer import WeightBuffer
from mindrlhf.weights.publish.collective import CollectiveTransport
from mindrlhf.weights.publish.sync import plan_sync, sums_of, written_of
from mindrlhf.weights.tensors import TensorInfo

TIMEOUT_S = 200
VERSIONS = (1, 2)


def main(directory: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    init()
    work = json.loads((directory / "sync.json").read_text())
    infos = [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in work["infos"]]
    planning.TRANSFER_BYTES = work["transfer_bytes"]
    for case in work["cases"]:
        sync(case, infos, Files(directory, case["name"]), get_rank())


class Files:
    """What the ranks of a case tell each other."""

    def __init__(self, directory: Path, name: str):
        self._start = directory / name

    def path(self, name: str) -> Path:
        return self._start.with_name(f"{self._start.name}_{name}")

    def tell(self, name: str, value: object) -> None:
        temporary = self.path(f"{name}.tmp")
        temporary.write_text(json.dumps(value))
        os.replace(temporary, self.path(name))

    def hear(self, name: str):
        deadline = time.monotonic() + TIMEOUT_S
        while not self.path(name).exists():
            assert time.monotonic() < deadline, f"nobody wrote {self.path(name)}"
            time.sleep(0.02)
        return json.loads(self.path(name).read_text())


@functools.cache
def open_on_cpu(ranks: tuple[int, ...], root: int, num_words: int):
    """The product's graph where all ranks take part; MindSpore has no kernel of it for other groups on the CPU."""
    if len(ranks) == get_group_size():
        return open_broadcast(ranks, root, num_words)
    group = group_of(ranks)

    def broadcast(words):
        tensor = ms.Tensor(np.zeros(num_words, np.int32) if words is None else words)
        broadcast_eagerly(tensor, root, group)
        return tensor.asnumpy() if words is None else None

    return broadcast


def sync(case: dict, infos: list[TensorInfo], files: Files, rank: int) -> None:
    nodes = [tuple(ranks) for ranks in case["nodes"]]
    (node,) = (number for number, ranks in enumerate(nodes) if rank in ranks)
    place = nodes[node].index(rank)
    if place == 0:
        buffer = WeightBuffer.create(infos)
        files.tell(f"buffer_{node}", buffer.path)
    else:
        buffer = WeightBuffer.attach(files.hear(f"buffer_{node}"), writable=True)
    transport = CollectiveTransport(buffer, rank, nodes, open_on_cpu, case["bucket_bytes"])
    for version in VERSIONS:
        values = random_bits(infos, version)
        buffer.begin(version)
        for name, bounds in case["held"][node][place :: len(nodes[node])]:
            region = tuple(slice(start, stop) for start, stop in bounds)
            buffer.write(name, values[name][(*region, ...)], region)
        files.tell(f"wrote_{rank}_{version}", buffer.written())
        written = [sums_of(one for rank in ranks for one in files.hear(f"wrote_{rank}_{version}")) for ranks in nodes]
        if version == VERSIONS[0]:
            transport.connect(plan_sync(written, infos), {}, b"")
        transport.sync(version)
        files.tell(f"came_{rank}_{version}", True)
        for member in nodes[node]:
            files.hear(f"came_{member}_{version}")
        if place == 0:
            buffer.commit(written_of({key: checksum for sums in written for key, checksum in sums.items()}))
            buffer.verify(version)
            np.savez(files.path(f"{node}_{version}.npz"), **{name: array for name, _, array in buffer.tensors(version)})
        files.tell(f"done_{rank}_{version}", transport.sent_bytes)
        for one in range(get_group_size()):  # nobody writes the next version while a buffer is read
            files.hear(f"done_{one}_{version}")
    transport.close()
    buffer.close()


if __name__ == "__main__":
    die_with_launcher()
    main(Path(sys.argv[1]))
