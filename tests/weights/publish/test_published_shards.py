"""Shards of fused parameters and their places in logical tensors: every element once, whatever the layout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from mindrlhf.layout.layout import Layout, parameter_layouts
from mindrlhf.specs import DEEPSEEK_V3, GLM4, QWEN2, QWEN3, QWEN3_5, QWEN3_MOE
from mindrlhf.specs.fuse import fuse
from mindrlhf.weights.convert import hf_shapes
from mindrlhf.weights.publish.shards import choose_writers, plan_publication

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG = tiny_model(num_hidden_layers=4, head_dim=8, vocab_size=160, **SIZES)
CONFIG |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 3, "linear_value_head_dim": 5}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {
    "Qwen3-MoE": (QWEN3_MOE, tiny_model("qwen3_moe", CONFIG, head_dim=8, num_experts=8)),
    "DeepSeek-V3": (DEEPSEEK_V3, tiny_model("deepseek_v3", CONFIG, num_key_value_heads=8, **LATENT)),
}


def logical_tensors(spec, dims):
    """Every element of every tensor is another number."""
    tensors, start = {}, 0
    for name, shape in hf_shapes(spec, dims).items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.float64).reshape(shape)
        start += size
    return tensors


def written_by_all(spec, dims, layouts, tensors, node=None):
    """What the ranks write from their shards of the fused parameters, and how often each element was written.

    ``node`` are the ranks of one, which share a buffer.
    """
    rules = {rule.mf_name: rule for rule in spec.rules(dims)}
    fused = {name: fuse(rule, dims, [tensors[hf] for hf in rule.hf_names]) for name, rule in rules.items()}
    written = {name: np.full(tensor.shape, -1.0) for name, tensor in tensors.items()}
    counts = {name: np.zeros(tensor.shape, int) for name, tensor in tensors.items()}
    places = {layout.name: layout for layout in layouts}
    for rank in node or sorted({rank for layout in layouts for rank in layout.ranks}):
        for name, parts in plan_publication(layouts, rules, dims, rank, node).items():
            held = fused[name][places[name].shard_of(rank)]
            for part in parts:
                written[part.hf_name][part.index] = part.of(held)
                counts[part.hf_name][part.index] += 1
    return written, counts


def check_written_once(spec, dims, layouts, node=None):
    """Each element is written once, and right."""
    tensors = logical_tensors(spec, dims)
    written, counts = written_by_all(spec, dims, layouts, tensors, node)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
        assert (counts[name] == 1).all(), name


@settings(max_examples=25)
@given(
    spec=st.sampled_from([QWEN2, QWEN3, QWEN3_5, GLM4]),
    tied=st.booleans(),
    data=st.sampled_from([1, 2, 3, 4]),
    model=st.sampled_from([1, 2, 4]),
    stages=st.sampled_from([1, 2, 4]),
    shard=st.sampled_from([1, -1]),
    whole_embedding=st.booleans(),
)
def test_each_element_is_written_once_and_right(spec, tied, data, model, stages, shard, whole_embedding):
    dims = spec.dims({**CONFIG, "tie_word_embeddings": tied})
    layout = Layout(data, model, stages, vocab_emb_dp=whole_embedding, optimizer_shard=shard)
    # As if elements were large, so that the optimiser shard cuts the small parameters of this test as well.
    check_written_once(spec, dims, parameter_layouts(spec, dims, layout, element_bytes=1 << 16))


@settings(max_examples=25)
@given(
    name=st.sampled_from(list(EXPERTS)),
    sizes=st.sampled_from([(1, 2, 2), (2, 1, 2), (4, 1, 2), (4, 1, 4), (2, 2, 4), (2, 2, 1), (1, 4, 4)]),
    stages=st.sampled_from([1, 2]),
    shard=st.sampled_from([1, -1]),
    width=st.sampled_from([1, 24]),
)
def test_each_element_of_experts_is_written_once_and_right(name, sizes, stages, shard, width):
    data, model, expert = sizes
    spec, config = EXPERTS[name]
    dims = spec.dims({**config, "moe_intermediate_size": width})
    layout = Layout(data, model, stages, expert_parallel=expert, optimizer_shard=shard)
    check_written_once(spec, dims, parameter_layouts(spec, dims, layout, element_bytes=1 << 16))


@pytest.mark.parametrize("data, model, num_nodes", [(2, 1, 2), (2, 2, 2), (4, 2, 2), (4, 2, 4), (3, 4, 3)])
def test_the_ranks_of_each_node_write_the_whole_model_to_its_buffer(data, model, num_nodes):
    dims = QWEN3.dims(CONFIG)
    layouts, size = parameter_layouts(QWEN3, dims, Layout(data, model)), data * model // num_nodes
    for node in range(num_nodes):
        check_written_once(QWEN3, dims, layouts, range(node * size, (node + 1) * size))


@pytest.mark.parametrize("layout", [Layout(model_parallel=4), Layout(2, 2, 2), Layout(2, 1, 2, optimizer_shard=-1)])
def test_ranks_of_a_node_that_holds_a_part_write_that_part_once(layout):
    dims = QWEN2.dims(CONFIG)
    layouts = parameter_layouts(QWEN2, dims, layout, element_bytes=1 << 16)
    tensors, size = logical_tensors(QWEN2, dims), layout.world_size // 2
    own = [written_by_all(QWEN2, dims, layouts, tensors, range(start, start + size)) for start in (0, size)]
    for name, tensor in tensors.items():
        for written, counts in own:
            assert counts[name].max() <= 1
            np.testing.assert_array_equal(written[name][counts[name] == 1], tensor[counts[name] == 1])
        assert (own[0][1][name] + own[1][1][name] >= 1).all(), name


@pytest.mark.parametrize("data", [2, 4])
def test_replicas_share_the_writing(data):
    """Four layers' parameters over 2 or 4 equal replicas: none writes much more than its share."""
    dims = QWEN2.dims(CONFIG)
    layouts = parameter_layouts(QWEN2, dims, Layout(data_parallel=data))
    loads = [0] * data
    for layout in layouts:
        (writer,) = choose_writers(layouts)[layout.name]
        loads[writer] += int(np.prod(layout.shape))
    largest = max(int(np.prod(layout.shape)) for layout in layouts)
    assert max(loads) - min(loads) <= largest


def test_a_shard_of_alternating_rows_copies_nothing():
    """Gate and up rows alternate in MindFormers: taking every second row of a shard is a view."""
    dims = QWEN2.dims(CONFIG)
    layouts = parameter_layouts(QWEN2, dims, Layout(model_parallel=2))
    rules = {rule.mf_name: rule for rule in QWEN2.rules(dims)}
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    gate, up = plan_publication(layouts, rules, dims, rank=1)[name]
    assert (gate.rows, up.rows) == (slice(0, 95, 2), slice(1, 96, 2))
    assert gate.index == up.index == (slice(48, 96), slice(0, 64))
