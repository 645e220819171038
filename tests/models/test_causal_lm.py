"""The CPU cells against Hugging Face transformers, which computes logits and gradients in the rollout interpreter."""

import json
from pathlib import Path

import numpy as np
import pytest
from slow_tests import RUNS_SLOW_TESTS
from tiny_models import LLAMA3_ROPE, tiny_model

from mindrlhf.config.memory import MemorySection
from mindrlhf.errors import UserError

pytestmark = pytest.mark.usefixtures("mindformers")

# One layer, where two prove no more and MindSpore would compile three times as long.
SIZES = {"vocab_size": 96, "initializer_range": 0.02}
LATENT = {**SIZES, "moe_intermediate_size": 20, "kv_lora_rank": 10}
LATENT |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
# Felt within a row: one channel is kept in part, the others are slowed in full.
LLAMA3 = {**LLAMA3_ROPE, "rope_theta": 100.0, "original_max_position_embeddings": 16}
# Felt within a row: the two kinds of layers turn at different speeds, one of them slowed.
GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
# Felt within a row, by half of each head.
HALF = {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 0.5}
CASES = {
    "qwen2-tied": tiny_model(**SIZES, tie_word_embeddings=True, num_hidden_layers=2),
    "qwen2-untied-no-gqa": tiny_model(**SIZES, num_key_value_heads=4),
    "qwen3-experts": tiny_model("qwen3_moe", **SIZES, head_dim=8, num_experts=6, moe_intermediate_size=20),
    "qwen3-experts-in-some-layers": tiny_model(
        "qwen3_moe", **SIZES, num_hidden_layers=2, tie_word_embeddings=True, head_dim=8, num_experts_per_tok=3,
        moe_intermediate_size=12, norm_topk_prob=False, mlp_only_layers=[1],
    ),
    "qwen3-yarn": tiny_model("qwen3", **SIZES, head_dim=16, rope_parameters=YARN),
    "llama3": tiny_model("llama", **SIZES, rope_parameters=LLAMA3),
    "llama-tied": tiny_model("llama", **SIZES, tie_word_embeddings=True, num_key_value_heads=4),
    "mistral-in-its-window": tiny_model("mistral", **SIZES, head_dim=16, sliding_window=16),
    "glm4": tiny_model("glm4", **SIZES, head_dim=16, pad_token_id=None),
    "glm4-no-bias": tiny_model(
        "glm4", **SIZES, num_hidden_layers=2, head_dim=8, partial_rotary_factor=0.75, pad_token_id=None,
        attention_bias=False, tie_word_embeddings=True,
    ),
    "gemma3": tiny_model(
        "gemma3_text", **SIZES, num_hidden_layers=2, head_dim=16, sliding_window=5, pad_token_id=None,
        layer_types=["sliding_attention", "full_attention"], rope_parameters=GEMMA3,
    ),
    "qwen3_5": tiny_model(
        "qwen3_5_text", **SIZES, tie_word_embeddings=True, num_hidden_layers=2, head_dim=16,
        layer_types=["linear_attention", "full_attention"], rope_parameters=HALF,
    ),
    "glm4-moe": tiny_model(
        "glm4_moe", **SIZES, num_hidden_layers=2, head_dim=16, moe_intermediate_size=20, n_routed_experts=6,
        num_mtp_layers=0,
    ),
    "deepseek-v3-yarn": tiny_model(
        "deepseek_v3", **LATENT, num_hidden_layers=2, q_lora_rank=12, n_shared_experts=2,
        rope_parameters={
            **YARN, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 8.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    ),
    "deepseek-v3-direct-queries": tiny_model(
        "deepseek_v3", **LATENT, first_k_dense_replace=0, q_lora_rank=None, n_routed_experts=6, num_experts_per_tok=3,
        n_group=1, topk_group=1, routed_scaling_factor=1.5, norm_topk_prob=False,
    ),
}  # fmt: skip
# What is compiled: a case and options of the model. One of each kind of layer is recomputed: that takes them whole.
VARIANTS = {
    "qwen2-tied-one-layer-recomputed": ("qwen2-tied", {"memory": MemorySection(recompute_layers="1")}),
    "qwen3-experts-in-some-layers": ("qwen3-experts-in-some-layers", {}),
    "glm4": ("glm4", {}),
    "gemma3": ("gemma3", {}),
    "glm4-moe": ("glm4-moe", {}),
    "deepseek-v3-yarn-recomputed": ("deepseek-v3-yarn", {"recompute": True}),
}
# What is recomputed above has the same layers without it; tests/specs has every frequency, and each day
# test_linear_attention.py compares a Qwen3.5.
if RUNS_SLOW_TESTS:
    VARIANTS |= {
        "qwen3_5-recomputed": ("qwen3_5", {"recompute": True}),
        "qwen3-yarn": ("qwen3-yarn", {}),
        "llama3": ("llama3", {}),
        "qwen2-untied-no-gqa": ("qwen2-untied-no-gqa", {}),
        "qwen3-experts-recomputed": ("qwen3-experts", {"recompute": True}),
        "deepseek-v3-direct-queries": ("deepseek-v3-direct-queries", {}),
        "glm4-no-bias-recomputed": ("glm4-no-bias", {"recompute": True}),
        "llama-tied": ("llama-tied", {}),
        "mistral-in-its-window": ("mistral-in-its-window", {}),
    }
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def references_dir(tmp_path_factory, run_in_rollout):
    out_dir = tmp_path_factory.mktemp("references")
    script = Path(__file__).with_name("transformers_reference.py")
    cases = {case: CASES[case] for case, _ in VARIANTS.values()}
    run_in_rollout(script, out_dir, json.dumps(cases))
    return out_dir


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


@pytest.fixture(scope="module")
def reference_dir(variant, references_dir):
    return references_dir / variant[0]


@pytest.fixture(scope="module")
def model(reference_dir, variant):
    from networks import load_hf_weights

    from mindrlhf.models.causal_lm import build_model
    from mindrlhf.weights.hf import read_hf_config

    network = build_model(read_hf_config(reference_dir), seq_length=16, **variant[1])
    load_hf_weights(network, reference_dir)
    return network


def test_weights_that_are_loaded_are_not_drawn_first(model, reference_dir, monkeypatch):
    from networks import load_model

    from mindrlhf.config.model import ModelSection
    from mindrlhf.config.run import RunSection

    def draw(*_):
        raise AssertionError("a weight was drawn")

    monkeypatch.setattr("mindspore.common.initializer.Normal._initialize", draw)
    network = load_model(ModelSection(path=str(reference_dir)), str(reference_dir), RunSection(), 16)
    found = {parameter.name: parameter.asnumpy() for parameter in network.get_parameters()}
    assert found.keys() == {parameter.name for parameter in model.get_parameters()}
    for parameter in model.get_parameters():
        np.testing.assert_array_equal(found[parameter.name], parameter.asnumpy())


@pytest.fixture(scope="module")
def expected(reference_dir):
    with np.load(reference_dir / "logits.npz") as arrays:
        return arrays["input_ids"], arrays["logits"]


@pytest.fixture(scope="module")
def computed(model, expected):
    """The mean square of the logits of three rows of 12 tokens, the gradients by parameter, and all logits.

    Of one graph: padded rows (12, 9, 5, 12 and 12 tokens; those of 12 are the three) and a packed row (6 + 8 tokens),
    each 16 long.
    """
    import mindspore as ms
    from causal_logits import CausalLMLogits
    from mindspore import nn, ops

    class MeanSquare(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.logits = CausalLMLogits(model)

        def construct(self, input_ids, segment_ids, weights):
            logits = self.logits(input_ids, segment_ids)
            return (ops.square(logits) * weights).sum(), logits

    rows, logits = expected
    input_ids = np.full((6, 16), 7, np.int32)
    segment_ids = np.zeros((6, 16), np.int32)
    for row, (source, length) in enumerate([(0, 12), (1, 9), (2, 5), (1, 12), (2, 12)]):
        input_ids[row, :length] = rows[source, :length]
        segment_ids[row, :length] = 1
    input_ids[5, :14] = np.concatenate([rows[0, :6], rows[1, :8]])
    segment_ids[5, :14] = [1] * 6 + [2] * 8
    weights = np.zeros((6, 16, 1), np.float32)
    weights[[0, 3, 4], :12] = 1 / logits.size
    parameters = model.trainable_params()
    function = ms.value_and_grad(MeanSquare(), None, parameters, has_aux=True)
    (loss, found), gradients = function(*map(ms.Tensor, (input_ids, segment_ids, weights)))
    by_name = {parameter.name: value.asnumpy() for parameter, value in zip(parameters, gradients, strict=True)}
    return float(loss), by_name, found.asnumpy()


@pytest.fixture(scope="module")
def actual(computed):
    return computed[2]


def test_padded_rows_match_transformers(actual, expected):
    for row, length in enumerate((12, 9, 5)):
        np.testing.assert_allclose(actual[row, :length], expected[1][row, :length], atol=TOLERANCE, rtol=0)


def test_packed_row_matches_transformers(actual, expected):
    np.testing.assert_allclose(actual[5, :6], expected[1][0, :6], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(actual[5, 6:14], expected[1][1, :8], atol=TOLERANCE, rtol=0)


def test_responses_of_a_shared_prompt_match_transformers(model, variant, expected):
    """A row of 6 tokens and twice what follows them: the second time far behind them, yet of their window or state."""
    import mindspore as ms
    from causal_logits import CausalLMLogits

    if variant[0] not in ("gemma3", "qwen3_5"):
        pytest.skip("of windows positions matter beside segments, of states what they go on from")
    row = expected[0][0]
    inputs = np.zeros((1, 3, 18), np.int32)
    inputs[0] = np.concatenate([row, row[6:]]), [1] * 6 + [1] * 12, [*range(12), *range(6, 12)]
    segment_ids = np.array([[1] * 6 + [2] * 6 + [3] * 6], np.int32)
    logits = CausalLMLogits(build_longer(model))(ms.Tensor(inputs), ms.Tensor(segment_ids)).asnumpy()[0]
    for found in (logits[:12], np.concatenate([logits[:6], logits[12:]])):
        np.testing.assert_allclose(found, expected[1][0], atol=TOLERANCE, rtol=0)


def build_longer(model):
    """The model with rows of 18 tokens."""
    from mindrlhf.models.causal_lm import build_model

    network = build_model(model.hf_config, seq_length=18, shared_prompts=True)
    values = {parameter.name: parameter for parameter in model.get_parameters()}
    for parameter in network.get_parameters():
        parameter.set_data(values[parameter.name])
    return network


def test_gradients_match_transformers(model, computed, reference_dir, expected):
    from mindrlhf.specs.fuse import split

    loss, by_name, _ = computed
    logits = expected[1]
    assert loss == pytest.approx(float(np.square(logits.astype(np.float64)).mean()), rel=1e-5)
    with np.load(reference_dir / "gradients.npz") as references:
        rules = [rule for rule in model.spec.rules(model.dims) if rule.trained]
        assert {rule.mf_name for rule in rules} == set(by_name)
        for rule in rules:
            for name, actual in zip(rule.hf_names, split(rule, model.dims, by_name[rule.mf_name])):
                reference = references[name]
                # An expert that no token chose has no gradient at all.
                scale = np.abs(reference).max() or 1.0
                np.testing.assert_allclose(actual / scale, reference / scale, atol=1e-4, rtol=0, err_msg=name)


def test_weights_come_back_as_they_were_loaded(model, reference_dir):
    from networks import iter_hf_tensors

    from mindrlhf.weights.hf import SafetensorsDirectory
    from mindrlhf.weights.infos import hf_tensor_infos

    checkpoint = SafetensorsDirectory(reference_dir)
    tensors = dict(iter_hf_tensors(model))
    assert set(tensors) == set(checkpoint.names())
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, checkpoint.read(name))
    infos = hf_tensor_infos(model)
    assert {name: (dtype, shape) for name, dtype, shape in infos} == {
        name: ("float32", array.shape) for name, array in tensors.items()
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_dtype": "bfloat16"}, "float32 only"),
        ({"parallel_config": {"data_parallel": 2, "model_parallel": 2}}, "model_parallel=2"),
        ({"seq_length": 17}, "sliding_window=16, but rows of 17 tokens"),
    ],
)
def test_what_the_cpu_or_a_model_cannot_do_is_refused(options, message):
    from mindrlhf.models.causal_lm import build_model

    config = {**CASES["mistral-in-its-window"], "architectures": ["MistralForCausalLM"]}
    with pytest.raises(UserError, match=message):
        build_model(config, **{"seq_length": 16, **options})


def test_one_square_of_the_row_length_is_kept(model):
    """The decoder's own mask; MindFormers' would be another two, of 17 and 34 GB for rows of 131,072 tokens."""
    import mindspore as ms

    from mindrlhf.models.causal_lm import build_model

    without_window = {} if model.dims.local else {"sliding_window": None}
    network = build_model({**model.hf_config, **without_window}, seq_length=512)
    held = {
        f"{path}.{name}": value.size
        for path, cell in network.cells_and_names()
        for name, value in vars(cell).items()
        if isinstance(value, ms.Tensor) and not isinstance(value, ms.Parameter)
    }
    kept = {"causal", "far"} if model.dims.local else {"causal"}
    assert {name.split(".")[-1] for name, size in held.items() if size >= 512 * 512} == kept
