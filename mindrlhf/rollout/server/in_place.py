"""Loading weights into the live parameters: by vLLM's loaders once, and from then on by the copies that they made.

vLLM looks up the place of each tensor anew for every version. Of a small model that takes longer than to copy it. All
that its loaders do passes through PyTorch's dispatcher: where they do no more than copy views of the board's tensors,
which stay where they are, into parameters, these copies are all there is to do for the next version.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mindrlhf.rollout.server.needs import storage_of, tensors_in
from mindrlhf.weights.board import WeightBoard

_ATEN = torch.ops.aten
_SET_TO_CONSTANTS = (_ATEN.fill_.Scalar, _ATEN.zero_.default)


@dataclass(frozen=True)
class _Plan:
    """What there is to copy from a bucket of a board, and the names of the parameters that this loads, or None."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    names: set[str] | None


class InPlaceLoader:
    """Loads what a board has into a model whose layers derive nothing from their weights.

    Args:
        model: of vLLM; its parameters keep their memory.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._board: WeightBoard | None = None
        self._plans: dict[int, _Plan] = {}  # by bucket of that board

    def load(self, board: WeightBoard, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Load the bucket that the board has now.

        Args:
            tensors: names and views of the board's memory.

        Returns:
            The names of the parameters that were loaded; None where the model does not say.
        """
        if self._board is not board:
            self._board, self._plans = board, {}
        with torch.inference_mode():
            if plan := self._plans.get(board.bucket):
                torch._foreach_copy_(plan.targets, plan.sources)
                return plan.names
            given = list(tensors)
            with _CopyRecorder([tensor for _, tensor in given]) as recorder:
                names = self._model.load_weights(iter(given))
            if recorder.targets and recorder.saw_all(list(self._model.parameters())):
                self._plans[board.bucket] = _Plan(recorder.targets, recorder.sources, names)
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
        """Whether these copies, made again, load the same: into live parameters, where nothing came later."""
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
