"""Both optimiser steps against AdamW in float64, written from Loshchilov and Hutter 2019 (arXiv:1711.05101), alg. 2."""

import functools

import numpy as np
import pytest
from rewound import set_arrays

from mindrlhf.config.training import OptimizerSection

pytestmark = pytest.mark.usefixtures("mindformers")

# The first is larger than a block of the host step, the last ones are not decayed.
SHAPES = {"matrix": (300, 250), "square": (3, 3), "norm": (250,), "bias": (1,)}
OPTIONS = OptimizerSection(start_lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
LEARNING_RATES = (1e-2, 3e-3, 0.0, 2e-2, 1e-3)


def draw_weights() -> dict[str, np.ndarray]:
    stream = np.random.default_rng(0)
    return {name: stream.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def draw_gradients(num_steps: int, scale: float) -> list[dict[str, np.ndarray]]:
    stream = np.random.default_rng(1)
    return [
        {name: (scale * stream.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
        for _ in range(num_steps)
    ]


class Float64AdamW:
    """The reference; gradients are clipped by their global norm first."""

    def __init__(self, options: OptimizerSection):
        self.options = options
        self.weights = {name: array.astype(np.float64) for name, array in draw_weights().items()}
        self.means = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.squares = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.num_steps = 0

    def step(self, gradients: dict[str, np.ndarray], lr: float) -> float:
        options = self.options
        norm = np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in gradients.values()))
        limit = options.max_grad_norm
        scale = limit / (norm + 1e-6) if 0 < limit < norm else 1.0
        self.num_steps += 1
        for name, gradient in gradients.items():
            gradient = gradient.astype(np.float64) * scale
            self.means[name] = options.beta1 * self.means[name] + (1 - options.beta1) * gradient
            self.squares[name] = options.beta2 * self.squares[name] + (1 - options.beta2) * gradient**2
            mean = self.means[name] / (1 - options.beta1**self.num_steps)
            square = self.squares[name] / (1 - options.beta2**self.num_steps)
            decay = options.weight_decay if len(SHAPES[name]) > 1 else 0.0
            self.weights[name] -= lr * (mean / (np.sqrt(square) + options.epsilon) + decay * self.weights[name])
        return norm


class Optimized:
    """Parameters, their optimiser and one of the two steps."""

    def __init__(self, kind: str, options: OptimizerSection):
        import mindspore as ms

        from mindrlhf.cpu.training.host_optimizer import HostOptimizerStep
        from mindrlhf.training.engine.cells import OptimizerStep, make_accumulators
        from mindrlhf.training.optimizers import make_optimizer

        weights = draw_weights()
        self.parameters = [ms.Parameter(ms.Tensor(weights[name]), name=name) for name in SHAPES]
        self.accumulators = make_accumulators(self.parameters)
        self.optimizer = make_optimizer(self.parameters, options, {})
        step = {"host": HostOptimizerStep, "graph": lambda *given: OptimizerStep(*given, 1)}[kind]
        self.run = step(self.optimizer, self.accumulators, options.max_grad_norm)
        held = {id(one): one for one in (*self.parameters, *self.accumulators, *self.optimizer.get_parameters())}
        self.start = [(one, one.asnumpy().copy()) for one in held.values()]

    def step(self, gradients: dict[str, np.ndarray], lr: float) -> float:
        import mindspore as ms

        for name, accumulator in zip(SHAPES, self.accumulators):
            accumulator.set_data(ms.Tensor(gradients[name]))
        self.optimizer.learning_rate.set_data(ms.Tensor(lr, ms.float32))
        return float(self.run())

    def state(self) -> list[np.ndarray]:
        optimizer = self.optimizer
        held = [*self.parameters, *optimizer.exp_avg, *optimizer.exp_avg_sq, optimizer.global_step]
        return [parameter.asnumpy() for parameter in [*held, *self.accumulators]]

    def arrays(self, parameters) -> dict[str, np.ndarray]:
        return {name: parameter.asnumpy() for name, parameter in zip(SHAPES, parameters)}


@functools.cache
def compiled(max_grad_norm: float) -> Optimized:
    return Optimized("graph", OptimizerSection(**{**vars(OPTIONS), "max_grad_norm": max_grad_norm}))


def begin(kind: str, max_grad_norm: float = OPTIONS.max_grad_norm) -> Optimized:
    """Return one as it is built; of a graph, which is compiled once, the same one again."""
    if kind == "host":
        return Optimized(kind, OptimizerSection(**{**vars(OPTIONS), "max_grad_norm": max_grad_norm}))
    set_arrays(compiled(max_grad_norm).start)
    return compiled(max_grad_norm)


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], what: str) -> None:
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-6, atol=1e-6, err_msg=f"{what} of {name}")


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0], ids=["clipped", "unclipped"])
@pytest.mark.parametrize("kind", ["host", "graph"])
def test_steps_equal_float64_adamw(kind, max_grad_norm):
    options = OptimizerSection(**{**vars(OPTIONS), "max_grad_norm": max_grad_norm})
    actual, expected = begin(kind, max_grad_norm), Float64AdamW(options)
    # A global norm of about 27, then one below 1: only the first is cut.
    for scale in (0.1, 1e-3):
        for gradients, lr in zip(draw_gradients(len(LEARNING_RATES), scale), LEARNING_RATES):
            norm = actual.step(gradients, lr)
            assert norm == pytest.approx(expected.step(gradients, lr), rel=1e-5)
            assert_close(actual.arrays(actual.parameters), expected.weights, "weights")
            for accumulator in actual.accumulators:
                assert not accumulator.asnumpy().any(), "accumulators are cleared"
    assert_close(actual.arrays(actual.optimizer.exp_avg), expected.means, "first moments")
    assert_close(actual.arrays(actual.optimizer.exp_avg_sq), expected.squares, "second moments")
    assert int(actual.optimizer.global_step.asnumpy()[0]) == expected.num_steps


def test_the_steps_can_take_turns():
    """The state of the one is the state of the other, so a checkpoint may move between devices."""
    from mindrlhf.cpu.training.host_optimizer import HostOptimizerStep

    mixed, host = begin("graph"), begin("host")
    graph, on_host = mixed.run, HostOptimizerStep(mixed.optimizer, mixed.accumulators, OPTIONS.max_grad_norm)
    try:
        for gradients, lr, step in zip(draw_gradients(4, 0.1), LEARNING_RATES, [on_host, graph, on_host, graph]):
            mixed.run = step
            assert mixed.step(gradients, lr) == pytest.approx(host.step(gradients, lr), rel=1e-5)
    finally:
        mixed.run = graph
    assert_close(mixed.arrays(mixed.parameters), host.arrays(host.parameters), "weights")


@pytest.mark.parametrize("kind", ["host", "graph"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_that_are_not_finite_are_as_if_they_had_never_been(kind, value):
    gradients = list(zip(draw_gradients(3, 0.1), LEARNING_RATES))
    plain, expected = begin(kind), []
    for arrays, lr in gradients:
        expected.append((plain.step(arrays, lr), [one.copy() for one in plain.state()]))
    disturbed = begin(kind)
    for number, ((arrays, lr), (norm, state)) in enumerate(zip(gradients, expected)):
        if number > 0:
            broken = {name: array.copy() for name, array in arrays.items()}
            broken["norm"][3] = value
            assert not np.isfinite(disturbed.step(broken, lr=0.5))
        assert disturbed.step(arrays, lr) == norm
        for one, other in zip(disturbed.state(), state, strict=True):
            np.testing.assert_array_equal(one, other)
