"""The state of MindFormers' AdamW as named arrays, and back; also of others with its attributes.

Moments may be plain NumPy arrays instead of MindSpore parameters: those that ranks share are.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.weights.tensors import TensorInfo, array_infos

if TYPE_CHECKING:
    from mindformers.core.optim.adamw import AdamW
    from mindspore import Parameter

GLOBAL_STEP_NAME = "global_step"


def optimizer_infos(optimizer: "AdamW") -> list[TensorInfo]:
    """Describe what :func:`optimizer_arrays` yields, without touching data."""
    # MindSpore calls its types Float32, Int32: NumPy's names but for the capital.
    return [
        TensorInfo(name, str(parameter.dtype).lower(), tuple(parameter.shape))
        for name, parameter in optimizer_state(optimizer).items()
    ]


def optimizer_arrays(optimizer: "AdamW") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the whole state of an optimiser, one array at a time.

    Yields:
        ``exp_avg.NAME`` and ``exp_avg_sq.NAME``, float32 in the shape of parameter NAME, the moments m and v of
        AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2), and ``global_step``, int32 [1], its t. On
        CPU they are live views: write them before the next update. The learning rate, set anew for each update, is
        not among them.
    """
    for name, parameter in optimizer_state(optimizer).items():
        yield name, parameter if isinstance(parameter, np.ndarray) else parameter.asnumpy()


def restore_optimizer(optimizer: "AdamW", arrays: Mapping[str, np.ndarray], *, writes_moments: bool = True) -> None:
    """Give an optimiser over the same parameters the state that :func:`optimizer_arrays` yielded.

    Args:
        optimizer: takes the state.
        arrays: the state.
        writes_moments: False leaves the moments to another process, with which this one shares them.

    Raises:
        UserError: a name is missing or unknown, or a dtype or shape differs.
    """
    import mindspore as ms

    state = optimizer_state(optimizer)
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
        target = state[info.name]
        if not isinstance(target, np.ndarray):
            # The copy keeps the parameter from sharing memory with the caller's array.
            target.set_data(ms.Tensor(array.copy()))
        elif writes_moments:
            target[...] = array


def optimizer_state(optimizer: "AdamW") -> dict[str, "Parameter | np.ndarray"]:
    """Return the parameters or arrays that hold what :func:`optimizer_arrays` yields, by the same names."""
    state = {GLOBAL_STEP_NAME: optimizer.global_step}
    for parameter, mean, square in zip(optimizer.parameters, optimizer.exp_avg, optimizer.exp_avg_sq, strict=True):
        state[f"exp_avg.{parameter.name}"] = mean
        state[f"exp_avg_sq.{parameter.name}"] = square
    assert len(state) == 1 + 2 * len(optimizer.parameters), "two trained parameters have the same name"
    return state
