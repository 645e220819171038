"""The state of an optimiser as named arrays, and back."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mindrlhf.algorithms.optimizers import GLOBAL_STEP_NAME, optimizer_of
from mindrlhf.errors import UserError
from mindrlhf.weights.tensors import TensorInfo, array_infos

if TYPE_CHECKING:
    from mindspore import Parameter


class Optimizer(Protocol):
    """An optimizer with a state.

    Attributes:
        global_step: updates so far, int32 [1].
        state: all else, float32, by the names of :mod:`mindrlhf.algorithms.optimizers`.
    """

    global_step: "Parameter"
    state: "Mapping[str, Parameter]"


def optimizer_infos(optimizer: "Optimizer") -> list[TensorInfo]:
    """Describe what :func:`optimizer_arrays` yields, without touching data."""
    # MindSpore calls its types Float32, Int32: NumPy's names but for the capital.
    return [
        TensorInfo(name, str(parameter.dtype).lower(), tuple(parameter.shape))
        for name, parameter in optimizer_state(optimizer).items()
    ]


def optimizer_arrays(optimizer: "Optimizer") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the whole state of an optimiser, one array at a time.

    Yields:
        ``STATE.NAME``, float32 in the shape of parameter NAME, such as ``exp_avg.NAME`` and ``exp_avg_sq.NAME``, the
        moments m and v of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), and ``global_step``,
        int32 [1], its t. On CPU they are live views: write them before the next update. The learning rate, set anew
        for each update, is not among them.
    """
    for name, parameter in optimizer_state(optimizer).items():
        yield name, parameter.asnumpy()


def restore_optimizer(optimizer: "Optimizer", arrays: Mapping[str, np.ndarray]) -> None:
    """Give an optimiser over the same parameters the state that :func:`optimizer_arrays` yielded.

    Args:
        optimizer: takes the state.
        arrays: the state.

    Raises:
        UserError: it is of another optimiser, a name is missing or unknown, or a dtype or shape differs.
    """
    import mindspore as ms

    state = optimizer_state(optimizer)
    if (own := optimizer_of(state)) != (other := optimizer_of(arrays)):
        kinds = f"{other.title}'s, not {own.title}'s"
        raise UserError(f"the optimiser state is {kinds}: set optimizer.type to {other.name}")
    if missing := sorted(state.keys() - arrays.keys()):
        raise UserError(f"the optimiser state lacks {missing[0]!r} ({len(missing)} missing): it is of another model")
    if unknown := sorted(arrays.keys() - state.keys()):
        raise UserError(f"the optimiser state has {unknown[0]!r}, unknown to the model ({len(unknown)} such)")
    for info in optimizer_infos(optimizer):
        array = arrays[info.name]
        (found,) = array_infos({info.name: array})
        if found != info:
            raise UserError(
                f"the optimiser state {info.name!r} is {found.dtype} {list(found.shape)}, but the model needs "
                f"{info.dtype} {list(info.shape)}"
            )
        # The copy keeps the parameter from sharing memory with the caller's array.
        state[info.name].set_data(ms.Tensor(array.copy()))


def optimizer_state(optimizer: "Optimizer") -> dict[str, "Parameter"]:
    """Return the parameters that hold what :func:`optimizer_arrays` yields, by the same names."""
    return {GLOBAL_STEP_NAME: optimizer.global_step, **optimizer.state}
