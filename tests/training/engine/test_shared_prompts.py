"""Rows whose samples share their prompt give the gradients of rows that repeat it: all parameters, actor and critic."""

import numpy as np
import pytest
from head_hooks import bind, collect_weight_gradient, graph_parameters
from slow_tests import RUNS_SLOW_TESTS, SLOW
from tiny_models import tiny_model

from mindrlhf.data.packing import TokenSequence
from mindrlhf.training.batch import Batch, RowOptions, make_batch

pytestmark = pytest.mark.usefixtures("mindformers")

VOCABULARY, LONGEST = 96, 64
KL_COEFFICIENT = 0.1
NUM_LAYERS = 2 if RUNS_SLOW_TESTS else 1
DENSE = tiny_model(
    vocab_size=VOCABULARY,
    num_hidden_layers=NUM_LAYERS,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    initializer_range=0.1,
)
LATENT = {
    **DENSE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": int(RUNS_SLOW_TESTS),  # every day experts alone
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
PLAIN = RowOptions((LONGEST,), 1, 1, False)
IN_STEP = "two ranks in step"
SHARED = {
    "one rank": RowOptions((LONGEST,), 4, 1, True, "shared_prompts"),
    "two ranks": RowOptions((LONGEST,), 4, 2, True, "shared_prompts"),
    IN_STEP: RowOptions((LONGEST,), 4, 2, True, "shared_prompts", in_step=True),
}
# Prompt length -> response lengths: a group that fills rows, one of one sample, a prompt of one token.
GROUPS = ((12, (5, 20, 1, 9, 30, 14)), (7, (10,)), (1, (3, 12, 4)), (20, (28, 2)))


def make_sequences(values=("advantages", "old_logprobs", "reference_logprobs")) -> list[TokenSequence]:
    stream = np.random.default_rng(2)
    sequences = []
    for prompt_length, response_lengths in GROUPS:
        prompt = stream.integers(1, VOCABULARY, prompt_length).astype(np.int32)
        for length in response_lengths:
            made = {
                "advantages": np.full(length, stream.standard_normal(), np.float32),
                "old_logprobs": (-4.5 + 0.5 * stream.standard_normal(length)).astype(np.float32),
                "reference_logprobs": (-4.5 + 0.5 * stream.standard_normal(length)).astype(np.float32),
                "values": stream.standard_normal(length).astype(np.float32),
                "returns": stream.standard_normal(length).astype(np.float32),
            }
            response = stream.integers(1, VOCABULARY, length).astype(np.int32)
            # What a tool wrote is in the middle of the longest response, and no loss is about it.
            is_generated = np.ones(length, bool)
            is_generated[8:12] = length < 30
            kept = {name: made[name][is_generated] for name in values}
            sequences.append(TokenSequence(prompt, response, kept, is_generated))
    return sequences


class Gradients:
    """A loss over a random model, and its gradients on all parameters, summed over the ranks of a batch by hand."""

    def __init__(self, network, policy, loss, inputs, scalars=()):
        import mindspore as ms

        from mindrlhf.training.engine.cells import AccumulateGradients, make_accumulators

        loss.set_train(True)
        self.network, self.policy, self.inputs, self.scalars = network, policy, inputs, scalars
        self.parameters = graph_parameters(policy)
        self.accumulators = make_accumulators(self.parameters)
        self.accumulate = AccumulateGradients(loss, ms.ParameterTuple(self.parameters), self.accumulators)

    def of(self, batch: Batch, num_ranks: int):
        """Return the gradients by name, the statistics, and what the model says of each response token."""
        import mindspore as ms

        from mindrlhf.training.engine.model import row_tensors

        statistics, shares = 0.0, []
        for rank in range(num_ranks):
            share = batch.part_of(rank, num_ranks)
            shares.append([])
            for rows in share.micro_batches:
                bind(self.policy)
                values = [ms.Tensor(rows.tokens.get(name, rows.mask)) for name in self.inputs]
                scalars = [ms.Tensor(value, ms.float32) for value in (*self.scalars, share.num_tokens)]
                found, outputs = self.accumulate(*row_tensors(rows), *values, *scalars)
                statistics = statistics + found.asnumpy().astype(np.float64)
                shares[-1].append(outputs.asnumpy())
        return self._take(), statistics, np.concatenate(batch.collect(shares))

    def _take(self) -> dict[str, np.ndarray]:
        gradients = {}
        for parameter, accumulator in zip(self.parameters, self.accumulators):
            gradients[parameter.name] = accumulator.asnumpy().astype(np.float64)
            accumulator.asnumpy()[...] = 0.0
        head = np.zeros(self.network.head_weight.shape, np.float32)
        collect_weight_gradient(self.policy, head)
        name = self.network.head_weight.name
        gradients[name] = gradients.get(name, 0.0) + head
        return gradients


def policy_gradients(model: dict) -> Gradients:
    from mindrlhf.algorithms import policy_losses
    from mindrlhf.algorithms.logprobs import PolicyLogProbs
    from mindrlhf.algorithms.losses import POLICY_INPUTS, PolicyLoss

    network = build(model)
    policy = PolicyLogProbs(network, 0.8, "cpu")
    surrogate = policy_losses.surrogate("gspo", clip_low=0.2, clip_high=0.28)
    options = {"on_policy": False, "kl_estimator": "k3", "entropy_coefficient": 0.05}
    return Gradients(network, policy, PolicyLoss(policy, surrogate, **options), POLICY_INPUTS, (KL_COEFFICIENT,))


def critic_gradients(model: dict) -> Gradients:
    from mindrlhf.algorithms.scores import TokenScores
    from mindrlhf.algorithms.value_loss import VALUE_INPUTS, ValueLoss
    from mindrlhf.specs import scorer_config

    network = build(scorer_config(model))
    critic = TokenScores(network, after_token=False)
    return Gradients(network, critic, ValueLoss(critic, 0.2), VALUE_INPUTS)


def build(model: dict):
    from networks import load_random_weights

    from mindrlhf.models.causal_lm import build_model

    network = build_model(model, seq_length=LONGEST)
    load_random_weights(network, seed=5)
    return network


@pytest.fixture(scope="module")
def policy():
    gradients = policy_gradients(DENSE)
    return gradients, gradients.of(make_batch(make_sequences(), PLAIN), 1)


@pytest.fixture(scope="module")
def critic():
    gradients = critic_gradients(DENSE)
    return gradients, gradients.of(make_batch(make_sequences(("values", "returns")), PLAIN), 1)


def assert_same(actual, expected) -> None:
    gradients, statistics, outputs = actual
    np.testing.assert_allclose(statistics, expected[1], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(outputs, expected[2], rtol=0, atol=1e-5)
    assert gradients.keys() == expected[0].keys()
    for name, reference in expected[0].items():
        # The sums of float32 are in another order; a float32 has 6e-8.
        assert np.linalg.norm(gradients[name] - reference) <= 2e-6 * np.linalg.norm(reference), name
        assert np.abs(reference).max() > 0, name
    whole, difference = (
        np.concatenate([array.ravel() for array in arrays])
        for arrays in (expected[0].values(), (gradients[name] - expected[0][name] for name in gradients))
    )
    assert np.linalg.norm(difference) <= 1e-6 * np.linalg.norm(whole)


@pytest.mark.parametrize("shared", [pytest.param(name, marks=SLOW) for name in ("one rank", "two ranks")] + [IN_STEP])
def test_a_policy_learns_the_same(policy, shared):
    gradients, plain = policy
    options = SHARED[shared]
    batch = make_batch(make_sequences(), options)
    assert_same(gradients.of(batch, options.num_ranks), plain)


@SLOW
def test_latent_attention_and_experts_learn_the_same():
    gradients, options = policy_gradients(LATENT), SHARED[IN_STEP]
    plain = gradients.of(make_batch(make_sequences(), PLAIN), 1)
    assert_same(gradients.of(make_batch(make_sequences(), options), 2), plain)


def test_a_critic_learns_the_same(critic):
    gradients, plain = critic
    options = SHARED["one rank"]
    assert_same(gradients.of(make_batch(make_sequences(("values", "returns")), options), 1), plain)
