"""Experts on the tokens that somebody else sent to them: rows, outputs and gradients."""

from types import SimpleNamespace

import numpy as np
import pytest
from engines import whole_engine, whole_model
from slow_tests import RUNS_SLOW_TESTS, SLOW
from tiny_models import tiny_model

from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import RowOptions, make_batch
from mindrlhf.training.routing.rows import (
    EXPERTS,
    ReplayedExperts,
    experts_by_layer,
    tokens_and_experts,
    without_experts,
)

VOCABULARY, NUM_EXPERTS, NUM_ACTIVE = 64, 6, 2
SIZES = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 3}
SOFTMAX = tiny_model(
    "qwen3_moe", **SIZES, num_key_value_heads=4, head_dim=4, num_experts=NUM_EXPERTS, mlp_only_layers=[1],
    rms_norm_eps=1e-6, rope_theta=10000.0,
)  # fmt: skip
# Every day without a layer that has none: the other model has one between those with experts.
SIGMOID = tiny_model(
    "deepseek_v3", **SIZES | {"num_hidden_layers": 3 if RUNS_SLOW_TESTS else 2}, q_lora_rank=None, kv_lora_rank=8,
    qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, first_k_dense_replace=int(RUNS_SLOW_TESTS),
    n_routed_experts=NUM_EXPERTS, n_shared_experts=0, n_group=1, topk_group=1, norm_topk_prob=False,
    routed_scaling_factor=1.5, rms_norm_eps=1e-6, rope_theta=10000.0,
)  # fmt: skip
REPLAYED = ReplayedExperts(num_layers=2, num_active=NUM_ACTIVE, num_experts=NUM_EXPERTS)
NONE = 255


