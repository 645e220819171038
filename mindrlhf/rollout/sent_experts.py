"""The experts of sampled tokens as the arrays of a message. For both interpreters: NumPy and nothing else."""

from collections.abc import Mapping, Sequence

import numpy as np


def experts_dtype(num_experts: int) -> type[np.unsignedinteger]:
    """The smallest that also has a number which is no expert's: its largest says that the router is to choose."""
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16


def pack_experts(experts: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    """Return the arrays of what each completion brings (see ``Completion``): none when none brings any."""
    if not experts or experts[0] is None:
        return {}
    return {
        "experts": np.concatenate(experts),
        "expert_lengths": np.array([len(one) for one in experts], np.int32),
    }


def unpack_experts(arrays: Mapping[str, np.ndarray], num_completions: int) -> list[np.ndarray | None]:
    """Return what :func:`pack_experts` was given."""
    if "experts" not in arrays:
        return [None] * num_completions
    return np.split(arrays["experts"], np.cumsum(arrays["expert_lengths"])[:-1])
