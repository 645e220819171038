"""Fixes to vLLM on a CPU.

All of it relies on internals of version ``CPU_VLLM``; any other version is used as it comes.
"""

import contextlib
import shutil
from collections.abc import Iterator

import torch.distributed
import vllm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from mindrlhf.rollout.server import CPU_VLLM

# vLLM 0.32 looks at it for models with latent attention only. Left to itself it takes, on a processor with AMX, kernels
# that refuse float32; these compute every dtype, on every processor.
LATENT_ATTENTION = "CPU_MLA"
_SILENT_BACKEND = torch.distributed.Backend.FAKE


def is_known() -> bool:
    """Return True for a CPU build of vLLM in a version whose internals this module knows."""
    return vllm.__version__.split("+")[0] == CPU_VLLM and current_platform.is_cpu()


@contextlib.contextmanager
def without_listeners() -> Iterator[None]:
    """Keep the only process of a server from listening on TCP ports while its engine is built in the body.

    Each of the dozen process groups that vLLM makes is one of gloo, which listens on a port of 127.0.0.1 even when
    nobody else can be in the group. Torch's "fake" groups talk to nobody; in a group of one their collectives (each
    copies its input to its output) are right.
    """
    new_group = torch.distributed.new_group

    def new_group_of_one(ranks=None, timeout=None, backend=None, **options):  # as vLLM calls it
        return new_group(ranks, backend=_SILENT_BACKEND, **options)

    # vLLM takes the groups of a process that has them as they are.
    torch.distributed.init_process_group(_SILENT_BACKEND, rank=0, world_size=1)
    torch.distributed.new_group = new_group_of_one
    try:
        yield
    finally:
        torch.distributed.new_group = new_group


def do_without_lscpu() -> None:
    """Number cores without ``lscpu``, as vLLM does on other systems."""
    if is_known() and shutil.which("lscpu") is None:
        cpu_resource_utils._get_cpu_list = cpu_resource_utils._synthesize_cpu_list


def rotate_every_head() -> None:
    """Rotate queries and keys whose heads are an axis of their own, as DeepSeek's, with torch.

    The CPU kernel of vLLM 0.32 counts heads and tokens by the last axis and the one before it. So of `[tokens, heads,
    size]` it rotates one head for each token, by the position of another. (`[tokens, heads * size]` it gets right.)
    """
    kernel = RotaryEmbedding.forward_cpu
    if not is_known() or kernel.__module__ == __name__:
        return

    def forward_cpu(self, positions, query, key=None):  # as vLLM calls it
        has_heads = query.ndim > 2 or (key is not None and key.ndim > 2)
        return (self.forward_native if has_heads else kernel.__get__(self))(positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def count_workers_as_devices(num_workers: int) -> None:
    """Say that this node has a device for each worker of a server that lies over several nodes.

    By their number vLLM tells which workers share memory with the engine, and for it a CPU is one device.
    """
    if is_known():
        current_platform.device_count = lambda: num_workers
