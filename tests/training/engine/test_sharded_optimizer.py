"""AdamW whose update can be withheld: MindFormers' numbers when it is made, nothing at all when it is not."""

import functools

import numpy as np
import pytest
from rewound import set_arrays

from mindrlhf.config.training import OptimizerSection

OPTIONS = OptimizerSection(weight_decay=0.1)
SHAPES = {"matrix": (8, 6), "vector": (6,)}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Return a function that returns a step of an optimiser as it is built, which gives all its state.

    The parameters of both kinds begin with equal values; each is compiled once.
    """
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.training.optimizers import make_optimizer, optimizer_state

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    from mindformers.core.optim.adamw import AdamW

    class Step(nn.Cell):
        def __init__(self, optimizer):
            super().__init__(auto_prefix=False)
            self.optimizer = optimizer

        def construct(self, gradients, applies):
            if applies is None:
                return self.optimizer(gradients)
            return self.optimizer(gradients, ms.Tensor([1.0], ms.float32), applies)

    @functools.cache
    def build(is_withholdable):
        random = np.random.default_rng(0)
        parameters = [
            ms.Parameter(ms.Tensor(random.standard_normal(shape).astype(np.float32)), name=name)
            for name, shape in SHAPES.items()
        ]
        if is_withholdable:
            optimizer = make_optimizer(parameters, OPTIONS, {})
        else:
            matrix, vector = parameters
            decayed = ((matrix, OPTIONS.weight_decay), (vector, 0.0))
            groups = [{"params": [one], "weight_decay": decay} for one, decay in decayed]
            groups.append({"order_params": parameters})
            betas = (OPTIONS.beta1, OPTIONS.beta2)
            optimizer = AdamW(groups, learning_rate=OPTIONS.start_lr, betas=betas, eps=OPTIONS.epsilon)
            kinds = {"exp_avg": optimizer.exp_avg, "exp_avg_sq": optimizer.exp_avg_sq}
            optimizer.state = {
                f"{kind}.{one.name}": state for kind, states in kinds.items() for one, state in zip(parameters, states)
            }
        cell = Step(optimizer)
        held = {id(one): one for one in (*parameters, *optimizer.get_parameters())}.values()
        start = [(one, one.asnumpy().copy()) for one in held]

        def step(seed, applies=True):
            random = np.random.default_rng(seed)
            gradients = tuple(ms.Tensor(random.standard_normal(shape).astype(np.float32)) for shape in SHAPES.values())
            optimizer.learning_rate.set_data(ms.Tensor(0.01 * seed, ms.float32))
            applied = ms.Tensor([float(applies)], ms.float32) if is_withholdable else None
            cell(ms.mutable(gradients), applied)
            state = {name: one.asnumpy().copy() for name, one in optimizer_state(optimizer).items()}
            return state | {one.name: one.asnumpy().copy() for one in parameters}

        return step, start

    def begin(is_withholdable):
        step, start = build(is_withholdable)
        set_arrays(start)
        return step

    return begin


def test_updates_are_those_of_mindformers(make):
    plain, withholdable = make(False), make(True)
    for seed in (1, 2, 3):
        expected, found = plain(seed), withholdable(seed)
        assert expected.keys() == found.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_an_update_that_is_withheld_changes_no_bit(make):
    step = make(True)
    before = step(1)
    for name, array in step(2, applies=False).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    after = step(3)
    assert after["global_step"] == before["global_step"] + 1
    assert np.abs(after["matrix"] - before["matrix"]).min() > 0


def test_the_first_update_may_be_withheld(make):
    first = make(True)(1, applies=False)
    assert first["global_step"] == 0
    assert all(np.all(array == 0) for name, array in first.items() if name.startswith("exp_avg"))
    assert all(np.isfinite(array).all() for array in first.values())
