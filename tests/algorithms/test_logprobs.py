"""The two forms of the log-probability cell against each other and against full float64 logits."""

import functools
import types

import numpy as np
import pytest
import vocabulary_reference as reference
from head_hooks import bind, collect_weight_gradient, graph_parameters

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 7, 5, 40
DEVICES = ("cpu", "ascend")  # tiled kernels; plain operators, which run on the CPU as well


def make_policy(device: str, temperature: float, tied: bool = False):
    """A policy whose hidden states are rows of an embedding, so that their gradients can be read off it."""
    import mindspore as ms
    from mindspore import nn, ops

    from mindrlhf.algorithms.logprobs import PolicyLogProbs

    stream = np.random.default_rng(7)

    class Embedding(nn.Cell):
        def __init__(self):
            super().__init__()
            shape = (VOCABULARY, WIDTH)
            self.table = ms.Parameter(stream.standard_normal(shape).astype(np.float32), name="table")
            self.head = ms.Parameter(stream.standard_normal(shape).astype(np.float32), name="head")
            self.head_weight = self.table if tied else self.head
            self.dims = types.SimpleNamespace(tied=tied)
            self.splits = (1, 1, 1)

        def construct(self, input_ids, segment_ids):
            return ops.gather(self.table, input_ids, 0)

    return PolicyLogProbs(Embedding(), temperature, device)


def draw():
    stream = np.random.default_rng(3)
    input_ids = stream.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    labels = stream.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    mask = (stream.random((ROWS, LENGTH)) < 0.6).astype(np.float32)
    mask[-1] = 0
    weights = stream.standard_normal((2, ROWS, LENGTH)).astype(np.float32)
    return input_ids, labels, mask, weights


@functools.cache
def shared_policy(device: str, temperature: float, tied: bool):
    """A policy that no test changes, so that its graph is compiled once."""
    return make_policy(device, temperature, tied)


@functools.cache
def gradients_of(policy):
    """A cell that returns log-probs, entropies and the gradients of their weighted sum."""
    import mindspore as ms
    from mindspore import nn, ops

    class WeightedSum(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.policy = policy

        def construct(self, input_ids, segment_ids, labels, mask, first, second):
            logprobs, entropy = self.policy(input_ids, segment_ids, labels, mask)
            return (logprobs * first + entropy * second).sum(), logprobs, entropy

    class Gradients(nn.Cell):
        def __init__(self, parameters):
            super().__init__(auto_prefix=False)
            self.function = ops.value_and_grad(WeightedSum(), None, parameters, has_aux=True)

        def construct(self, *inputs):
            return self.function(*inputs)

    return Gradients(ms.ParameterTuple(graph_parameters(policy)))


def run(policy, input_ids, labels, mask, weights):
    """Return log-probs, entropies and the gradients, by parameter name, of their sum weighted by ``weights``."""
    import mindspore as ms

    arrays = (input_ids, np.ones_like(input_ids), labels, mask, *weights)
    bind(policy)
    (_, logprobs, entropy), slopes = gradients_of(policy)(*map(ms.Tensor, arrays))
    parameters = graph_parameters(policy)
    gradients = {one.name: slope.asnumpy().copy() for one, slope in zip(parameters, slopes, strict=True)}
    head = policy.model.head_weight.name
    outside = np.zeros((VOCABULARY, WIDTH), np.float32)
    collect_weight_gradient(policy, outside)
    gradients[head] = gradients.get(head, 0.0) + outside
    return logprobs.asnumpy(), entropy.asnumpy(), gradients


def expected(policy, input_ids, labels, mask, weights, temperature):
    table, head = policy.model.table.asnumpy(), policy.model.head_weight.asnumpy()
    hidden = table[input_ids.reshape(-1)].astype(np.float64) / temperature
    flat = (hidden, head, labels.reshape(-1), mask.reshape(-1))
    logprobs, entropy, _ = reference.forward(*flat)
    grad_hidden, grad_head = reference.backward(*flat, weights[0].reshape(-1), weights[1].reshape(-1))
    grad_table = np.zeros(table.shape)
    np.add.at(grad_table, input_ids.reshape(-1), grad_hidden / temperature)
    if policy.model.dims.tied:
        gradients = {"table": grad_table + grad_head}
    else:
        gradients = {"table": grad_table, "head": grad_head}
    return logprobs.reshape(mask.shape), entropy.reshape(mask.shape), gradients


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_both_forms_equal_float64_in_value_and_gradient(temperature, tied):
    inputs = draw()
    for device in DEVICES:
        policy = shared_policy(device, temperature, tied)
        logprobs, entropy, gradients = run(policy, *inputs)
        expected_logprobs, expected_entropy, expected_gradients = expected(policy, *inputs, temperature)
        np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5, err_msg=device)
        np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=1e-5, err_msg=device)
        for name, gradient in expected_gradients.items():
            np.testing.assert_allclose(gradients[name], gradient, rtol=1e-4, atol=1e-5, err_msg=f"{device} {name}")


