"""The gated delta rule and its convolution on packed rows, against their definitions in float64."""

import numpy as np
import pytest
from delta_reference import last_ancestors, recurrent
from slow_tests import RUNS_SLOW_TESTS

pytestmark = pytest.mark.usefixtures("mindformers")

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
# Rows of segments: (number, the one that it continues, tokens). Those of a graph are of one length.
GRAPHS = {
    "segments": (
        False,
        [
            [(1, 1, 100), (2, 2, 28), (3, 3, 1), (4, 4, 2), (5, 5, 61), (6, 6, 44), (0, 0, 20)],
            [(1, 1, 200), (2, 2, 56)],
        ],
    ),
    # A prompt of one token leaves nothing to continue; one ends with a chunk; responses go over several chunks.
    "shared prompts": (
        True,
        [
            [(1, 1, 90), (2, 1, 50), (3, 1, 3), (4, 1, 70), (5, 5, 20), (6, 5, 10), (7, 5, 40), (9, 8, 17)],
            [(1, 0, 5), (2, 0, 50), (3, 3, 73), (4, 3, 100), (5, 3, 1), (6, 3, 71)],
        ],
    ),
}
# By day test_linear_attention.py has a row of a chunk and a token, and those above have chunks that are full and not.
if RUNS_SLOW_TESTS:
    GRAPHS |= {
        "one chunk": (False, [[(1, 1, 1), (2, 2, 63)], [(1, 1, 64)]]),
        "a chunk and a token": (False, [[(1, 1, 65)]]),
        "2,048 tokens": (True, [[(1, 1, 2048)], [(1, 1, 700), (2, 1, 900), (3, 1, 448)]]),
    }


def row_of(parts):
    segments = np.concatenate([[own] * size for own, _, size in parts]).astype(np.int32)
    return segments, np.concatenate([[other] * size for _, other, size in parts]).astype(np.int32)


def inputs_of(length, rng, scale=0.1, alike=False):
    """Queries, keys, values, log decays, rates and slopes of a row."""
    query, key = (rng.standard_normal((length, KEY_HEADS, KEY_DIM)) for _ in range(2))
    if alike:
        key = key[:1] + 0.05 * key
    query, key = (one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (query, key))
    value = rng.standard_normal((length, HEADS, VALUE_DIM))
    decay = -rng.exponential(scale, (length, HEADS))
    rate = rng.uniform(0.9 if alike else 0, 1, (length, HEADS))
    return query, key, value, decay, rate, rng.standard_normal(value.shape)


