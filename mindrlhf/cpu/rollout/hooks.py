"""Hooks of a rollout server: see :func:`mindrlhf.system.speed_ups.of_server`. Loading this loads no vLLM."""

from typing import TYPE_CHECKING

from mindrlhf.cpu.rollout.lean_imports import lean_imports

if TYPE_CHECKING:
    import torch

    from mindrlhf.cpu.rollout.engine import CpuEngine
    from mindrlhf.cpu.rollout.in_place import InPlaceLoader

__all__ = ["find_engine", "lean_imports", "make_loader"]

_DTYPES = ("float32", "bfloat16")


def find_engine(dtype: str, tensor_parallel_size: int) -> "type[CpuEngine] | None":
    """Return what takes the place of :class:`mindrlhf.rollout.server.engine.VllmEngine`; None where nothing may."""
    from mindrlhf.rollout.server import cpu

    if not cpu.is_known() or dtype not in _DTYPES or tensor_parallel_size != 1:
        return None
    from mindrlhf.cpu.rollout.engine import CpuEngine

    return CpuEngine


def make_loader(model: "torch.nn.Module") -> "InPlaceLoader":
    """Return what loads weights into the model of such an engine, whose ``_weights_load_in_place`` is true."""
    from mindrlhf.cpu.rollout.in_place import InPlaceLoader

    return InPlaceLoader(model)
