"""The forward-loop generator: token by token against its own distribution, and against the training cell."""

import numpy as np
import pytest
from forward_loop import sample_token
from head_hooks import bind
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_tests import SLOW
from tiny_models import tiny_model

from mindrlhf.errors import UserError
from mindrlhf.rollout.types import GenerationRequest, SamplingParams

ROW_LENGTH = 24
MODEL = tiny_model(tie_word_embeddings=True, initializer_range=0.3)
REQUESTS = [GenerationRequest(7, (5, 9, 2), 3, seed=1), GenerationRequest(3, (11,), 2, seed=2)]


class Draw:
    """A random stream of one number."""

    def __init__(self, value):
        self.value = value

    def random(self):
        return self.value


def draw(probabilities, uniform, **options):
    logits = np.log(np.asarray(probabilities, np.float64)).astype(np.float32)
    token, logprob = sample_token(logits, SamplingParams(1, **options), Draw(uniform))
    return token, np.exp(logprob)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.49, 1), (0.51, 3), (0.79, 3), (0.81, 0), (0.999999, 2)])
def test_tokens_by_hand_from_the_likeliest_down(uniform, token):
    probabilities = [0.15, 0.5, 0.05, 0.3]
    assert draw(probabilities, uniform) == (token, pytest.approx(probabilities[token], rel=1e-6))


def test_top_k_and_top_p_leave_the_likeliest_and_share_their_mass():
    probabilities = [0.15, 0.5, 0.05, 0.3]
    assert draw(probabilities, 0.99, top_k=2) == (3, pytest.approx(0.3 / 0.8, rel=1e-6))
    assert draw(probabilities, 0.0, top_k=2) == (1, pytest.approx(0.5 / 0.8, rel=1e-6))
    # 0.5 is not 0.6 yet, 0.5 + 0.3 is: two tokens are kept. Any mass keeps one.
    assert draw(probabilities, 0.99, top_p=0.6) == (3, pytest.approx(0.3 / 0.8, rel=1e-6))
    assert draw(probabilities, 0.99, top_p=1e-9) == (1, pytest.approx(1.0))
    # Of the two likeliest, 0.625 and 0.375, the first alone reaches 0.6.
    assert draw(probabilities, 0.99, top_k=2, top_p=0.6) == (1, pytest.approx(1.0))


def test_temperature():
    probabilities = [0.2, 0.8]
    # Logits over 0.5: probabilities squared and normalised.
    assert draw(probabilities, 0.999, temperature=0.5) == (0, pytest.approx(0.04 / 0.68, rel=1e-6))
    assert draw(probabilities, 0.999, temperature=0.0) == (1, pytest.approx(0.8, rel=1e-6))


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.integers(-20, 20), min_size=1, max_size=20),
    uniform=st.floats(0, 1, exclude_max=True),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_the_inverse_of_the_distribution(logits, uniform, temperature):
    """A token is drawn for the uniforms between the mass of those before it and its own end."""
    sampling = SamplingParams(1, temperature=temperature)
    token, logprob = sample_token(np.asarray(logits, np.float32), sampling, Draw(uniform))
    scaled = np.asarray(logits, np.float32).astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    assert np.exp(logprob) == pytest.approx(probabilities[token], rel=1e-9)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    before = sum(probabilities[i] for i in order[: order.index(token)])
    assert before - 1e-9 <= uniform <= before + probabilities[token] + 1e-9


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from networks import load_random_weights

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    network = build_model(MODEL, seq_length=ROW_LENGTH)
    load_random_weights(network, seed=3)
    return network


@pytest.fixture(scope="module")
def generator(model):
    from forward_loop import ForwardLoopGenerator

    return ForwardLoopGenerator(model, row_length=ROW_LENGTH, num_rows=4)


def collect(generator, requests=REQUESTS, **options):
    sampling = SamplingParams(**{"max_tokens": 12, **options})
    return {(c.request_id, c.sample_index): c for c in generator.generate(requests, sampling)}


