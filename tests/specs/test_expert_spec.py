"""Specs of models with experts: counts by hand, which layer has what, layouts, shards of expert parallelism."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.models.rotary import rotary_tables, turn_matrix
from mindrlhf.specs import DEEPSEEK_V3, GLM4_MOE, QWEN3_MOE, find_spec
from mindrlhf.specs.fuse import fuse, fuse_blocks, split

MODEL_CONFIGS = Path(__file__).parents[2] / "model_configs"
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}
DEEPSEEK = {
    **{key: value for key, value in QWEN.items() if key != "num_experts"},
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 5,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}


def read_config(name):
    return json.loads((MODEL_CONFIGS / name / "config.json").read_text(encoding="utf-8"))


GLM = read_config("glm4_5/glm4_5_air")


def num_parameters(spec, dims):
    return sum(int(np.prod(rule.mf_shape(dims))) for rule in spec.rules(dims))


def numbered_parts(rule, dims):
    """Tensors of a rule whose elements are all different."""
    shapes = rule.shape(dims)
    bounds = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes)])
    return [np.arange(start, stop).reshape(shape) for start, stop, shape in zip(bounds, bounds[1:], shapes)]


def test_qwen3_30b_a3b_counted_by_hand():
    config = read_config("qwen3/qwen3_30b_a3b")
    dims = QWEN3_MOE.dims(config)
    attention = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048 + 2 * 128
    experts = 128 * 3 * 2048 * 768 + 128 * 2048
    layer = attention + experts + 2 * 2048
    assert num_parameters(QWEN3_MOE, dims) == 48 * layer + 2 * 151936 * 2048 + 2048 == 30_532_122_624


def test_deepseek_v3_counted_by_hand():
    config = read_config("deepseek_v3/deepseek_v3_671b")
    dims = DEEPSEEK_V3.dims(config)
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192
    keys_values = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = queries + keys_values + 128 * 128 * 7168
    dense = 3 * 7168 * 18432
    # Routed and shared experts, the router and its selection bias.
    experts = (256 + 1) * 3 * 7168 * 2048 + 256 * 7168 + 256
    total = 61 * (attention + 2 * 7168) + 3 * dense + 58 * experts + 2 * 129280 * 7168 + 7168
    assert num_parameters(DEEPSEEK_V3, dims) == total == 671_026_419_200


def test_qwen_layers_have_experts_or_a_dense_mlp():
    dims = QWEN3_MOE.dims({**QWEN, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert dims.experts.layers == (False, True, False, False)
    names = {name for rule in QWEN3_MOE.rules(dims) for name in rule.hf_names}
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    assert "model.layers.1.mlp.gate_proj.weight" not in names
    for layer in (0, 2, 3):
        assert f"model.layers.{layer}.mlp.gate_proj.weight" in names
        assert f"model.layers.{layer}.mlp.gate.weight" not in names


def test_deepseek_layers_start_dense_and_then_have_shared_and_routed_experts():
    dims = DEEPSEEK_V3.dims(DEEPSEEK)
    shapes = {name: shape for rule in DEEPSEEK_V3.rules(dims) for name, shape in zip(rule.hf_names, rule.shape(dims))}
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (12, 8)
    assert not any(name.startswith("model.layers.0.mlp.experts") for name in shapes)
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (12, 8)
    assert shapes["model.layers.1.mlp.gate.e_score_correction_bias"] == (4,)
    assert shapes["model.layers.1.self_attn.q_b_proj.weight"] == (2 * 6, 5)
    assert shapes["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"] == (3 + 2, 8)
    assert shapes["model.layers.1.self_attn.kv_b_proj.weight"] == (2 * 8, 3)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (8, 2 * 4)


def test_queries_may_be_projected_directly():
    dims = DEEPSEEK_V3.dims({**DEEPSEEK, "q_lora_rank": None})
    shapes = {name: shape for rule in DEEPSEEK_V3.rules(dims) for name, shape in zip(rule.hf_names, rule.shape(dims))}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (2 * 6, 8)
    assert not any("q_a_" in name or "q_b_" in name for name in shapes)


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_experts_are_stacked_and_transposed(config):
    spec = find_spec(config)
    dims = spec.dims(config)
    by_name = {rule.mf_name: rule for rule in spec.rules(dims)}
    first, second = (by_name[f"decoder.layers.2.mlp.experts.weight{number}"] for number in (1, 2))
    gate_up, down = numbered_parts(first, dims), numbered_parts(second, dims)
    fused = fuse(first, dims, gate_up), fuse(second, dims, down)
    assert (fused[0].shape, fused[1].shape) == (first.mf_shape(dims), second.mf_shape(dims)) == ((32, 12), (24, 8))
    for expert in range(4):
        for row in range(8):
            gate, up = (gate_up[2 * expert + part][:, row] for part in (0, 1))
            assert fused[0][8 * expert + row].tolist() == [*gate, *up]
        for row in range(6):
            assert fused[1][6 * expert + row].tolist() == down[expert][:, row].tolist()
    for rule, parts, array in ((first, gate_up, fused[0]), (second, down, fused[1])):
        for part, back in zip(parts, split(rule, dims, array), strict=True):
            assert back.flags.c_contiguous
            np.testing.assert_array_equal(back, part)


def test_experts_are_read_one_at_a_time():
    dims = QWEN3_MOE.dims(QWEN)
    rule = next(rule for rule in QWEN3_MOE.rules(dims) if rule.mf_name.endswith("experts.weight1"))
    tensors = dict(zip(rule.hf_names, numbered_parts(rule, dims)))
    num_read = []
    blocks = []
    for block in fuse_blocks(rule, dims, lambda name: (num_read.append(name), tensors[name])[1]):
        blocks.append(block)
        assert len(num_read) == 2 * len(blocks)
    np.testing.assert_array_equal(np.concatenate(blocks), fuse(rule, dims, list(tensors.values())))


@pytest.mark.parametrize("config", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_expert_parallel_shards_are_whole_experts(config):
    """Rank r of four that share the experts holds expert r, fused alone."""
    spec = find_spec(config)
    dims = spec.dims(config)
    layouts = {
        layout.name: layout for layout in parameter_layouts(spec, dims, Layout(data_parallel=8, expert_parallel=4))
    }
    for rule in spec.rules(dims):
        layout = layouts[rule.mf_name]
        if rule.expert_axis is None:
            assert layout.num_replicas == 8
            continue
        parts = numbered_parts(rule, dims)
        whole = fuse(rule, dims, parts)
        per_expert = len(parts) // 4
        for rank in range(8):
            expert = rank % 4
            one = replace(rule, num_experts=1, hf_names=rule.hf_names[:per_expert])
            alone = fuse(one, dims, parts[expert * per_expert : (expert + 1) * per_expert])
            np.testing.assert_array_equal(whole[layout.shard_of(rank)], alone)


def test_transformers_5_calls_the_number_of_experts_otherwise():
    config = {**{key: value for key, value in QWEN.items() if key != "num_experts"}, "num_local_experts": 4}
    assert QWEN3_MOE.dims(config).num_experts == 4


def test_router_options_reach_mindformers():
    dims = DEEPSEEK_V3.dims({**DEEPSEEK, "rope_scaling": {**YARN, "type": "yarn"}, "routed_scaling_factor": 2.5})
    options = DEEPSEEK_V3.mcore_config(dims)
    expected = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 12,
        "moe_layer_freq": [0, 1, 1, 1],
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "max_position_embeddings": 8,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 2,
    }
    assert {key: options[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN, {"num_experts": None}, "num_experts=None"),
        (QWEN, {"num_experts_per_tok": 5}, "num_experts_per_tok=5"),
        (QWEN, {"quantization_config": {"quant_method": "fp8"}}, "dequantise"),
        (DEEPSEEK, {"q_lora_rank": 0}, "q_lora_rank=0"),
        (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank=None"),
        (DEEPSEEK, {"v_head_dim": 7}, "v_head_dim=7"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method='greedy'"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK, {"n_group": 3}, "n_group=3"),
        (DEEPSEEK, {"num_experts_per_tok": 3}, "only 2 experts"),
        (DEEPSEEK, {"num_experts_per_tok": 1}, "best 2 experts"),
        (DEEPSEEK, {"rope_scaling": {**YARN, "mscale_all_dim": 0.5}}, "mscale_all_dim=0.5"),
        (DEEPSEEK, {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "without 'factor'"),
        (DEEPSEEK, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        (GLM, {"attention_bias": False}, "attention_bias=false"),
        (GLM, {"partial_rotary_factor": 0.0}, "partial_rotary_factor=0.0"),
        (GLM, {"partial_rotary_factor": 1.5}, "at most all"),
        (GLM, {"partial_rotary_factor": "half"}, "wrong type"),
        (GLM, {"n_group": 3}, "must divide"),
        (GLM, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "only the default rotary embedding"),
        (GLM, {"quantization_config": {"quant_method": "compressed-tensors"}}, "dequantise"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(config, changes, message):
    with pytest.raises(UserError, match=message):
        find_spec(config).dims({**config, **changes})


def test_glm_4_5_counted_by_hand():
    """The larger has norms of queries and keys, the smaller has not."""
    dims = GLM4_MOE.dims(GLM)
    attention = 4096 * (96 + 8 + 8) * 128 + (96 + 8 + 8) * 128 + 96 * 128 * 4096 + 2 * 4096
    experts = (128 + 1) * 3 * 4096 * 1408 + 128 * 4096 + 128
    outside = 2 * 151552 * 4096 + 4096
    assert num_parameters(GLM4_MOE, dims) == 46 * attention + 3 * 4096 * 10944 + 45 * experts + outside
    assert not any(
        "norm.weight" in name and "self_attn" in name for rule in GLM4_MOE.rules(dims) for name in rule.hf_names
    )
    larger = GLM4_MOE.dims(read_config("glm4_5/glm4_5"))
    names = [name for rule in GLM4_MOE.rules(larger) for name in rule.hf_names]
    assert sum(name.endswith(("q_norm.weight", "k_norm.weight")) for name in names) == 2 * 92
    assert (dims.rotary_dim, larger.experts.scale, sum(larger.experts.layers)) == (64, 2.5, 89)
    assert not GLM4_MOE.mcore_config(dims)["qk_layernorm"] and GLM4_MOE.mcore_config(larger)["qk_layernorm"]


@pytest.mark.parametrize(
    "rope", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}]
)
def test_half_of_a_head_is_rotated_and_the_rest_stays(rope):
    small = {"head_dim": 8, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {key: value for key, value in GLM.items() if not key.startswith("partial")}
    dims = GLM4_MOE.dims({**config, **small, **rope, "rope_theta": 100.0})
    assert dims.rotary_dim == 4
    cosines, sines = rotary_tables(5, dims)
    heads = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    turned = heads * cosines + (heads @ turn_matrix(dims)) * sines
    np.testing.assert_array_equal(turned[:, 4:], heads[:, 4:])
    for position in range(5):
        for channel in range(2):  # with the one that is two further, as a complex number
            angle = position * 100.0 ** (-channel / 2)
            number = complex(heads[position, channel], heads[position, channel + 2]) * np.exp(1j * angle)
            assert turned[position, channel] == pytest.approx(number.real, abs=1e-5)
            assert turned[position, channel + 2] == pytest.approx(number.imag, abs=1e-5)
