"""Engines that several tests share, since to compile their graphs takes seconds: put back instead of built anew."""

from typing import Any

import numpy as np


class Rewound:
    """Engines that can be put back to what they were when this was made.

    With them go their weights, gradients, moments, step count and rate, and the shapes that they have seen.
    """

    def __init__(self, *engines: Any):
        """``engines`` may be workers too, whose reference comes back with their engine."""
        self._owners = [(one, dict(vars(one))) for one in engines]
        self._engines = [getattr(one, "engine", one) for one in engines]
        self._attributes = [(dict(vars(engine)), set(engine._shapes_seen)) for engine in self._engines]
        held = [parameter for engine in self._engines for parameter in engine.state_parameters()]
        self._arrays = [(parameter, parameter.asnumpy().copy()) for parameter in held]

    def rewind(self) -> None:
        """Put everything back."""
        for one, attributes in self._owners:
            vars(one).update(attributes)
        for engine, (attributes, shapes) in zip(self._engines, self._attributes):
            vars(engine).clear()
            vars(engine).update(attributes)
            engine._shapes_seen = set(shapes)
            gradient = getattr(getattr(engine.model.graph, "token_logprobs", None), "weight_gradient", None)
            if gradient is not None:  # of the head, not yet collected
                gradient.fill(0.0)
        set_arrays(self._arrays)


def set_arrays(arrays) -> None:
    """Write values into parameters; a graph that is compiled goes on with them."""
    import mindspore as ms

    for parameter, array in arrays:
        parameter.set_data(ms.Tensor(array.copy()))
        np.testing.assert_array_equal(parameter.asnumpy(), array, err_msg=parameter.name)
