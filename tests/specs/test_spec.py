"""ModelSpec: reading config.json, rules, shapes and layouts; all against values worked out here."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.errors import UserError
from mindrlhf.models.rotary import rotary_frequencies, score_scale
from mindrlhf.specs import GEMMA3, GLM4, LLAMA, MISTRAL, QWEN2, QWEN3, Llama3Dims, ModelDims, find_spec, with_num_layers
from mindrlhf.specs.dims import LocalDims
from mindrlhf.specs.fuse import fuse, split

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


def make_dims(num_groups, heads_per_group, head_dim, hidden_size, intermediate_size):
    return ModelDims(
        num_layers=1,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_groups * heads_per_group,
        num_kv_heads=num_groups,
        head_dim=head_dim,
        vocab_size=11,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        initializer_range=0.02,
        tied=False,
    )


def test_qwen25_half_billion_has_its_published_number_of_parameters():
    dims = QWEN2.dims(CONFIG)
    num_parameters = sum(np.prod(rule.mf_shape(dims)) for rule in QWEN2.rules(dims))
    assert num_parameters == 494_032_768


def test_rules_name_each_tensor_once_and_know_the_output_of_untied_models():
    tied, untied = (QWEN3.dims({**CONFIG, "head_dim": 64, "tie_word_embeddings": tied}) for tied in (True, False))
    names = [name for rule in QWEN3.rules(tied) for name in rule.hf_names]
    assert len(names) == len(set(names)) == 2 + 24 * 11
    assert not any("{" in name for name in names)
    assert [name for rule in QWEN3.rules(untied) for name in rule.hf_names] == [*names, "lm_head.weight"]


def test_rope_theta_is_read_from_both_places():
    assert QWEN2.dims(CONFIG).rope_theta == 1e6
    without = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    newer = {**without, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert QWEN2.dims(newer).rope_theta == 5e5


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA = {**CONFIG, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 4, "query_pre_attn_scalar": 64}
GEMMA = {key: value for key, value in GEMMA.items() if key not in ("hidden_act", "rope_theta")}
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (QWEN2, {"architectures": ["GemmaForCausalLM"]}, "language models are Qwen2ForCausalLM, Qwen3ForCausalLM"),
        (QWEN2, {"architectures": ["LLaMAForCausalLM"]}, r'write "architectures": \["LlamaForCausalLM"\]'),
        (QWEN2, {"architectures": None}, "architectures=None"),
        (QWEN2, {"architectures": [], "model_type": "mistral"}, r'write "architectures": \["MistralForCausalLM"\]'),
        (QWEN2, {"hidden_size": None}, "hidden_size=None"),
        (QWEN2, {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        (QWEN2, {"vocab_size": "many"}, "vocab_size='many'"),
        (QWEN2, {"num_key_value_heads": 4}, "must divide"),
        (QWEN2, {"hidden_size": 897}, "head_dim"),
        (QWEN2, {"hidden_act": "gelu"}, "silu"),
        (QWEN2, {"use_sliding_window": True}, "sliding"),
        (QWEN2, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "'default' and 'yarn'"),
        (QWEN2, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        (QWEN2, {"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale for YaRN"),
        (QWEN2, {"rope_scaling": {**YARN, "attention_factor": 1.0}}, "attention_factor"),
        (QWEN3, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True: Llama with biases in attention"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias=True: Llama with biases in the MLP"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "dequantise"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'default' and 'llama3' are supported"),
        (LLAMA, {"rope_scaling": YARN}, "rope_type='yarn'"),
        *[
            (LLAMA, {"rope_scaling": {name: value for name, value in LLAMA3.items() if name != key}}, key)
            for key in LLAMA3
            if key != "rope_type"
        ],
        (LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "the last larger than the second"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "factor": 0.5}}, "at least 1"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "factor": float("nan")}}, "at least 1"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "low_freq_factor": "one"}}, "wrong type"),
        (LLAMA, {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}, "original_max"),
        (MISTRAL, {"rope_scaling": LLAMA3}, "only the default rotary embedding is"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window=0"),
        (MISTRAL, {"sliding_window": "4096"}, "sliding_window='4096'"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "capped scores"),
        (GEMMA3, {"attention_bias": True}, "attention biases"),
        (GEMMA3, {"use_bidirectional_attention": True}, "causal"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation='gelu': only 'gelu_pytorch_tanh'"),
        (GEMMA3, {"sliding_window": None}, "sliding_window=None"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "for each of the 4 layers"),
        (GEMMA3, {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "for each of the 4 layers"),
        (GEMMA3, {"layer_types": 4}, "layer_types=4"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        (GEMMA3, {"query_pre_attn_scalar": None}, "wrong type"),
        (GEMMA3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'default' and 'linear'"),
        (GEMMA3, {"rope_scaling": {"rope_type": "linear"}}, "without 'factor'"),
        (GEMMA3, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor=0.0"),
        (GEMMA3, {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "in sliding_att"),
        (GEMMA3, {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "'default' and 'linear'"),
        (GEMMA3, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (GLM4, {"partial_rotary_factor": 0.01}, "partial_rotary_factor=0.01"),
        (GLM4, {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        (GLM4, {"hidden_act": "gelu"}, "only 'silu'"),
        (GLM4, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "only the default rotary embedding is"),
    ],
)
def test_what_cannot_be_computed_is_refused(family, changes, message):
    base = GEMMA if family is GEMMA3 else {**CONFIG, "architectures": [family.hf_architecture]}
    config = {**base, **changes}
    with pytest.raises(UserError, match=message):
        find_spec(config).dims(config)


def test_an_architecture_without_a_spec_is_told_what_there_is_for_language_models_alone():
    with pytest.raises(UserError) as refused:
        find_spec({"architectures": ["PhiForCausalLM"]})
    assert "MistralForCausalLM" in str(refused.value) and "docs/families.md" in str(refused.value)
    assert "SequenceClassification" not in str(refused.value)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},  # as transformers 4 writes it
        {"rope_theta": 5e5, "rope_scaling": {"type" if key == "rope_type" else key: LLAMA3[key] for key in LLAMA3}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},  # transformers 5
    ],
)
def test_llama3_rope_is_read_from_both_places(rope):
    plain = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    dims = LLAMA.dims({**plain, "architectures": ["LlamaForCausalLM"], **rope})
    assert dims.llama3 == Llama3Dims(8.0, 1.0, 4.0, 8192) and dims.yarn is None and dims.rope_theta == 5e5


@pytest.mark.parametrize(
    "theta, factor, low, high, length", [(5e5, 8, 1, 4, 8192), (1e4, 32, 1, 4, 8192), (100, 2, 2, 3, 64)]
)
def test_llama3_frequencies_are_those_of_their_definition_one_by_one(theta, factor, low, high, length):
    """By wavelength, as transformers defines them, in float64."""
    rope = {**LLAMA3, "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    rope["original_max_position_embeddings"] = length
    dims = LLAMA.dims({**CONFIG, "rope_theta": theta, "rope_scaling": rope})
    expected = []
    for channel in range(0, dims.head_dim, 2):
        frequency = theta ** (-channel / dims.head_dim)
        wavelength = 2 * np.pi / frequency
        if wavelength > length / low:
            frequency /= factor
        elif wavelength >= length / high:
            smooth = (length / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        expected.append(frequency)
    np.testing.assert_allclose(rotary_frequencies(dims), expected, rtol=1e-6)


def test_mistral_has_the_window_that_transformers_gives_it():
    config = {**CONFIG, "architectures": ["MistralForCausalLM"], "num_attention_heads": 16, "head_dim": 56}
    assert MISTRAL.dims({**config, "sliding_window": None}).window is None
    assert MISTRAL.dims({**config, "sliding_window": 1024}).window == 1024
    without = {key: value for key, value in config.items() if key != "num_key_value_heads"}
    dims = MISTRAL.dims(without)
    assert (dims.window, dims.num_kv_heads) == (4096, 8)
    assert LLAMA.dims({**CONFIG, "sliding_window": 1024}).window is None  # which transformers does not read there
    dims.check_window(4096)
    with pytest.raises(UserError, match="sliding_window=4096, but rows of 4097 tokens"):
        dims.check_window(4097)


def test_yarn_of_rotated_tables_is_read():
    dims = QWEN2.dims({**CONFIG, "rope_scaling": YARN})
    assert (dims.yarn.factor, dims.yarn.original_length) == (4.0, 32)
    # transformers: cosines and sines times 0.1 ln(factor) + 1 each, so that products have its square.
    assert score_scale(dims) == pytest.approx((0.1 * np.log(4.0) + 1) ** 2 / np.sqrt(dims.head_dim))


@settings(max_examples=30)
@given(
    num_groups=st.integers(1, 4),
    heads_per_group=st.integers(1, 4),
    head_dim=st.integers(1, 4).map(lambda half: 2 * half),
    width=st.integers(1, 5),
    intermediate_size=st.integers(1, 6),
)
def test_layouts_place_each_row_where_mindformers_reads_it(
    num_groups, heads_per_group, head_dim, width, intermediate_size
):
    dims = make_dims(num_groups, heads_per_group, head_dim, width, intermediate_size)
    for rule in (*QWEN2.rules(dims), *GLM4.rules(dims)):
        sizes = [int(np.prod(shape)) for shape in rule.shape(dims)]
        bounds = np.cumsum([0, *sizes])
        parts = [
            np.arange(start, start + size, dtype=np.float32).reshape(shape)
            for start, size, shape in zip(bounds, sizes, rule.shape(dims))
        ]
        fused = fuse(rule, dims, parts)
        assert fused.shape == rule.mf_shape(dims)
        for row, source in _expected_rows(rule, dims, parts):
            np.testing.assert_array_equal(fused[row], source)
        for part, back in zip(parts, split(rule, dims, fused)):
            assert back.flags.c_contiguous
            np.testing.assert_array_equal(back, part)


def _expected_rows(rule, dims, parts):
    """(row of the fused array, its content), from the definition of each layout, one row at a time."""
    if rule.transform == "copy":
        yield from enumerate(parts[0])
    elif rule.transform == "halves":
        for index in range(dims.intermediate_size):
            yield 2 * index, parts[0][index]
            yield 2 * index + 1, parts[0][dims.intermediate_size + index]
    elif rule.transform == "gate_up":
        for index in range(dims.intermediate_size):
            yield 2 * index, parts[0][index]
            yield 2 * index + 1, parts[1][index]
    else:
        row = 0
        for group in range(dims.num_kv_heads):
            heads = range(group * dims.heads_per_group, (group + 1) * dims.heads_per_group)
            for part, head in [(0, head) for head in heads] + [(1, group), (2, group)]:
                for channel in range(dims.head_dim):
                    yield row, parts[part][head * dims.head_dim + channel]
                    row += 1


def test_gemma_says_by_layer_what_it_attends_to_in_both_forms():
    """As transformers 4 and 5 write it; a pattern of 3 means that every third layer attends to all."""
    old = {"sliding_window_pattern": 3, "rope_theta": 2e6, "rope_local_base_freq": 500.0, "sliding_window": 7}
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    kinds = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")]
    new = {"layer_types": kinds, "rope_parameters": BY_KIND, "sliding_window": 7}
    dims = GEMMA3.dims({**GEMMA, **old, **scaling})
    assert dims == GEMMA3.dims({**GEMMA, **new})
    assert dims.local == LocalDims((True, True, False, True), 7, 500.0)
    assert (dims.rope_theta, dims.rope_factor, dims.of_local_layers.rope_theta) == (2e6, 8.0, 500.0)
    assert dims.of_local_layers.rope_factor == 1 and dims.tied
    assert GEMMA3.dims(with_num_layers({**GEMMA, **new}, 2)).local.layers == (True, True)
    plain = GEMMA3.dims(GEMMA)
    assert plain.local.layers == (True,) * 4 and plain.local.window == 4096 and plain.local.rope_theta == 1e4
    assert plain.rope_theta == 1e6 and plain.rope_factor == 1
    assert GEMMA3.dims({**GEMMA, "layer_types": ["full_attention"] * 4, "sliding_window": None}).local is None


def test_glm4_has_its_bias_and_half_a_rotation_by_default():
    dims = GLM4.dims({**CONFIG, "head_dim": 64})
    assert dims.qkv_bias and dims.rotary_dim == 32 and dims.rotates_neighbours and dims.norms_outputs
    names = [name for rule in GLM4.rules(dims) for name in rule.hf_names]
    assert "model.layers.0.self_attn.q_proj.bias" in names and "model.layers.1.mlp.gate_up_proj.weight" in names
    without = GLM4.rules(GLM4.dims({**CONFIG, "attention_bias": False}))
    assert not any(name.endswith(".bias") for rule in without for name in rule.hf_names)


def test_copied_tensors_are_views():
    dims = make_dims(1, 1, 2, 4, 4)
    rule = next(rule for rule in QWEN2.rules(dims) if rule.transform == "copy")
    array = np.zeros(rule.mf_shape(dims), np.float32)
    assert np.shares_memory(split(rule, dims, array)[0], array)
