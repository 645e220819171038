"""Loading weights into the live parameters: by vLLM's loaders once, and from then on by the copies that they made.

vLLM looks up the place of each tensor anew for every version. Of a small model that takes longer than to copy it. All
that its loaders do passes through PyTorch's dispatcher: where they do no more than copy views of the buffer's tensors,
which stay where they are, into parameters, these copies are all there is to do for the next version.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindrlhf.cpu.rollout.linear import forget_copies
from mindrlhf.weights.publish.buffer import WeightBuffer

_ATEN = torch.ops.aten
_SET_TO_CONSTANTS = (_ATEN.fill_.Scalar, _ATEN.zero_.default)
_TURNED_AT_ONCE = 1 << 17  # elements: they stay in the cache


@dataclass(frozen=True)
class _Plan:
    """Return the copies to make from a bucket of a buffer, and the names of the parameters that this loads, or None."""

    copies: list[tuple[torch.Tensor, torch.Tensor]]  # target and source
    turned: list[tuple[torch.Tensor, torch.Tensor]]  # those for which ``_is_turned`` is true
    names: set[str] | None

    def run(self) -> None:
        """Make the copies, in any order: no two are into the same elements."""
        for target, source in self.turned:
            _turn(target, source)
        if self.copies:  # PyTorch takes no empty lists
            torch._foreach_copy_(*map(list, zip(*self.copies, strict=True)))


class InPlaceLoader:
    """Loads what a buffer has into a model whose layers derive nothing from their weights.

    Args:
        model: of vLLM; its parameters keep their memory.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._buffer: WeightBuffer | None = None
        self._plans: dict[int, _Plan] = {}  # by bucket of that buffer

    def load(self, buffer: WeightBuffer, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Load the bucket that the buffer has now.

        Args:
            tensors: names and views of the buffer's memory.

        Returns:
            The names of the parameters that were loaded; None where the model does not say.
        """
        if self._buffer is not buffer:
            self._buffer, self._plans = buffer, {}
        with torch.inference_mode():
            forget_copies(self._model)
            if plan := self._plans.get(buffer.bucket):
                plan.run()
                return plan.names
            given = list(tensors)
            with _CopyRecorder([tensor for _, tensor in given]) as recorder:
                names = self._model.load_weights(iter(given))
            if recorder.targets and recorder.saw_all(list(self._model.parameters())):
                pairs = list(zip(recorder.targets, recorder.sources, strict=True))
                copies, turned = ([pair for pair in pairs if _is_turned(*pair) == is_so] for is_so in (False, True))
                self._plans[buffer.bucket] = _Plan(copies, turned, names)
            return names


class _CopyRecorder(TorchDispatchMode):
    """Writes down where the elements of tensors are copied to."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.targets: list[torch.Tensor] = []
        self.sources: list[torch.Tensor] = []
        self._given = set(map(storage_of, tensors))
        self._is_all = True

    def saw_all(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether these copies, made again, load the same: into live parameters, where nothing came later."""
        live = set(map(storage_of, parameters))
        return (
            self._is_all
            and all(storage_of(target) in live for target in self.targets)
            and all(torch.equal(target, source.to(target.dtype)) for target, source in zip(self.targets, self.sources))
        )

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if function is _ATEN.copy_.default and storage_of(arguments[1]) in self._given:
            self.targets.append(arguments[0])
            self.sources.append(arguments[1])
        elif function._schema.is_mutable:
            # Padding is set once, and stays.
            self._is_all = self._is_all and function in _SET_TO_CONSTANTS
        else:
            # Views are made of them, and nothing is computed.
            read = self._given.intersection(map(storage_of, tensors_in((arguments, options))))
            self._is_all = self._is_all and read.issubset(map(storage_of, tensors_in(result)))
        return result


def _is_turned(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a large matrix that lies row by row is copied into one that lies column by column."""
    return (
        source.ndim == 2
        and source.dtype == target.dtype
        and source.numel() >= _TURNED_AT_ONCE
        and source.is_contiguous()
        and target.stride(0) == 1 < target.stride(1)
    )


def _turn(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy such a matrix by whole columns of some rows: element by element PyTorch takes three times as long."""
    num_rows = max(1, _TURNED_AT_ONCE // source.shape[1])
    scratch = torch.empty(num_rows * source.shape[1], dtype=source.dtype)
    for first in range(0, source.shape[0], num_rows):
        columns = source[first : first + num_rows].t()
        turned = scratch[: columns.numel()].view(columns.shape).copy_(columns)
        target[first : first + num_rows].t().copy_(turned)


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that tells a tensor's storage from all others that are there."""
    return tensor.untyped_storage()._cdata


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operator."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
