"""vLLM against the training cells on the same weights: the same log-probabilities, the same greedy tokens."""

import numpy as np
import pytest

from mindrlhf.data.packing import TokenSequence
from mindrlhf.rollout.types import GenerationRequest, SamplingParams
from mindrlhf.training.batch import RowOptions, make_batch

pytestmark = pytest.mark.timeout(300)

VOCABULARY, ROW_LENGTH = 500, 64
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "torch_dtype": "float32",
}
MODELS = {
    "dense": MODEL,
    # vLLM packs experts for its kernels: an update must pack them anew.
    "experts": {
        **MODEL,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
TOLERANCE = 1e-4


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCABULARY, length).tolist())


REQUESTS = [GenerationRequest(i, prompt(length, i), 4, seed=i) for i, length in enumerate((1, 7, 16, 33))]


@pytest.fixture(scope="module", params=MODELS)
def network(request, tmp_path_factory):
    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.models.context import prepare_mindformers
    from mindrlhf.weights.convert import load_random_weights

    prepare_mindformers("cpu", tmp_path_factory.mktemp("mindformers-log"))
    model = build_model(MODELS[request.param], seq_length=ROW_LENGTH)
    load_random_weights(model, seed=8)
    return model


@pytest.fixture(scope="module")
def server(network, rollout_python, tmp_path_factory):
    """A server that has its weights from the training model, through the board."""
    import json

    from mindrlhf.config.sections import RolloutSection
    from mindrlhf.rollout.replicas import start_replicas
    from mindrlhf.weights.board import TensorInfo, WeightBoard
    from mindrlhf.weights.convert import hf_tensor_infos, iter_hf_tensors

    directory = tmp_path_factory.mktemp("server")
    (directory / "config.json").write_text(json.dumps(network.hf_config))
    replicas = start_replicas(
        RolloutSection(python=rollout_python),
        model_dir=str(directory),
        max_model_len=ROW_LENGTH,
        seed=0,
        device="cpu",
        log_dir=directory,
        load_weights=False,
    )
    try:
        with WeightBoard.create(TensorInfo(*info) for info in hf_tensor_infos(network)) as board:
            replicas.use_board(board.path)
            board.begin(1)
            for name, array in iter_hf_tensors(network):
                board.write(name, array)
            board.seal()
            replicas.update_weights(1)
            yield replicas
    finally:
        replicas.close()


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_agree_with_the_training_cell(server, network, temperature, pack):
    import mindspore as ms

    from mindrlhf.algorithms.logprobs import PolicyLogProbs

    completions = list(server.generate(REQUESTS, SamplingParams(max_tokens=24, temperature=temperature)))
    assert len(completions) == 16
    prompts = {request.request_id: np.array(request.prompt_ids, np.int32) for request in REQUESTS}
    sequences = [TokenSequence(prompts[c.request_id], c.token_ids, {}) for c in completions]
    batch = make_batch(sequences, RowOptions((ROW_LENGTH,), 16, 1, pack))
    policy = PolicyLogProbs(network, temperature, "cpu")
    (rows,) = batch.micro_batches
    policy.bind()
    outputs = policy(*(ms.Tensor(array) for array in (rows.input_ids, rows.segment_ids, rows.labels, rows.mask)))
    trained = np.concatenate(batch.collect([[outputs[0].asnumpy()]]))
    sampled = np.concatenate([completion.logprobs for completion in completions])
    assert sampled.std() > 0.5, "a flat distribution would agree with anything"
    np.testing.assert_allclose(trained, sampled, rtol=0, atol=TOLERANCE)


def test_greedy_tokens_agree_with_the_forward_loop(server, network):
    from forward_loop import ForwardLoopGenerator

    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    requests = [GenerationRequest(r.request_id, r.prompt_ids, 1, r.seed) for r in REQUESTS]
    plain = ForwardLoopGenerator(network, row_length=ROW_LENGTH, num_rows=len(requests))
    expected = {c.request_id: c for c in plain.generate(requests, sampling)}
    actual = {c.request_id: c for c in server.generate(requests, sampling)}
    for name, completion in expected.items():
        assert actual[name].token_ids.tolist() == completion.token_ids.tolist()
        np.testing.assert_allclose(actual[name].logprobs, completion.logprobs, rtol=0, atol=TOLERANCE)


def test_top_k_and_top_p_agree_with_the_forward_loop(server, network):
    """Tokens are sampled from other random streams, but their log-probs are of one and the same cut distribution."""
    import mindspore as ms
    from causal_logits import CausalLMLogits
    from forward_loop import sample_token

    sampling = SamplingParams(max_tokens=1, temperature=0.8, top_p=0.7, top_k=20)
    requests = [GenerationRequest(i, REQUESTS[2].prompt_ids, 32, seed=i) for i in range(2)]
    completions = list(server.generate(requests, sampling))
    ids = np.zeros((1, ROW_LENGTH), np.int32)
    ids[0, :16] = REQUESTS[2].prompt_ids
    logits = CausalLMLogits(network)(ms.Tensor(ids), ms.Tensor((ids > 0).astype(np.int32))).asnumpy()[0, 15]
    stream = np.random.default_rng(0)
    expected = dict(sample_token(logits, sampling, stream) for _ in range(2000))
    assert 2 < len(expected) <= 20
    for completion in completions:
        token = int(completion.token_ids[0])
        assert token in expected
        assert float(completion.logprobs[0]) == pytest.approx(expected[token], abs=TOLERANCE)