def test_no_entropy_gradient_takes_the_other_path_of_the_kernel():
    input_ids, labels, mask, weights = draw()
    weights[1] = 0
    results = {
        device: run(shared_policy(device, 1.0, False), input_ids, labels, mask, weights)[2] for device in DEVICES
    }
    for name, gradient in results["ascend"].items():
        np.testing.assert_allclose(results["cpu"][name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_head_gradient_adds_up_and_is_handed_over_once():
    policy, inputs = shared_policy("cpu", 1.0, False), draw()
    first = run(policy, *inputs)[2]["head"]
    second = run(policy, *inputs)[2]["head"]
    np.testing.assert_allclose(second, first, rtol=1e-6, err_msg="the first run's gradient was handed over twice")
    rest = np.zeros_like(first)
    collect_weight_gradient(policy, rest)
    np.testing.assert_array_equal(rest, 0)


def test_changed_weights_are_seen():
    """The kernels read the head where it lies: an update in place or by assignment must reach them."""
    import mindspore as ms

    policy, inputs = make_policy("cpu", 1.0), draw()
    before = run(policy, *inputs)[0]
    policy.model.head.set_data(ms.Tensor(policy.model.head.asnumpy() * 2))
    assigned, _, _ = run(policy, *inputs)
    policy.model.head.asnumpy()[...] /= 2
    restored, _, _ = run(policy, *inputs)
    np.testing.assert_allclose(restored, before, rtol=1e-6)
    assert np.abs(assigned - before).max() > 0.1


def shard_cell(head, entropy_slope: bool):
    """A function of hidden states, labels and slopes: log-probs, entropies and both gradients."""
    import mindspore as ms
    from mindspore import ops

    from mindrlhf.algorithms.logprobs import GraphTokenLogProbs

    weight = ms.Parameter(head.astype(np.float32), name="head")
    cell = GraphTokenLogProbs(weight)
    cell.head_shard.entropy_slope = entropy_slope

    def loss(hidden, labels, mask, first, second):
        logprobs, entropy = cell(hidden, labels, mask)
        return (logprobs * first + entropy * second).sum(), logprobs, entropy

    gradient = ops.value_and_grad(loss, 0, ms.ParameterTuple([weight]), has_aux=True)

    def run_it(*arrays):
        (_, *values), (grad_hidden, (grad_head,)) = ms.jit(gradient)(*map(ms.Tensor, arrays))
        return [one.asnumpy() for one in (*values, grad_hidden, grad_head)]

    return run_it


@pytest.mark.parametrize("size", [1.0, 40.0])  # and rows where one token has all of the probability
def test_a_head_whose_entropy_has_no_slope(size):
    """Gradients of log-probabilities alone, whatever the slope of the entropy is: it is told, not computed."""
    stream = np.random.default_rng(5)
    hidden = (size * stream.standard_normal((2, 16, WIDTH))).astype(np.float32)
    head = stream.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    labels = stream.integers(0, VOCABULARY, (2, 16)).astype(np.int32)
    mask = (stream.random((2, 16)) < 0.7).astype(np.float32)
    slopes = stream.standard_normal((2, 2, 16)).astype(np.float32)
    found = shard_cell(head, False)(hidden, labels, mask, *slopes)
    flat = (hidden.reshape(-1, WIDTH).astype(np.float64), head, labels.reshape(-1), mask.reshape(-1))
    logprobs, entropy, _ = reference.forward(*flat)
    grad_hidden, grad_head = reference.backward(*flat, slopes[0].reshape(-1), np.zeros(32))
    scale = 1e-5 * size
    np.testing.assert_allclose(found[0].reshape(-1), logprobs, rtol=1e-5, atol=scale)
    np.testing.assert_allclose(found[1].reshape(-1), entropy, rtol=1e-5, atol=scale)
    np.testing.assert_allclose(found[2].reshape(-1, WIDTH), grad_hidden, rtol=1e-4, atol=scale)
    np.testing.assert_allclose(found[3], grad_head, rtol=1e-4, atol=scale)


def test_a_rank_whose_tokens_hardly_count_keeps_the_slope_of_its_label():
    """Its share of the probability is far below float32's smallest number, and so is the slope of its log-sum."""
    import mindspore as ms

    from mindrlhf.algorithms.head_shard import HeadShard

    stream = np.random.default_rng(6)
    rows, weight = (stream.standard_normal(shape).astype(np.float32) for shape in ((4, WIDTH), (8, WIDTH)))
    index = np.array([[3], [-1], [8], [0]], np.int32)  # the second and third label are other ranks'
    shard = HeadShard(in_place=False)
    shard.entropy_slope = False
    slope = np.array([[-1e-30, 0, 2.0], [-1e-30, 0, 2.0], [-0.5, 0, 3.0], [0, 0, 0]], np.float32)
    logits = rows @ weight.T
    arrays = [ms.Tensor(one) for one in (rows, weight, logits, index, np.zeros((4, 3), np.float32), slope)]
    grad_rows, grad_weight = (one.asnumpy() for one in ms.jit(shard.bprop)(*arrays)[:2])
    p = np.exp(logits.astype(np.float64))
    grad_logits = slope[:, :1] * p / p.sum(1, keepdims=True)
    grad_logits[0, 3] += 2.0
    np.testing.assert_allclose(grad_rows, grad_logits @ weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad_weight, grad_logits.T @ rows, rtol=1e-5, atol=1e-6)


def test_losses_without_an_entropy_bonus_leave_its_slope_out():
    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.losses import PolicyLoss

    surrogate = policy_losses.surrogate("ppo_clip", clip_low=0.2, clip_high=0.28)
    for coefficient in (0.0, 0.01):
        policy = make_policy("ascend", 1.0)
        PolicyLoss(policy, surrogate, on_policy=True, entropy_coefficient=coefficient)
        assert policy.token_logprobs.head_shard.entropy_slope == (coefficient > 0)
