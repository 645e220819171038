"""The plan's exact numbers, computed another way: by hand from config numbers, and by brute force over ranks."""

import math
from pathlib import Path

import pytest

from mindrlhf.dryrun.plan.parameters import (
    OptimizerState,
    active_parameters,
    count_parameters,
    parameter_rows,
    stage_states,
)
from mindrlhf.dryrun.plan.plan import read_model
from mindrlhf.layout.layout import Layout, parameter_layouts

CONFIGS = Path(__file__).parents[3] / "model_configs"
MODELS = {
    "qwen2_5_7b": CONFIGS / "qwen2_5" / "qwen2_5_7b",
    "qwen2_5_32b": CONFIGS / "qwen2_5" / "qwen2_5_32b",
    "qwen3_8b": CONFIGS / "qwen3" / "qwen3_8b",
    "qwen3_32b": CONFIGS / "qwen3" / "qwen3_32b",
    "qwen3_30b_a3b": CONFIGS / "qwen3" / "qwen3_30b_a3b",
    "deepseek_v3_671b": CONFIGS / "deepseek_v3" / "deepseek_v3_671b",
    "qwen2_5_vl_3b": CONFIGS / "qwen2_5_vl" / "qwen2_5_vl_3b",
    "tiny (tied)": CONFIGS / "qwen2_5" / "qwen2_5_tiny",
}


def _attention(hidden: int, heads: int, kv_heads: int, head: int) -> int:
    return hidden * head * (2 * heads + 2 * kv_heads)


def _qwen2(layers, hidden, mlp, heads, kv_heads, vocab) -> int:
    head = hidden // heads
    biases = head * (heads + 2 * kv_heads)
    layer = _attention(hidden, heads, kv_heads, head) + biases + 3 * hidden * mlp + 2 * hidden
    return 2 * vocab * hidden + layers * layer + hidden


def _qwen3(layers, hidden, mlp, heads, kv_heads, vocab) -> int:
    layer = _attention(hidden, heads, kv_heads, 128) + 2 * 128 + 3 * hidden * mlp + 2 * hidden
    return 2 * vocab * hidden + layers * layer + hidden


def _qwen3_moe(experts: int) -> int:
    hidden = 2048
    layer = _attention(hidden, 32, 4, 128) + 2 * 128 + 128 * hidden + experts * 3 * hidden * 768 + 2 * hidden
    return 2 * 151_936 * hidden + 48 * layer + hidden


def _deepseek_v3(experts: int) -> int:
    hidden = 7168
    query = hidden * 1536 + 1536 + 1536 * 128 * (128 + 64)
    key_value = hidden * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = query + key_value + 128 * 128 * hidden + 2 * hidden
    dense = 3 * hidden * 18_432
    routed = experts * 3 * hidden * 2048 + 3 * hidden * 2048 + 256 * hidden + 256
    return 2 * 129_280 * hidden + 61 * attention + 3 * dense + 58 * routed + hidden


@pytest.mark.parametrize(
    "name, by_hand, published",
    [
        ("qwen2_5_7b", _qwen2(28, 3584, 18_944, 28, 4, 152_064), "7.62"),
        ("qwen2_5_32b", _qwen2(64, 5120, 27_648, 40, 8, 152_064), "32.8"),
        ("qwen3_8b", _qwen3(36, 4096, 12_288, 32, 8, 151_936), "8.19"),
        ("qwen3_32b", _qwen3(64, 5120, 25_600, 64, 8, 151_936), "32.8"),
        ("qwen3_30b_a3b", _qwen3_moe(128), "30.5"),
        ("deepseek_v3_671b", _deepseek_v3(256), "671"),
    ],
)
def test_parameter_counts_are_the_published_ones(name, by_hand, published):
    model = read_model(str(MODELS[name]))
    counted = count_parameters(parameter_layouts(model.spec, model.dims, Layout()))
    assert counted == by_hand
    assert f"{counted / 1e9:.3g}" == published


@pytest.mark.parametrize("name, by_hand", [("qwen3_30b_a3b", _qwen3_moe(8)), ("deepseek_v3_671b", _deepseek_v3(8))])
def test_active_parameters_are_those_of_eight_experts(name, by_hand):
    model = read_model(str(MODELS[name]))
    assert active_parameters(model.spec, model.dims) == by_hand


