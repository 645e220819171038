"""How the tensors of a `ParameterRule` are fused into one MindFormers parameter and split again (NumPy only)."""

from collections.abc import Sequence

import numpy as np

from mindrlhf.models.spec import ModelDims, ParameterRule


def fuse(rule: ParameterRule, dims: ModelDims, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Hugging Face tensors, in the order of `rule.hf_names`, as one MindFormers array (a view when nothing moves)."""
    return _FUSE[rule.transform](dims, parts)


def split(rule: ParameterRule, dims: ModelDims, fused: np.ndarray) -> list[np.ndarray]:
    """The inverse of `fuse`; every array is contiguous, and a view of `fused` when nothing moves."""
    return _SPLIT[rule.transform](dims, fused)


def _fuse_qkv(dims: ModelDims, parts: Sequence[np.ndarray]) -> np.ndarray:
    grouped = [part.reshape(dims.num_kv_heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:])


def _split_qkv(dims: ModelDims, fused: np.ndarray) -> list[np.ndarray]:
    grouped = fused.reshape(dims.num_kv_heads, -1, *fused.shape[1:])
    num_queries = dims.heads_per_group * dims.head_dim
    bounds = ((0, num_queries), (num_queries, num_queries + dims.head_dim), (num_queries + dims.head_dim, None))
    return [np.ascontiguousarray(grouped[:, slice(*bound)]).reshape(-1, *fused.shape[1:]) for bound in bounds]


def _fuse_gate_up(_: ModelDims, parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


def _split_gate_up(_: ModelDims, fused: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(fused[offset::2]) for offset in (0, 1)]


_FUSE = {"copy": lambda _, parts: parts[0], "qkv": _fuse_qkv, "gate_up": _fuse_gate_up}
_SPLIT = {"copy": lambda _, fused: [fused], "qkv": _split_qkv, "gate_up": _split_gate_up}
