"""Cells of the CPU decoder against NumPy; whole models are compared with transformers in test_causal_lm.py."""

import numpy as np


def test_axes_are_exchanged_and_gradients_are_exchanged_back():
    import mindspore as ms

    from mindrlhf.models.cpu_cells import ExchangeAxes

    stream = np.random.default_rng(0)
    values, weights = (stream.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 5, 4), (2, 5, 3, 4)))
    exchange = ExchangeAxes()

    def weighted_sum(x):
        return (exchange(x) * ms.Tensor(weights)).sum()

    assert np.array_equal(exchange(ms.Tensor(values)).asnumpy(), values.transpose(0, 2, 1, 3))
    gradient = ms.grad(weighted_sum)(ms.Tensor(values)).asnumpy()
    assert np.array_equal(gradient, weights.transpose(0, 2, 1, 3))
