"""Products with the weights of a server on a CPU, in float32.

vLLM repacks weights for oneDNN, which makes each weight update a rebuild of the model instead of a copy. Here they stay
plain matrices that updates are copied into. Where oneDNN is the faster library, it multiplies large weights as it likes
them best, from a packed copy that is made at the first product after an update: with 32 rows, one thread and a Zen 4,
512 x 2048 takes 0.70 ms, 0.99 from the plain matrix, and 1.06 by MKL.
"""

import functools
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from mindrlhf.system.processor import mkl_holds_back

# Multiplications of a product from which on oneDNN is worth its call, some 10 microseconds.
_SMALL_PRODUCT = 1 << 20
# Elements of a weight from which on a packed copy pays.
_SMALL_WEIGHT = 1 << 17
# What the packed copies of a server may take; weights that come later stay plain.
MAX_PACKED_BYTES = 1 << 30
_PACKED_FOR_ROWS = 32

_mkl_holds_back = functools.cache(mkl_holds_back)


class PlainLinear:
    """Multiply by the live weight, taken as a plain tensor: vLLM's parameter classes slow each torch call down.

    Args:
        weight: float32 [out, in]; updates are copied into it.
        packs: whether it is multiplied from a packed copy.
    """

    def __init__(self, weight: torch.Tensor, packs: bool):
        self._weight = weight
        self._onednn = torch.ops.mkldnn._linear_pointwise.default if _mkl_holds_back() else None
        self._packs = packs
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = None if bias is None else bias.data
        if self._packs:
            if self._packed is None:
                self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACKED_FOR_ROWS)
            return self._onednn(x, self._packed, bias, "none", [], "")
        if self._onednn is not None and x.numel() * self._weight.shape[0] > _SMALL_PRODUCT:
            return self._onednn(x, self._weight, bias, "none", [], "")
        return torch.nn.functional.linear(x, self._weight, bias)

    def of_rows(self, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what computes the same for rows [rows, in], with fewer calls on the way where it can be."""
        if self._packs or self._onednn is not None:
            return lambda x: self(x, self._weight, bias)
        turned = self._weight.t()
        if bias is None:
            return functools.partial(torch.mm, mat2=turned)
        return lambda x: torch.addmm(bias, x, turned)

    def shares_memory(self, weight: torch.Tensor) -> bool:
        return self._weight.data_ptr() == weight.data_ptr()

    def forget_copy(self) -> None:
        """To be called when the weight has changed."""
        self._packed = None


class PackedCopies:
    """Which layers of a server multiply from a packed copy: those with large weights, while there is room.

    It stays so for as long as a layer lives, however often vLLM sets its kernel up.
    """

    def __init__(self) -> None:
        self._chosen: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
        self._num_bytes = 0

    def wants(self, layer: torch.nn.Module, weight: torch.Tensor) -> bool:
        """Decide it for a layer, or say what was decided."""
        if layer not in self._chosen:
            fits = self._num_bytes + weight.nbytes <= MAX_PACKED_BYTES
            packs = fits and _mkl_holds_back() and weight.numel() >= _SMALL_WEIGHT
            self._chosen[layer] = packs
            self._num_bytes += packs * weight.nbytes
        return self._chosen[layer]


def forget_copies(model: torch.nn.Module) -> None:
    """To be called when the weights of ``model`` have changed."""
    for module in model.modules():
        kernel = getattr(module, "cpu_linear", None)
        if isinstance(kernel, PlainLinear):
            kernel.forget_copy()
