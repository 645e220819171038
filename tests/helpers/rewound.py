"""Learners that several tests share, since to compile their graphs takes seconds: put back instead of built anew."""

from typing import Any

import numpy as np


class Rewound:
    """Learners that can be put back to what they were when this was made.

    With them go their weights, gradients, moments, step count and rate, and the shapes that they have seen.
    """

    def __init__(self, *learners: Any):
        self._attributes = [(learner, dict(vars(learner)), set(learner._shapes_seen)) for learner in learners]
        held = [parameter for learner in learners for parameter in learner.state_parameters()]
        self._arrays = [(parameter, parameter.asnumpy().copy()) for parameter in held]

    def rewind(self) -> None:
        """Put everything back."""
        for learner, attributes, shapes in self._attributes:
            vars(learner).clear()
            vars(learner).update(attributes, _shapes_seen=set(shapes))
            gradient = getattr(getattr(learner.policy, "token_logprobs", None), "weight_gradient", None)
            if gradient is not None:  # of the head, not yet collected
                gradient.fill(0.0)
        set_arrays(self._arrays)


def set_arrays(arrays) -> None:
    """Write values into parameters; a graph that is compiled goes on with them."""
    import mindspore as ms

    for parameter, array in arrays:
        parameter.set_data(ms.Tensor(array.copy()))
        np.testing.assert_array_equal(parameter.asnumpy(), array, err_msg=parameter.name)