LAYOUTS = [
    ("qwen2_5_7b", Layout(data_parallel=2, model_parallel=4)),
    ("qwen2_5_7b", Layout(data_parallel=2, model_parallel=2, pipeline_stage=3, optimizer_shard=-1)),
    ("qwen2_5_7b", Layout(data_parallel=4, model_parallel=2, vocab_emb_dp=True, optimizer_shard=2)),
    ("qwen2_5_32b", Layout(model_parallel=8, pipeline_stage=2, context_parallel=2, optimizer_shard=-1)),
    ("tiny (tied)", Layout(data_parallel=2, model_parallel=2, pipeline_stage=2, optimizer_shard=-1)),
    ("qwen3_30b_a3b", Layout(data_parallel=4, model_parallel=2, expert_parallel=8, optimizer_shard=-1)),
    ("qwen3_30b_a3b", Layout(data_parallel=4, model_parallel=4, expert_parallel=4, pipeline_stage=2)),
]


@pytest.mark.parametrize("name, layout", LAYOUTS, ids=[f"{name} {layout}" for name, layout in LAYOUTS])
def test_state_is_the_sum_over_the_shards_of_every_rank(name, layout):
    """Every rank's bytes from the start and stop of its shards; no shard shape is used."""
    model = read_model(str(MODELS[name]))
    layouts = parameter_layouts(model.spec, model.dims, layout, 2)
    states = stage_states(layouts, layout.pipeline_stage, "bfloat16")
    for rank in range(layout.world_size):
        elements = sum(
            math.prod(part.stop - part.start for part in one.shard_of(rank)) for one in layouts if rank in one.ranks
        )
        state = states[layout.stage_of(rank)]
        assert (state.num_elements, state.parameters, state.moments) == (elements, 2 * elements, 8 * elements)


@pytest.mark.parametrize("name, layout", LAYOUTS, ids=[f"{name} {layout}" for name, layout in LAYOUTS])
def test_the_first_holders_of_every_shard_hold_the_model_once(name, layout):
    model = read_model(str(MODELS[name]))
    for one in parameter_layouts(model.spec, model.dims, layout):
        boxes = {tuple((part.start, part.stop) for part in one.shard_of(rank)) for rank in one.ranks}
        assert sum(math.prod(stop - start for start, stop in box) for box in boxes) == math.prod(one.shape)


def test_rows_of_the_table_add_up_to_the_stage():
    model = read_model(str(MODELS["qwen2_5_7b"]))
    layouts = parameter_layouts(model.spec, model.dims, Layout(data_parallel=2, model_parallel=4, optimizer_shard=-1))
    rows, (state,) = parameter_rows(layouts, "float32"), stage_states(layouts, 1, "float32")
    assert sum(row.num_tensors * row.state_bytes for row in rows) == state.parameters + state.moments
    assert sum(row.num_tensors * math.prod(row.shape) for row in rows) == 7_615_616_512
    queries = next(row for row in rows if row.name.endswith("linear_qkv.weight"))
    # 28 heads and 2 * 4 key-value heads of 128 channels, over 4 tensor-parallel ranks, over 2 replicas.
    assert (queries.shape, queries.shard_shape) == ((36 * 128, 3584), (36 * 128 // 4 // 2, 3584))
    assert queries.split == "axis 0 / 4; opt / 2"


def test_muon_keeps_one_moment_of_the_matrices_and_two_of_the_rest():
    """Qwen2.5-7B: 28 layers, hidden size 3584, 28 + 2 * 4 heads of 128, 18944 channels, 152064 tokens, untied."""
    model = read_model(str(MODELS["qwen2_5_7b"]))
    layouts = parameter_layouts(model.spec, model.dims, Layout(data_parallel=2, model_parallel=4, optimizer_shard=1))
    matrices_of = {rule.mf_name: rule.matrices(model.dims) for rule in model.spec.rules(model.dims)}
    optimizer = OptimizerState("muon", matrices_of)
    (state,) = stage_states(layouts, 1, "bfloat16", optimizer=optimizer)
    matrices = 28 * (36 * 128 * 3584 + 28 * 128 * 3584 + 3 * 3584 * 18944) // 4
    rest = (2 * 152064 * 3584 + 28 * 36 * 128) // 4 + (2 * 28 + 1) * 3584
    assert state.num_elements == matrices + rest
    assert state.moments == 4 * matrices + 8 * rest
    # Every rank of four gathers all matrices of a layer, one parameter after the other.
    assert (state.gathered_matrices, state.largest_gathered_matrices) == (4 * matrices, 2 * 3584 * 18944)
    rows = parameter_rows(layouts, "bfloat16", optimizer=optimizer)
    assert sum(row.num_tensors * row.state_bytes for row in rows) == state.parameters + state.moments