@pytest.fixture(scope="module", params=[SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def model(request, mindformers):
    from networks import load_random_weights

    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.models.causal_lm import build_model

    network = build_model(request.param, seq_length=48)
    load_random_weights(network, seed=4)
    return whole_model(PolicyLogProbs(network, 1.0, "cpu"))


def make_sequences() -> list[TokenSequence]:
    """Two groups of samples; those of a group have one prompt, whose tokens go to the same experts."""
    stream = np.random.default_rng(0)
    sequences = []
    for prompt_length, response_lengths in ((5, (4, 7, 2)), (1, (3, 6))):
        prompt = stream.integers(1, VOCABULARY, prompt_length).astype(np.int32)
        of_prompt = _choices(stream, prompt_length - 1)
        for length in response_lengths:
            experts = np.concatenate([of_prompt, _choices(stream, length)])
            response = stream.integers(1, VOCABULARY, length).astype(np.int32)
            sequences.append(TokenSequence(prompt, response, {}, experts=experts))
    return sequences


def _choices(stream, num_tokens: int) -> np.ndarray:
    """Distinct experts at random, uint8 [tokens, layers, active]."""
    ranks = stream.random((num_tokens, REPLAYED.num_layers, NUM_EXPERTS))
    return np.argsort(ranks)[..., :NUM_ACTIVE].astype(np.uint8)


PLAIN = RowOptions((24,), 2, 1, True, experts=REPLAYED)
SHARED = RowOptions((24,), 2, 1, True, "shared_prompts", experts=REPLAYED)


def logprobs(model, sequences, options, change=lambda rows: rows) -> np.ndarray:
    batch = make_batch(sequences, options)
    return np.concatenate(batch.collect([[model.logprobs(change(rows)) for rows in batch.micro_batches]]))


def test_each_token_has_its_experts_wherever_it_lies():
    """By looking tokens up: which token of which sequence a place holds is known from ids that occur once."""
    stream = np.random.default_rng(1)
    ids = stream.permutation(np.arange(1, 40)).astype(np.int32)
    prompt, first, second = ids[:6], ids[6:10], ids[10:19]
    of_prompt = _choices(stream, 5)
    sequences = [
        TokenSequence(prompt, response, {}, experts=np.concatenate([of_prompt, _choices(stream, len(response))]))
        for response in (first, second)
    ]
    expected = {}
    for sequence in sequences:
        tokens = np.concatenate([sequence.prompt_ids, sequence.response_ids])[:-1]
        expected |= {int(token): experts for token, experts in zip(tokens[:5], sequence.experts[:5])}
        expected |= {int(token): experts for token, experts in zip(tokens[6:], sequence.experts[6:])}
    for options in (PLAIN, SHARED):
        seen = set()
        for rows in make_batch(sequences, options).micro_batches:
            chosen = rows.context[EXPERTS]
            assert chosen.dtype == np.uint8 and chosen.shape == (*rows.mask.shape, 2, NUM_ACTIVE)
            assert (chosen[rows.segment_ids == 0] == NONE).all()
            for token, experts in zip(rows.input_ids.ravel().tolist(), chosen.reshape(-1, 2, NUM_ACTIVE)):
                if token in expected:
                    seen.add(token)
                    np.testing.assert_array_equal(experts, expected[token])
        assert seen == set(expected)
    (rows,) = make_batch(sequences, PLAIN).micro_batches
    dims = SimpleNamespace(experts=SimpleNamespace(layers=(True, True), num_active=NUM_ACTIVE, num_experts=NUM_EXPERTS))
    wide = tokens_and_experts(rows, dims)
    np.testing.assert_array_equal(wide[..., 0], rows.input_ids)
    np.testing.assert_array_equal(wide[..., 1 + NUM_ACTIVE :], rows.context[EXPERTS][:, :, 1])
    assert (tokens_and_experts(without_experts(rows), dims)[..., 1:] == NUM_EXPERTS).all(), "no expert"
    last = make_batch(sequences, PLAIN).micro_batches[0]
    assert (last.context[EXPERTS][last.input_ids == first[-1]] == NONE).all()


def test_more_experts_than_a_byte_has_numbers_take_two():
    assert ReplayedExperts(1, 8, 255).dtype is np.uint8 and ReplayedExperts(1, 8, 256).dtype is np.uint16


def test_log_probs_do_not_depend_on_how_samples_share_rows(model):
    sequences = make_sequences()
    plain, shared = (logprobs(model, sequences, options) for options in (PLAIN, SHARED))
    np.testing.assert_allclose(plain, shared, atol=2e-6, rtol=0)
    own = logprobs(model, sequences, PLAIN, without_experts)
    assert np.abs(plain - own).max() > 1e-2, "experts at random compute something else"


def forget(rows):
    rows.context[EXPERTS][:] = NONE
    return rows


def test_tokens_without_experts_go_where_the_router_says(model):
    sequences = make_sequences()
    own = logprobs(model, sequences, PLAIN, without_experts)
    logprobs(model, sequences, PLAIN)
    num_compiled = len(model.graph.compile_cache)
    np.testing.assert_allclose(logprobs(model, sequences, PLAIN, forget), own, atol=1e-6, rtol=0)
    assert len(model.graph.compile_cache) == num_compiled > 0, "other experts are no reason to compile again"


def _mlp(parts, router, rows, chosen) -> np.ndarray:
    """The layer in float64, one token after the other: gates of the chosen experts alone."""
    gate_up, down, settings = parts
    is_sigmoid, is_normalized, scale = settings
    outputs = np.zeros_like(rows)
    for place, row in enumerate(rows):
        logits = router @ row
        scores = 1 / (1 + np.exp(-logits)) if is_sigmoid else np.exp(logits) / np.exp(logits).sum()
        gates = scores[chosen[place]]
        gates = scale * (gates / gates.sum() if is_normalized else gates)
        for expert, weight in zip(chosen[place], gates):
            gate, up = np.split(row @ gate_up[expert], 2)
            outputs[place] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return outputs


def test_outputs_and_gradients_of_a_layer_are_those_of_its_formula(model):
    import mindspore as ms

    layer = model.network.model.decoder.layers[-1].mlp
    stream = np.random.default_rng(5)
    rows = stream.standard_normal((7, 16))
    chosen = _choices(stream, 7)[:, 0].astype(np.int32)
    cotangent = stream.standard_normal((7, 16))
    tensors = [ms.Tensor(array, ms.float32) for array in (rows, cotangent)]

    def loss(hidden, weights):
        output, _, _ = layer(hidden, extra_loss=(ms.Tensor(chosen),))
        if layer.has_shared_expert:
            output = output - layer.shared_experts(hidden)[0]
        return (output * weights).sum()

    router = layer.router.weight
    value, gradients = ms.value_and_grad(loss, None, [router])(*tensors)
    gate_up = layer.experts.weight1.asnumpy().astype(np.float64).reshape(NUM_EXPERTS, 16, 24)
    down = layer.experts.weight2.asnumpy().astype(np.float64).reshape(NUM_EXPERTS, 12, 16)
    settings = (layer.router.is_sigmoid, layer.router.is_normalized, layer.router.scale or 1.0)
    weight = router.asnumpy().astype(np.float64)

    def exact(matrix) -> float:
        return float((_mlp((gate_up, down, settings), matrix, rows, chosen) * cotangent).sum())

    assert float(value) == pytest.approx(exact(weight), rel=1e-5)
    expected = np.zeros_like(weight)
    for place in np.ndindex(*weight.shape):
        step = np.zeros_like(weight)
        step[place] = 1e-5
        expected[place] = (exact(weight + step) - exact(weight - step)) / 2e-5
    (gradient,) = gradients if isinstance(gradients, tuple) else (gradients,)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient.asnumpy(), expected, atol=1e-5 * np.abs(expected).max() + 1e-6, rtol=1e-4)


def test_rows_travel_by_layer():
    (rows,) = make_batch(make_sequences()[:1], PLAIN).micro_batches
    by_layer = experts_by_layer(rows)
    one, other = (rows.context[EXPERTS][:, :, layer].reshape(-1, NUM_ACTIVE) for layer in range(2))
    assert by_layer.dtype == np.int32 and (one != other).any()
    np.testing.assert_array_equal(by_layer, [one, other])
    assert experts_by_layer(without_experts(rows)) is None


@pytest.mark.parametrize(
    "model", [SOFTMAX, pytest.param(SIGMOID, marks=SLOW)], ids=["softmax", "sigmoid"], indirect=True
)
def test_updates_move_the_routers_of_the_experts_that_are_replayed(model):
    """Gradients of all parameters do not depend on how samples share rows, and are others than without replay."""
    from mindrlhf.algorithms.losses import SupervisedLoss

    engine = whole_engine(SupervisedLoss(model.graph))

    def gradients(options, change=lambda rows: rows) -> dict[str, np.ndarray]:
        batch = make_batch(make_sequences(), options)
        for rows in batch.micro_batches:
            engine.add(change(rows), batch.num_tokens)
        found = {name: array.copy() for name, array in engine.gradients()}
        engine.apply(0.0)  # clears the sums, and moves no weight
        return found

    # Every day in the graph of the first, to which tokens that have no experts are known to do the same.
    own = gradients(PLAIN, without_experts if RUNS_SLOW_TESTS else forget)
    plain, shared = gradients(PLAIN), gradients(SHARED)
    routers = [name for name in plain if name.endswith("router.weight")]
    assert len(routers) == REPLAYED.num_layers
    for name, gradient in plain.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(shared[name] / scale, gradient / scale, atol=1e-4, rtol=0, err_msg=name)
    for name in routers:
        assert np.abs(plain[name]).max() > 1e-5
        assert np.abs(plain[name] - own[name]).max() > 1e-2 * np.abs(plain[name]).max()
