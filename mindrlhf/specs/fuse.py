"""Fusion of the tensors of a `ParameterRule` into one MindFormers parameter, and its inverse (NumPy only).

The experts of a large model are gigabytes per layer, so both directions also exist as streams.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mindrlhf.specs import ModelDims, ParameterRule


def fuse(rule: ParameterRule, dims: ModelDims, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Hugging Face tensors, in the order of `rule.hf_names`, as one MindFormers array (a view when nothing moves)."""
    by_name = dict(zip(rule.hf_names, parts, strict=True))
    blocks = list(fuse_blocks(rule, dims, by_name.__getitem__))
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def fuse_blocks(rule: ParameterRule, dims: ModelDims, read: Callable[[str], np.ndarray]) -> Iterator[np.ndarray]:
    """The MindFormers array in pieces to be stacked along the first axis: one per expert, or the whole.

    Args:
        read: returns the Hugging Face tensor of a name; called once for each, when its piece is due.
    """
    per_block = len(rule.hf_names) // rule.num_experts
    for start in range(0, len(rule.hf_names), per_block):
        yield _FUSE[rule.transform](dims, [read(name) for name in rule.hf_names[start : start + per_block]])


def split(rule: ParameterRule, dims: ModelDims, fused: np.ndarray) -> list[np.ndarray]:
    """The inverse of `fuse`; every array is contiguous, and a view of `fused` when nothing moves."""
    return list(split_parts(rule, dims, fused))


def split_parts(rule: ParameterRule, dims: ModelDims, fused: np.ndarray) -> Iterator[np.ndarray]:
    """`split`, one array after the other."""
    if rule.transform == "stack":
        yield from np.split(fused, len(rule.hf_names))
        return
    for block in np.split(fused, rule.num_experts):
        yield from _SPLIT[rule.transform](dims, block)


def _fuse_groups(num_groups: int, parts: Sequence[np.ndarray]) -> np.ndarray:
    grouped = [part.reshape(num_groups, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(-1, *parts[0].shape[1:])


def _split_groups(num_rows: Sequence[int], fused: np.ndarray) -> Iterator[np.ndarray]:
    """The parts of groups that have ``num_rows`` of each."""
    grouped = fused.reshape(-1, sum(num_rows), *fused.shape[1:])
    for part in np.split(grouped, np.cumsum(num_rows)[:-1], axis=1):
        yield np.ascontiguousarray(part).reshape(-1, *fused.shape[1:])


def _split_qkv(dims: ModelDims, fused: np.ndarray) -> Iterator[np.ndarray]:
    return _split_groups((dims.query_rows, dims.head_dim, dims.head_dim), fused)


def _fuse_delta(dims: ModelDims, parts: Sequence[np.ndarray]) -> np.ndarray:
    linear = dims.linear
    return _fuse_groups(linear.key_heads, np.split(parts[0], (linear.key_size, 2 * linear.key_size)))


def _split_delta(dims: ModelDims, fused: np.ndarray) -> Iterator[np.ndarray]:
    yield np.concatenate(list(_split_groups(dims.linear.group_rows, fused)))


def _fuse_gate_up(_: ModelDims, parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


def _split_gate_up(_: ModelDims, fused: np.ndarray) -> Iterator[np.ndarray]:
    for offset in (0, 1):
        yield np.ascontiguousarray(fused[offset::2])


def _fuse_halves(dims: ModelDims, parts: Sequence[np.ndarray]) -> np.ndarray:
    return _fuse_gate_up(dims, np.split(parts[0], 2))


def _split_halves(dims: ModelDims, fused: np.ndarray) -> Iterator[np.ndarray]:
    yield np.concatenate(list(_split_gate_up(dims, fused)))


def _fuse_transposed(_: ModelDims, parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([part.T for part in parts], axis=1)


def _split_transposed(num_parts: int) -> Callable[[ModelDims, np.ndarray], Iterator[np.ndarray]]:
    return lambda _, fused: (np.ascontiguousarray(part.T) for part in np.split(fused, num_parts, axis=1))


_FUSE = {
    "copy": lambda _, parts: parts[0],
    "stack": lambda _, parts: np.concatenate(parts),
    "qkv": lambda dims, parts: _fuse_groups(dims.num_kv_heads, parts),
    "delta": _fuse_delta,
    "gate_up": _fuse_gate_up,
    "halves": _fuse_halves,
    "expert_gate_up": _fuse_transposed,
    "expert_down": _fuse_transposed,
}
_SPLIT = {
    "copy": lambda _, fused: [fused],
    "qkv": _split_qkv,
    "delta": _split_delta,
    "gate_up": _split_gate_up,
    "halves": _split_halves,
    "expert_gate_up": _split_transposed(2),
    "expert_down": _split_transposed(1),
}
