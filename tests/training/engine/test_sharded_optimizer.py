"""AdamW whose update can be withheld: nothing changes where it is not made. Its numbers are in tests/cpu."""

import numpy as np
import pytest
from rewound import set_arrays

from mindrlhf.config.training import OptimizerSection

SHAPES = {"matrix": (8, 6), "vector": (6,)}


@pytest.fixture(scope="module")
def built(mindformers):
    """Return a function that makes a step and returns all that it may change, and what that is at first."""
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.training.optimizers import make_optimizer, optimizer_state

    class Step(nn.Cell):
        def __init__(self, optimizer):
            super().__init__(auto_prefix=False)
            self.optimizer = optimizer

        def construct(self, gradients, applies):
            return self.optimizer(gradients, ms.Tensor([1.0], ms.float32), applies)

    stream = np.random.default_rng(0)
    arrays = {name: stream.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    parameters = [ms.Parameter(ms.Tensor(array), name=name) for name, array in arrays.items()]
    optimizer = make_optimizer(parameters, OptimizerSection(weight_decay=0.1), {})
    cell = Step(optimizer)
    held = {**optimizer_state(optimizer), **{one.name: one for one in parameters}}

    def step(seed, applies=True):
        stream = np.random.default_rng(seed)
        gradients = tuple(ms.Tensor(stream.standard_normal(shape).astype(np.float32)) for shape in SHAPES.values())
        optimizer.learning_rate.set_data(ms.Tensor(0.01 * seed, ms.float32))
        cell(ms.mutable(gradients), ms.Tensor([float(applies)], ms.float32))
        return {name: one.asnumpy().copy() for name, one in held.items()}

    return step, [(one, one.asnumpy().copy()) for one in held.values()]


@pytest.fixture
def step(built):
    set_arrays(built[1])
    return built[0]


def test_an_update_that_is_withheld_changes_no_bit(step):
    before = step(1)
    for name, array in step(2, applies=False).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    after = step(3)
    assert after["global_step"] == before["global_step"] + 1
    assert np.abs(after["matrix"] - before["matrix"]).min() > 0


def test_the_first_update_may_be_withheld(step):
    first = step(1, applies=False)
    assert first["global_step"] == 0
    assert all(np.all(array == 0) for name, array in first.items() if name.startswith("exp_avg"))
    assert all(np.isfinite(array).all() for array in first.values())
