"""vLLM against the training cells on the same weights: the same log-probabilities, the same greedy tokens."""

import contextlib
import json

import numpy as np
import pytest
from engines import whole_model
from slow_tests import SLOW
from tiny_models import LLAMA3_ROPE, WIDE, tiny_model

from mindrlhf.data.packing import TokenSequence
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.training.batch import RowOptions, make_batch

# Runs of every day compare generator and trainer too: test_train_ranks of a plain model, test_train_experts of experts.
pytestmark = [pytest.mark.timeout(300), SLOW]

VOCABULARY, ROW_LENGTH = 500, 64
MODEL = tiny_model(base=WIDE, vocab_size=VOCABULARY)
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
MODELS = {
    "dense": MODEL | {"num_hidden_layers": 3},
    "yarn": MODEL | {"max_position_embeddings": 64, "rope_scaling": YARN},
    "llama3": tiny_model("llama", MODEL, rope_scaling=LLAMA3_ROPE),
    # vLLM attends within the window, which holds whole rows.
    "mistral": tiny_model("mistral", MODEL, sliding_window=ROW_LENGTH),
    "glm4": tiny_model("glm4", MODEL),
    # Both attend within the window, which is shorter than rows.
    "gemma3": tiny_model("gemma3_text", MODEL, num_hidden_layers=3, sliding_window=9),
    "qwen3_5": tiny_model(
        "qwen3_5_text", MODEL, num_hidden_layers=3, head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    ),
    # vLLM packs experts for its kernels: an update must pack them anew.
    "experts": tiny_model("qwen3_moe", MODEL, num_experts=8),
    "glm": tiny_model("glm4_moe", MODEL, n_routed_experts=8, n_group=1, topk_group=1),
    "latent": tiny_model("deepseek_v3", MODEL),
}  # fmt: skip
TOLERANCE = 1e-4
BUCKET_BYTES = 90_000  # ends in the middle of layers, and of what vLLM fuses


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCABULARY, length).tolist())


REQUESTS = [GenerationRequest(i, prompt(length, i), 4, seed=i) for i, length in enumerate((1, 7, 16, 33))]


@pytest.fixture(scope="module", params=MODELS)
def network(request, tmp_path_factory):
    from networks import load_random_weights

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    model = build_model(MODELS[request.param], seq_length=ROW_LENGTH)
    load_random_weights(model, seed=8)
    return model


@pytest.fixture(scope="module")
def server(network, rollout_python, tmp_path_factory):
    with started(network, tmp_path_factory.mktemp("server"), python=rollout_python) as replicas:
        yield replicas


@contextlib.contextmanager
def started(network, directory, **rollout):
    """A server that has its weights from the training model, and records experts.

    Other weights come first, by a buffer that holds all; those of the model come by one that takes them in buckets.
    """
    from mindrlhf.config.rollout import RolloutSection
    from mindrlhf.rollout.pool import start_pool

    (directory / "config.json").write_text(json.dumps(network.hf_config))
    replicas = start_pool(
        RolloutSection(**rollout),
        model_dir=str(directory),
        max_model_len=ROW_LENGTH,
        seed=0,
        device="cpu",
        log_dir=directory,
        load_weights=False,
        record_routing=network.dims.experts is not None,
    )
    try:
        dtype = rollout.get("dtype", "float32")
        with make_buffer(network, dtype, 0) as first, make_buffer(network, dtype, BUCKET_BYTES) as buffer:
            replicas.servers[0].node.servers.buffer_path = first.path
            put(first, network, version=1, bucket=0, factor=0.5)
            replicas.update_weights(1)
            assert buffer.num_buckets > 5
            replicas.servers[0].node.servers.buffer_path = buffer.path
            for bucket in range(buffer.num_buckets):
                put(buffer, network, version=2, bucket=bucket, factor=1.0)
                replicas.update_weights(2)
            yield replicas
    finally:
        replicas.close()


def make_buffer(network, dtype, bucket_bytes):
    from mindrlhf.weights.infos import hf_tensor_infos
    from mindrlhf.weights.publish.buffer import WeightBuffer

    return WeightBuffer.create(hf_tensor_infos(network, dtype), bucket_bytes)


def put(buffer, network, *, version, bucket, factor):
    from networks import iter_hf_tensors

    buffer.begin(version, bucket)
    for name, array in iter_hf_tensors(network, wants=buffer.wants):
        buffer.write(name, array * np.float32(factor))
    buffer.commit()