def with_gradients(cell, slopes, *inputs):
    """Outputs of a cell, and the gradients of its inputs, by one graph."""
    from mindspore import nn, ops

    class Step(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.outputs = cell
            self.gradient = ops.GradOperation(get_all=True, sens_param=True)

        def construct(self, slopes, *inputs):
            return self.outputs(*inputs), self.gradient(self.outputs)(*inputs, slopes)

    outputs, gradients = Step()(slopes, *inputs)
    return outputs.asnumpy(), [one.asnumpy() for one in gradients]


def computed(rows, segments, continued, shares):
    """Outputs and gradients of rows ``[B, S, ..]`` by the cells."""
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.models.gated_delta import Ancestors, GatedDeltaRule

    class Outputs(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.ancestors, self.rule = Ancestors(4), GatedDeltaRule()

        def construct(self, query, key, value, decay, rate, segments, continued):
            relations, _ = self.ancestors(segments, continued, shares)
            return self.rule(query, key, value, decay, rate, relations)[0]

    *inputs, slopes = (ms.Tensor(one.astype(np.float32)) for one in rows)
    outputs, gradients = with_gradients(Outputs(), slopes, *inputs, ms.Tensor(segments), ms.Tensor(continued))
    return outputs, gradients[:5]


def apart(found, expected):
    return np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)


def expected_of(row, segments, continued):
    query, key, value, decay, rate, slopes = row
    times = HEADS // KEY_HEADS
    repeated = [np.repeat(one, times, 1) for one in (query, key)]
    outputs, gradients = recurrent(*repeated, value, decay, rate, segments, continued, slopes)
    for place in (0, 1):
        gradients[place] = gradients[place].reshape(len(segments), KEY_HEADS, times, KEY_DIM).sum(2)
    return outputs, gradients


@pytest.mark.parametrize("name", GRAPHS)
def test_rows_are_those_of_the_recurrence(name):
    """Decays slow and fast by turns, and once neighbouring keys that are almost alike."""
    shares, rows = GRAPHS[name]
    laid = [row_of(parts) for parts in rows for _ in range(3)]
    kinds = [(0.01, False), (3.0, False), (1e-3, True)] * len(rows)
    drawn = [
        inputs_of(len(one[0]), np.random.default_rng(seed), *kind) for seed, (one, kind) in enumerate(zip(laid, kinds))
    ]
    batch = [np.stack(each) for each in zip(*drawn)]
    outputs, gradients = computed(batch, *(np.stack(each) for each in zip(*laid)), shares)
    for place, (row, ids) in enumerate(zip(drawn, laid)):
        expected, expected_gradients = expected_of(row, *ids)
        assert apart(outputs[place], expected) < 1e-5
        for found, exact in zip(gradients, expected_gradients, strict=True):
            assert apart(found[place], exact) < 1e-5


def test_slow_decays_keep_their_digits():
    import mindspore as ms

    from mindrlhf.models.gated_delta import softplus

    rows = np.linspace(-20, 10, 301, dtype=np.float32)
    found = softplus(ms.Tensor(rows)).asnumpy()
    # MindSpore's exponential on a CPU is up to 1e-5 off.
    np.testing.assert_allclose(found, np.logaddexp(0, rows.astype(np.float64)), rtol=2e-5, atol=0)


@pytest.mark.parametrize("shares", [False, True])
def test_a_convolution_sees_ancestors_alone(shares):
    import mindspore as ms
    from mindspore import nn

    from mindrlhf.models.gated_delta import Ancestors, CausalConvolution

    class Convolved(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.ancestors, self.convolution = Ancestors(4), CausalConvolution()

        def construct(self, rows, taps, segments, continued):
            return self.convolution(rows, taps, self.ancestors(segments, continued, shares)[1])

    rng = np.random.default_rng(0)
    laid = [row_of(parts) for parts in GRAPHS["shared prompts" if shares else "segments"][1]]
    segments, continued = (np.stack(each) for each in zip(*laid))
    length = segments.shape[1]
    rows, taps = rng.standard_normal((2, length, 5)), rng.standard_normal((5, 1, 4))
    slopes = rng.standard_normal(rows.shape)
    expected, drows, dtaps = np.zeros_like(rows), np.zeros_like(rows), np.zeros_like(taps)
    for row in range(2):
        places = last_ancestors(segments[row], continued[row], 3)
        for token in range(length):
            seen = [(token, 3), *((at - 1, 2 - back) for back, at in enumerate(places[token]) if at)]
            total = sum(rows[row, at] * taps[:, 0, tap] for at, tap in seen)
            share = 1 / (1 + np.exp(-total))
            expected[row, token] = total * share
            slope = slopes[row, token] * (share + total * share * (1 - share))
            for at, tap in seen:
                drows[row, at] += slope * taps[:, 0, tap]
                dtaps[:, 0, tap] += slope * rows[row, at]
    flat = [ms.Tensor(one.reshape(2 * length, 5).astype(np.float32)) for one in (rows, slopes)]
    inputs = (flat[0], ms.Tensor(taps.astype(np.float32)), ms.Tensor(segments), ms.Tensor(continued))
    outputs, gradients = with_gradients(Convolved(), flat[1], *inputs)
    assert apart(outputs.reshape(rows.shape), expected) < 1e-5
    assert apart(gradients[0].reshape(rows.shape), drows) < 1e-5
    assert apart(gradients[1], dtaps) < 1e-5