def test_every_sample_comes_once_and_has_its_length(generator):
    completions = collect(generator)
    assert set(completions) == {(7, 0), (7, 1), (7, 2), (3, 0), (3, 1)}
    for completion in completions.values():
        assert completion.finish_reason == "length" and len(completion.token_ids) == len(completion.logprobs) == 12
        assert completion.token_ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
    assert len({tuple(completion.token_ids) for completion in completions.values()}) == 5


def test_a_sample_depends_on_its_request_alone(generator):
    together = collect(generator)
    alone = collect(generator, REQUESTS[1:])
    for key, completion in alone.items():
        np.testing.assert_array_equal(completion.token_ids, together[key].token_ids)
        np.testing.assert_allclose(completion.logprobs, together[key].logprobs, atol=1e-5)
    other = collect(generator, [GenerationRequest(3, (11,), 2, seed=99)])
    assert other[3, 0].token_ids.tolist() != alone[3, 0].token_ids.tolist()


def test_a_stop_token_ends_a_sample_and_is_part_of_it(generator):
    free = collect(generator)[7, 0].token_ids.tolist()
    stop = free[4]
    stopped = collect(generator, stop_token_ids=(stop,))[7, 0]
    first = free.index(stop)
    assert stopped.token_ids.tolist() == free[: first + 1]
    assert stopped.finish_reason == "stop" and len(stopped.logprobs) == first + 1


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=SLOW), 0.7])
def test_log_probabilities_are_those_of_the_training_cell(generator, model, temperature):
    import mindspore as ms

    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.data.packing import TokenSequence
    from mindrlhf.training.batch import RowOptions, make_batch

    completions = list(collect(generator, temperature=temperature).values())
    prompts = {request.request_id: np.array(request.prompt_ids, np.int32) for request in REQUESTS}
    sequences = [TokenSequence(prompts[c.request_id], c.token_ids, {}) for c in completions]
    batch = make_batch(sequences, RowOptions((ROW_LENGTH,), 5, 1, False))
    policy = PolicyLogProbs(model, temperature, "cpu")
    (rows,) = batch.micro_batches
    bind(policy)
    outputs = policy(*(ms.Tensor(array) for array in (rows.input_ids, rows.segment_ids, rows.labels, rows.mask)))
    for completion, expected in zip(completions, batch.collect([[outputs[0].asnumpy()]]), strict=True):
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=1e-4)


def test_greedy_takes_the_likeliest_of_a_forward_pass(generator):
    import mindspore as ms

    completion = collect(generator, REQUESTS[:1], temperature=0.0)[7, 1]
    ids = np.zeros((4, ROW_LENGTH), np.int32)
    ids[0, :15] = [*REQUESTS[0].prompt_ids, *completion.token_ids]
    segments = np.zeros_like(ids)
    segments[0, :15] = 1
    logits = generator._logits(ms.Tensor(ids), ms.Tensor(segments)).asnumpy()[0]
    assert logits[2:14].argmax(axis=1).tolist() == completion.token_ids.tolist()


def test_a_prompt_without_room_is_the_users_error(generator):
    with pytest.raises(UserError, match="a prompt of 13 tokens and max_tokens 12 exceed the row of 24"):
        collect(generator, [GenerationRequest(0, (1,) * 13, 1, seed=0)])


def test_weights_come_from_the_buffer(generator, model):
    from mindrlhf.weights.convert import hf_tensor_infos, random_hf_weights
    from mindrlhf.weights.publish.buffer import TensorInfo, WeightBuffer

    before = collect(generator)
    infos = [TensorInfo(*info) for info in hf_tensor_infos(model)]
    with WeightBuffer.create(infos) as buffer:
        generator.use_weight_buffer(buffer.path)
        results = []
        for version, seed in ((5, 4), (6, 3)):
            buffer.begin(version)
            for name, array in random_hf_weights(MODEL, seed):
                buffer.write(name, array)
            buffer.commit()
            generator.update_weights(version)
            results.append(collect(generator))
        generator.close()
    assert results[0][7, 0].weights_version == 5 and results[1][7, 0].weights_version == 6
    assert any(results[0][key].token_ids.tolist() != c.token_ids.tolist() for key, c in before.items())
    for key, completion in before.items():
        np.testing.assert_array_equal(results[1][key].token_ids, completion.token_ids)