@pytest.mark.parametrize(
    "temperature, pack",
    [(1.0, False), (0.7, True), (1.0, True), (0.7, False)],
)
def test_log_probabilities_agree_with_the_training_cell(server, network, temperature, pack):
    completions = list(server.generate(REQUESTS, SamplingParams(max_tokens=24, temperature=temperature)))
    assert len(completions) == 16
    sampled = np.concatenate([completion.logprobs for completion in completions])
    assert sampled.std() > 0.5, "a flat distribution would agree with anything"
    trained = trained_logprobs(network, completions, temperature, pack=pack, replays=False)
    np.testing.assert_allclose(trained, sampled, rtol=0, atol=TOLERANCE)
    if network.dims.experts is None:
        assert all(completion.experts is None for completion in completions)
        return
    # Also tokens of a prompt that another sample had put into the cache have the experts that they went to.
    replayed = trained_logprobs(network, completions, temperature, pack=pack, replays=True)
    np.testing.assert_allclose(replayed, sampled, rtol=0, atol=TOLERANCE)


def trained_logprobs(network, completions, temperature, *, pack, replays) -> np.ndarray:
    """What the training cell says of the samples, with its own choice of experts or with the server's."""
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.training.routing.rows import ReplayedExperts

    prompts = {request.request_id: np.array(request.prompt_ids, np.int32) for request in REQUESTS}
    sequences = [TokenSequence(prompts[c.request_id], c.token_ids, {}, experts=c.experts) for c in completions]
    experts = ReplayedExperts.of(network.dims) if replays else None
    batch = make_batch(sequences, RowOptions((ROW_LENGTH,), 16, 1, pack, experts=experts))
    model = whole_model(PolicyLogProbs(network, temperature, "cpu"))
    return np.concatenate(batch.collect([[model.logprobs(rows) for rows in batch.micro_batches]]))


def test_replayed_experts_narrow_the_gap_to_a_generator_in_bfloat16(network, rollout_python, tmp_path_factory):
    """Where rounding makes a router choose another expert, a token's log-prob differs by far more than rounding."""
    if network.dims.experts is None or network.dims.latent:
        pytest.skip("a model of softmax routers shows it")
    with started(network, tmp_path_factory.mktemp("coarse"), python=rollout_python, dtype="bfloat16") as replicas:
        completions = list(replicas.generate(REQUESTS, SamplingParams(max_tokens=24)))
    sampled = np.concatenate([completion.logprobs for completion in completions]).astype(np.float64)
    gaps = {}
    for replays in (False, True):
        gap = trained_logprobs(network, completions, 1.0, pack=False, replays=replays) - sampled
        gaps[replays] = {"k3": float(np.mean(np.exp(gap) - 1 - gap)), "max": float(np.abs(gap).max())}
    print(gaps)
    assert gaps[True]["k3"] < gaps[False]["k3"] and gaps[True]["max"] < gaps[False]["max"]


def test_top_k_and_top_p_cut_the_distribution_of_the_training_cell(server, network):
    import mindspore as ms
    from causal_logits import CausalLMLogits

    sampling = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.7, top_k=20)
    requests = [GenerationRequest(i, REQUESTS[2].prompt_ids, 32, seed=i) for i in range(2)]
    ids = np.zeros((1, ROW_LENGTH), np.int32)
    ids[0, :16] = REQUESTS[2].prompt_ids
    logits = CausalLMLogits(network)(ms.Tensor(ids), ms.Tensor((ids > 0).astype(np.int32))).asnumpy()[0, 15]
    likeliest = np.argsort(-logits, kind="stable")[:20]
    shares = np.exp((logits[likeliest] - logits.max()).astype(np.float64) / 0.8)
    shares /= shares.sum()
    kept = np.searchsorted(np.cumsum(shares), 0.7) + 1
    expected = dict(zip(likeliest[:kept].tolist(), np.log(shares[:kept] / shares[:kept].sum())))
    for completion in server.generate(requests, sampling):
        assert float(completion.logprobs[0]) == pytest.approx(expected[int(completion.token_ids[0])], abs=TOLERANCE)
    greedy = next(iter(server.generate(requests[:1], SamplingParams(max_tokens=1, temperature=0.0))))
    assert greedy.token_ids.tolist() == likeliest[:1].tolist()


def test_buckets_that_do_not_follow_each_other_are_refused(network, rollout_python, tmp_path):
    from mindrlhf.errors import RunFailure

    with (
        started(network, tmp_path, python=rollout_python, restarts=0) as replicas,
        make_buffer(network, "float32", BUCKET_BYTES) as buffer,
    ):
        replicas.servers[0].node.servers.buffer_path = buffer.path
        gap = "bucket 1 of the weights is due; the buffer holds bucket 2"
        for bucket, message in ((0, ""), (2, gap)):
            put(buffer, network, version=3, bucket=bucket, factor=1.0)
            with pytest.raises(RunFailure, match=message) if message else contextlib.nullcontext():
                replicas.update_weights(3)
