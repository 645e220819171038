"""Memory that the ranks of a run share where they are all on one machine.

It is a ``memfd``, as the weight buffer is: it has no name, so nothing is left behind by ``kill -9``, and the size of
``/dev/shm`` does not limit it. The others open it through ``/proc`` of rank 0, which tells them where over the device's
collectives; these are also what the ranks wait for each other by.
"""

import contextlib
import hashlib
import mmap
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from mindrlhf.training.runtime import Rank

# Numbers travel as float32 words, exact below 2**24.
_MACHINE_WORDS = _TOKEN_WORDS = 4


@dataclass(frozen=True)
class RankMemory:
    """The shared memory, and what the ranks wait for each other by.

    Attributes:
        array: uint8 [size], zero at first; the same on all ranks.
        wait: returns when all ranks have called it; what they wrote before is then there to read.
        rank: of this process.
    """

    array: np.ndarray
    wait: Callable[[], None]
    rank: Rank


def share_memory(rank: Rank, size_bytes: int) -> RankMemory | None:
    """Return memory for all ranks, or None on all of them where it cannot be had; rank 0 then prints why.

    Every rank of the run must call it, with the same size.
    """
    assert rank.world_size > 1, "there is nobody to share memory with"
    add = _AddOverRanks()
    memory, descriptor, token = None, -1, bytes(2 * _TOKEN_WORDS)
    if rank.is_rank_0:
        with contextlib.suppress(OSError):
            memory, descriptor = _allocate(size_bytes)
            token = secrets.token_bytes(2 * _TOKEN_WORDS)
            memory[: len(token)] = token
    words = np.zeros((rank.world_size, _MACHINE_WORDS + _TOKEN_WORDS + 2), np.float32)
    words[rank.index] = [*np.frombuffer(_machine() + token, np.uint16), os.getpid(), descriptor]
    told = add(words)
    if (told[:, :_MACHINE_WORDS] != told[0, :_MACHINE_WORDS]).any():
        return _refused(rank, "the ranks are on several machines")
    *token_words, pid, descriptor_of_0 = told[0, _MACHINE_WORDS:]
    token = np.array(token_words, np.uint16).tobytes()
    if not rank.is_rank_0 and descriptor_of_0 >= 0:
        with contextlib.suppress(OSError, ValueError):
            memory = _attach(f"/proc/{int(pid)}/fd/{int(descriptor_of_0)}", size_bytes, token)
    num_sharing = add(np.array([memory is not None], np.float32))[0]
    if descriptor >= 0:
        os.close(descriptor)  # all others have opened it by now
    if num_sharing < rank.world_size:
        return _refused(rank, f"no {size_bytes / 2**30:.2f} GiB of shared memory")
    array = np.frombuffer(memory, np.uint8)
    array[: len(token)] = 0  # by every rank, before any of them may write anything else
    ready = np.ones(1, np.float32)
    add(ready)

    def wait() -> None:
        add(ready)

    return RankMemory(array, wait, rank)


class _AddOverRanks:
    """The sum over the ranks of a small array, in float32."""

    def __init__(self):
        class Add(nn.Cell):
            def __init__(self):
                super().__init__(auto_prefix=False)
                self.all_reduce = ops.AllReduce()

            def construct(self, value):
                return self.all_reduce(value)

        self._add = Add()

    def __call__(self, value: np.ndarray) -> np.ndarray:
        return self._add(ms.Tensor(value)).asnumpy()


def _allocate(size_bytes: int) -> tuple[mmap.mmap, int]:
    descriptor = os.memfd_create("mindrlhf-ranks", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, size_bytes)  # or memory that is missing would end the run by a signal
        return mmap.mmap(descriptor, size_bytes), descriptor
    except OSError:
        os.close(descriptor)
        raise


def _attach(path: str, size_bytes: int, token: bytes) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
    if memory[: len(token)] != token:
        raise ValueError(f"{path} is not the memory of rank 0")
    return memory


def _machine() -> bytes:
    """Return what is the same for processes that see each other in /proc, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    processes = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.blake2b(f"{boot} {processes}".encode(), digest_size=2 * _MACHINE_WORDS).digest()


def _refused(rank: Rank, reason: str) -> None:
    if rank.is_rank_0:
        print(f"mindrlhf: gradients are summed by collectives, and every rank keeps all moments: {reason}", flush=True)
