"""Kernels of vLLM on a CPU that others take the place of, in a server of one process.

1. In float32 linear weights stay plain matrices, which updates are copied into (``linear.py``).
2. RMSNorm uses vLLM's own C kernel, which it leaves to GPUs, in place of eight small torch calls.
3. Attention layers are called as functions, not as registered torch operators.
"""

import torch
from vllm import ir
from vllm.model_executor.layers import utils as linear_kernels
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from mindrlhf.cpu.rollout.linear import PlainLinear, Way, Ways

RMS_NORM_PROVIDER = "mindrlhf_cpu"


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
    """Return whether an update only loads live parameters: no layer derives anything from its weights."""
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
