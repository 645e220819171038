"""Products with the weights of a server on a CPU, in float32.

vLLM repacks weights for oneDNN, which makes each weight update a rebuild of the model instead of a copy. Here they stay
plain matrices that updates are copied into, and each is multiplied in the way that is fastest for its size on this
processor (``Way``). Most of a product with few rows is reading the weight, and oneDNN reads a left operand once, as it
lies. So a large weight is made the left operand: (weight @ rows transposed) transposed. With 32 rows, one thread and an
Intel Xeon with AVX-512, 9728 x 896 takes 5.1 ms so, and 8.0 by MKL, which PyTorch calls.
"""

import enum
import functools
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from mindrlhf.cpu.processor import has_avx2, mkl_holds_back

# Multiplications of a product from which on oneDNN is worth its call, some 10 microseconds.
_SMALL_PRODUCT = 1 << 20
# Elements of a weight from which on a packed copy pays: where MKL holds back, and elsewhere.
_PACKS_FROM_HELD_BACK, _PACKS_FROM = 1 << 17, 1 << 20
# Elements of a weight from which on the left place pays, and how many it must have for each result: to transpose a
# result takes as long as some 100 multiplications.
_LEFT_FROM, _WIDE = 1 << 19, 512
# Rows up to which it pays; with more, the transposition costs what it saves, and oneDNN has the weight on the right.
FEW_ROWS = 96
# oneDNN compiles and keeps half a megabyte for each shape of a weight and number of rows. Up to so many rows each
# number has its own; above, up to so many, there are multiples of 8; above that, four numbers to each power of two.
_OWN_NUMBER, _IN_EIGHTS = 32, 128
# What the packed copies of a server may take; weights that come later stay plain.
MAX_PACKED_BYTES = 1 << 30
_PACKED_FOR_ROWS = 32

_has_avx2 = functools.cache(has_avx2)
_mkl_holds_back = functools.cache(mkl_holds_back)


class Way(enum.Enum):
    """Product of a weight with rows."""

    COLUMNS = enum.auto()  # PyTorch, large products oneDNN where MKL holds back; it lies column by column where it can
    PACKED = enum.auto()  # oneDNN, from a packed copy, made at the first product after an update
    LEFT = enum.auto()  # oneDNN, row by row as it lies, with few rows as the left operand


class PlainLinear:
    """Multiply by the live weight, taken as a plain tensor: vLLM's parameter classes slow each torch call down.

    Args:
        weight: float32 [out, in]; updates are copied into it.
        way: of multiplying it.
    """

    def __init__(self, weight: torch.Tensor, way: Way):
        self._weight, self._way = weight, way
        self._uses_onednn = way is not Way.COLUMNS or _mkl_holds_back()
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        bias = None if bias is None else bias.data
        if self._way is Way.LEFT and x.ndim == 2 and len(x) <= FEW_ROWS:
            result = self._from_the_left(x).contiguous()
            return result if bias is None else result.add_(bias)
        if self._way is Way.PACKED and self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, _PACKED_FOR_ROWS)
        if self._uses_onednn and (self._way is not Way.COLUMNS or x.numel() * len(self._weight) > _SMALL_PRODUCT):
            return _onednn(x, self._weight if self._packed is None else self._packed, bias)
        return torch.nn.functional.linear(x, self._weight, bias)

    def of_rows(self, bias: torch.Tensor | None, may_lie_by_columns: bool = False) -> Callable[..., torch.Tensor]:
        """Return what computes the same for rows [rows, in], with fewer calls on the way where it can be.

        Args:
            bias: float32 [out], or None.
            may_lie_by_columns: whether results [rows, out] may lie column by column, which saves copying them.
        """
        if self._way is Way.LEFT and bias is None and may_lie_by_columns:
            return lambda x: self._from_the_left(x) if len(x) <= FEW_ROWS else self(x, self._weight, None)
        if self._uses_onednn:
            return lambda x: self(x, self._weight, bias)
        turned = self._weight.t()
        if bias is None:
            return functools.partial(torch.mm, mat2=turned)
        return lambda x: torch.addmm(bias, x, turned)

    def _from_the_left(self, x: torch.Tensor) -> torch.Tensor:
        """Return products [rows, out], column by column, with x [rows, in]."""
        padded = _padded(x)
        product = torch.ops.mkldnn._linear_pointwise.default(self._weight, padded, None, "none", [], "")
        return (product if padded is x else product[:, : len(x)]).t()

    def shares_memory(self, weight: torch.Tensor) -> bool:
        return self._weight.data_ptr() == weight.data_ptr()

    def forget_copy(self) -> None:
        """To be called when the weight has changed."""
        self._packed = None


def kept_rows(num_rows: int) -> int:
    """Return the number of rows, at least so many, for which oneDNN compiles: one of 64 up to 4,096.

    What a server reads in one pass, tokens of prompts and of samples together, has any number of rows, and each would
    have kernels of its own: gigabytes after some hundred evaluations of a small model.
    """
    if num_rows <= _OWN_NUMBER:
        return num_rows
    step = 8 if num_rows <= _IN_EIGHTS else 1 << (num_rows - 1).bit_length() - 3
    return -(-num_rows // step) * step


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [n, in], followed by as many of the first ones again as ``kept_rows`` asks for."""
    num_more = kept_rows(len(rows)) - len(rows)
    return torch.cat((rows, rows[:num_more])) if num_more else rows


def _onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x [..., in] @ weight [out, in] transposed + bias [out].

    A row's results have the same bits without the rows that are added. (Of a row alone oneDNN adds up in another order:
    that is not padded.)
    """
    if x.ndim != 2:
        return _onednn(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)
    padded = _padded(x)
    products = torch.ops.mkldnn._linear_pointwise.default(padded, weight, bias, "none", [], "")
    return products if padded is x else products[: len(x)]


class Ways:
    """In which way each layer of a server multiplies.

    Where MKL does not use all of the processor, large weights have packed copies while there is room. Elsewhere they
    take the left place, and only narrow ones have copies, as the head of a small model with many words. It stays so for
    as long as a layer lives, however often vLLM sets its kernel up.
    """

    def __init__(self) -> None:
        self._chosen: WeakKeyDictionary[torch.nn.Module, Way] = WeakKeyDictionary()
        self._num_bytes = 0

    def of(self, layer: torch.nn.Module, weight: torch.Tensor) -> Way:
        """Decide it for a layer, or say what was decided."""
        if layer not in self._chosen:
            way = self._decide(weight)
            self._chosen[layer] = way
            self._num_bytes += weight.nbytes if way is Way.PACKED else 0
        return self._chosen[layer]

    def _decide(self, weight: torch.Tensor) -> Way:
        holds_back = _mkl_holds_back()
        if not holds_back and _has_avx2() and weight.numel() >= _LEFT_FROM and weight.shape[1] >= _WIDE:
            return Way.LEFT
        is_large = weight.numel() >= (_PACKS_FROM_HELD_BACK if holds_back else _PACKS_FROM)
        fits = self._num_bytes + weight.nbytes <= MAX_PACKED_BYTES
        return Way.PACKED if _has_avx2() and is_large and fits else Way.COLUMNS


def forget_copies(model: torch.nn.Module) -> None:
    """To be called when the weights of ``model`` have changed."""
    for module in model.modules():
        kernel = getattr(module, "cpu_linear", None)
        if isinstance(kernel, PlainLinear):
            kernel.forget_copy()
