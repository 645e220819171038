"""The slices of full tensors that a vLLM worker reads, learnt by tracing vLLM's own loaders once.

The loaders get tensors without memory ("meta" tensors of PyTorch, which have sizes, strides and storages but no
values), and put them into parameters without memory. All that they do passes through PyTorch's dispatcher: slicing,
narrowing and reshaping make views, whose storage says of which tensor and whose offset and strides of which elements;
what a view is copied from is read. Where a loader computes something else of a tensor, all of it counts as read.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta, to_meta_tensor

from mindrlhf.weights.publish.slices import TensorSlice, merge_slices
from mindrlhf.weights.tensors import TensorInfo

_logger = logging.getLogger(__name__)
_ATEN = torch.ops.aten
# They make a copy of the elements of a view, and read no others.
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
# A view of more slices counts as the whole tensor.
_MAX_SLICES = 64


def trace_reads(
    load: Callable[[Iterator[tuple[str, torch.Tensor]]], Any],
    infos: Sequence[TensorInfo],
    parameters: Mapping[str, torch.Tensor],
) -> dict[str, list[TensorSlice] | None]:
    """Return what a loader reads of each tensor.

    Args:
        load: takes names and tensors, and may return the names of the parameters that it loaded.
        infos: the tensors.
        parameters: by name, what they are loaded into; without memory, see :func:`without_memory`.

    Returns:
        By tensor, disjoint slices: none of a tensor that is skipped. None where all of it must
        be taken for read: the loader computes of it or keeps it, or the elements are no slices. So it is with every
        tensor where the loader cannot do without values.
    """
    recorder = _ReadRecorder(infos)
    try:
        # In inference mode, reshaping and converting would pass as they are, and not as views and copies.
        with recorder, torch.inference_mode(False), torch.no_grad():
            loaded = load(recorder.feed()) or ()
        unseen = [name for name in loaded if name in parameters and not recorder.has_filled(parameters[name])]
        if unseen:
            raise RuntimeError(f"nobody saw how {unseen[0]} was loaded")
    except Exception as error:
        _logger.warning("the parts of the weights that this worker reads are not known, so it gets all: %s", error)
        return {info.name: None for info in infos}
    return recorder.reads()


@contextlib.contextmanager
def without_memory(model: torch.nn.Module) -> Iterator[None]:
    """Have a model with the parameters that its loaders fill, without memory, and then with its own as they were.

    Setting up its kernels may have given it others than these; vLLM keeps a record of them, to reload weights.
    """
    before = []
    for layer in model.modules():
        containers = (layer._parameters, layer._buffers, layer._non_persistent_buffers_set)
        before.append((layer, dict(layer.__dict__), [(container, container.copy()) for container in containers]))
    try:
        for layer, _, _ in before:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for name, parameter in layer._parameters.items():
                if parameter is not None:
                    layer._parameters[name] = _loadable(parameter)
        yield
    finally:
        for layer, attributes, containers in before:
            layer.__dict__.clear()
            layer.__dict__.update(attributes)
            for container, items in containers:
                container.clear()
                container.update(items)


def _loadable(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter without memory for one of vLLM's record, or for one that its reload fills in place."""
    copy = to_meta_tensor(parameter)
    if hasattr(copy, "weight_loader"):
        # A reload puts loaders of its own around those of the record, which do nothing after it.
        copy.weight_loader = _get_original_loader(copy)
    return copy


