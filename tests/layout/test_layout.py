"""Layouts: ranks, groups, stages and shards, against brute force and MindFormers' own rule."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from mindrlhf.config.training import ParallelSection
from mindrlhf.errors import UserError
from mindrlhf.layout.layout import Coordinates, Layout, parameter_layouts
from mindrlhf.layout.parameter import ParameterLayout
from mindrlhf.specs import find_spec

SIZES = {"num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4}
CONFIG = tiny_model(hidden_size=512, intermediate_size=1024, vocab_size=1024, **SIZES)


def layouts_of(text, **changes):
    config = {**CONFIG, **changes}
    spec = find_spec(config)
    return {one.name: one for one in parameter_layouts(spec, spec.dims(config), Layout.parse(text))}


@st.composite
def parameters(draw):
    """A parameter layout whose axes divide: any device matrix, any axes of it on any axes of the array."""
    matrix = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3))
    num_axes = draw(st.integers(1, 3))
    free = draw(st.permutations(range(len(matrix))))
    tensor_map = [-1] * num_axes
    for axis, entry in zip(draw(st.permutations(range(num_axes))), free):
        tensor_map[axis] = draw(st.sampled_from([-1, entry]))
    whole = ParameterLayout("p", (0,) * num_axes, (0,), tuple(matrix), tuple(tensor_map))
    size = draw(st.sampled_from([n for n in range(1, whole.num_repeats + 1) if whole.num_repeats % n == 0]))
    shape = [draw(st.integers(1, 3)) * parts for parts in whole.splits]
    shape[0] *= size
    stages = draw(st.sampled_from([(0,), (1,), (0, 2)]))
    return ParameterLayout("p", tuple(shape), stages, tuple(matrix), tuple(tensor_map), size)


@given(parameters())
def test_shards_cover_every_element_equally_often(layout):
    counts = np.zeros(layout.shape, int)
    for rank in layout.ranks:
        assert tuple(part.stop - part.start for part in layout.shard_of(rank)) == layout.shard_shape
        counts[layout.shard_of(rank)] += 1
    assert (counts == layout.num_replicas).all()
    once = np.zeros(layout.shape, int)
    for rank in layout.writers():
        once[layout.shard_of(rank)] += 1
    assert (once == 1).all()


@given(parameters())
def test_neighbours_of_an_optimizer_group_are_one_step_apart(layout):
    if layout.optimizer_shard_size > 1:
        first = layout.ranks[0]
        start = [part.start for part in layout.shard_of(first)]
        following = [part.start for part in layout.shard_of(first + layout.optimizer_shard_step)]
        assert following == [start[0] + layout.shard_shape[0], *start[1:]]


def test_an_axis_may_be_split_by_two_matrix_axes_the_first_outermost():
    layout = ParameterLayout("p", (12, 2), (0,), (2, 3, 2), ((2, 0), -1))
    assert [layout.shard_of(rank)[0].start // 3 for rank in range(12)] == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3]


@given(
    st.builds(
        Layout,
        data_parallel=st.sampled_from([1, 2, 3]),
        model_parallel=st.sampled_from([1, 2, 4]),
        pipeline_stage=st.sampled_from([1, 2, 3]),
        context_parallel=st.sampled_from([1, 2]),
        use_seq_parallel=st.booleans(),
        vocab_emb_dp=st.booleans(),
        optimizer_shard=st.sampled_from([1, -1, 2]),
    )
)
@settings(max_examples=50)
def test_short_form_ranks_and_groups(layout):
    assert Layout.parse(str(layout)) == layout
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    sizes = (layout.pipeline_stage, layout.data_parallel, layout.context_parallel, layout.model_parallel)
    assert places == [Coordinates(*place) for place in itertools.product(*map(range, sizes))]
    for axis, size in zip(Coordinates._fields, sizes):
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        assert {len(group) for group in groups} == {size}
        assert all(len({places[rank]._replace(**{axis: 0}) for rank in group}) == 1 for group in groups)


def test_two_by_two_by_two_by_hand():
    layouts = layouts_of("dp=2,mp=2,pp=2")
    down = layouts["decoder.layers.0.mlp.linear_fc2.weight"]
    assert [down.shard_of(rank) for rank in range(4)] == [
        (slice(0, 512), slice(half, half + 512)) for half in (0, 512)
    ] * 2
    assert down.replicas() == {((0, 512), (0, 512)): (0, 2), ((0, 512), (512, 1024)): (1, 3)}
    assert layouts["decoder.layers.4.mlp.linear_fc2.weight"].ranks == (4, 5, 6, 7)
    assert layouts["embedding.word_embeddings.weight"].stages == (0,)
    assert layouts["output_layer.weight"].stages == layouts["decoder.final_layernorm.weight"].stages == (1,)
    assert layouts["decoder.final_layernorm.weight"].tensor_map == (-1,)


def test_a_tied_embedding_lives_in_the_first_and_the_last_stage():
    layouts = layouts_of("mp=2,pp=3", tie_word_embeddings=True)
    assert layouts["embedding.word_embeddings.weight"].ranks == (0, 1, 4, 5)
    assert "output_layer.weight" not in layouts
    assert layouts_of("mp=2,pp=1", tie_word_embeddings=True)["embedding.word_embeddings.weight"].stages == (0,)


def test_the_optimizer_shard_leaves_small_shards_whole():
    layouts = layouts_of("dp=4,mp=2,opt=1")
    qkv = layouts["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert (qkv.optimizer_shard_size, qkv.optimizer_shard_step, qkv.shard_shape) == (4, 2, (128, 512))
    assert layouts["decoder.layers.0.self_attention.linear_qkv.bias"].optimizer_shard_size == 1
    assert layouts["decoder.layers.0.input_layernorm.weight"].optimizer_shard_size == 1
    grouped = layouts_of("dp=4,mp=2,opt=2")["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert [grouped.shard_of(rank)[0].start for rank in range(8)] == [0, 512, 256, 768, 0, 512, 256, 768]


def test_the_embedding_is_whole_on_request():
    assert layouts_of("mp=4")["embedding.word_embeddings.weight"].shard_shape == (256, 512)
    assert layouts_of("mp=4,vocab_emb_dp=1")["embedding.word_embeddings.weight"].shard_shape == (1024, 512)
    tied = layouts_of("mp=4,vocab_emb_dp=1", tie_word_embeddings=True)
    assert tied["embedding.word_embeddings.weight"].shard_shape == (256, 512)


@given(st.integers(1, 70), st.integers(1, 9))
@settings(max_examples=60)
def test_layers_go_to_stages_by_the_rule_of_mindformers(num_layers, num_stages):
    layout = Layout(pipeline_stage=num_stages)
    if num_layers < num_stages:
        with pytest.raises(UserError, match=f"{num_layers} layers: set it to {num_layers} or less"):
            layout.layer_stages(num_layers)
        return
    offsets = layout.layer_offsets(num_layers)
    # MindFormers, LayerSetting: the offsets must add up to the remainder; a layer's stage is found in the running sum.
    assert sum(offsets) == num_layers % num_stages
    ends = np.cumsum(np.full(num_stages, num_layers // num_stages) + offsets)
    expected = [int(np.searchsorted(ends, layer + 1)) for layer in range(num_layers)]
    assert list(layout.layer_stages(num_layers)) == expected
    assert num_stages == 1 or offsets[-1] == 0


def test_from_config():
    section = ParallelSection(model_parallel=2, pipeline_stage=2, enable_parallel_optimizer=True, vocab_emb_dp=False)
    assert Layout.from_config(section, 8) == Layout.parse("dp=2,mp=2,pp=2,opt=1")
    section = ParallelSection(model_parallel=2)
    assert Layout.from_config(section, 8) == Layout.parse("dp=4,mp=2,vocab_emb_dp=1")
    with pytest.raises(UserError, match="do not divide by"):
        Layout.from_config(ParallelSection(model_parallel=3), 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mp=3", "8 query heads: set it to one of 1, 2, 4"),
        ("mp=8", "4 key/value heads: set it to one of 1, 2, 4"),
        ("pp=6", "5 layers: set it to 5 or less"),
        ("ep=2", "expert_parallel is 2"),
        ("mp=x", "give a whole number"),
        ("mp", "give a whole number"),
        ("tp=2", "use NAME=NUMBER"),
        ("mp=2,mp=2", "'mp' twice"),
        ("dp=0", "give 1 or more"),
        ("sp=2", "sp=0 or sp=1"),
        ("opt=-2", "optimizer_shard is -2"),
        ("dp=4,opt=3", "does not divide the 4 ranks"),
    ],
)
def test_what_cannot_be_is_explained(text, message):
    with pytest.raises(UserError, match=message) as raised:
        layouts_of(text, vocab_size=1536)
    assert "\n" not in str(raised.value)


def test_parameters_add_up_to_the_published_count():
    config = {
        **CONFIG,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "vocab_size": 152064,
    }
    layouts = layouts_of("dp=1,mp=4,pp=2", **{name: config[name] for name in config if name != "architectures"})
    held = {rank: sum(math.prod(one.shard_shape) for one in layouts.values() if rank in one.ranks) for rank in range(8)}
    assert sum(math.prod(one.shape) for one in layouts.values()) == 7_615_616_512  # Qwen2.5-7B
    # A rank has a quarter of what is split, and all of the norms.
    norms = [math.prod(one.shape) for one in layouts.values() if one.tensor_map == (-1,)]
    assert sum(held.values()) == 7_615_616_512 + 3 * sum(norms)
