"""What this package changes inside vLLM when it runs on a CPU, and nowhere else.

Everything here relies on internals of the versions in ``TESTED_VERSIONS``; with any other version the server uses
vLLM as it comes. Four changes are for every dtype: ``without_listeners`` for a server of one process,
``count_workers_as_devices`` for one over several nodes, ``do_without_lscpu``, and ``rotate_every_head``, without which
DeepSeek's attention is wrong. The others are for a server of one process (``supports``), each for speed:

1. In float32 linear weights stay plain matrices, which updates are copied into (``linear.py``).
2. RMSNorm uses vLLM's own C kernel, which it leaves to GPUs, in place of eight small torch calls.
3. Tokens are sampled by ``sampler.py``.
4. Attention layers are called as functions, not as registered torch operators.
5. Requests go to the engine core and come back from it without vLLM's text output layer; log-probabilities are taken
   where tokens are sampled.
6. Tokens are planned several at a time (``multi_step.py``), and dense models compute them without vLLM's layers
   (``dense.py``).
"""

import contextlib
import shutil
from collections.abc import Iterator

import torch
import torch.distributed
import vllm
from vllm import ir
from vllm.model_executor.layers import utils as linear_kernels
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.utils import cpu_resource_utils

from mindrlhf.cpu.rollout.linear import PlainLinear, Way, Ways

TESTED_VERSIONS = ("0.32.0",)
_DTYPES = ("float32", "bfloat16")
RMS_NORM_PROVIDER = "mindrlhf_cpu"
# vLLM 0.32 looks at it for models with latent attention only. Left to itself it takes, on a processor with AMX, kernels
# that refuse float32; these compute every dtype, on every processor.
LATENT_ATTENTION = "CPU_MLA"
_SILENT_BACKEND = torch.distributed.Backend.FAKE


def is_known() -> bool:
    """Whether this is vLLM for CPUs, in a version whose internals this module knows."""
    return vllm.__version__.split("+")[0] in TESTED_VERSIONS and current_platform.is_cpu()


def supports(dtype: str, tensor_parallel_size: int) -> bool:
    """Whether the changes for speed may be used."""
    return is_known() and dtype in _DTYPES and tensor_parallel_size == 1


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
    """Where there is no program ``lscpu``, which vLLM asks for the cores, number them as it does on other systems."""
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


def install_kernels() -> None:
    """Changes 1 and 2; to be called before the engine is built."""
    if RMS_NORM_PROVIDER in ir.ops.rms_norm.impls:
        return
    repack = linear_kernels.dispatch_cpu_unquantized_gemm
    ways = Ways()

    def keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.float32:
            repack(layer, remove_weight)
            return
        way = ways.of(layer, weight)
        if remove_weight and way is Way.COLUMNS:  # embeddings keep theirs, since rows are looked up in it
            # Column by column, which the BLAS prefers for few rows.
            weight.data = weight.data.t().contiguous().t()
        layer.cpu_linear = PlainLinear(weight.data, way)

    linear_kernels.dispatch_cpu_unquantized_gemm = keep_plain
    current_platform.import_kernels()

    def accepts(x, weight, epsilon, variance_size=None):
        return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()

    def accepts_residual(x, x_residual, weight, epsilon, variance_size=None):
        return accepts(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype

    @ir.ops.rms_norm.register_impl(RMS_NORM_PROVIDER, supports_args=accepts)
    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        output = torch.empty_like(x)
        torch.ops._C.rms_norm(output, x, weight, epsilon)
        return output

    @ir.ops.fused_add_rms_norm.register_impl(RMS_NORM_PROVIDER, supports_args=accepts_residual)
    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + x_residual
        output = torch.empty_like(total)
        torch.ops._C.rms_norm(output, total, weight, epsilon)
        return output, total


def call_attention_directly(model: torch.nn.Module) -> None:
    """Spare the attention layers their detour through a registered operator, which only graph capture needs."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.use_direct_call = True


def weights_are_plain(model: torch.nn.Module) -> bool:
    """Whether loading into the live parameters is all an update takes: no layer derives anything from its weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        plain = (
            method is None
            or isinstance(module, Attention)
            or (
                type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
                and isinstance(module.cpu_linear, PlainLinear)
                and module.cpu_linear.shares_memory(module.weight)
            )
        )
        if not plain:
            return False
    return True