class _ReadRecorder(TorchDispatchMode):
    """Watches what is done with the tensors that it feeds."""

    def __init__(self, infos: Sequence[TensorInfo]) -> None:
        super().__init__()
        self._infos = infos
        self._info_of: dict[int, TensorInfo] = {}  # by storage
        # As long as they are there, no other storage gets the same address.
        self._storages: dict[str, StorageWeakRef] = {}
        self._slices: dict[str, list[TensorSlice]] = {info.name: [] for info in infos}
        self._whole: set[str] = set()
        self._filled: set[int] = set()  # storages

    def feed(self) -> Iterator[tuple[str, torch.Tensor]]:
        for info in self._infos:
            tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")
            self._info_of[storage_of(tensor)] = info
            self._storages[info.name] = StorageWeakRef(tensor.untyped_storage())
            yield info.name, tensor
            del tensor

    def has_filled(self, parameter: torch.Tensor) -> bool:
        return storage_of(parameter) in self._filled

    def reads(self) -> dict[str, list[TensorSlice] | None]:
        # Whoever still holds a tensor may read it later.
        kept = {name for name, storage in self._storages.items() if not storage.expired()}
        whole = self._whole | kept
        return {name: None if name in whole else merge_slices(slices) for name, slices in self._slices.items()}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        if function is _ATEN.copy_.default:
            target, source = arguments[:2]
            self._read_whole(target)
            self._read(source)
            self._filled.add(storage_of(target))
            if source.is_meta and not target.is_meta:
                raise TypeError(f"a tensor {tuple(source.shape)} is loaded into one that has memory")
            return function(*arguments, **options)
        result = function(*arguments, **options)
        made = set(map(storage_of, tensors_in(result)))
        for tensor in tensors_in((arguments, options)):
            if function._schema.is_mutable:
                self._filled.add(storage_of(tensor))
            if function in _COPIES:
                self._read(tensor)
            elif function._schema.is_mutable or storage_of(tensor) not in made:
                self._read_whole(tensor)
        return result

    def _read(self, tensor: torch.Tensor) -> None:
        info = self._info_of.get(storage_of(tensor))
        if info is None:
            return
        slices = None
        if tensor.dtype == getattr(torch, info.dtype):
            slices = slices_of_view(info.shape, tensor.storage_offset(), tensor.shape, tensor.stride())
        if slices is None:
            self._whole.add(info.name)
        else:
            self._slices[info.name] += slices

    def _read_whole(self, tensor: torch.Tensor) -> None:
        info = self._info_of.get(storage_of(tensor))
        if info is not None:
            self._whole.add(info.name)


def slices_of_view(
    shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]
) -> list[TensorSlice] | None:
    """Return the slices of a tensor that a view of it shows; None where they are too many, or it shows no slices.

    Args:
        shape: of the tensor, whose elements lie in C order.
        offset, sizes, strides: of the view, in elements.
    """
    if 0 in sizes:
        return []
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    firsts = [offset // step % size for step, size in zip(steps, shape)]
    lasts, walks = list(firsts), [[] for _ in shape]  # along each axis of the tensor
    for size, stride in zip(sizes, strides):
        while size > 1 and stride:
            axis = next(axis for axis, step in enumerate(steps) if step <= stride and shape[axis] > 1)
            along, number = stride // steps[axis], size
            if lasts[axis] + (size - 1) * along >= shape[axis]:
                # Flattened axes: it goes through all of this one, and on along the one before.
                number = shape[axis] // along
                if axis == 0 or number < 2 or number * along != shape[axis] or size % number:
                    return None
            if stride % steps[axis]:
                return None
            walks[axis].append((along, number))
            lasts[axis] += (number - 1) * along
            size, stride = size // number, steps[axis] * shape[axis]
    if any(last >= size for last, size in zip(lasts, shape)):
        return None
    runs = [_runs(first, walk) for first, walk in zip(firsts, walks)]
    if None in runs or math.prod(map(len, runs)) > _MAX_SLICES:
        return None
    return list(itertools.product(*runs))


def _runs(first: int, walks: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return (start, stop) of the stretches of an axis that are shown; None where they are too many.

    Args:
        first: the first place.
        walks: (stride, number) of the axes of the view that go along it.
    """
    runs = [(first, first + 1)]
    for stride, number in sorted(walks):
        start, stop = runs[0]
        if len(runs) == 1 and stop - start >= stride:
            runs = [(start, stop + (number - 1) * stride)]
        elif len(runs) * number > _MAX_SLICES:
            return None
        else:
            runs = [(start + n * stride, stop + n * stride) for n in range(number) for start, stop in runs]
    return [run for (run,) in merge_slices((run,) for run in runs)]


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number that tells a tensor's storage from all others that are there."""
    return tensor.untyped_storage()._cdata


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operator."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
